"""Samples in memory that all ranks share: equal in type and bits, each read once, whoever reads them."""

from __future__ import annotations

import collections
import decimal
import multiprocessing
import os
import pickle
import random
import signal
import time
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from ddp_runner.data.workers.fetch import BatchKey, SampleReader
from ddp_runner.features.preload.memory import (
    Filling,
    OtherSamplesError,
    PreloadedDataset,
    SampleMemory,
    UnreadSampleError,
)
from ddp_runner.features.preload.packing import ALIGNMENT, new_memory, pack, unpack
from ddp_runner.features.preload.reading import PROBES, TRIES, NoRoomError, NotKeptError, Reading
from ddp_runner.values.generators import generator_states
from tests.processes import poll

ROOM = 10**12


class Pair(NamedTuple):
    left: torch.Tensor
    right: np.ndarray


RECORD = np.dtype([("a", "<i4"), ("b", "<f8")])


def _read_only(array):
    array.setflags(write=False)
    return array


def _samples():
    """Name -> a sample, of every kind that people give."""
    grid = torch.arange(24).reshape(2, 3, 4)
    kinds = {
        str(dtype).removeprefix("torch."): torch.tensor([0, 1, 0, 1, 1]).to(dtype)
        for dtype in (
            *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
            *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
            *(torch.complex64, torch.complex128),
        )
    }
    return kinds | {
        "nan and infinity": torch.tensor([float("nan"), -0.0, float("-inf"), 5e-324]).double(),
        "no dimension": torch.tensor(3.5),
        "nothing in it": torch.empty(0, 4),
        "transposed": grid.transpose(0, 2),
        "channels last": torch.randn(1, 3, 4, 5).to(memory_format=torch.channels_last),
        "with gaps": grid[:, ::2],
        "expanded": torch.tensor([7]).expand(5),
        "a part": grid.reshape(-1)[5:9],
        "trained": torch.ones(3, requires_grad=True),
        "a parameter": torch.nn.Parameter(torch.ones(2)),
        "sparse": torch.eye(3).to_sparse(),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "array by columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "array with gaps": np.arange(10)[::3],
        "array to be read": _read_only(np.arange(4)),
        "array of nothing": np.empty((0, 2)),
        "array of objects": np.array([{"a": 1}, None], dtype=object),
        "records": np.array([(1, 2.5)], dtype=RECORD),
        "number of numpy": np.float32(1.5),
        "whole number": 2**70,
        "number": 0.1,
        "truth": True,
        "text": "Füße \U0001f9b6",
        "bytes": b"\0\xff",
        "none": None,
        "decimal": decimal.Decimal("1.10"),
        "tuple": (torch.ones(2), 3),
        "named": Pair(torch.ones(2), np.ones(3)),
        "dict": {"x": torch.ones(2), "y": [1, 2, {"z": np.zeros(1)}], "text": "a"},
        "ordered": collections.OrderedDict(b=1, a=2),
    }


def assert_equal(one, other):
    """Type, values and bits, and how a tensor lies where its elements lie side by side."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.requires_grad) == (
            other.dtype,
            other.shape,
            other.requires_grad,
        )
        if one.layout is torch.strided:
            one, other = (t.detach().resolve_conj().contiguous() for t in (one, other))
            bits = [t.reshape(-1).view(torch.uint8).numpy().tobytes() for t in (one, other)]
            assert bits[0] == bits[1]
        else:
            assert torch.equal(one.to_dense(), other.to_dense())
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape, one.flags.writeable) == (
            other.dtype,
            other.shape,
            other.flags.writeable,
        )
        if one.dtype.hasobject:
            assert one.tolist() == other.tolist()
        else:
            assert one.tobytes() == other.tobytes()
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_equal(left, right)
    else:
        assert one == other


def come_back(sample):
    packed = pack(sample)
    memory = new_memory(len(packed))
    memory[:] = packed
    return unpack(memory)


@pytest.mark.parametrize("kind", sorted(_samples()))
def test_a_sample_comes_back_equal_in_type_and_bits(kind):
    """Whatever it is, and whatever its tensors and arrays look like."""
    sample = _samples()[kind]
    back = come_back(sample)
    assert_equal(sample, back)
    assert len(pack(sample)) % ALIGNMENT == 0
    if kind in ("transposed", "channels last"):
        assert back.stride() == sample.stride()


def test_tensors_of_a_sample_are_aligned_and_can_be_written():
    """As those of torch's own are: what computes with them does so in the same way."""
    back = come_back((torch.ones(3), np.ones(5), torch.ones(1, dtype=torch.uint8)))
    for one in back:
        place = one.data_ptr() if isinstance(one, torch.Tensor) else one.ctypes.data
        assert place % ALIGNMENT == 0
        one[0] = 0
    assert [float(one[0]) for one in back] == [0, 0, 0]


