"""Faults in every phase of runs whose collectives end in silence, with wrong numbers, when aborted.

As NCCL's do (see tests.kernel.group.silent): who has not heard of the abort takes them for whole.
``SILENT_FAULTS=200 pytest -m soak tests/scenarios/test_silent.py`` injects so many.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.scenarios.harness import Run, assert_every_sample_once, poll
from tests.scenarios.test_phases import KIND, reported_step
from tests.scenarios.workload import TROUBLE_NAME

TASK = f"{Path(__file__).with_name('silenced.py')}:SilencedTask"
WORLD = 3
LATE = 1  # silenced.SLOW_RANK, whose import would make gloo silent here too: is ahead of others where those are cut first
HUNG = 2  # whose device is the one that hangs
STEPS = 60
SETTINGS = (
    *("-b", 12, "num_workers=0", "log.display=plain", "--audit", "task.pace_s=0.01"),
    *("save_every_steps=20", "save_interval=0", "evaluate_every_steps=30", "evaluate_interval=0"),
    *("recovery.max_restarts=1000", "recovery.no_progress_generations=5"),
    *("recovery.hang_min_s=4", "recovery.drill_at=off"),
)
HARMS = (
    ("kill", "backward", 0, 0),
    ("kill", "forward", 2, 5),
    ("raise", "forward", 0, 9),
    ("kill", "reducing", 2, 13),
    ("kill", "data", LATE, 17),
    ("raise", "backward", 2, 21),
    ("kill", "optimizer", 0, 25),
    ("stop", "forward", 2, 31),
    ("kill", "commit", 2, 35),
    ("raise", "commit", 0, 39),
    ("hang", "forward", 0, 45),
    ("kill", "reduced", 0, 49),
    ("raise", "optimizer", 2, 53),
    ("kill", "backward", 2, STEPS - 1),
)
SOAKED = int(os.environ.get("SILENT_FAULTS", "200"))


def _run(folder, *words, steps=STEPS):
    return Run(folder, *SETTINGS, "--max-steps", steps, *words, world=WORLD, task=TASK)


@pytest.fixture
def undisturbed(made_once):
    """The weights where nothing goes wrong."""
    steps = ("--max-steps", STEPS, "task.pace_s=0")
    return made_once(*SETTINGS, *steps, world=WORLD, task=TASK).digest


def _plan(harms):
    return [
        word
        for kind, phase, rank, step in harms
        for word in ("--inject", f"{kind}:rank={rank},step={step},phase={phase}")
    ]


def test_no_wrong_sum_is_committed_and_no_survivor_blamed(tmp_path, undisturbed):
    """Whatever a rank was doing, and though one hears of each abort later than the others."""
    with _run(tmp_path / "faults", *_plan(HARMS)) as run:
        assert run.wait(240.0) == 0, run.console
    assert run.digest == undisturbed
    summary = run.summary()
    assert (summary["exact"], summary["steps"]) == (True, STEPS)
    reported = [(f["kind"], f["rank"], f["step"]) for f in summary["faults"]]
    assert reported == [
        ({**KIND, "hang": "rank_hung"}[kind], rank, reported_step(kind, phase, step))
        for kind, phase, rank, step in HARMS
    ], "\n".join(map(str, summary["faults"]))
    assert [f for f in summary["faults"] if f["steps_lost"]] == []
    assert_every_sample_once(run, WORLD, samples=192)
    assert len(run.events("cut")) == len(HARMS)


def test_a_rank_whose_device_hangs_is_distinguished_from_who_waits(tmp_path, undisturbed):
    """In a step, and in an evaluation: all hosts wait in the same sum, and no abort ends what that device does."""
    with _run(tmp_path / "hung", "recovery.hang_min_s=2") as run:
        trouble = run.folder / TROUBLE_NAME
        trouble.write_text(f"device {HUNG} sleep1000 15", encoding="utf-8")
        poll(lambda: not trouble.exists(), what="the first device that hangs")
        trouble.write_text(f"device_evaluating {HUNG} sleep1000", encoding="utf-8")
        assert run.wait(120.0) == 0, run.console
    faults = run.summary()["faults"]
    reported = [(fault["kind"], fault["rank"], fault["step"]) for fault in faults]
    assert reported == [("rank_hung", HUNG, 14), ("rank_hung", HUNG, 29)], faults
    assert all("its device has not reached the sum" in fault["cause"] for fault in faults)
    assert [plan["replaced"] for plan in run.events("plan")] == [[HUNG], [HUNG]]
    pids = [
        {one["pid"] for one in run.events("rank_formed") if one["rank"] == r} for r in range(WORLD)
    ]
    assert [len(of_rank) for of_rank in pids] == [1, 1, 3]
    assert run.digest == undisturbed
    assert run.summary()["exact"] is True
    assert all(fault["steps_lost"] == 0 for fault in faults)


@pytest.mark.soak
def test_so_many_random_faults_leave_the_weights_of_a_fault_free_run(tmp_path):
    """Kill, raise and hang, at random places: no wrong weight, and no survivor is blamed."""
    steps = 12 * SOAKED
    with _run(tmp_path / "fault_free", "task.pace_s=0", steps=steps) as fault_free:
        assert fault_free.wait(3600.0) == 0, fault_free.console
    harm = "random:seed=1,mtbf_s=1,kinds=kill+stop+raise+hang"
    settings = ("task.pace_s=0.08", "recovery.hang_min_s=0.7", "--inject", harm)
    with _run(tmp_path / "faults", *settings, steps=steps) as run:
        assert run.wait(7200.0, hurries=False) == 0, run.console
    assert len(run.summary()["faults"]) > SOAKED / 2
    assert run.digest == fault_free.digest
    assert run.summary()["exact"] is True


@pytest.mark.slow
def test_under_torchrun_a_rank_that_raises_leaves_its_peers_nothing_to_commit(
    tmp_path, undisturbed
):
    """It ends without aborting, as nobody can agree on that there; torchrun ends the others.

    Every step is saved: one that was committed of an aborted sum would be what all go on from.
    """
    # Else no save is made before all ranks have been compared, one that has ended too.
    saves = ("save_every_steps=1", "task.pace_s=0.05", "recovery.replica_check_steps=0")
    launcher = (
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(WORLD), "--max-restarts", "2", "-m", "ddp_runner", "train"),
    )
    settings = (*SETTINGS, "--max-steps", STEPS, *saves)
    with Run(tmp_path / "faults", *settings, command=launcher, task=TASK) as run:
        run.wait_for_step(20)
        (run.folder / TROUBLE_NAME).write_text("loss 2 raise", encoding="utf-8")
        assert run.wait(240.0) == 0, run.console
    assert not (run.folder / TROUBLE_NAME).exists(), "it was raised"
    assert run.digest == undisturbed
