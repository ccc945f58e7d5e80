"""The memory in which each rank of a machine keeps its own objects: it outlives the rank.

The supervisor owns it and hands it to every rank of its machine; a rank writes into its own places alone, and the
rank that saves reads those of all. Without a supervisor it is this process's. Never touches a disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ddp_runner.core.local_places import PLACES, number_of_place, ranks_of
from ddp_runner.training.local_state.by_value import Pickled

_HEADER = struct.Struct(
    "<8sqqqqq"
)  # mark, step, count, flags, bytes of the pickle, number of buffers
_SIGNED_BYTES = _HEADER.size + 16
_MARK = b"ddplocal"
_CELL_BYTES = 8
# Flags of a place.
SETTLED = 1  # what followed the step's update is in it, too
CHANGES_LATE = 2  # the program has changed what is kept behind an update, at least once
KNOWN = 4  # whether it does is known: a step was looked at after its update


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a place holds. ``count``: the newest of a rank has the highest."""

    step: int
    count: int
    flags: int
    text_bytes: int
    buffers: int

    def to_bytes(self) -> bytes:
        """Return the header with a digest of itself."""
        packed = _HEADER.pack(
            _MARK, self.step, self.count, self.flags, self.text_bytes, self.buffers
        )
        return packed + hashlib.blake2b(packed, digest_size=16).digest()

    @classmethod
    def from_bytes(cls, read: bytes) -> Header | None:
        """Return the header; None where the place holds nothing whole."""
        packed, digest = read[: _HEADER.size], read[_HEADER.size :]
        if len(read) < _SIGNED_BYTES or packed[:8] != _MARK:
            return None
        if hashlib.blake2b(packed, digest_size=16).digest() != digest:
            return None
        _, step, count, flags, text_bytes, buffers = _HEADER.unpack(packed)
        return cls(step=step, count=count, flags=flags, text_bytes=text_bytes, buffers=buffers)


