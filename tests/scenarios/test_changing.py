"""What a step changes beside the optimizer is state, whoever is killed; what nobody can see is reported."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.scenarios.harness import Run

TASKS = Path(__file__).with_name("changing.py")
SETTINGS = ("-b", 8, "--max-steps", 24, "save_every_steps=7", "save_interval=0")
KILLS = [("--inject", f"kill:rank={rank},step={step},phase={phase}") for rank, step, phase in (
    (1, 4, "forward"), (0, 9, "reduce"), (1, 15, "optimizer"),
)]  # fmt: skip


def _weights(folder, *words, task, workers):
    settings = (*SETTINGS, f"num_workers={workers}")
    with Run(folder, *settings, *words, task=f"{TASKS}:{task}") as run:
        assert run.wait() == 0, run.console
    assert run.summary()["exact"] is True, run.summary()["inexact_reasons"]
    return run.digest


def _is_killed(folder, *, task, workers=0):
    calm = _weights(folder / "calm", task=task, workers=workers)
    words = [word for kill in KILLS for word in kill]
    assert _weights(folder / "killed", *words, task=task, workers=workers) == calm


@pytest.mark.parametrize("task", ["Counts", "Clips", "Grows"])
def test_what_a_step_changes_is_the_same_whoever_is_killed(tmp_path, task):
    """In forward, in the reduction and in the optimizer; rank 0 too."""
    _is_killed(tmp_path, task=task)


def test_layers_unfrozen_or_frozen_while_training(tmp_path):
    """The replacement hears which parameters are trained by now, and DDP sums their gradients."""
    _is_killed(tmp_path, task="Unfreezes", workers=1)


@pytest.mark.parametrize("task", ["Counts", "Grows", "Unfreezes"])
def test_a_stopped_run_goes_on_with_what_its_steps_have_changed(tmp_path, task):
    """Buffers of the file's shape, counters and generators of the file."""
    settings = (*SETTINGS, "--max-steps", 60, "--audit", "num_workers=0")
    with Run(tmp_path / "calm", *settings, task=f"{TASKS}:{task}") as run:
        assert run.wait() == 0, run.console
    calm = run.digest
    for end in (75, 0):
        with Run(tmp_path / "run", *settings, task=f"{TASKS}:{task}") as run:
            if end:
                run.wait_for_step(10)
                run.signal(signal.SIGTERM)
            assert run.wait() == end, run.console
    assert (run.digest, run.summary()["exact"]) == (calm, True)


def test_a_step_that_cannot_be_repeated_is_reported_or_ends_all(tmp_path):
    """A state in a global: seen by what the first step comes to when it is computed twice."""
    settings = (*SETTINGS, "num_workers=0")
    with Run(tmp_path / "reported", *settings, task=f"{TASKS}:HasAGlobal") as run:
        assert run.wait() == 0, run.console
    summary = run.summary()
    assert (summary["exact"], summary["exact_proof"]["repeated"]) == (False, 0)
    (reason,) = summary["inexact_reasons"]
    assert "the first step cannot be repeated" in reason
    assert "0.weight differs on ranks 0-1" in reason
    with Run(
        tmp_path / "ended", *settings, "require_exact=true", task=f"{TASKS}:HasAGlobal"
    ) as run:
        assert run.wait() == 1, run.console
    assert "the first step cannot be repeated" in run.console
