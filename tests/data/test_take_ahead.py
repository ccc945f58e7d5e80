"""The next step's batches, taken before they are asked for: the same ones, each given once."""

from __future__ import annotations

import pytest
import torch

from ddp_runner.data.workers.pool import WorkerPool
from tests.processes import poll

from .test_loader import TOTAL_STEPS, assert_same, flat, make, pinnable


@pytest.fixture(scope="module")
def reference():
    """Each step's rows, loaded in the process itself."""
    with make() as loader:
        return [flat(loader.take(step)) for step in range(TOTAL_STEPS)]


@pytest.fixture
def here(monkeypatch):
    """All batches count as arrived: taking them waits for what is not there yet."""
    monkeypatch.setattr(WorkerPool, "arrived", 99)


def test_steps_taken_ahead_are_those_that_would_have_come(reference, here):
    """Step by step, over epochs and to the last one; every batch is changed once."""
    changed = []

    def change(batch):
        changed.append(batch)
        return batch.clone()

    with make(num_workers=2) as loader:
        for step in range(TOTAL_STEPS):
            assert_same(loader.take(step), reference[step])
            loader.take_ahead(step + 1, change)
    assert len(changed) == 2 * (TOTAL_STEPS - 1)


def test_a_step_is_done_again_after_the_next_was_taken(reference, here):
    """Its samples are loaded again by workers of their own; the next one is still there."""
    with make(num_workers=2) as loader:
        loader.take(0)
        loader.take_ahead(1, torch.clone)
        pids = loader.worker_pids
        assert_same(loader.take(0), reference[0])
        assert_same(loader.take_copy(1), reference[1])
        assert_same(loader.take(1), reference[1])
        assert_same(loader.take(2), reference[2])
        assert loader.worker_pids == pids


@pytest.mark.parametrize("other", [0, 1, 4, 9])
def test_another_step_may_be_taken_than_the_one_ahead(reference, here, other):
    """After a roll-back, or a skip: whatever step comes, and those after it."""
    with make(num_workers=2) as loader:
        loader.take(0)
        loader.take(1)
        loader.take_ahead(2, torch.clone)
        for step in (other, other + 1, 2, 3):
            assert_same(loader.take(step), reference[step])


def test_another_share_forgets_what_was_taken_ahead(reference, here):
    """Micro-batches that are halved, as memory asks, are cut from the same samples."""
    with make(num_workers=2) as loader:
        loader.take(0)
        loader.take_ahead(1, torch.clone)
        loader.assign(rank=1, world_size=2, micro_batch_size=2)
        taken = loader.take(1)
    assert [len(micro.indices) for micro in taken] == [2, 2, 2]
    assert_same(taken, reference[1])


def test_only_batches_that_are_in_pinned_memory_are_taken_ahead(monkeypatch):
    """None are waited for: those of the step after are taken once all have arrived, else none."""
    monkeypatch.setattr("ddp_runner.data.workers.system_limits.can_pin", lambda: True)
    taken = []
    with make(num_workers=1, pin_memory=True, collate_fn=pinnable, prefetch_factor=2) as loader:
        loader.take(0)
        pool = loader._pool
        assert poll(lambda: pool.arrived >= 2)
        loader.take_ahead(1, taken.append)
        assert all(batch.pinned for batch in taken)
    assert len(taken) == 2
    with make(num_workers=1) as loader:  # nothing is pinned
        loader.take(0)
        loader.take_ahead(1, taken.append)
    assert len(taken) == 2