class Place:
    """One place of one rank."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def header(self) -> Header | None:
        """Return the header; None where the place holds nothing whole."""
        return Header.from_bytes(os.pread(self._descriptor, _SIGNED_BYTES, 0))

    def clear(self) -> None:
        """Hold nothing."""
        if os.fstat(self._descriptor).st_size:
            os.pwrite(self._descriptor, bytes(_SIGNED_BYTES), 0)

    def write(self, pickled: Pickled, *, step: int, count: int, flags: int) -> None:
        """Hold ``pickled``, of ``step``. Raises OSError where the machine has no memory for it."""
        sizes = struct.pack(f"<{len(pickled.buffers)}q", *[one.nbytes for one in pickled.buffers])
        end = _SIGNED_BYTES + len(sizes) + pickled.size_bytes
        self.clear()
        if os.fstat(self._descriptor).st_size < end:
            # Asked for now: memory that is not there would end this process when it is written to.
            os.posix_fallocate(self._descriptor, 0, end)
        at = _SIGNED_BYTES
        for part in (sizes, pickled.text, *pickled.buffers):
            at = self._write_whole(part, at)
        header = Header(
            step=step,
            count=count,
            flags=flags,
            text_bytes=len(pickled.text),
            buffers=len(pickled.buffers),
        )
        # INVARIANT local-sealed-last: a place says what it holds only once all of that is in it.
        # Broken if: the header is written before the last part, or stays while a part is written.
        # Guarded by: test_what_is_cut_short_leaves_the_step_before.
        os.pwrite(self._descriptor, header.to_bytes(), 0)

    def _write_whole(self, part: bytes | memoryview, at: int) -> int:
        view = memoryview(part).cast("B") if len(part) else memoryview(b"")
        while len(view):
            written = os.pwrite(self._descriptor, view, at)
            view, at = view[written:], at + written
        return at

    def sign(self, header: Header) -> None:
        """Hold the same with another header."""
        os.pwrite(self._descriptor, header.to_bytes(), 0)

    def read(self, header: Header) -> Pickled:
        """Return a copy of what the place holds by ``header``. Raises OSError where it is not all there."""
        at = _SIGNED_BYTES
        sizes_bytes = 8 * header.buffers
        sizes = struct.unpack(f"<{header.buffers}q", self._read_whole(sizes_bytes, at))
        text = bytes(self._read_whole(header.text_bytes, at + sizes_bytes))
        at += sizes_bytes + header.text_bytes
        buffers = []
        for size in sizes:
            buffers.append(memoryview(self._read_whole(size, at)))
            at += size
        return Pickled(text, buffers)

    def _read_whole(self, size: int, at: int) -> bytearray:
        found = bytearray(size)
        view = memoryview(found)
        while view:
            count = os.preadv(self._descriptor, [view], at)
            if count == 0:
                raise OSError("what a rank has kept of its own is cut short")
            view, at = view[count:], at + count
        return found

    def holds(self, header: Header, pickled: Pickled) -> bool:
        """Return True if these very bytes are there."""
        if len(pickled.text) != header.text_bytes or len(pickled.buffers) != header.buffers:
            return False
        sizes = struct.pack(f"<{len(pickled.buffers)}q", *[one.nbytes for one in pickled.buffers])
        at = _SIGNED_BYTES
        if pickled.size_bytes < mmap.PAGESIZE:
            found = os.pread(self._descriptor, len(sizes) + len(pickled.text), at)
            return found == sizes + pickled.text
        if os.fstat(self._descriptor).st_size < at + len(sizes) + pickled.size_bytes:
            return False
        with contextlib.closing(mmap.mmap(self._descriptor, 0, prot=mmap.PROT_READ)) as memory:
            for part in (sizes, pickled.text, *pickled.buffers):
                size = len(part) if isinstance(part, bytes) else part.nbytes
                if size and not _are_same(memory, part, at=at, size=size):
                    return False
                at += size
        return True


def _are_same(memory: mmap.mmap, part: bytes | memoryview, *, at: int, size: int) -> bool:
    there = np.frombuffer(memory, dtype=np.uint8, count=size, offset=at)
    is_same = bool(np.array_equal(there, np.frombuffer(part, dtype=np.uint8)))
    del there  # it holds the memory open
    return is_same


class RankMemory:
    """The places of all ranks of a machine, as one of them has them."""

    def __init__(self, paths: Sequence[str], *, local_rank: int) -> None:
        """``paths``: as of :func:`~ddp_runner.core.local_places.names_of_places`; empty: this process keeps its own, and sees no other's."""
        self.is_shared = bool(paths)
        self._paths = tuple(paths)
        self._opened: dict[int, int] = {}
        self._board: mmap.mmap | None = None
        self._local_rank = local_rank if paths else 0
        self.own = [self._place(self._local_rank, number) for number in range(PLACES)]

    def places_of(self, local_rank: int) -> list[Place]:
        """Return the places of a rank of this machine; none where they cannot be reached from here."""
        if local_rank == self._local_rank or not self.is_shared:
            return self.own if local_rank == self._local_rank else []
        return [self._place(local_rank, number) for number in range(PLACES)]

    def _place(self, local_rank: int, number: int) -> Place:
        return Place(self._open(number_of_place(local_rank, number)))

    def _open(self, number: int) -> int:
        if number not in self._opened:
            self._opened[number] = (
                os.open(self._paths[number], os.O_RDWR | os.O_CLOEXEC)
                if self.is_shared
                else os.memfd_create("local")
            )
        return self._opened[number]

    def announce(self, value: int) -> None:
        """Show the other ranks of this machine that this one has got as far as ``value``, which only grows."""
        struct.pack_into("<q", self._mapped(), self._local_rank * _CELL_BYTES, value)

    def have_announced(self, local_ranks: Iterable[int], value: int) -> bool:
        """Return True once all of these have got as far."""
        board = self._mapped()
        return all(
            struct.unpack_from("<q", board, one * _CELL_BYTES)[0] >= value for one in local_ranks
        )

    def _mapped(self) -> mmap.mmap:
        if self._board is None:
            descriptor = self._open(0)
            ranks = ranks_of(len(self._paths))
            if os.fstat(descriptor).st_size < ranks * _CELL_BYTES:
                os.ftruncate(descriptor, ranks * _CELL_BYTES)
            self._board = mmap.mmap(descriptor, ranks * _CELL_BYTES)
        return self._board

    def close(self) -> None:
        """Close what was opened."""
        board, self._board = self._board, None
        if board is not None:
            board.close()
        for descriptor in self._opened.values():
            os.close(descriptor)
        self._opened.clear()


def newest_of(places: Sequence[Place], step: int) -> tuple[Place, Header] | None:
    """Return the newest place of ``step`` among a rank's; None where there is none."""
    found = [(place, header) for place in places if (header := place.header()) is not None]
    of_step = [one for one in found if one[1].step == step]
    return max(of_step, key=lambda one: one[1].count) if of_step else None
