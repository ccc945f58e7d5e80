"""A step that is done again has the samples of its first try, whatever the loss has done to them."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.scenarios.conftest import PATIENT
from tests.scenarios.harness import Run

TASKS = Path(__file__).with_name("batches.py")
SETTINGS = ("-b", 8, "--max-steps", 50, "--audit", *PATIENT)
WAYS = (("key", 0), ("item", 0), ("pop", 0), ("array", 0), ("array", 2), ("list", 0), ("list", 2))


@pytest.fixture
def pure(made_once):
    """A run in peace of a loss that leaves its batch alone, which computes the same."""
    return made_once(*SETTINGS, "num_workers=0", task=f"{TASKS}:BatchTask")


@pytest.mark.parametrize(("way", "workers"), WAYS)
def test_a_loss_may_change_its_batch(tmp_path, pure, way, workers):
    """Ranks are killed while all are inside the loss, which has changed its batch by then."""
    with Run(
        tmp_path,
        *SETTINGS,
        f"num_workers={workers}",
        f"task.way={way}",
        task=f"{TASKS}:BatchTask",
    ) as run:
        for rank, step in ((1, 8), (0, 25)):
            run.wait_for_step(step)
            run.signal(signal.SIGKILL, run.rank_pid(rank))
        assert run.wait() == 0, run.console
    assert len(run.summary()["faults"]) == 2
    assert (run.digest, run.summary()["exact"]) == (pure.digest, True)


@pytest.mark.parametrize(("way", "workers"), [("key", 0), ("list", 2)])
def test_the_pass_that_is_thrown_away_has_a_batch_of_its_own(tmp_path, pure, way, workers):
    """Without a search for unused parameters there is one at each forming; in peace and after a kill."""
    with Run(
        tmp_path,
        *SETTINGS,
        f"num_workers={workers}",
        "find_unused_parameters=false",
        f"task.way={way}",
        task=f"{TASKS}:BatchTask",
    ) as run:
        run.wait_for_step(20)
        run.signal(signal.SIGKILL, run.rank_pid(1))
        assert run.wait() == 0, run.console
    assert (run.digest, run.summary()["exact"]) == (pure.digest, True)
