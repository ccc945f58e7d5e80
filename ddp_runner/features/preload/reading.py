"""Reads a dataset, sample by sample, into the memory that ranks share. Goes on where another has left off."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ddp_runner.data.by_number import sample_at
from ddp_runner.data.sample_hash import sample_hash
from ddp_runner.data.workers.fetch import BatchKey, SampleFailed, SampleReader
from ddp_runner.features.preload.memory import SampleMemory, Unread
from ddp_runner.features.preload.packing import new_memory, pack, unpack
from ddp_runner.values.generators import generator_states, generators_kept, moved_generators

TRIES = 3  # of a sample that raises: its storage may be out of reach for a moment
_PAUSE_S = 0.1
_TRIED_AGAIN = 100  # samples; where more raise, it is no moment's trouble
_WRITTEN_BYTES = 4_000_000  # at once
_WRITTEN_S = 0.5  # at the latest, so that whoever waits sees that it goes on
_AHEAD_BYTES = 64_000_000  # of samples that are looked at first
_AT_ONCE = 64  # samples, of a dataset that gives many


class NotKeptError(ValueError):
    """A sample cannot be kept as bytes, or is another one each time; its text says which, and why."""


class _Watched:
    """A dataset that does not say that its samples are the same each time: ``moved`` says which one was not.

    Each sample moves the generators that a loader seeds before it, or does not.
    """

    deterministic = False

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.moved = ""

    def __getitem__(self, index: int) -> Any:
        before = generator_states()
        try:
            return sample_at(self._dataset, index)
        finally:
            if whose := moved_generators(before):
                what = f"sample {index} moves the generator of {' and '.join(whose)}"
                self.moved = self.moved or f"{what}: it may be another one each time"


class NoRoomError(MemoryError):
    """The samples do not fit. ``needed_bytes``: about what all of them take; 0: more than was estimated."""

    def __init__(self, needed_bytes: int, available_bytes: int) -> None:
        super().__init__(f"{needed_bytes} bytes are needed, {available_bytes} are available")
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class Reading:
    """Reads ``dataset`` into ``memory`` for one process, which holds the memory's lock.

    ``room`` says how many bytes are available; ``on_sample`` is given each index before it is read, and
    ``on_progress`` how many are there.
    """

    def __init__(
        self,
        dataset: Any,
        memory: SampleMemory,
        *,
        room: Callable[[], int],
        on_sample: Callable[[int], None],
        on_progress: Callable[[int], None],
    ) -> None:
        # INVARIANT preloaded-draws-nothing: a sample is kept only where loading it again gives the same bits.
        # Broken if: a sample that moves a generator is kept because the dataset's first ones do not.
        # Guarded by: test_a_sample_that_draws_is_refused_wherever_it_is.
        is_same = bool(getattr(dataset, "deterministic", False))
        self._watched = None if is_same else _Watched(dataset)
        self._source = SampleReader(self._watched or dataset, seed=0, collate=list)
        self._gives_many = hasattr(dataset, "__getitems__")
        self._memory = memory
        self._room = room
        self._on_sample = on_sample
        self._on_progress = on_progress
        self._filling = memory.filling()
        self._pending: list[bytearray] = []
        self._pending_bytes = 0
        self._written_s = time.monotonic()
        self._room_bytes = room()  # before the first sample

    def read(self) -> None:
        """Read what is missing. Raises NotKeptError, NoRoomError, or OSError where memory takes no more."""
        memory = self._memory
        with generators_kept():
            ahead = self._look_ahead()
            mean = estimated_bytes([len(one) for one in ahead.values()], samples=1)
            at_once = max(1, min(_AT_ONCE, _WRITTEN_BYTES // max(1, mean)))
            step = at_once if self._gives_many else 1
            index = self._filling.done
            while index < memory.samples:
                if index in ahead:
                    self._add(ahead.pop(index))
                    index += 1
                    continue
                end = min(index + step, memory.samples)
                wanted = range(index, min([end, *(one for one in ahead if index < one < end)]))
                for number, sample in zip(wanted, self._samples(wanted), strict=True):
                    self._add(_packed(sample, number), is_unread=isinstance(sample, Unread))
                index = wanted.stop
        self._write()

    def _look_ahead(self) -> dict[int, bytearray]:
        """The first samples to look at, packed. Raises NoRoomError where all of them would not fit."""
        memory, found, size_bytes = self._memory, {}, 0
        for index in probes(memory.samples):
            if index < self._filling.done:
                continue
            (sample,) = self._samples((index,))
            if isinstance(sample, Unread):
                continue
            found[index] = packed = _packed(sample, index)
            _compare(sample, packed, index)
            if self._watched is not None:
                self._compare_again(sample, packed, index)
            size_bytes += len(packed)
            if size_bytes > _AHEAD_BYTES:
                break
        left = memory.samples - self._filling.done
        needed = estimated_bytes([len(one) for one in found.values()], samples=left)
        if not fits(needed, available_bytes=self._room_bytes):
            raise NoRoomError(needed, self._room_bytes)
        return found

    def _compare_again(self, sample: Any, packed: bytearray, index: int) -> None:
        """Raise NotKeptError where a second reading, as of another epoch, is another sample."""
        (again,) = self._samples((index,), epoch=1)
        if isinstance(again, Unread) or type(again) is not type(sample):
            is_same = False
        else:
            hashed = sample_hash(sample)
            is_same = hashed == sample_hash(again) if hashed else packed == _packed(again, index)
        if not is_same:
            raise NotKeptError(f"sample {index} differs when it is read again")

    def _samples(self, indices: Sequence[int], *, epoch: int = 0) -> list[Any]:
        found = self._loaded(indices, epoch)
        if self._watched is not None and self._watched.moved:
            raise NotKeptError(self._watched.moved)
        return found

    def _loaded(self, indices: Sequence[int], epoch: int) -> list[Any]:
        loaded = self._source.load(
            BatchKey(epoch=epoch, indices=tuple(indices)), on_sample=self._on_sample
        )
        if not isinstance(loaded, SampleFailed):
            return list(loaded)
        return [self._alone(index) for index in indices]

    def _alone(self, index: int) -> Any:
        """Return one sample, or its placeholder. Raises MemoryError if it could not be read for want of memory."""
        source, key = self._source.one_by_one(), BatchKey(epoch=0, indices=(index,))
        tries = TRIES if self._filling.unread < _TRIED_AGAIN else 1
        for left in reversed(range(tries)):
            loaded = source.load(key, on_sample=self._on_sample)
            if not isinstance(loaded, SampleFailed):
                return loaded[0]
            if loaded.for_memory:
                raise MemoryError(f"sample {index}: {loaded.error}")
            if left:
                time.sleep(_PAUSE_S)
        return Unread(loaded.error)

    def _add(self, packed: bytearray, *, is_unread: bool = False) -> None:
        self._pending.append(packed)
        self._pending_bytes += len(packed)
        before = self._filling
        self._filling = replace(before, done=before.done + 1)
        if is_unread:
            first = before.done if before.first_unread < 0 else before.first_unread
            self._filling = replace(self._filling, unread=before.unread + 1, first_unread=first)
        is_late = time.monotonic() >= self._written_s + _WRITTEN_S
        if is_late or self._pending_bytes >= _WRITTEN_BYTES:
            self._write()

    def _write(self) -> None:
        available = self._room()
        if not may_go_on(available, first_available_bytes=self._room_bytes):
            raise NoRoomError(0, available)
        if self._pending:
            self._memory.append(self._pending, filling=self._filling)
        self._pending, self._pending_bytes = [], 0
        self._written_s = time.monotonic()
        self._on_progress(self._filling.done)


def _packed(sample: Any, index: int) -> bytearray:
    try:
        return pack(sample)
    except Exception as error:
        raise NotKeptError(f"sample {index} cannot be pickled: {error}") from error


def _compare(sample: Any, packed: bytearray, index: int) -> None:
    """Raise NotKeptError where what comes back is another sample, of a type that pickles something less."""
    memory = new_memory(len(packed))
    memory[:] = packed
    try:
        back = unpack(memory)
    except Exception as error:
        raise NotKeptError(f"sample {index} cannot be made of its pickle: {error}") from error
    if type(back) is not type(sample) or sample_hash(back) != sample_hash(sample):
        raise NotKeptError(f"sample {index} differs when it comes back from its pickle")


# Whether the samples that are preloaded fit into memory. Values only.

PROBES = 32  # samples by whose size that of all is estimated
SHARE_MAX = 0.9  # of what is available: training needs some as well


def probes(samples: int) -> tuple[int, ...]:
    """The samples to look at first, spread over all of them."""
    count = min(PROBES, samples)
    return tuple(number * (samples - 1) // max(1, count - 1) for number in range(count))


def estimated_bytes(sizes: Sequence[int], *, samples: int) -> int:
    """Return the estimated bytes of ``samples`` samples, from the ``sizes`` of some."""
    return -(-sum(sizes) * samples // len(sizes)) if sizes else 0


def fits(needed_bytes: int, *, available_bytes: int) -> bool:
    """Return True if ``needed_bytes`` may be taken; asked before the first sample is read."""
    return needed_bytes <= SHARE_MAX * available_bytes


def may_go_on(available_bytes: int, *, first_available_bytes: int) -> bool:
    """Return True if enough memory is left: samples may be larger than estimated."""
    return available_bytes >= (1 - SHARE_MAX) * first_available_bytes / 2
