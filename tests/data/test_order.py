"""The sample order: once per epoch, the same for every world, for ever."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_runner.data.order import SampleOrder, micro_batch_count, micro_batches, permutation, share

sizes = st.integers(1, 400)


@given(size=sizes, batch=st.integers(1, 60), epoch=st.integers(0, 5), seed=st.integers(0, 2**63))
def test_each_index_is_taken_at_most_once_per_epoch(size, batch, epoch, seed):
    """The steps of an epoch never repeat a sample, and leave out less than one global batch."""
    batch = min(batch, size)
    order = SampleOrder(seed=seed, dataset_size=size, global_batch_size=batch)
    first = epoch * order.steps_per_epoch
    taken = np.concatenate([order.indices(first + k) for k in range(order.steps_per_epoch)])
    assert len(set(taken.tolist())) == len(taken) > size - batch
    assert taken.min() >= 0
    assert taken.max() < size


@given(total=st.integers(0, 200), world_size=st.integers(1, 17))
def test_shares_of_all_ranks_are_the_whole_in_order(total, world_size):
    """Whatever the world size, the ranks together load exactly the step's samples, evenly."""
    indices = np.arange(total, dtype=np.int64) * 7
    shares = [share(indices, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert np.concatenate(shares).tolist() == indices.tolist()
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(total=st.integers(0, 100), size=st.integers(1, 40))
def test_micro_batches_are_the_share_cut_in_order(total, size):
    """Cutting loses, repeats and reorders nothing; as few pieces as can be, nearly equal ones."""
    indices = np.arange(total, dtype=np.int64)
    pieces = micro_batches(indices, size)
    assert [i for piece in pieces for i in piece.tolist()] == indices.tolist()
    assert len(pieces) == micro_batch_count(total, size) == -(-total // size)
    sizes = {len(piece) for piece in pieces} or {0}
    assert max(sizes) <= size
    assert max(sizes) - min(sizes) <= 1


@given(total=st.integers(2, 100), size=st.integers(3, 40))
def test_no_sample_is_left_alone_where_three_fit(total, size):
    """Batch normalisation refuses a batch of one."""
    assert min(map(len, micro_batches(np.arange(total, dtype=np.int64), size))) >= 2


def test_order_is_the_same_for_ever():
    """A resumed run continues the order of an older installation: the numbers are a contract."""
    assert permutation(seed=1234, epoch=0, size=12).tolist() == GOLDEN_EPOCH_0
    assert permutation(seed=1234, epoch=1, size=12).tolist() == GOLDEN_EPOCH_1


def test_indices_do_not_depend_on_what_was_asked_before():
    """A step's samples are a function of the step, also when epochs are visited at random."""
    seen = SampleOrder(seed=3, dataset_size=50, global_batch_size=7)
    for step in (0, 40, 3, 21, 0, 60, 8, 40):
        fresh = SampleOrder(seed=3, dataset_size=50, global_batch_size=7)
        assert seen.indices(step).tolist() == fresh.indices(step).tolist()


def test_epochs_and_seeds_differ():
    """Each epoch and each seed has its own order."""
    orders = {tuple(permutation(seed=s, epoch=e, size=64)) for s in range(4) for e in range(4)}
    assert len(orders) == 16


def test_without_shuffle_the_order_is_the_dataset():
    """``shuffle=False`` takes the samples as they lie."""
    order = SampleOrder(seed=1, dataset_size=10, global_batch_size=4, shuffle=False)
    assert order.indices(1).tolist() == [4, 5, 6, 7]
    assert order.indices(2).tolist() == [0, 1, 2, 3]
    assert order.position(3) == (1, 1)


def test_permutation_shuffles_evenly():
    """Every sample comes at every place about equally often, over many epochs."""
    counts = np.zeros((8, 8))
    for epoch in range(4000):
        counts[np.arange(8), permutation(seed=5, epoch=epoch, size=8)] += 1
    assert np.abs(counts - 500).max() < 100  # 500 expected, 21 standard deviation


def test_dataset_smaller_than_a_global_batch_is_an_error():
    """Nothing can be trained if not one step can be filled."""
    with pytest.raises(ValueError, match="3 samples, fewer than one global batch of 4"):
        SampleOrder(seed=0, dataset_size=3, global_batch_size=4)


def test_rank_outside_the_world_is_an_error():
    """A share exists for ranks of the world only."""
    with pytest.raises(ValueError, match="rank=2"):
        share(np.arange(4), rank=2, world_size=2)


GOLDEN_EPOCH_0 = [9, 3, 7, 5, 0, 2, 6, 1, 8, 4, 10, 11]
GOLDEN_EPOCH_1 = [3, 9, 7, 11, 2, 1, 8, 6, 5, 10, 4, 0]
