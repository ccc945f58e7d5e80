"""SafeDataLoader without a run: iterated by epochs like torch's, whatever happens to its workers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, get_worker_info

from ddp_runner import SafeDataLoader
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.faults import FaultError, FaultKind

SIZE = 23


class Numbers:
    """Each sample is its index, and a draw of torch's generator."""

    def __init__(self, bad=()):
        self._bad = bad

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        if index in self._bad:
            raise ValueError(f"sample {index} is broken")
        return torch.tensor([float(index), torch.rand(()).item()])


def indices(batches):
    return [[int(row[0]) for row in batch] for batch in batches]


def killed_once(loader):
    """An epoch whose worker is killed after the first batch."""
    found = []
    for number, batch in enumerate(loader):
        if number == 0:
            os.kill(loader.worker_pids[0], signal.SIGKILL)
        found.append(batch)
    return found


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [1, 4, 23])
def test_it_gives_what_torch_gives(batch_size, drop_last):
    """The same batches of the same samples in the same order, and as many."""
    mine = SafeDataLoader(Numbers(), batch_size=batch_size, drop_last=drop_last)
    theirs = DataLoader(Numbers(), batch_size=batch_size, drop_last=drop_last)
    assert indices(mine) == indices(theirs)
    assert len(mine) == len(theirs) == len(list(mine))
    assert [batch.shape for batch in mine] == [batch.shape for batch in theirs]


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_shuffled_epoch_has_each_sample_once(drop_last):
    """Another order in each epoch, the same again for the same seed and epoch."""
    loader = SafeDataLoader(Numbers(), batch_size=5, shuffle=True, seed=7, drop_last=drop_last)
    first, second = indices(loader), indices(loader)
    seen = [index for batch in first for index in batch]
    assert len(set(seen)) == len(seen) == (20 if drop_last else SIZE)
    assert first != second
    loader.set_epoch(0)
    assert indices(loader) == first
    assert indices(SafeDataLoader(Numbers(), 5, shuffle=True, seed=8)) != first


@pytest.fixture
def forkserver():
    """Python's default method of starting processes from 3.14 on."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("forkserver", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.usefixtures("forkserver")
def test_workers_are_forked_whatever_python_starts_processes_by():
    """A dataset that cannot be pickled is loaded by workers, as under Python's older default."""

    class Unpicklable(Numbers):
        hook = staticmethod(lambda sample: sample)

    expected = indices(SafeDataLoader(Unpicklable(), batch_size=4))
    with SafeDataLoader(Unpicklable(), batch_size=4, num_workers=2) as loader:
        assert indices(loader) == expected


def test_workers_change_neither_order_nor_random_numbers():
    """Nor does leaving an epoch in its middle, which ends its workers."""
    with SafeDataLoader(Numbers(), batch_size=4, shuffle=True) as alone:
        expected = [torch.cat(list(alone)) for _ in range(2)]
    with SafeDataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=2) as loader:
        assert torch.equal(torch.cat(list(loader)), expected[0])
        assert loader.worker_pids == ()
        for number, _ in enumerate(loader):
            if number == 1:
                assert len(loader.worker_pids) == 2
                break
        loader.set_epoch(1)
        assert torch.equal(torch.cat(list(loader)), expected[1])


def test_a_worker_that_is_killed_costs_no_batch():
    """It is replaced with a warning, and the epoch is the one without it; those that stay are kept."""
    with SafeDataLoader(Numbers(), batch_size=4) as alone:
        expected = torch.cat(list(alone))
    loader = SafeDataLoader(Numbers(), batch_size=4, num_workers=1, persistent_workers=True)
    with loader:
        with pytest.warns(RuntimeWarning, match="killed"):
            found = killed_once(loader)
        assert torch.equal(torch.cat(found), expected)
        (kept,) = loader.worker_pids
        assert len(list(loader)) == len(loader)
        assert loader.worker_pids == (kept,)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_bad_sample_stops_or_is_replaced():
    """As in a run: named, or another one in its place for good."""
    loader = SafeDataLoader(Numbers(bad=(6,)), batch_size=4)
    with pytest.raises(FaultError, match="sample 6") as raised:
        list(loader)
    assert raised.value.fault.kind is FaultKind.BAD_SAMPLE
    loader = SafeDataLoader(Numbers(bad=(6,)), batch_size=4, on_bad_sample="substitute")
    first = indices(loader)
    assert 6 not in first[1]
    assert len(first[1]) == 4
    assert indices(loader) == first


def test_ranks_share_each_batch_out():
    """Together they have each sample once, and equally many batches."""
    parts = [
        indices(SafeDataLoader(Numbers(), 3, shuffle=True, drop_last=True, rank=rank, world_size=2))
        for rank in range(2)
    ]
    assert [len(part) for part in parts] == [3, 3]
    seen = [index for part in parts for batch in part for index in batch]
    assert len(set(seen)) == len(seen) == 18


