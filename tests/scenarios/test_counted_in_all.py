"""Loader workers of a machine, and batches of a step, that are counted over all ranks: whole runs."""

from __future__ import annotations

import signal

import pytest

from tests.scenarios.conftest import SETTINGS, STEPS
from tests.scenarios.harness import Run, assert_every_sample_once, poll

# As SETTINGS have it of two ranks with batches of 8: parts of 4, two for each.
TOTAL = (*SETTINGS, "-b", 4, "num_workers=0", "accumulation_total=4")


def loader_pids(run):
    """Those of each rank that the status shows, once it shows any."""
    status = run.status()
    return [] if status is None else [rank["loader_pids"] for rank in status["ranks"]]


def test_a_total_of_workers_is_shared_out_and_kept(tmp_path, fault_free):
    """Rank 0 has the one that is over; a replacement has its rank's part; the weights are as ever."""
    settings = [word for word in SETTINGS if word != "num_workers=1"]
    with Run(tmp_path, *settings, "workers_total=3", "task.pace_s=0.2", world=2) as run:
        poll(lambda: [len(pids) for pids in loader_pids(run)] == [2, 1], what="workers")
        before = loader_pids(run)[1]
        run.wait_for_step(4)
        run.signal(signal.SIGKILL, run.rank_pid(1))
        poll(lambda: len(pids := loader_pids(run)[1]) == 1 and pids != before, what="a new worker")
        assert run.wait() == 0, run.console
    assert "3 loader workers over 2 ranks" in " ".join(run.console.split())
    assert (run.digest, run.summary()["exact"]) == (fault_free(2).digest, True)


@pytest.fixture
def accumulated(made_once):
    """The same steps, counted for each rank."""
    settings = [word for word in TOTAL if word != "accumulation_total=4"]
    return made_once(*settings, "accumulation=2", world=2)


def test_a_total_of_batches_trains_as_its_part_for_each_rank(tmp_path, accumulated):
    """To the bit, also where a rank is killed; the start block shows both readings."""
    with Run(tmp_path, *TOTAL, "task.pace_s=0.04", world=2) as run:
        run.wait_for_step(4)
        run.signal(signal.SIGKILL, run.rank_pid(0))
        assert run.wait() == 0, run.console
    assert (run.digest, run.summary()["exact"]) == (accumulated.digest, True)
    block = " ".join(run.console.split())
    assert "global batch 16 = 4 x 2 accumulated x 2 ranks" in block
    assert "16 samples; for each rank (accumulation=4) it would be 32" in block


def test_the_batch_of_a_total_stays_with_fewer_ranks(tmp_path):
    """A rank is given up; then a launch with a number of ranks that does not fit is refused, as a total, not as a batch."""
    dies = ("--inject", "kill:rank=1,step=8", "--inject", "kill:rank=1,step=12")
    may = ("--min-ranks", 2, "recovery.slot_failures_max=2", "accumulation_total=6")
    words = (*TOTAL, *may)
    with Run(tmp_path, *words, *dies, world=3) as run:
        assert run.wait() == 0, run.console
    assert "2 of 3 ranks from step" in run.summary()["inexact_reasons"][0]
    assert run.summary()["samples"] == STEPS * 24
    assert_every_sample_once(run, 3, samples=192)
    longer = ("--max-steps", STEPS + 2)
    with Run(tmp_path, *words, *longer, world=4) as refused:
        assert refused.wait() == 2
    assert "data.accumulation_total=6: must be a multiple of the 4 ranks: take 4 or 8; or " in (
        refused.console
    )
    instead = ("accumulation_total=0", "global_batch_size=24")
    with Run(tmp_path, *words, *longer, *instead, world=4) as resumed:
        assert resumed.wait() == 0, resumed.console
    assert f"resumed at step {STEPS}" in " ".join(resumed.console.split())
