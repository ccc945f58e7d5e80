# ruff: noqa: NPY002 - the generators that datasets draw from
"""Loader: exact order and randomness, whatever loads the samples."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, default_collate

from ddp_runner.data.order import SampleOrder, share
from ddp_runner.data.workers.count import (
    WorkersTotal,
    worker_count,
    worker_notes,
)
from ddp_runner.data.workers.memory_files import collate_batch
from ddp_runner.kernel.system.threads import cores_here
from tests.data.mapped import map_loader

ORDER = SampleOrder(seed=11, dataset_size=50, global_batch_size=12)
TOTAL_STEPS = 13  # three epochs of four steps, and one step


class Augmented:
    """Samples that hold their index and draws of all three generators."""

    def __getitem__(self, index):
        draws = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return torch.tensor([index, *draws], dtype=torch.float64)


class Deterministic:
    """Samples without randomness, fetched many at a time."""

    deterministic = True

    def __getitem__(self, index):
        return torch.tensor(index)

    def __getitems__(self, indices):
        return [torch.tensor(index) for index in indices]


class Pinnable:
    def __init__(self, rows):
        self.rows, self.pinned = rows, False

    def pin_memory(self, device=None):
        self.pinned = True
        return self


def pinnable(samples):
    return Pinnable(torch.stack(samples))


def make(dataset=None, **changes):
    settings = {
        "order": ORDER,
        "rank": 1,
        "world_size": 2,
        "total_steps": TOTAL_STEPS,
        "micro_batch_size": 4,
        "seed": 5,
        "num_workers": 0,
    }
    return map_loader(Augmented() if dataset is None else dataset, **{**settings, **changes})


def flat(micro_batches):
    """``(indices, rows)`` of one step."""
    indices = [index for micro in micro_batches for index in micro.indices]
    return indices, torch.cat([micro.batch for micro in micro_batches])


@pytest.fixture(scope="module")
def reference():
    """Each step's rows, loaded in the process itself."""
    with make() as loader:
        return [flat(loader.take(step)) for step in range(TOTAL_STEPS)]


def assert_same(taken, expected):
    indices, rows = flat(taken)
    assert indices == expected[0]
    assert torch.equal(rows, expected[1])


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_every_step_has_its_samples_and_draws(reference, workers):
    """Order and augmentation over epochs are those of one process, with any number of workers."""
    with make(num_workers=workers) as loader:
        for step in range(TOTAL_STEPS):
            taken = loader.take(step)
            mine = share(ORDER.indices(step), rank=1, world_size=2).tolist()
            assert [len(micro.indices) for micro in taken] == [3, 3]
            assert flat(taken)[0] == mine == flat(taken)[1][:, 0].tolist()
            assert_same(taken, reference[step])


@pytest.mark.parametrize("workers", [0, 2])
def test_any_step_can_be_taken_next(reference, workers):
    """Retries, jumps within an epoch and across epochs land exactly."""
    with make(num_workers=workers, start_step=6) as loader:
        for step in (6, 7, 7, 2, 3, 12, 0):
            assert_same(loader.take(step), reference[step])


def test_draws_differ_between_samples_epochs_and_seeds(reference):
    """Augmentation repeats for the same sample of the same epoch only."""
    draws = torch.cat([rows[:, 1] for _, rows in reference])
    assert len(set(draws.tolist())) == len(draws)
    with make(seed=6) as loader:
        assert not torch.equal(flat(loader.take(0))[1], reference[0][1])


def test_augmentation_does_not_depend_on_the_world(reference):
    """A sample is augmented alike by whichever rank loads it."""
    with make(rank=0, world_size=1) as loader:
        rows = {row[0].item(): row for row in flat(loader.take(0))[1]}
    assert all(torch.equal(rows[row[0].item()], row) for row in reference[0][1])


@pytest.mark.parametrize("workers", [0, 2])
def test_the_callers_generators_are_left_alone(workers):
    """Loading draws nothing from the generators that training uses."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    with make(num_workers=workers) as loader:
        loader.take(0)
        drawn = (random.random(), np.random.rand(), torch.rand(()).item())
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    assert drawn == (random.random(), np.random.rand(), torch.rand(()).item())


@pytest.mark.parametrize("workers", [0, 1])
def test_deterministic_datasets_are_asked_for_many_at_once(workers):
    """``__getitems__`` serves a whole micro-batch, in order."""
    with make(Deterministic(), num_workers=workers) as loader:
        for micro in loader.take(3):
            assert micro.batch.tolist() == list(micro.indices)


class SeveralOnly(Dataset):
    """Has no sample by one number: torch's own ``__getitem__`` only raises."""

    def __init__(self):
        self.asked = []

    def __len__(self):
        return ORDER.dataset_size

    def __getitems__(self, indices):
        self.asked.append(list(indices))
        return [torch.tensor(index) for index in indices]


class NoBase:
    __getitems__ = SeveralOnly.__getitems__
    __init__ = SeveralOnly.__init__


