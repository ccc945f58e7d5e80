"""SIGKILL in every phase, from the first start on, and an error inside the optimizer: no bit differs."""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.scenarios.harness import Run, assert_every_sample_once, poll

HALF_UPDATES = f"{Path(__file__).with_name('hungry.py')}:HalfUpdatesTask"

SETTINGS = (
    *("-b", 8, "num_workers=1", "log.display=plain", "--audit", "task.pace_s=0.01"),
    *("evaluate_every_steps=10", "evaluate_interval=0", "save_every_steps=10", "save_interval=0"),
    "recovery.max_restarts=100",
)
STEPS = 64
# Kind, phase, rank (the last one as -1), step (of an evaluation or save: the one before it).
HARMS = (
    ("kill", "startup", -1, 0),
    ("kill", "forming", 0, 0),
    ("kill", "data", -1, 5),
    ("kill", "forward", 0, 9),
    ("kill", "evaluate", -1, 19),
    ("kill", "checkpoint", 0, 29),
    ("kill", "backward", -1, 35),
    ("kill", "optimizer", 0, 39),
    ("kill", "commit", 0, 43),
    ("raise", "commit", -1, 47),
    ("raise", "commit", 0, 51),
    ("stop", "commit", -1, 55),
    ("raise", "optimizer", 0, 59),
)
KIND = {"kill": "rank_killed", "raise": "rank_raised", "stop": "rank_hung"}


@pytest.mark.parametrize("world", [2, 3])
def test_a_fault_in_any_phase_costs_no_committed_step_and_no_bit(tmp_path, world):
    """What a rank was doing does not matter, saving, evaluating and half an update included."""
    specs = [(kind, phase, rank % world, step) for kind, phase, rank, step in HARMS]
    asked = []
    for kind, phase, rank, step in specs:
        asked += ["--inject", f"{kind}:rank={rank},step={step},phase={phase}"]
    with Run(tmp_path / "peace", *SETTINGS, "--max-steps", STEPS, world=world) as peace:
        assert peace.wait() == 0, peace.console
    with Run(tmp_path / "faults", *SETTINGS, "--max-steps", STEPS, *asked, world=world) as run:
        assert run.wait() == 0, run.console
    assert run.digest == peace.digest
    summary = run.summary()
    assert (summary["exact"], summary["steps"]) == (True, STEPS)
    faults = summary["faults"]
    assert [(f["kind"], f["rank"], f["step"]) for f in faults] == [
        (KIND[kind], rank, step) for kind, _, rank, step in specs
    ], faults
    assert all(f["recovered_s"] is not None and f["steps_lost"] == 0 for f in faults)
    assert_every_sample_once(run, world, samples=192)
    check_fences(run, world)
    check_saves(run)


def test_half_updated_weights_never_spread(tmp_path):
    """Killed or raised between two parameters, on one rank or on all: such a state is nobody's source."""
    steps = (*SETTINGS, "--max-steps", 36, "task.pace_s=0", "num_workers=0")
    with Run(tmp_path / "peace", *steps, task=HALF_UPDATES) as peace:
        assert peace.wait() == 0, peace.console
    plan = "task.plan=5-1-kill+12-0-raise+19-all-raise"
    with Run(tmp_path / "faults", *steps, plan, task=HALF_UPDATES) as run:
        assert run.wait() == 0, run.console
    assert len(list(tmp_path.glob("faults/half_*"))) == 4, "all of them happened"
    assert run.digest == peace.digest
    summary = run.summary()
    assert (summary["exact"], summary["steps"]) == (True, 36)
    first, second, *last = summary["faults"]
    assert (first["kind"], first["rank"], first["steps_lost"]) == ("rank_killed", 1, 0)
    assert (second["kind"], second["rank"], second["steps_lost"]) == ("rank_raised", 0, 0)
    assert {fault["kind"] for fault in last} == {"rank_raised"}
    lost = sum(fault["steps_lost"] for fault in last)
    assert lost <= 19, "with no whole replica left, the newest checkpoint is the source"


def test_a_rank_that_was_declared_dead_comes_back_to_nothing(tmp_path):
    """SIGCONT, again and again, in the middle of a save: it publishes nothing and joins nothing."""
    settings = (*SETTINGS, "--max-steps", 40, "hang_min_s=0.7", "task.pace_s=0.05")
    slow = ("--inject", "slow_disk:rank=0,step=6,seconds=3,phase=data")
    with Run(tmp_path / "peace", *SETTINGS, "--max-steps", 40, "task.pace_s=0") as peace:
        assert peace.wait() == 0, peace.console
    with Run(tmp_path / "run", *settings, *slow) as run:
        first = run.wait_for_event("rank_formed", rank=0)["pid"]
        poll(lambda: list(run.checkpoints.glob(f".*.tmp-{first}")), what="its save")
        run.signal(signal.SIGSTOP, first)
        generation = run.wait_for_event("fault", kind="rank_hung", rank=0)["generation"]
        while run.events("form")[-1]["generation"] == generation:
            with contextlib.suppress(ProcessLookupError):
                run.signal(signal.SIGCONT, first)
            time.sleep(0.001)
        assert not psutil.pid_exists(first), "reaped before its number is given out again"
        assert run.wait() == 0, run.console
    assert run.digest == peace.digest
    saved = [event["step"] for event in run.events("checkpoint_saved")]
    assert sorted(set(saved)) == saved, "each step once, by one process"
    check_fences(run, 2)
    assert run.summary()["exact"] is True


def check_saves(run):
    """The save that rank 0 died of, at step 30, is made up for before the next one is due."""
    saved = {event["step"] for event in run.events("checkpoint_saved")}
    assert saved & set(range(30, 40)), saved


def check_fences(run, world):
    """Nobody writes for a generation that is over: each rank's lines are in the order of generations."""
    for rank in range(world):
        lines = run.audit_lines(rank)
        generations = [line["generation"] for line in lines]
        assert generations == sorted(generations), rank
        steps = [line["step"] for line in lines]
        assert steps == sorted(set(steps)), f"rank {rank} did a committed step again"
