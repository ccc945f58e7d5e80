"""The smoke test and the debugging mode, as a user starts them."""

from __future__ import annotations

import time

from tests.scenarios.conftest import WITHOUT_WORKERS as SETTINGS
from tests.scenarios.harness import Run
from tests.scenarios.test_refusals import contents


def test_the_smoke_test_is_quick_and_leaves_a_real_run_alone(tmp_path):
    """--test trains in folders of its own, in under a minute."""
    with Run(tmp_path, *SETTINGS, "--max-steps", 5) as real:
        assert real.wait() == 0, real.console
    assert not any("DEBUG" in line for line in lines_of(real, "supervisor.log"))
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
    of_rank = [line for line in lines_of(run, "rank_0.log") if "DEBUG" in line]
    for word in ("from the supervisor: Form(", "to the supervisor: CheckpointSaved(", "buckets of"):
        assert any(word in line for line in of_rank), word
    of_supervisor = [line for line in lines_of(run, "supervisor.log") if "DEBUG" in line]
    for word in ("setting:", "WorldFormed(", "CheckpointSaved("):
        assert any(word in line for line in of_supervisor), word


def lines_of(run, name):
    return (run.logs / name).read_text(encoding="utf-8").splitlines()