@pytest.mark.parametrize(
    "kind", [SeveralOnly, NoBase, lambda: Subset(SeveralOnly(), range(ORDER.dataset_size))]
)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_gives_several_samples_only_is_loaded(workers, kind):
    """It is asked for one after the other: each has random numbers of its own."""
    dataset = kind()
    with make(dataset, num_workers=workers) as loader:
        for micro in loader.take(3):
            assert micro.batch.tolist() == list(micro.indices)
    asked = getattr(dataset, "dataset", dataset).asked
    assert bool(asked) == (workers == 0)
    assert all(len(one) == 1 for one in asked)


def test_batches_of_any_shape_arrive_whole():
    """Views, empty tensors, arrays, text and many tensors travel with their values."""

    class Mixed:
        def __getitem__(self, index):
            many = torch.arange(600).split(2)
            view = torch.arange(20)[5:9]
            return {"many": many, "view": view, "empty": torch.zeros(0), "np": np.ones(2), "t": "ü"}

    with make(Mixed(), num_workers=1, collate_fn=list) as loader:
        sample = loader.take(0)[0].batch[0]
    assert torch.cat(sample["many"]).tolist() == list(range(600))
    assert sample["view"].tolist() == [5, 6, 7, 8]
    assert (sample["empty"].numel(), sample["np"].tolist(), sample["t"]) == (0, [1.0, 1.0], "ü")


def test_batches_larger_than_a_pipe_arrive_whole():
    """What is no tensor comes through the pipe in pieces."""

    class Large:
        def __getitem__(self, index):
            return bytes([index]) * 300_000

    with make(Large(), num_workers=2, collate_fn=list) as loader:
        for step in range(3):
            for micro in loader.take(step):
                assert micro.batch == [bytes([index]) * 300_000 for index in micro.indices]


def test_pinning_hands_on_the_same_batches_and_ends(reference, monkeypatch):
    """The pinning thread keeps the order; close() waits for it."""
    monkeypatch.setattr("ddp_runner.data.workers.system_limits.can_pin", lambda: True)

    with make(num_workers=2, pin_memory=True, collate_fn=pinnable) as loader:
        for step in range(5):
            taken = loader.take(step)
            assert all(micro.batch.pinned for micro in taken)
            assert torch.equal(torch.cat([m.batch.rows for m in taken]), reference[step][1])
    assert "loader-pin" not in {thread.name for thread in threading.enumerate()}


def test_pinning_without_a_device_is_left_out():
    """Control: ``pin_memory`` on a machine without a device loads as without it."""
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    with make(num_workers=1, pin_memory=True) as loader:
        loader.take(0)
        assert "loader-pin" not in {thread.name for thread in threading.enumerate()}


def test_shrinking_the_prefetch_keeps_the_position(reference):
    """Memory pressure halves what is loaded ahead; no step is lost or repeated."""
    with make(num_workers=1, prefetch_factor=4) as loader:
        assert_same(loader.take(0), reference[0])
        pids = loader.worker_pids
        loader.shrink_prefetch()
        assert_same(loader.take(1), reference[1])
        assert loader.prefetch_factor == 2
        assert loader.worker_pids != pids
        loader.shrink_prefetch()
        loader.shrink_prefetch()
        assert loader.prefetch_factor == 1
        assert_same(loader.take(2), reference[2])


def test_workers_last_over_epochs_and_are_reported():
    """No worker is restarted at an epoch's end; start and end are reported to the caller."""
    reported = []
    with make(num_workers=1, on_workers=reported.append) as loader:
        for step in range(TOTAL_STEPS):
            loader.take(step)
        pids = loader.worker_pids
        assert len(pids) == loader.workers == 1
    assert reported == [pids, ()]


def test_rank_without_a_share_takes_nothing():
    """More ranks than samples in a step: the last ranks get an empty list, and no workers."""
    with make(rank=12, world_size=13, num_workers=1) as loader:
        assert loader.take(0) == []
        assert loader.worker_pids == ()


def test_steps_outside_the_run_and_closed_loaders_are_errors():
    """The position may stand at the end of the run, where nothing can be taken."""
    with make(start_step=TOTAL_STEPS) as loader:
        with pytest.raises(ValueError, match="the last one is 12"):
            loader.take(TOTAL_STEPS)
        with pytest.raises(ValueError, match="step=-1"):
            loader.seek(-1)
    with pytest.raises(ValueError, match="closed"):
        loader.take(0)


def test_only_auto_is_cut_to_the_ranks_part_of_the_cores():
    """A number is what was asked for: data that waits for a disk or a network needs no core."""
    for local_world_size, cores, expected in ((1, 16, 2), (4, 16, 2), (4, 4, 1), (4, 2, 1)):
        count = worker_count("auto", local_world_size=local_world_size, cores=cores)
        assert count == expected
    assert worker_count(8, local_world_size=4, cores=2) == 8
    assert worker_count(0, local_world_size=4, cores=2) == 0
    assert cores_here() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("total", "ranks", "counts"),
    [(8, 4, [2, 2, 2, 2]), (7, 3, [3, 2, 2]), (2, 4, [1, 1, 0, 0]), (0, 2, [0, 0]), (5, 1, [5])],
)
def test_a_total_of_workers_is_shared_out_over_the_ranks(total, ranks, counts):
    """All of them and no more; the first ranks have the remainder."""
    found = [
        worker_count(WorkersTotal(total=total, local_rank=rank), local_world_size=ranks, cores=1)
        for rank in range(ranks)
    ]
    assert found == counts