class Counted(Dataset):
    """Counts what is read of it; ``raises``: sample -> how often it raises."""

    deterministic = True

    def __init__(self, samples=100, *, raises=None):
        self.samples = samples
        self.read = collections.Counter()
        self.raises = dict(raises or {})

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        self.read[index] += 1
        if self.raises.get(index, 0):
            self.raises[index] -= 1
            raise ValueError(f"no sample {index} today")
        return {"x": torch.full((index % 7,), index), "y": np.array([index]), "text": str(index)}


class Many(Counted):
    """Gives many at once."""

    def __init__(self, samples=100, **how):
        super().__init__(samples, **how)
        self.asked = []

    def __getitems__(self, indices):
        self.asked.append(len(indices))
        return [self[index] for index in indices]


@pytest.fixture
def memory():
    """For a hundred samples."""
    found = SampleMemory(os.memfd_create("samples"), samples=100)
    yield found
    found.close()


def read_into(memory, dataset, *, room=lambda: ROOM, seen=None):
    reading = Reading(
        dataset,
        memory,
        room=room,
        on_sample=lambda _index: None,
        on_progress=lambda done: None if seen is None else seen.append(done),
    )
    assert memory.try_lock()
    reading.read()
    memory.unlock()


@pytest.mark.parametrize("kind", [Counted, Many])
def test_each_sample_is_read_once_and_is_there_for_ever(memory, kind):
    """In any order, and as often as it is asked for."""
    dataset, seen = kind(), []
    assert not memory.is_whole
    read_into(memory, dataset, seen=seen)
    assert memory.is_whole
    assert dataset.read == dict.fromkeys(range(100), 1)
    assert (seen[-1], seen) == (100, sorted(seen))
    shared, plain = PreloadedDataset(memory), kind()
    assert (len(shared), shared.deterministic) == (100, True)
    for index in (99, 0, 41, 99):
        assert_equal(shared[index], plain[index])
    with pytest.raises(IndexError):
        shared[100]
    with pytest.raises(IndexError):
        shared[-1]


def test_a_dataset_that_gives_many_is_asked_for_many(memory):
    """As the loader does it."""
    dataset = Many()
    read_into(memory, dataset)
    assert max(dataset.asked) > 1


def test_what_changes_a_sample_changes_no_other_reading_of_it(memory):
    """A loss may double its batch in place; the next epoch has the sample as it was."""
    read_into(memory, Counted())
    shared = PreloadedDataset(memory)
    sample = shared[12]
    sample["x"] *= 2
    sample["y"][0] = -1
    assert_equal(shared[12], Counted()[12])


def test_a_sample_that_raises_for_a_moment_is_read_all_the_same(memory):
    """Its storage may have been out of reach."""
    read_into(memory, Many(raises={17: TRIES - 1}))
    assert_equal(PreloadedDataset(memory)[17], Counted()[17])
    assert memory.filling().unread == 0


