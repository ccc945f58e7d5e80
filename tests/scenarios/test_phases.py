"""SIGKILL in every phase, from the first start on, and an error inside the optimizer: no bit differs."""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.scenarios import conftest
from tests.scenarios.harness import WORKLOAD, Run, assert_every_sample_once, poll

HALF_UPDATES = f"{Path(__file__).with_name('hungry.py')}:HalfUpdatesTask"

STEPS = 72
SETTINGS = (
    *("-b", 8, "num_workers=0", "log.display=plain", "--audit", "task.pace_s=0.01"),
    *("evaluate_every_steps=10", "evaluate_interval=0", "save_every_steps=10", "save_interval=0"),
    *("recovery.max_restarts=100", "recovery.no_progress_generations=5", "keep_last=9"),
    "recovery.hang_min_s=4",  # one rank is stopped; a busy machine holds none for so long
)
# Kind, phase, rank (the last one as -1), step (of an evaluation or save: the one before it).
# At a boundary one harm at most: no rank waits there for another one, so two of them are one incident.
HARMS = (
    ("kill", "startup", -1, 0),
    ("kill", "forming", 0, 0),
    ("kill", "backward", -1, 0),
    ("kill", "data", -1, 5),
    ("kill", "forward", 0, 9),
    ("raise", "compare", -1, 9),
    ("raise", "forward", 0, 15),
    ("kill", "evaluate", -1, 19),
    ("kill", "compare", -1, 29),
    ("kill", "backward", -1, 35),
    ("kill", "optimizer", 0, 37),
    ("raise", "evaluate", -1, 39),
    ("kill", "commit", 0, 43),
    ("raise", "commit", -1, 47),
    ("kill", "checkpoint", 0, 49),
    ("raise", "commit", 0, 51),
    ("stop", "commit", -1, 55),
    ("raise", "optimizer", 0, 57),
    ("raise", "checkpoint", 0, 59),
    # The last step, and the last save.
    ("kill", "backward", -1, STEPS - 1),
    ("kill", "checkpoint", 0, STEPS - 1),
)
KIND = {"kill": "rank_killed", "raise": "rank_raised", "stop": "rank_hung"}


# Two ranks, of which one is left: test_every_kind_of_fault_is_repaired_without_a_lost_step.
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_fault_in_any_phase_costs_no_committed_step_and_no_bit(made_once, tmp_path, world):
    """What a rank was doing does not matter, saving, evaluating and half an update included."""
    specs = [(kind, phase, rank % world, step) for kind, phase, rank, step in HARMS]
    asked = []
    for kind, phase, rank, step in specs:
        asked += ["--inject", f"{kind}:rank={rank},step={step},phase={phase}"]
    task = f"{WORKLOAD}:DiesAtExit"  # which is no fault any more
    # No harm of the next save comes before the disk has done with this one.
    harmed = (*SETTINGS, "--max-steps", STEPS, "task.awaits_saves=true", *asked)
    with Run(tmp_path, *harmed, world=world, task=task) as run:
        assert run.wait(180.0) == 0, run.console  # twenty repairs, on a machine that may be busy
    steps = ("--max-steps", STEPS, "task.pace_s=0", "num_workers=0", "warm_spare=false")
    assert run.digest == made_once("-b", 8, *steps, world=world).digest
    summary = run.summary()
    assert (summary["exact"], summary["steps"]) == (True, STEPS)
    faults = summary["faults"]
    assert [(f["kind"], f["rank"], f["step"]) for f in faults] == [
        (KIND[kind], rank, reported_step(kind, phase, step)) for kind, phase, rank, step in specs
    ], "\n".join(map(str, faults))
    assert all(f["recovered_s"] is not None for f in faults)
    # Who dies at once after its commit may be alone with that step: gloo ends its sum on one rank first.
    alone = [f["phase"] == "data" and f["kind"] == "rank_killed" for f in faults]
    assert all(f["steps_lost"] <= is_alone for f, is_alone in zip(faults, alone, strict=True)), (
        faults
    )
    assert_every_sample_once(run, world, samples=192)
    check_fences(run, world)
    check_saves(run)


