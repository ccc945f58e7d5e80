"""Many restarts in a short time, and a world that shrinks and grows: what they may change, and what not."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

import pytest

from tests.scenarios.conftest import PATIENT
from tests.scenarios.harness import WORKLOAD, Run, poll
from tests.soak.usage import usage_of

PLAIN = f"{WORKLOAD}:PacedTask"
SMOOTH = f"{WORKLOAD.with_name('hungry.py')}:SmoothTask"
KILLS = 8  # one descriptor that each leaves open would be more than may come and go
DESCRIPTORS_MORE = 3  # what comes and goes: a file that is being written, a connection that is made
ENDLESS = (
    *("-b", 8, "--max-steps", 100_000, "num_workers=0", "save_every_steps=0", "save_interval=0"),
    *("evaluate_interval=0", "log.display=plain", "--audit", *PATIENT),
)


def losses_without_faults(folder, *, steps, task, world):
    """What each of the first ``steps`` steps loses on average where nothing goes wrong."""
    with Run(folder, *ENDLESS, "task.pace_s=0", task=task, world=world) as run:
        run.wait_for_step(steps)
        run.signal(signal.SIGTERM)
        assert run.wait() == 75, run.console
    return losses(run, steps)


def losses(run, steps):
    """By the audit of rank 0, newest line of each step."""
    audit = run.audit(1)[0]
    return [audit[step]["loss_hex"] for step in range(1, steps + 1)]


def kill(run, rank):
    """SIGKILL the newest process of this rank; returns once it was replaced, and a step was done since."""
    formed = [event["pid"] for event in run.events("rank_formed") if event["rank"] == rank]
    repaired = len(run.events("repaired"))
    run.signal(signal.SIGKILL, formed[-1])
    poll(lambda: len(run.events("repaired")) > repaired, what=f"a repair:\n{run.console}")
    run.wait_for_step(run.committed() + 1)


def settle(pid, most=None):
    """How many descriptors a process holds; with ``most``, once there are no more than that."""

    def few_enough():
        now = usage_of(pid).descriptors
        return now if most is None or now <= most else 0

    return poll(few_enough, what=f"{most} descriptors at most of {descriptors(pid)}")


def descriptors(pid):
    """For an assertion that fails."""
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            found.append(str(path.readlink()))
    return sorted(found)


@pytest.mark.timeout(400)  # thirty times what other tests do once, on a machine that may be busy
def test_many_restarts_change_no_bit_and_leave_no_descriptor_open(tmp_path):
    """Each as soon as the one before is repaired; the supervisor and the rank that stays hold no more."""
    many = ("--max-restarts", KILLS, "task.pace_s=0.01")
    with Run(tmp_path / "run", *ENDLESS, *many, task=PLAIN) as run:
        run.wait_for_event("spare_ready")
        for _ in range(2):
            kill(run, 1)
        stays = (run.process.pid, run.rank_pid(0))
        most = [settle(pid) + DESCRIPTORS_MORE for pid in stays]
        for _ in range(KILLS - 2):
            kill(run, 1)
        for pid, bound in zip(stays, most, strict=True):
            settle(pid, bound)
        run.signal(signal.SIGTERM)
        assert run.wait() == 75, run.console
    summary = run.summary()
    faults = {(fault["kind"], fault["rank"], fault["steps_lost"]) for fault in summary["faults"]}
    assert (len(summary["faults"]), faults) == (KILLS, {("rank_killed", 1, 0)})
    assert summary["exact"] is True
    steps = summary["steps"]
    calm = losses_without_faults(tmp_path / "fault_free", steps=steps, task=PLAIN, world=2)
    assert losses(run, steps) == calm


@pytest.mark.slow  # with samples and steps compared: test_elastic
def test_four_ranks_three_and_four_again_end_where_four_do(tmp_path):
    """Killed too often, a slot is given up and comes back: the same samples, the same losses to 1e-4."""
    elastic = ("--min-ranks", 3, "--regrow-after", 0.3, "recovery.slot_failures_max=1")
    with Run(tmp_path / "run", *ENDLESS, *elastic, "task.pace_s=0.02", task=SMOOTH, world=4) as run:
        run.wait_for_step(5)
        run.signal(signal.SIGKILL, run.rank_pid(2))
        poll(lambda: "rank 2 is back: 4 ranks" in run.console, what=f"its return:\n{run.console}")
        run.wait_for_step(run.committed() + 10)
        run.signal(signal.SIGTERM)
        assert run.wait() == 75, run.console
    summary = run.summary()
    (reason,) = summary["inexact_reasons"]
    assert (summary["exact"], reason.startswith("3 of 4 ranks from step ")) == (False, True)
    steps = summary["steps"]
    ranks = [sum(step in audit for audit in run.audit(4)) for step in range(1, steps + 1)]
    shrunk = [number for number, count in enumerate(ranks) if count == 3]
    assert set(ranks) == {3, 4}
    assert ranks[0] == ranks[-1] == 4
    assert shrunk == list(range(shrunk[0], shrunk[-1] + 1))
    calm = losses_without_faults(tmp_path / "fault_free", steps=steps, task=SMOOTH, world=4)
    ours, theirs = ([float.fromhex(one) for one in each] for each in (losses(run, steps), calm))
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert summary["final_loss"] == pytest.approx(theirs[-1], rel=1e-4)