@pytest.mark.parametrize("kind", [Counted, Many])
def test_a_sample_that_cannot_be_read_raises_when_it_is_asked_for(memory, kind):
    """It is the loader's to stop for it, or to put another in its place; the others are there."""
    read_into(memory, kind(raises={17: 99, 60: 99}))
    filling = memory.filling()
    assert (filling.unread, filling.first_unread) == (2, 17)
    shared = PreloadedDataset(memory)
    with pytest.raises(UnreadSampleError, match="ValueError: no sample 17 today"):
        shared[17]
    failed = SampleReader(shared, seed=1, collate=list).load(
        BatchKey(epoch=0, indices=(16, 17, 18)), on_sample=lambda _: None
    )
    assert failed.indices == (17,)
    assert_equal(shared[18], Counted()[18])


def test_data_that_does_not_fit_is_refused_before_it_is_read(memory):
    """By the size of some samples, spread over all of them."""
    dataset = Counted()
    with pytest.raises(NoRoomError) as caught:
        read_into(memory, dataset, room=lambda: 1000)
    assert sum(dataset.read.values()) <= 32
    assert caught.value.needed_bytes > 1000
    assert memory.filling().done == 0


def test_memory_that_runs_short_while_it_is_filled_ends_the_reading(memory):
    """Samples may be larger than those that were looked at, and others take memory as well."""
    left = iter([ROOM, ROOM // 100])
    with pytest.raises(NoRoomError):
        read_into(memory, Counted(), room=lambda: next(left))


class Lossy:
    """Forgets a part of itself when it is pickled."""

    def __init__(self, value):
        self.value = value

    def __array__(self, *_args, **_how):
        return np.array([self.value])

    def __reduce__(self):
        return Lossy, (0,)


class Given(Dataset):
    """One and the same sample a hundred times."""

    deterministic = True

    def __init__(self, sample):
        self.sample = sample

    def __len__(self):
        return 100

    def __getitem__(self, index):
        return self.sample


@pytest.mark.parametrize(
    ("sample", "why"),
    [(lambda: 1, "sample 0 cannot be pickled"), (Lossy(5), "sample 0 differs when it comes back")],
)
def test_a_sample_that_cannot_be_kept_is_named(memory, sample, why):
    """It is found with the first, before all others are read."""
    with pytest.raises(NotKeptError, match=why):
        read_into(memory, Given(sample))


class Quiet(Counted):
    """Does not say that it is the same each time; ``draws`` does so for one sample."""

    deterministic = False

    def __init__(self, *, draws=None, at=99, **how):
        super().__init__(**how)
        self.draws, self.at = draws, at

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        if self.draws is not None and index == self.at:
            sample["y"] = np.array([self.draws()])
        return sample


def test_data_that_draws_nothing_is_kept_though_it_does_not_say_so(memory):
    """Some samples are read twice, to see that they are the same; generators are given back."""
    dataset, before = Quiet(raises={50: 99}), generator_states()
    read_into(memory, dataset)
    assert generator_states() == before
    assert memory.filling().unread == 1
    reads = {index: times for index, times in dataset.read.items() if index != 50}
    assert {*reads.values()} == {1, 2}
    assert sum(times == 2 for times in reads.values()) == PROBES
    for index in (0, 41, 99):
        assert_equal(PreloadedDataset(memory)[index], Counted()[index])


@pytest.mark.parametrize("at", [0, 1, 98])  # 1 and 98 are none of those that are looked at first
@pytest.mark.parametrize(
    ("draws", "whose"),
    [
        (random.random, "Python's random"),
        (np.random.rand, "numpy"),
        (lambda: float(torch.rand(1)), "torch"),
        (lambda: random.seed(3) or 1.0, "Python's random"),
    ],
)
def test_a_sample_that_draws_is_refused_wherever_it_is(memory, at, draws, whose):
    """Also where no other sample does; it is not among those that were kept."""
    with pytest.raises(NotKeptError, match=f"sample {at} moves the generator of {whose}"):
        read_into(memory, Quiet(draws=draws, at=at))
    assert memory.filling().done <= at


def test_a_sample_that_differs_by_its_own_means_is_refused(memory):
    """By a generator of the dataset's, a clock, or a counter: nobody seeds these."""
    own = np.random.default_rng(1)
    with pytest.raises(NotKeptError, match="sample 99 differs when it is read again"):
        read_into(memory, Quiet(draws=own.random))
    assert memory.filling().done == 0


def test_memory_that_holds_other_data_is_refused(memory):
    """Ranks whose datasets differ in length must not share it."""
    read_into(memory, Counted())
    other = SampleMemory(os.dup(memory._descriptor), samples=99)
    with pytest.raises(OtherSamplesError, match="some have 100 samples and some 99"):
        _ = other.is_whole
    other.close()


class Slow(Counted):
    """Notes each reading in a file, and takes its time from sample 40 on."""

    def __init__(self, notes):
        super().__init__()
        self.notes = notes

    def __getitem__(self, index):
        with self.notes.open("a") as file:
            file.write(f"{os.getpid()} {index}\n")
        if index >= 40 and multiprocessing.parent_process() is not None:
            time.sleep(0.2)
        return super().__getitem__(index)


def _fill_slowly(path, notes):
    memory = SampleMemory(os.open(path, os.O_RDWR), samples=100)
    read_into(memory, Slow(notes))


def test_a_reader_that_is_killed_is_followed_by_another(memory, tmp_path):
    """While it lives, also stopped, nobody else reads; then another goes on behind what is there."""
    notes = tmp_path / "notes"
    path = f"/proc/{os.getpid()}/fd/{memory._descriptor}"
    reader = multiprocessing.get_context("spawn").Process(target=_fill_slowly, args=(path, notes))
    reader.start()
    poll(lambda: memory.filling().done > 40, what="a part of the samples")
    os.kill(reader.pid, signal.SIGSTOP)
    assert not memory.try_lock()
    os.kill(reader.pid, signal.SIGKILL)
    reader.join()
    done = memory.filling().done
    assert 40 < done < 100
    dataset = Slow(notes)
    read_into(memory, dataset)
    assert memory.is_whole
    assert min(dataset.read) >= done
    shared, plain = PreloadedDataset(memory), Counted()
    for index in range(100):
        assert_equal(shared[index], plain[index])


def _append_until_killed(memory, writes):
    """Add samples two at a time; at the write after so many this process is killed."""
    left, write = iter(range(writes)), os.pwrite

    def write_or_die(*words):
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(*words)

    os.pwrite = write_or_die
    for done in (2, 4):
        packed = [pack(Counted()[index]) for index in (done - 2, done - 1)]
        memory.append(packed, filling=Filling(done=done))


def _killed_at(writes):
    """The memory that such a process leaves; how it ended."""
    memory = SampleMemory(os.memfd_create("samples"), samples=100)
    pid = os.fork()
    if pid == 0:
        try:
            _append_until_killed(memory, writes)
        finally:
            os._exit(0)
    return memory, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_kill_at_any_write_counts_only_whole_samples():
    """The reader that follows begins with the first sample that is not whole."""
    counts, code = [], -signal.SIGKILL
    while code == -signal.SIGKILL:
        memory, code = _killed_at(len(counts))
        counts.append(memory.filling().done)
        for index in range(counts[-1]):
            assert_equal(PreloadedDataset(memory)[index], Counted()[index])
        memory.close()
    assert (sorted(set(counts)), counts) == ([0, 2, 4], sorted(counts))


def test_first_samples_that_are_not_counted_yet_are_none(memory):
    """Whoever looks while they are written, or after their reader was killed at that, finds an empty file."""
    os.pwrite(memory._descriptor, b"half of a sample", memory._data_begin)
    assert memory.filling() == Filling()
    read_into(memory, Counted())
    assert memory.is_whole


def test_a_fork_reads_as_its_parent_does(memory):
    """Loader workers are forks of a rank; their readings move nobody's place in the file."""
    read_into(memory, Counted())
    shared = PreloadedDataset(memory)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        content = pickle.dumps([shared[index]["text"] for index in range(99, -1, -1)])
        os.write(writer, content)
        os._exit(0)
    own = [shared[index]["text"] for index in range(100)]
    os.waitpid(pid, 0)
    theirs = pickle.loads(os.read(reader, 10_000))
    assert (own, theirs) == ([str(n) for n in range(100)], own[::-1])
    os.close(reader)
    os.close(writer)