@pytest.mark.parametrize(
    ("total", "ranks", "cores", "note"),
    [
        (4, 2, 4, ""),
        (9, 2, 4, "9 loader workers (workers_total), 4 cores for 2 ranks: more only help"),
        (2, 4, 8, "workers_total=2 for 4 ranks: the last 2 load their own data"),
        (0, 4, 8, ""),
    ],
)
def test_a_total_of_workers_that_may_surprise_is_reported(total, ranks, cores, note):
    """Above the cores it says what auto would give; below the ranks, who has none."""
    asked = WorkersTotal(total=total, local_rank=0)
    notes = worker_notes(asked, local_world_size=ranks, cores=cores)
    assert len(notes) == bool(note)
    assert "".join(notes).startswith(note)
    assert "total, 4 cores" not in note or notes[0].endswith("num_workers=auto is 2 for each here")


def test_more_workers_than_cores_load_and_are_reported(reference):
    """As many as were asked for, beside a line that says so; a cut of ``auto`` is reported as well."""
    cores = len(os.sched_getaffinity(0))
    with make(num_workers=cores + 2) as loader:
        assert_same(loader.take(0), reference[0])
        assert len(loader.worker_pids) == loader.workers == cores + 2
        assert f"{cores + 2} loader workers per rank, {cores} core" in loader.notes[0]
        assert loader.notes[0].endswith(f"num_workers=auto is {min(2, cores)} here")
    with make(num_workers="auto", local_world_size=cores) as loader:
        assert_same(loader.take(0), reference[0])
        assert len(loader.worker_pids) == 1
        assert loader.notes[0].startswith("1 loader worker per rank (num_workers=auto): ")
    with make(num_workers=1, local_world_size=cores + 1) as loader:
        assert not any("worker" in note for note in loader.notes), "one is never too many"


class Nested:
    """Samples of every shape that collating knows, and two views of one tensor of this ``size``."""

    deterministic = True

    def __init__(self, size):
        self._size = size

    def __getitem__(self, index):
        base = torch.arange(float(self._size)) + index
        return {
            "views": (base[:2], base[2:]),
            "array": np.full((2, 2), index, dtype=np.int32),
            "number": index,
            "text": f"sample {index}",
            "empty": torch.zeros(0),
        }


def _keep_views(samples):
    """Drops what it collated first, and sends views of one storage."""
    for _ in range(3):
        collate_batch(samples)
    whole = torch.stack([torch.cat(sample["views"]) for sample in samples])
    return {"all": collate_batch(samples), "left": whole[:, :2], "whole": whole}


@pytest.mark.parametrize(("num_workers", "size"), [(0, 4), (1, 4), (1, 10_000)])
def test_batches_are_those_of_default_collate(num_workers, size):
    """As copies, and through memory files, as in the rank itself: same structure, types, values; views stay views."""
    dataset = Nested(size)
    with make(dataset, num_workers=num_workers, collate_fn=_keep_views) as loader:
        for step in range(3):
            for taken in loader.take(step):
                expected = default_collate([dataset[index] for index in taken.indices])
                assert repr(taken.batch["all"]) == repr(expected)
                left, whole = taken.batch["left"], taken.batch["whole"]
                assert torch.equal(whole, torch.cat(expected["views"], 1))
                left[:] = -1.0
                assert torch.equal(whole[:, :2], left)


class Large:
    """A MB a sample. Its first value: how many batches of before the worker still has mapped."""

    deterministic = True

    def __getitem__(self, index):
        gc.disable()  # whatever is kept until a collection is kept for good then
        row = torch.full((1 << 18,), index, dtype=torch.float32)
        row[0] = Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:ddp-runner-batch")
        return row


def test_a_worker_keeps_no_batch_that_it_has_sent():
    """Shared memory holds what is loaded ahead, not what a worker's garbage is still tied to.

    On busy cores the thread that sends may come after the next batch was begun: two are on their way at most.
    """
    with make(Large(), num_workers=1) as loader:
        for step in range(TOTAL_STEPS):
            for taken in loader.take(step):
                assert taken.batch[:, 1].tolist() == list(taken.indices)
                assert taken.batch[:, 0].max() <= 4, "of thirteen, a mapping or two each"


def test_a_loader_whose_worker_was_lost_may_load_here():
    """A repair may load the parts of a batch in this process; what that leaves in the dataset is no change by a loss."""
    with make(num_workers=1) as loader, make() as without:
        loader.take(0)
        without.take(0)
        assert (loader.loads_here, without.loads_here) == (False, True)
        os.kill(loader.worker_pids[0], signal.SIGKILL)
        for step in range(1, 6):
            loader.take(step)
        assert loader.loads_here