def reported_step(kind, phase, step):
    """The step that a fault is reported at; an exception after a step is one at the next."""
    return step + (kind == "raise" and phase in ("evaluate", "checkpoint"))


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_half_updated_weights_never_spread(fault_free, tmp_path, world):
    """Killed or raised between two parameters, on one rank or on all: such a state is nobody's source."""
    steps = (*SETTINGS, "--max-steps", conftest.STEPS, "task.pace_s=0")
    plan = "task.plan=5-1-kill+12-0-raise+19-all-raise"
    with Run(tmp_path / "faults", *steps, plan, world=world, task=HALF_UPDATES) as run:
        assert run.wait() == 0, run.console
    assert len(list(tmp_path.glob("faults/half_*"))) == 2 + world, "all of them happened"
    assert len(run.events("plan")) == 3, "the last ones together"
    assert run.digest == fault_free(world).digest
    summary = run.summary()
    assert (summary["exact"], summary["steps"]) == (True, conftest.STEPS)
    first, second, *last = summary["faults"]
    assert (first["kind"], first["rank"], first["steps_lost"]) == ("rank_killed", 1, 0)
    assert (second["kind"], second["rank"], second["steps_lost"]) == ("rank_raised", 0, 0)
    assert {fault["kind"] for fault in last} == {"rank_raised"}
    lost = sum(fault["steps_lost"] for fault in last)
    assert lost <= 19, "with no whole replica left, the newest checkpoint is the source"


def test_a_rank_that_was_declared_dead_comes_back_to_nothing(fault_free, tmp_path):
    """SIGCONT, again and again, in the middle of a save of its own: it publishes nothing and joins nothing.

    By then the disk has taken its time: the save would be over at once.
    """
    settings = (*SETTINGS, "--max-steps", conftest.STEPS, "hang_min_s=2.5", "task.pace_s=0.08")
    settings += ("memory_every=0",)  # no other process writes for it
    slow = ("--inject", "slow_disk:rank=0,step=6,seconds=2,phase=data")
    with Run(tmp_path, *settings, *slow) as run:
        first = run.wait_for_event("rank_formed", rank=0)["pid"]
        poll(lambda: list(run.checkpoints.glob(f".*.tmp-*-{first}-*")), what="its save")
        run.signal(signal.SIGSTOP, first)
        generation = run.wait_for_event("fault", kind="rank_hung", rank=0)["generation"]
        while run.events("forming")[-1]["generation"] == generation:
            with contextlib.suppress(ProcessLookupError):
                run.signal(signal.SIGCONT, first)
            time.sleep(0.001)
        assert not psutil.pid_exists(first), "reaped before its number is given out again"
        assert run.wait() == 0, run.console
    assert run.digest == fault_free(2).digest
    saved = [event["step"] for event in run.events("checkpoint_saved")]
    assert sorted(set(saved)) == saved, "each step once, by one process"
    published = {
        int(path.stem.removeprefix("step_")) for path in run.checkpoints.glob("step_*.json")
    }
    assert published == set(saved), "nothing but what was reported"
    check_fences(run, 2)
    assert run.summary()["exact"] is True


def check_saves(run):
    """Whatever became of the rank that made it, a save is made up for before the next one is due.

    A save may be on disk and yet unreported: the rank that had written it was killed at once.
    """
    saved = {int(path.stem.removeprefix("step_")) for path in run.checkpoints.glob("step_*.pt")}
    for due in range(10, STEPS - 10, 10):
        assert saved & set(range(due, due + 10)), (due, saved)


def check_fences(run, world):
    """Nobody writes for a generation that is over: each rank's lines are in the order of generations."""
    for rank in range(world):
        lines = run.audit_lines(rank)
        generations = [line["generation"] for line in lines]
        assert generations == sorted(generations), rank
        steps = [line["step"] for line in lines]
        assert steps == sorted(set(steps)), f"rank {rank} did a committed step again"
