"""A slot that keeps dying is given up and the run goes on with fewer ranks; later it grows again."""

from __future__ import annotations

import signal

from tests.scenarios import conftest
from tests.scenarios.harness import Run, assert_every_sample_once, poll
from tests.scenarios.workload import HOLD_NAME, TROUBLE_NAME

STEPS = 48
SETTINGS = (
    *("-b", 8, "--max-steps", STEPS, "num_workers=0", "save_every_steps=10", "--audit"),
    *("evaluate_interval=0", "log.display=plain", "recovery.slot_failures_max=2"),
    *conftest.PATIENT,
)
# The first time when its peers have ended the step before, so that its state is not the only newest one;
# the second time in a step that the others commit.
DIES_TWICE = (
    *("--inject", "slow:rank=1,step=8,seconds=0.25", "--inject", "kill:rank=1,step=8"),
    *("--inject", "kill:rank=1,step=12,phase=commit"),
)


def sizes(run, world):
    """How many samples each step took from each slot, by the newest generation that did it."""
    audits = run.audit(world)
    found = {}
    for step in range(1, STEPS + 1):
        lines = {slot: audit[step] for slot, audit in enumerate(audits) if step in audit}
        newest = max(line["generation"] for line in lines.values())
        found[step] = {
            slot: len(line["indices"])
            for slot, line in lines.items()
            if line["generation"] == newest
        }
    return found


def could_join(run, rank):
    """Whether a rank that was given up waits for the next step of the others, or has been taken back."""
    status = run.status()
    waits = status and (status["world_size"], status["ranks"][rank]["state"]) == (2, "ready")
    return waits or f"rank {rank} is back" in run.console


def test_a_slot_that_keeps_dying_is_given_up_and_grows_back(tmp_path):
    """The global batch stays; every sample is taken once an epoch; the summary says what differs."""
    hold = tmp_path / HOLD_NAME
    hold.write_text("36")  # however long its new process takes to start
    options = ("--min-ranks", 2, "--regrow-after", 0.1, "num_workers=1")
    with Run(tmp_path, *SETTINGS, *DIES_TWICE, *options, world=3) as run:
        poll(lambda: could_join(run, 1), what="its return")
        hold.unlink()
        assert run.wait() == 0, run.console
    summary = run.summary()
    assert summary["exact"] is False
    assert [(fault["rank"], fault["steps_lost"]) for fault in summary["faults"]] == [(1, 0)] * 2
    assert all(fault["recovered_s"] is not None for fault in summary["faults"])
    by_step = sizes(run, 3)
    fewer = [step for step, taken in by_step.items() if taken == {0: 12, 2: 12}]
    # Whether the others got as far as to commit step 13 is chance.
    assert summary["inexact_reasons"] == [f"2 of 3 ranks from step {fewer[0] - 1}"]
    assert fewer[0] in (13, 14)
    assert fewer == list(range(fewer[0], fewer[0] + len(fewer)))
    assert fewer[-1] < STEPS, "it grew again"
    assert all(by_step[step] == {0: 8, 1: 8, 2: 8} for step in by_step if step not in fewer)
    assert_every_sample_once(run, 3, samples=192)
    assert (summary["steps"], summary["samples"]) == (STEPS, STEPS * 24)


def test_without_leave_to_shrink_the_slot_is_tried_again(fault_free, tmp_path):
    """Control: by default nothing is given up and no bit differs."""
    as_fault_free = ("--max-steps", conftest.STEPS, "task.pace_s=0")
    with Run(tmp_path, *SETTINGS, *DIES_TWICE, *as_fault_free, world=3) as run:
        assert run.wait() == 0, run.console
    assert run.summary()["exact"] is True
    assert run.digest == fault_free(3).digest
    assert_every_sample_once(run, 3, samples=192)


def test_a_rank_whose_device_is_lost_is_given_up_at_once(tmp_path):
    """It does not come back by itself."""
    options = ("--max-steps", 24, "--min-ranks", 2)
    (tmp_path / TROUBLE_NAME).write_text("loss 1 device 9", encoding="utf-8")
    with Run(tmp_path, *SETTINGS, *options, world=3) as run:
        assert run.wait() == 0, run.console
    (fault,) = run.summary()["faults"]
    assert (fault["kind"], fault["rank"], fault["steps_lost"]) == ("device_lost", 1, 0)
    (plan,) = run.events("plan")
    assert (plan["dropped"], plan["replaced"]) == ([1], [])
    assert run.summary()["inexact_reasons"] == [f"2 of 3 ranks from step {fault['step']}"]
    assert_every_sample_once(run, 3, samples=192)


def test_a_fault_while_growing_again_is_repaired(tmp_path):
    """The ranks have left a healthy generation on purpose: one of them may die just then."""
    options = ("--min-ranks", 2, "--regrow-after", 0.1, "task.pace_s=0.08", "hang_min_s=1.5")
    endless = ("--max-steps", 100_000)  # however long its new process takes to start
    with Run(tmp_path, *SETTINGS, *DIES_TWICE, *options, *endless, world=3) as run:
        poll(lambda: "is back" in run.console, what="its return", every_s=0.002)
        run.signal(signal.SIGKILL, run.rank_pid(2))
        poll(lambda: len(run.events("repaired")) == 3, what="the third repair")
        run.signal(signal.SIGTERM)
        assert run.wait() == 75, run.console
    assert run.summary()["faults"][-1]["rank"] == 2
    assert_every_sample_once(run, 3, samples=192)
