"""Packed samples in a memory file without a name, by index. Never reads a dataset.

The file belongs to no rank: it ends with the last process that holds it, and nothing of it is left behind. It is
read by ``pread`` and not mapped, so that no page of it counts as memory of who reads it.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset

from ddp_runner.features.preload.packing import aligned, new_memory, unpack

_HEADER = struct.Struct("<8sqqq")
_MAGIC = b"samples1"
_HEADER_BYTES = 64
_OFFSET_BYTES = 8


@dataclass(frozen=True, slots=True)
class Unread:
    """Stands in the place of a sample that could not be read; ``error`` is what it raised."""

    error: str


class UnreadSampleError(Exception):
    """Raised for a sample that could not be read at the start."""


class OtherSamplesError(Exception):
    """Raised if the stored samples are of a dataset of another length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """The progress of a file: its first ``done`` samples are there, of which ``unread`` could not be read.

    ``first_unread`` is one of these, -1 where there is none.
    """

    done: int = 0
    unread: int = 0
    first_unread: int = -1


class SampleMemory:
    """The file behind ``descriptor``, which it closes, for a dataset of ``samples``.

    One process at a time fills it, whoever has the lock; all others read. A fork reads as well as its parent.
    """

    def __init__(self, descriptor: int, *, samples: int) -> None:
        self._descriptor = descriptor
        self.samples = samples
        self._data_begin = aligned(_HEADER_BYTES + (samples + 1) * _OFFSET_BYTES)

    def filling(self) -> Filling:
        """Return how far the file is filled. Raises OtherSamplesError if it is another dataset's."""
        found = os.pread(self._descriptor, _HEADER_BYTES, 0)
        # Nothing stands there yet where the first samples are being written, or their reader was killed at that.
        if len(found) < _HEADER_BYTES or not any(found):
            return Filling()
        magic, done, unread, first_unread = _HEADER.unpack_from(found)
        (samples,) = struct.unpack_from("<q", found, _HEADER.size)
        if magic != _MAGIC or samples != self.samples:
            raise OtherSamplesError(f"of which some have {samples} samples and some {self.samples}")
        return Filling(done=done, unread=unread, first_unread=first_unread)

    @property
    def is_whole(self) -> bool:
        """True if every sample is there."""
        return self.filling().done == self.samples

    @property
    def size_bytes(self) -> int:
        """The memory in use, in bytes."""
        return os.fstat(self._descriptor).st_blocks * 512

    def try_lock(self) -> bool:
        """Become the one who fills it; False where another process is. Its death lets go of it."""
        try:
            # Of the process, not of the file's description: whoever it forks has no part in it.
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def unlock(self) -> None:
        """Fill it no more."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def append(self, packed: Sequence[bytes | bytearray], *, filling: Filling) -> None:
        """Write the next samples; ``filling``: once they are there. Raises OSError without memory."""
        first = filling.done - len(packed)
        end = self._offset_of(first)
        offsets = [end]
        for one in packed:
            end += len(one)
            offsets.append(end)
        # INVARIANT counted-last: a sample counts as read only once all of it is in memory, so that who goes
        # on after a reader that was killed begins with the first that is not. Broken if: the header is written
        # before the samples. Guarded by: test_a_kill_at_any_write_counts_only_whole_samples.
        self._write(b"".join(packed), offsets[0])
        self._write(struct.pack(f"<{len(offsets)}q", *offsets), self._place_of_offset(first))
        header = _HEADER.pack(_MAGIC, filling.done, filling.unread, filling.first_unread)
        self._write((header + struct.pack("<q", self.samples)).ljust(_HEADER_BYTES, b"\0"), 0)

    def read(self, index: int) -> Any:
        """Sample ``index``, in memory of its own."""
        begin, end = struct.unpack(
            "<2q", os.pread(self._descriptor, 2 * _OFFSET_BYTES, self._place_of_offset(index))
        )
        packed = new_memory(end - begin)
        done = os.preadv(self._descriptor, [packed], begin)
        while done < len(packed):
            more = os.preadv(self._descriptor, [packed[done:]], begin + done)
            if not more:
                raise EOFError(f"sample {index} is cut off")
            done += more
        return unpack(packed)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)

    def _place_of_offset(self, index: int) -> int:
        return _HEADER_BYTES + index * _OFFSET_BYTES

    def _offset_of(self, index: int) -> int:
        if index == 0:
            return self._data_begin
        found = os.pread(self._descriptor, _OFFSET_BYTES, self._place_of_offset(index))
        return int.from_bytes(found, "little")

    def _write(self, content: bytes, at: int) -> None:
        view, done = memoryview(content), 0
        while done < len(view):
            done += os.pwrite(self._descriptor, view[done:], at + done)


class PreloadedDataset(Dataset[Any]):
    """A map-style dataset whose samples lie in ``memory``; each time one is asked for it is a new one."""

    deterministic = True

    def __init__(self, memory: SampleMemory) -> None:
        self._memory = memory

    def __len__(self) -> int:
        return self._memory.samples

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self._memory.samples:
            raise IndexError(index)
        sample = self._memory.read(index)
        if type(sample) is Unread:
            raise UnreadSampleError(f"when it was preloaded: {sample.error}")
        return sample
