"""The smoke test and the debugging mode, as a user starts them."""

from __future__ import annotations

import time

from tests.scenarios.conftest import SETTINGS
from tests.scenarios.harness import Run
from tests.scenarios.test_refusals import contents


def test_the_smoke_test_is_quick_and_leaves_a_real_run_alone(tmp_path):
    """--test trains in folders of its own, in under a minute."""
    with Run(tmp_path, *SETTINGS, "--max-steps", 5) as real:
        assert real.wait() == 0, real.console
    before = {**contents(real.logs), **contents(real.checkpoints)}
    began_s = time.monotonic()
    with Run(tmp_path, "--test", task=None) as run:
        assert run.wait() == 0, run.console
    assert time.monotonic() - began_s < 60.0
    after = {**contents(run.logs), **contents(run.checkpoints)}
    assert {name: after[name] for name in before} == before
    new = set(after) - set(before)
    assert new
    assert all(name.startswith("test/") for name in new), new
    assert (run.logs / "test" / "summary.json").exists()


def test_a_run_in_debug_mode_ends_with_the_same_weights(fault_free, tmp_path):
    """--debug shows more and checks more; it changes no result."""
    with Run(tmp_path, *SETTINGS, "--debug") as run:
        assert run.wait() == 0, run.console
    assert run.digest == fault_free(2).digest
