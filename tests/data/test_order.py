"""The sample order: once per epoch, the same for every world, for ever."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_runner.core.batch_sizes import cut
from ddp_runner.data.order import SampleOrder, micro_batch_count, micro_batches, share
from ddp_runner.data.permutation import KeyedPermutation
from ddp_runner.data.stream import StreamOrder
from ddp_runner.values.generators import mix64

sizes = st.integers(1, 400)
MASK = 2**64 - 1
GOLDEN_RATIO = 0x9E3779B97F4A7C15


def permutation(*, seed, epoch, size, version=2):
    """A whole epoch, step by step."""
    order = SampleOrder(seed=seed, dataset_size=size, global_batch_size=1, version=version)
    return np.concatenate([order.indices(epoch * size + place) for place in range(size)])


class Reference:
    """The second order once more, from its description alone, one place at a time, and backwards."""

    def __init__(self, *, seed, epoch, size):
        self.size = size
        self.left = math.isqrt(size - 1) + 1
        self.left += self.left % 2
        self.right = -(-size // self.left)
        base = mix64(mix64(seed) ^ (epoch * GOLDEN_RATIO & MASK))
        rounds = range(1, (24 if size < 4096 else 12) + 1)
        self.keys = [mix64((base + number * GOLDEN_RATIO) & MASK) for number in rounds]

    def _through(self, value, *, sign):
        left, right = divmod(value, self.right)
        rounds = list(enumerate(self.keys))
        for number, key in rounds[::sign]:
            if number % 2 == 0:
                left = (left + sign * (mix64((right + key) & MASK) >> 1)) % self.left
            else:
                right = (right + sign * (mix64((left + key) & MASK) >> 1)) % self.right
        return left * self.right + right

    def _within(self, value, *, sign):
        value = self._through(value, sign=sign)
        while value >= self.size:
            value = self._through(value, sign=sign)
        return value

    def sample(self, place):
        return self._within(place, sign=1)

    def place(self, sample):
        return self._within(sample, sign=-1)


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
    for size, golden in GOLDEN_LARGE.items():
        order = SampleOrder(seed=1234, dataset_size=size, global_batch_size=4)
        assert order.indices(order.steps_per_epoch - 1).tolist() == golden


def test_the_first_order_is_the_same_for_ever():
    """Runs that began with the first version go on in it."""
    assert permutation(seed=1234, epoch=0, size=12, version=1).tolist() == FIRST_EPOCH_0
    assert permutation(seed=1234, epoch=1, size=12, version=1).tolist() == FIRST_EPOCH_1


def test_an_order_of_a_newer_program_is_an_error():
    """It cannot be continued."""
    with pytest.raises(ValueError, match="in order 3; this program knows 1, 2"):
        SampleOrder(seed=1, dataset_size=8, global_batch_size=4, version=3)


def test_every_size_is_permuted_one_to_one():
    """All sizes up to 1,024, and around 4,096, where larger ones have fewer rounds; else one of 31, each in whole.

    No sample is left out or comes twice in an epoch.
    """
    for size in (*range(1, 1_025), *range(1_025, 10_001, 31), *range(4_090, 4_103)):
        order = KeyedPermutation(seed=size, epoch=size % 3, size=size)
        taken = order.at(np.arange(size, dtype=np.int64))
        assert len(taken) == size
        assert (np.bincount(taken, minlength=size) == 1).all(), size


@settings(deadline=None)
@given(
    size=st.integers(10_000, 2**62),
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 10**9),
    data=st.data(),
)
def test_large_sizes_are_permuted_as_described_and_back(size, seed, epoch, data):
    """Any stretch of places: the samples of the description, from which its inverse leads back."""
    first = data.draw(st.integers(0, size - 20))
    places = np.arange(first, first + 20, dtype=np.int64)
    samples = KeyedPermutation(seed=seed, epoch=epoch, size=size).at(places).tolist()
    reference = Reference(seed=seed, epoch=epoch, size=size)
    assert samples == [reference.sample(place) for place in places.tolist()]
    assert [reference.place(sample) for sample in samples] == places.tolist()
    assert 0 <= min(samples) <= max(samples) < size


@given(size=st.integers(2, 9000), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 1000))
def test_small_sizes_are_permuted_as_described(size, seed, epoch):
    """What the exhaustive test sends through is this very network."""
    places = np.array([0, size // 2, size - 1], dtype=np.int64)
    reference = Reference(seed=seed, epoch=epoch, size=size)
    samples = KeyedPermutation(seed=seed, epoch=epoch, size=size).at(places)
    assert samples.tolist() == [reference.sample(place) for place in places.tolist()]


@pytest.mark.parametrize("size", [10**4, 10**9, 10**12])
def test_a_large_dataset_costs_no_more_than_a_small_one(size):
    """The first step, one amid the epoch, and the change of epochs need no memory to speak of."""
    order = SampleOrder(seed=3, dataset_size=size, global_batch_size=64)
    end = order.steps_per_epoch
    tracemalloc.start()
    for step in (0, 1, end // 2, end - 1, end, 2 * end):
        mine = order.share_of(step, rank=1, world_size=3)
        assert len(set(mine.tolist())) == 21
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1_000_000


@pytest.mark.parametrize("version", [1, 2])
@given(
    size=st.integers(1, 300),
    batch=st.integers(1, 60),
    world_size=st.integers(1, 7),
    steps=st.lists(st.integers(0, 400), max_size=8),
)
def test_the_ranks_together_load_the_step(version, size, batch, world_size, steps):
    """Each its share of it, whatever was asked for before."""
    batch = min(batch, size)
    settings = {"seed": 7, "dataset_size": size, "global_batch_size": batch, "version": version}
    order = SampleOrder(**settings)
    for step in steps:
        shares = [order.share_of(step, rank=r, world_size=world_size) for r in range(world_size)]
        whole = SampleOrder(**settings).indices(step)
        assert np.concatenate(shares).tolist() == whole.tolist()
        assert len(whole) == order.batch_size(step) == batch


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


@pytest.mark.parametrize("size", [3, 4])
def test_every_arrangement_of_a_few_is_as_likely(size):
    """All of them come, about equally often, over many epochs."""
    places = np.arange(size, dtype=np.int64)
    epochs = 100 * math.factorial(size)
    found = Counter(
        tuple(KeyedPermutation(seed=5, epoch=epoch, size=size).at(places))
        for epoch in range(epochs)
    )
    assert len(found) == math.factorial(size)
    # Chi-squared, in standard deviations from its mean.
    excess = sum((count - 100) ** 2 / 100 for count in found.values()) - (len(found) - 1)
    assert excess < 4 * math.sqrt(2 * (len(found) - 1))


def assert_even(values, *, count):
    """Whether 0 to ``count`` - 1 come equally often, in bins of nearly equal width."""
    bins = min(count, 8)
    widths = np.bincount(np.arange(count) * bins // count)
    expected = len(values) * widths / count
    found = np.bincount(values * bins // count, minlength=bins)
    assert (np.abs(found - expected) < 5 * np.sqrt(expected)).all(), (found, expected)


@pytest.mark.parametrize("size", [8, 50, 5000])
def test_permutation_shuffles_evenly(size):
    """Every sample comes at every place, and every distance between neighbours, equally often."""
    places = np.arange(8, dtype=np.int64)
    taken = np.stack(
        [KeyedPermutation(seed=5, epoch=epoch, size=size).at(places) for epoch in range(2000)]
    )
    for samples in taken.T:
        assert_even(samples, count=size)
    for distances in ((taken[:, 1:] - taken[:, :-1]) % size).T:
        assert_even(distances - 1, count=size - 1)


def test_epochs_have_nothing_in_common():
    """The places of a sample in two epochs, or for two seeds, are not correlated."""
    size = 20_000
    places = np.arange(size, dtype=np.int64)
    names = [*((1, epoch) for epoch in range(4)), *((seed, 0) for seed in range(2, 6))]
    orders = [
        KeyedPermutation(seed=seed, epoch=epoch, size=size).at(places) for seed, epoch in names
    ]
    for one, other in [(places, orders[0]), *pairwise(orders)]:
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(size)
        assert (one == other).sum() < 10  # one is expected


def test_dataset_smaller_than_a_global_batch_is_an_error():
    """Nothing can be trained if not one step can be filled."""
    with pytest.raises(ValueError, match="3 samples, fewer than one global batch of 4"):
        SampleOrder(seed=0, dataset_size=3, global_batch_size=4)


def test_rank_outside_the_world_is_an_error():
    """A share exists for ranks of the world only."""
    with pytest.raises(ValueError, match="rank=2"):
        share(np.arange(4), rank=2, world_size=2)


FIRST_EPOCH_0 = [9, 3, 7, 5, 0, 2, 6, 1, 8, 4, 10, 11]
FIRST_EPOCH_1 = [3, 9, 7, 11, 2, 1, 8, 6, 5, 10, 4, 0]
GOLDEN_EPOCH_0 = [9, 5, 8, 4, 11, 10, 2, 7, 1, 3, 0, 6]
GOLDEN_EPOCH_1 = [10, 9, 5, 0, 3, 2, 6, 1, 4, 8, 7, 11]
GOLDEN_LARGE = {
    10**6: [115195, 269317, 320458, 452262],
    10**9: [449178407, 142547817, 507347649, 741586000],
    10**12: [422807662593, 174783429829, 711325076195, 946154616346],
    2**62: [3892768467093667445, 1253305566714987390, 2446307147489080494, 1923229420385316333],
}


@given(
    shares=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    batch=st.integers(1, 60),
    step=st.integers(0, 5),
)
def test_ranks_with_shares_load_a_step_together(shares, batch, step):
    """Every sample of it once, in its order, for a stream too; who is left keeps its own share."""
    how = {"seed": 4, "dataset_size": 7 * batch, "global_batch_size": batch}
    for kind in (SampleOrder, StreamOrder):
        order, ranks = kind(**how, shares=tuple(shares)), len(shares)
        parts = [order.share_of(step, rank=rank, world_size=ranks) for rank in range(ranks)]
        assert np.concatenate(parts).tolist() == kind(**how).indices(step).tolist()
        assert [len(part) for part in parts] == list(cut(batch, shares))
        left = order.of_ranks(range(ranks)[1:] or (0,))
        counts = [
            left.span_of(step, rank=rank, world_size=len(left.shares))[1]
            for rank in range(len(left.shares))
        ]
        assert counts == list(cut(batch, shares[1:] or shares))


def test_shares_of_other_ranks_than_there_are_raise():
    """Nobody may cut a step by numbers that are another world's."""
    order = SampleOrder(seed=1, dataset_size=40, global_batch_size=8, shares=(3, 1))
    with pytest.raises(ValueError, match="shares of 2"):
        order.share_of(0, rank=0, world_size=3)
    assert SampleOrder(seed=1, dataset_size=40, global_batch_size=8).of_ranks((1,)).shares == ()
