"""Faults that ``--inject`` has asked for at a step that a run does not reach: it must not look as if they were repaired."""

from __future__ import annotations

import pytest

from ddp_runner.kernel.rules.exits import ExitCode, RunStatus
from ddp_runner.kernel.wire.events import Injected
from tests.supervisor.judging import assert_done


@pytest.mark.parametrize("spec", ["kill:rank=1,step=900", "bad_sample:rank=0,step=900"])
def test_a_fault_that_never_comes_fails_the_run(simulate, spec):
    """By its own words; all of the run is trained."""
    run = simulate(run_options={"inject": (spec, "bad_sample:rank=0,step=3", "random:mtbf_s=999")})
    ending = run.run_to_end()
    assert (ending.status, ending.exit_code) == (RunStatus.FAILED, ExitCode.FAILED)
    assert ending.reason.endswith(f"never caused: {spec}")
    assert run.best == run.steps


def test_a_fault_that_came_is_not_named(simulate):
    """Control: it came on one rank of all."""
    run = simulate(run_options={"inject": ("slow:rank=all,step=5,times=3",)})
    run.to_step(5)
    came = Injected(rank=1, number=0, kind="slow", step=5, phase="forward")
    run.supervisor.on_message(came, 1)
    assert_done(run)
