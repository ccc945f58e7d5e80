"""Saves that wait for a verdict: the replicas are compared beside the step after the one that is saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ddp_runner.checkpoint.store import CheckpointStore
from tests.scenarios.conftest import PATIENT
from tests.scenarios.harness import Run

pytestmark = pytest.mark.whole_run

FLIPPING = f"{Path(__file__).with_name('hungry.py')}:FlippingTask"
SETTINGS = (
    *("-e", 3, "-b", 8, "--max-steps", 24, "num_workers=0", "--audit", "log.display=plain"),
    *("save_every_steps=10", "save_interval=0", "evaluate_interval=0", "keep_last=9"),
    *PATIENT,
    "task.awaits_saves=true",  # so that a save has ended, and been reported, when the next one is due
)


def finish(folder, *arguments):
    with Run(folder, *SETTINGS, *arguments, task=FLIPPING, world=3) as run:
        assert run.wait() == 0, run.console
        return run


def saved_steps(run):
    return [event["step"] for event in run.events("checkpoint_saved")]


def weights(run, step):
    path = run.checkpoints / f"step_{step:08}.pt"
    return torch.load(path, weights_only=True)["model"]


@pytest.fixture
def fault_free(made_once):
    """Control: every verdict is good, and everything that is due is saved, once."""
    run = made_once(*SETTINGS, "task.rank=7", task=FLIPPING, world=3)
    assert run.summary()["faults"] == []
    assert saved_steps(run) == [10, 20, 24]
    return run


def test_a_rank_that_dies_before_the_verdict_costs_a_save_only(tmp_path, fault_free):
    """A peer at step 10, the saving rank itself at 20: compared again by those that are left, then saved."""
    kills = [f"kill:rank={rank},step={step},phase=compare" for rank, step in ((1, 10), (0, 20))]
    run = finish(tmp_path, "task.rank=7", *(word for kill in kills for word in ("--inject", kill)))
    faults = run.summary()["faults"]
    assert [(fault["kind"], fault["rank"], fault["step"]) for fault in faults] == [
        ("rank_killed", 1, 10), ("rank_killed", 0, 20)
    ]  # fmt: skip
    assert all(fault["steps_lost"] == 0 for fault in faults)
    assert (run.digest, run.summary()["exact"]) == (fault_free.digest, True)
    # Until somebody died for it, nothing was written of that step; then once.
    reported = [(event["event"], event.get("step")) for event in run.events()]
    seen = [one for one in reported if one[0] in ("repaired", "checkpoint_saved")]
    assert [name for name, _ in seen] == ["repaired", "checkpoint_saved"] * 2 + ["checkpoint_saved"]
    first, second, last = saved_steps(run)
    # A step later where the thread of the save that was dropped had not ended yet.
    assert (first in (10, 11), second in (20, 21), last) == (True, True, 24)
    loaded = CheckpointStore(run.checkpoints, keep_last=9).load()
    assert (loaded.manifest.step, loaded.rejected) == (24, ())


def test_a_bit_that_flips_at_a_save_reaches_neither_file_nor_weights(tmp_path, fault_free):
    """On the rank that saves; its step is given up before its optimizer: the run ends as without faults."""
    run = finish(tmp_path, "task.rank=0")
    (fault,) = run.summary()["faults"]
    assert (fault["kind"], fault["rank"], fault["step"]) == ("replica_diverged", 0, 10)
    assert (fault["steps_lost"], run.digest) == (0, fault_free.digest)
    assert "4.weight" in fault["cause"]
    first, second, last = sorted(set(saved_steps(run)))
    # A step later where the thread of the save that was dropped had not ended yet.
    assert (first in (10, 11), second in (20, 21), last) == (True, True, 24)
    for step in {first, second, last} & set(saved_steps(fault_free)):
        for name, expected in weights(fault_free, step).items():
            assert torch.equal(weights(run, step)[name], expected), (step, name)
    events = [(event["event"], event.get("step")) for event in run.events()]
    repaired = [name for name, _ in events].index("repaired")
    assert events.index(("checkpoint_saved", first)) > repaired, "what it had copied was dropped"