def test_an_iterator_ends_with_the_next_one():
    """Both would take from the same workers."""
    loader = SafeDataLoader(Numbers(), batch_size=4)
    first = iter(loader)
    next(first)
    second = iter(loader)
    next(second)
    with pytest.raises(RuntimeError, match="another iterator"):
        next(first)
    assert len(list(second)) == 5


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "options", "error", "said"),
    [
        (Stream(), {}, TypeError, "Stream has no items by number"),
        ({"a": 1}.values(), {}, TypeError, "by number"),
        (Numbers(), {"batch_size": 0}, ValueError, "batch_size=0"),
        (Numbers(), {"batch_size": None}, ValueError, "batch_size=None: at least 1"),
        (Numbers(), {"batch_size": 40, "drop_last": True}, ValueError, "fewer than one"),
        (Numbers(), {"world_size": 2}, ValueError, "drop_last"),
        (Numbers(), {"rank": 1}, ValueError, "rank=1"),
        (Numbers(), {"on_bad_sample": "skip"}, ValueError, "stop or substitute"),
        (Numbers(), {"timeout": -1}, ValueError, "timeout=-1"),
        (Numbers(), {"sampler": range(3), "shuffle": True}, ValueError, "shuffle=True"),
        (Numbers(), {"sampler": iter(range(3))}, TypeError, "has no length"),
        (
            Numbers(),
            {"sampler": range(3), "world_size": 2, "drop_last": True},
            ValueError,
            "of this rank",
        ),
        (
            Numbers(),
            {"sampler": range(3), "on_bad_sample": "substitute"},
            ValueError,
            "leaves out",
        ),
    ],
)
def test_what_does_not_fit_is_refused_at_once(dataset, options, error, said):
    """Before anything is loaded, with the reason."""
    with pytest.raises(error, match=said):
        SafeDataLoader(dataset, **options)


class Once:
    """A torch sampler that draws its order when it is asked, and never the same one."""

    def __init__(self):
        self.epochs = []
        self._asked = 0

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __len__(self):
        return 5

    def __iter__(self):
        self._asked += 1
        return iter([self._asked, 9, 8, 7, 6])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_sampler_decides_as_in_torch(workers, drop_last):
    """Which samples an epoch has, in which order; it is asked once an epoch."""
    options = {"batch_size": 2, "drop_last": drop_last, "num_workers": workers}
    theirs = DataLoader(Numbers(), sampler=Once(), **options)
    with SafeDataLoader(Numbers(), sampler=Once(), persistent_workers=True, **options) as mine:
        for _ in range(2):
            assert indices(mine) == indices(theirs)
        assert len(mine) == len(theirs)
        mine.set_epoch(4)
        assert mine.sampler.epochs == [4]


def test_an_epoch_of_a_sampler_outlives_its_worker():
    """A worker that is killed costs no batch of it, and no other draw."""
    loader = SafeDataLoader(Numbers(), batch_size=1, sampler=Once(), num_workers=1)
    with loader, pytest.warns(RuntimeWarning, match="killed"):
        found = killed_once(loader)
    assert indices(found) == [[1], [9], [8], [7], [6]]


def test_a_distributed_sampler_shares_out():
    """The sampler of torch's own guides, one for each rank."""
    seen = []
    for rank in range(2):
        sampler = DistributedSampler(Numbers(), num_replicas=2, rank=rank)
        loader = SafeDataLoader(Numbers(), batch_size=3, sampler=sampler)
        loader.set_epoch(1)
        assert indices(loader) == indices(DataLoader(Numbers(), batch_size=3, sampler=sampler))
        seen += [index for batch in indices(loader) for index in batch]
    assert set(seen) == set(range(SIZE))


class Opened(Numbers):
    """Each sample is the number of the worker whose function has opened it."""

    worker = -1.0

    def __getitem__(self, index):
        return torch.tensor([self.worker])


def open_it(worker):
    get_worker_info().dataset.worker = float(worker)


def raise_it(worker):
    raise OSError(f"no device for {worker}")


def test_workers_are_set_up_as_in_torch():
    """Each by its number, its copy of the dataset at hand; this process is not."""
    for workers in (0, 2):
        theirs = DataLoader(Opened(), 1, num_workers=workers, worker_init_fn=open_it)
        with SafeDataLoader(Opened(), 1, num_workers=workers, worker_init_fn=open_it) as loader:
            assert indices(loader) == indices(theirs)
    loader = SafeDataLoader(Opened(), 1, num_workers=1, worker_init_fn=open_it)
    with pytest.warns(RuntimeWarning, match="killed"):
        assert indices(killed_once(loader)) == [[0]] * SIZE


def test_a_worker_that_cannot_be_set_up_is_an_error():
    """Of its function, which the line names; no sample is blamed and nothing loaded without it."""
    loader = SafeDataLoader(Numbers(), 1, num_workers=2, worker_init_fn=raise_it)
    with loader, pytest.raises(BadInputError, match="worker_init_fn: OSError: no device for 0"):
        list(loader)


class Slow(Numbers):
    def __getitem__(self, index):
        time.sleep(1.5)
        return super().__getitem__(index)


def test_a_time_limit_of_zero_is_none_as_in_torch():
    """And any other one is the limit of a batch."""
    with SafeDataLoader(Slow(), 1, num_workers=1, timeout=0, sampler=range(1)) as loader:
        assert indices(loader) == [[0]]
    loader = SafeDataLoader(Slow(), 1, num_workers=1, timeout=0.2, sampler=range(1))
    with loader, pytest.warns(RuntimeWarning, match=r"no batch within 0\.2 s"):
        assert indices(loader) == [[0]]
