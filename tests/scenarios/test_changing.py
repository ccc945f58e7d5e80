"""What a step changes beside the optimizer is state, whoever is killed; what nobody can see is reported."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.scenarios.conftest import NO_SPARE
from tests.scenarios.harness import Run

TASKS = Path(__file__).with_name("changing.py")
SETTINGS = ("-b", 8, "--max-steps", 24, "save_every_steps=7", "save_interval=0")
KILLS = [("--inject", f"kill:rank={rank},step={step},phase={phase}") for rank, step, phase in (
    (1, 4, "forward"), (0, 9, "reduce"), (1, 15, "optimizer"),
)]  # fmt: skip


def _outlives_all(folder, *, task, workers=0):
    """Kills, a stop and a resume: the weights are those of a run without any of it."""
    settings = (*SETTINGS, "--max-steps", 36, "--audit", f"num_workers={workers}")
    with Run(folder / "calm", *settings, NO_SPARE, task=f"{TASKS}:{task}") as calm:
        assert calm.wait() == 0, calm.console
    assert calm.summary()["exact"] is True, calm.summary()["inexact_reasons"]
    words = [word for kill in KILLS for word in kill]
    with Run(folder / "run", *settings, *words, task=f"{TASKS}:{task}") as run:
        run.wait_for_step(20)
        run.signal(signal.SIGTERM)
        assert run.wait() == 75, run.console
    assert len(run.summary()["faults"]) == len(KILLS)
    with Run(folder / "run", *settings, NO_SPARE, task=f"{TASKS}:{task}") as run:
        assert run.wait() == 0, run.console
    assert run.summary()["exact"] is True, run.summary()["inexact_reasons"]
    assert run.digest == calm.digest


def test_what_a_step_changes_is_the_same_whoever_is_killed(tmp_path):
    """In forward, in the reduction and in the optimizer; rank 0 too. Then by way of the file.

    Buffers of the file's shape, counters and generators of the file.
    """
    _outlives_all(tmp_path, task="CountsClipsAndGrows")


def test_layers_unfrozen_or_frozen_while_training(tmp_path):
    """The replacement hears which parameters are trained by now, and DDP sums their gradients."""
    _outlives_all(tmp_path, task="Unfreezes", workers=1)


def test_a_step_that_cannot_be_repeated_is_reported_or_ends_all(tmp_path):
    """A state in a global: seen by what the first step comes to when it is computed twice."""
    settings = (*SETTINGS, NO_SPARE, "num_workers=0")
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


def test_a_first_step_that_is_interrupted_is_rehearsed_again(tmp_path):
    """A rank is lost while the step is rehearsed: the ranks compare it after the repair."""
    kill = ("--inject", "kill:rank=0,step=0", "--no-proof")
    with Run(
        tmp_path, *SETTINGS, *kill, NO_SPARE, "num_workers=0", task=f"{TASKS}:HasAGlobal"
    ) as run:
        assert run.wait() == 0, run.console
    assert len(run.summary()["faults"]) == 1
    assert run.summary()["exact"] is False
    assert any(
        "the first step cannot be repeated" in one for one in run.summary()["inexact_reasons"]
    )
