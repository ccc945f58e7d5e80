"""A step that is done again has the samples of its first try, whatever the loss has done to them."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from ddp_runner.data.stream import READ_AGAIN
from tests.scenarios.conftest import PATIENT
from tests.scenarios.harness import Run

TASKS = Path(__file__).with_name("batches.py")
SETTINGS = ("-b", 8, "--max-steps", 28, "--audit", *PATIENT)
KILLED_AT = (6, 10, 14, 18, 22)  # each with another rest of five, and so another way
KILLS = [
    word
    for number, step in enumerate(KILLED_AT)
    for word in ("--inject", f"kill:rank={1 - number % 2},step={step},phase=backward")
]


@pytest.fixture
def pure(made_once):
    """A fault-free run of a loss that leaves its batch alone, which computes the same."""
    return made_once(*SETTINGS, "num_workers=0", task=f"{TASKS}:BatchTask")


@pytest.mark.parametrize(("workers", "searches"), [(0, "false"), (1, "true")])
def test_a_loss_may_change_its_batch(tmp_path, pure, workers, searches):
    """In five ways, and a rank is killed when the loss has changed its batch in each.

    Without a search for unused parameters each forming has a pass that is thrown away, with a batch of its own.
    """
    words = (f"num_workers={workers}", f"find_unused_parameters={searches}", *KILLS)
    with Run(tmp_path, *SETTINGS, *words, task=f"{TASKS}:ChangingTask") as run:
        assert run.wait() == 0, run.console
    assert len(run.summary()["faults"]) == len(KILLED_AT)
    assert (run.digest, run.summary()["exact"]) == (pure.digest, True)


def test_rows_that_the_dataset_keeps_are_not_changed_with_the_batch(tmp_path, made_once):
    """Loaded in the rank itself, in several epochs, and after a kill: as with workers."""
    how = (*SETTINGS, "task.way=rows")
    with_workers = made_once(*how, "num_workers=1", task=f"{TASKS}:BatchTask")
    with Run(tmp_path, *how, "num_workers=0", task=f"{TASKS}:BatchTask") as run:
        run.wait_for_step(14)
        run.signal(signal.SIGKILL, run.rank_pid(1))
        assert run.wait() == 0, run.console
    assert (run.digest, run.summary()["exact"]) == (with_workers.digest, True)


STREAM_STEPS = 40  # of 6 an epoch
STREAM_SETTINGS = ("-b", 8, "--max-steps", STREAM_STEPS, "save_every_steps=5", "--audit", *PATIENT)
STREAM_SETTINGS = (*STREAM_SETTINGS, "num_workers=0")


@pytest.fixture
def pure_stream(made_once):
    """The same without faults."""
    return made_once(*STREAM_SETTINGS, task=f"{TASKS}:ShuffledTask")


def test_a_stream_whose_order_follows_from_its_epoch_is_exact(tmp_path, pure_stream):
    """Ranks replaced in the second and third epoch, a loss that changes its batch, a stop in the fifth."""
    how = (*STREAM_SETTINGS, "task.way=key")
    with Run(tmp_path, *how, task=f"{TASKS}:ShuffledTask") as run:
        for rank, step in ((1, 8), (0, 15)):
            run.wait_for_step(step)
            run.signal(signal.SIGKILL, run.rank_pid(rank))
        run.wait_for_step(26)
        run.signal(signal.SIGTERM)
        assert run.wait() == 75, run.console
    with Run(tmp_path, *how, task=f"{TASKS}:ShuffledTask") as again:
        again.wait_for_step(34)
        again.signal(signal.SIGKILL, again.rank_pid(1))
        assert again.wait() == 0, again.console
    assert (again.digest, again.summary()["exact"]) == (pure_stream.digest, True)
    assert "a copy of each step's batches is kept" in (run.logs / "rank_0.log").read_text()


def test_an_order_that_is_carried_over_epochs_is_not_exact(tmp_path, made_once):
    """A replacement does not have it; without faults that is no matter."""
    calm = made_once(*STREAM_SETTINGS, task=f"{TASKS}:CarryingTask")
    assert calm.summary()["exact"] is True
    with Run(tmp_path, *STREAM_SETTINGS, task=f"{TASKS}:CarryingTask") as run:
        run.wait_for_step(15)
        run.signal(signal.SIGKILL, run.rank_pid(1))
        assert run.wait() == 0, run.console
    summary = run.summary()
    assert summary["exact"] is False
    assert set(summary["inexact_reasons"]) == {
        READ_AGAIN,
        "the ranks' streams differ",
    }
