"""Numbers that reads count up in a dataset are found, in the rank and in loader workers; what else reads change is not."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils.data import Dataset, Subset

from ddp_runner.data.attributes import COUNTED_LOADS, CountedReads
from ddp_runner.data.order import SampleOrder
from tests.data.mapped import map_loader


class Transform:
    def __init__(self):
        self.calls = 0


class Counting(Dataset):
    """Counts its reads, one of them in its transform."""

    def __init__(self):
        self.reads, self.transform, self.size = 0, Transform(), 64

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.reads += 1
        self.transform.calls += 1
        return torch.tensor([index])


class Lazy(Counting):
    """Opens late, keeps what it has read, and remembers where it was."""

    def __init__(self):
        super().__init__()
        self.cache, self.is_open, self.last, self.opened = {}, False, 0, 0

    def __getitem__(self, index):
        if not self.is_open:
            self.is_open, self.opened = True, 1
        self.last = index
        return self.cache.setdefault(index, torch.tensor([index]))


def _counted(dataset, workers):
    order = SampleOrder(seed=3, dataset_size=64, global_batch_size=4)
    with map_loader(
        dataset,
        order=order,
        rank=0,
        world_size=1,
        total_steps=40,
        micro_batch_size=4,
        seed=3,
        num_workers=workers,
    ) as loader:
        for step in range(2 * COUNTED_LOADS + 2):
            loader.take(step)
        return loader.counted


@pytest.mark.parametrize("workers", [0, 2])
def test_what_reads_count_up_is_found(workers):
    """Also behind a subset."""
    assert _counted(Counting(), workers) == ("reads", "transform.calls")
    assert _counted(Subset(Counting(), range(64)), workers) == (
        "dataset.reads",
        "dataset.transform.calls",
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_what_reads_only_remember_is_no_count(workers):
    """Control: a cache, a flag, a length that is found late, the place of the last read."""
    assert _counted(Lazy(), workers) == ()


def test_a_number_that_stops_is_no_count():
    """Control: it has been the same over two loads."""
    dataset = Counting()
    reads = CountedReads(dataset)
    for number in range(COUNTED_LOADS):
        with reads.around_load():
            dataset.reads = min(number, 3)
    assert reads.names == ()


def test_what_counts_between_loads_is_no_count():
    """A loss counts its steps in an object that the data holds, too."""
    dataset = Counting()
    reads = CountedReads(dataset)
    for _ in range(COUNTED_LOADS):
        with reads.around_load():
            dataset.reads += 1
        dataset.transform.calls += 1
    assert reads.names == ("reads",)


def test_a_dataset_that_cannot_be_looked_into_has_no_counts():
    dataset = Counting()
    dataset.owner = weakref.proxy(Transform())
    reads = CountedReads(dataset)
    for _ in range(COUNTED_LOADS):
        with reads.around_load():
            dataset.reads += 1
    assert reads.names == ()
