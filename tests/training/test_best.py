"""Which state is the best: a function of the course, whatever else was saved, skipped or refused."""

from __future__ import annotations

import json

import pytest
import torch

from ddp_runner.checkpoint.codec import weights_sha256
from ddp_runner.kernel.wire.events import RepairedInPlace, TuningChanged
from tests.training.test_session import messages_of, settings, train

# It only gets worse: the first evaluation is the best one.
DIVERGING = {
    "optimizer": "sgd",
    "momentum": 0.0,
    "learning_rate": 1.0,
    "schedule": "constant",
    "warmup_steps": 0,
    "max_grad_norm": None,
    "explosion_window": 0,
    "save_interval": 0,
    "save_every_steps": 0,
    "evaluate_interval": 0,
    "evaluate_every_steps": 3,
    "max_steps": 8,
}


def manifests(folder):
    paths = sorted((folder / "checkpoints").glob("step_*.json"))
    return {one["step"]: one for one in map(json.loads, (path.read_text() for path in paths))}


def weights_at(folder, step):
    state = torch.load(folder / f"checkpoints/step_{step:08d}.pt", weights_only=True)
    return weights_sha256(state["model"])


def final(folder):
    return weights_sha256(torch.load(folder / "checkpoints/final.pt", weights_only=True))


def test_the_best_shortly_after_a_skipped_step_is_the_end(tmp_path):
    """What was evaluated as finite is kept, though nothing goes back to it."""
    how = settings(tmp_path, **DIVERGING, load_best_at_end=True, **{"task.nan_at": "1"})
    report, *_ = train(how)
    assert report.steps == 8
    assert manifests(tmp_path)[3]["reason"] == "amid_skipped"
    assert final(tmp_path) == weights_at(tmp_path, 3)


def test_a_roll_back_passes_over_the_best_that_was_kept_amid_skips(tmp_path):
    """It goes to the state of before the skipped steps; what lies on the course that was left is set aside."""
    how = {
        **DIVERGING,
        "learning_rate": 0.01,
        "evaluate_every_steps": 5,
        "save_every_steps": 3,
        "load_best_at_end": True,
        "max_errors_per_epoch": 1,
        "epochs": 1,
        "max_steps": 6,
    }
    _, messages, _ = train(settings(tmp_path, **how, **{"task.nan_at": "3+5"}))
    (repaired,) = messages_of(messages, RepairedInPlace)
    assert "rolled back to step 3" in repaired.action
    assert [path.name for path in tmp_path.glob("checkpoints/set_aside_*/step_*.pt")] == [
        "step_00000005.pt"
    ]
    assert manifests(tmp_path)[5]["reason"] == "interval", "evaluated again, the errors forgotten"


def improvement_at(folder, step):
    state = torch.load(folder / f"checkpoints/step_{step:08d}.pt", weights_only=True)
    return state["improvement"]["now"], state["best"]


@pytest.mark.parametrize("every", [4, 3])
def test_the_evaluation_at_the_old_end_counts_only_where_it_is_due(tmp_path, every):
    """A run that is made longer has the plateaus and the best of one of that length; also where both evaluate there."""
    how = {**DIVERGING, "evaluate_every_steps": every, "plateau_patience": 2, "keep_last": 9}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    report, *_ = train(settings(whole, **how))
    train(settings(parts, **{**how, "max_steps": 6, "learning_rate": 1.0}))
    again, *_ = train(settings(parts, **how))
    assert again.weights_sha256 == report.weights_sha256
    assert improvement_at(parts, 8) == improvement_at(whole, 8)


@pytest.mark.parametrize("validation", [8, 0])
def test_only_what_was_evaluated_is_judged(tmp_path, validation):
    """A file of a step between two evaluations knows the best so far, and is not judged by the one before.

    Without validation data the training loss is judged where an evaluation would be, where the best is to be the end.
    """
    how = {**DIVERGING, "keep_last": 9, "task.validation": validation, "save_every_steps": 6}
    train(settings(tmp_path, **how, load_best_at_end=not validation), save_at=[3])
    found = manifests(tmp_path)
    kept = {} if validation else {3: True}
    judged = {step: one["monitored"] is not None for step, one in found.items()}
    assert judged == {**kept, 4: False, 6: True, 8: True}
    assert {one["about"]["best"]["step"] for one in found.values()} == {3}


@pytest.mark.parametrize("asked", [True, False])
def test_a_best_whose_file_is_gone_is_said_and_not_exact(tmp_path, asked):
    """A resume from the best of those there are is none of what evaluations have found; control: kept, it is."""
    how = {**DIVERGING, "keep_last": 9, "save_every_steps": 6, "load_best_at_end": asked}
    train(settings(tmp_path, **how))
    _, messages, _ = train(settings(tmp_path, **how, resume="best"))
    found = [m.inexact_reason for m in messages_of(messages, TuningChanged)]
    reasons = [reason for reason in found if "step 6 is the best" in reason]
    line = (
        'config={"resume": "best"}: step 6 is the best of the checkpoints there are, and validation_loss was best after'
        " step 3, of which there is none: load_best_at_end=true keeps it"
    )
    assert reasons == ([] if asked else [line])


def test_a_run_begun_with_a_best_that_is_another_is_not_exact(tmp_path):
    """The pointer of a run whose best was not kept; control: its newest."""
    how = {**DIVERGING, "keep_last": 9, "save_every_steps": 6}
    train(settings(tmp_path / "source", **how))
    for name, count in (("best", 1), ("last", 0)):
        source = str(tmp_path / "source/checkpoints" / name)
        _, messages, _ = train(settings(tmp_path / name, **how, init_from=source))
        found = [m.inexact_reason for m in messages_of(messages, TuningChanged)]
        assert sum("after step 3, of which there is none" in one for one in found) == count
