"""Manages the memory in which each rank of a machine keeps its own objects; it outlives the rank.

The supervisor owns it and passes it to every rank of its machine. A rank writes only into its own places, and the
saving rank reads those of all. Without a supervisor this process owns it. Never touches a disk.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ddp_runner.system.local_places import CELL_BYTES, PLACE_BYTES, PLACES, begin_of
from ddp_runner.training.local_state.by_value import Pickled

_HEADER = struct.Struct("<8sqqqqqq")  # the mark, and the fields of a header
_SIGNED_BYTES = _HEADER.size + 16
_MARK = b"ddplocal"
_SIZE_BYTES = 8  # of a buffer's size
# Flags of a place.
SETTLED = 1  # it includes changes after the step's update
CHANGES_LATE = 2  # the program has changed kept objects after an update, at least once
KNOWN = 4  # whether it does is known: a step was checked after its update
NO_STEP = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Describes the content of a place. ``count``: the newest place of a rank has the highest.

    ``as_of_update``: the newest step whose state a process of this rank took as of its update, while no rank was known
    to change objects later.
    """

    step: int
    count: int
    flags: int
    text_bytes: int
    buffers: int
    as_of_update: int = NO_STEP

    def to_bytes(self) -> bytes:
        """Return the header with a digest of itself."""
        fields = (self.step, self.count, self.flags, self.text_bytes, self.buffers)
        packed = _HEADER.pack(_MARK, *fields, self.as_of_update)
        return packed + hashlib.blake2b(packed, digest_size=16).digest()

    @classmethod
    def from_bytes(cls, read: bytes) -> Header | None:
        """Return the header; None if the place holds no complete content."""
        packed, digest = read[: _HEADER.size], read[_HEADER.size :]
        if len(read) < _SIGNED_BYTES or packed[:8] != _MARK:
            return None
        if hashlib.blake2b(packed, digest_size=16).digest() != digest:
            return None
        _, step, count, flags, text_bytes, buffers, as_of_update = _HEADER.unpack(packed)
        return cls(
            step=step,
            count=count,
            flags=flags,
            text_bytes=text_bytes,
            buffers=buffers,
            as_of_update=as_of_update,
        )


class Place:
    """Reads and writes one place of one rank: a part of the file ``descriptor`` from ``begin`` on.

    ``is_own``: only this process writes there.
    """

    def __init__(self, descriptor: int, begin: int, *, is_own: bool) -> None:
        self._descriptor = descriptor
        self._begin = begin
        self._is_own = is_own
        self._known: Header | None = self._read_header() if is_own else None
        self._room_bytes = 0  # that this process has allocated

    def header(self) -> Header | None:
        """Return the header; None if the place holds no complete content."""
        return self._known if self._is_own else self._read_header()

    def _read_header(self) -> Header | None:
        return Header.from_bytes(os.pread(self._descriptor, _SIGNED_BYTES, self._begin))

    def clear(self) -> None:
        """Mark the place as empty."""
        if self.header() is not None:
            self._known = None
            os.pwrite(self._descriptor, bytes(_SIGNED_BYTES), self._begin)

    def write(
        self,
        pickled: Pickled,
        *,
        step: int,
        count: int,
        flags: int,
        as_of_update: int = NO_STEP,
    ) -> None:
        """Write ``pickled``, of ``step``. Raises OSError if the machine lacks memory for it."""
        sizes = struct.pack(f"<{len(pickled.buffers)}q", *[one.nbytes for one in pickled.buffers])
        needed_bytes = _SIGNED_BYTES + len(sizes) + pickled.size_bytes
        if needed_bytes > PLACE_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        self.clear()
        if self._room_bytes < needed_bytes:
            os.posix_fallocate(self._descriptor, self._begin, needed_bytes)
            self._room_bytes = needed_bytes
        at = self._begin + _SIGNED_BYTES
        parts: list[bytes | memoryview] = [sizes + pickled.text, *pickled.buffers]
        for part in parts:
            at = self._write_whole(part, at)
        header = Header(
            step=step,
            count=count,
            flags=flags,
            text_bytes=len(pickled.text),
            buffers=len(pickled.buffers),
            as_of_update=as_of_update,
        )
        # INVARIANT local-sealed-last: the header of a place is written only once its whole content is there.
        # Broken if: the header is written before the last part, or stays while a part is written.
        # Guarded by: test_what_is_cut_short_leaves_the_step_before.
        self.sign(header)

    def _write_whole(self, part: bytes | memoryview, at: int) -> int:
        view = memoryview(part)
        while view.nbytes:
            written = os.pwrite(self._descriptor, view, at)
            view, at = view[written:], at + written
        return at

    def sign(self, header: Header) -> None:
        """Replace the header of the same content."""
        os.pwrite(self._descriptor, header.to_bytes(), self._begin)
        self._known = header

    def read(self, header: Header) -> Pickled:
        """Return a copy of the content that ``header`` describes. Raises OSError if it is incomplete."""
        at = self._begin + _SIGNED_BYTES
        sizes = struct.unpack(
            f"<{header.buffers}q", self._read_whole(_SIZE_BYTES * header.buffers, at)
        )
        at += _SIZE_BYTES * header.buffers
        text = bytes(self._read_whole(header.text_bytes, at))
        at += header.text_bytes
        buffers = []
        for size in sizes:
            buffers.append(memoryview(self._read_whole(size, at)))
            at += size
        return Pickled(text, buffers)

    def _read_whole(self, size: int, at: int) -> bytearray:
        found = bytearray(size)
        view = memoryview(found)
        while view.nbytes:
            count = os.preadv(self._descriptor, [view], at)
            if count == 0:
                raise OSError(errno.ENODATA, "per-rank state in memory is cut short")
            view, at = view[count:], at + count
        return found

    def holds(self, header: Header, pickled: Pickled) -> bool:
        """Return True if the place holds exactly these bytes."""
        if len(pickled.text) != header.text_bytes or len(pickled.buffers) != header.buffers:
            return False
        sizes = struct.pack(f"<{len(pickled.buffers)}q", *[one.nbytes for one in pickled.buffers])
        head = sizes + pickled.text
        at = self._begin + _SIGNED_BYTES
        if os.pread(self._descriptor, len(head), at) != head:
            return False
        if not pickled.buffers:
            return True
        skipped = _SIGNED_BYTES + len(head)
        size = skipped + sum(one.nbytes for one in pickled.buffers)
        with contextlib.closing(
            mmap.mmap(self._descriptor, size, prot=mmap.PROT_READ, offset=self._begin)
        ) as memory:
            for part in pickled.buffers:
                if not _are_same(memory, part, at=skipped):
                    return False
                skipped += part.nbytes
        return True


def _are_same(memory: mmap.mmap, part: memoryview, *, at: int) -> bool:
    there = np.frombuffer(memory, dtype=np.uint8, count=part.nbytes, offset=at)
    is_same = bool(np.array_equal(there, np.frombuffer(part, dtype=np.uint8)))
    del there  # it holds the memory open
    return is_same


class RankMemory:
    """Gives one rank access to the places of all ranks of its machine."""

    def __init__(self, paths: Sequence[str], *, local_rank: int, local_world_size: int) -> None:
        """``paths``: the file that the ranks share; empty: this process keeps its own, and sees no other rank's."""
        self.is_shared = bool(paths)
        self._descriptor = (
            os.open(paths[0], os.O_RDWR | os.O_CLOEXEC) if paths else os.memfd_create("local_state")
        )
        self._board: mmap.mmap | None = None
        self._local_rank = local_rank
        self._board_bytes = max(1, local_world_size) * CELL_BYTES
        self.own = self._places_of(local_rank, is_own=True)

    def places_of(self, local_rank: int) -> list[Place]:
        """Return the places of a rank of this machine; an empty list if they are not accessible."""
        if local_rank == self._local_rank:
            return self.own
        return self._places_of(local_rank, is_own=False) if self.is_shared else []

    def _places_of(self, local_rank: int, *, is_own: bool) -> list[Place]:
        begins = [begin_of(local_rank, number) for number in range(PLACES)]
        return [Place(self._descriptor, begin, is_own=is_own) for begin in begins]

    def announce(self, value: int) -> None:
        """Show the other ranks of this machine that this one has reached ``value``, which only grows."""
        struct.pack_into("<q", self._mapped(), self._local_rank * CELL_BYTES, value)

    def have_announced(self, local_ranks: Iterable[int], value: int) -> bool:
        """Return True once all of these ranks have reached ``value``."""
        board = self._mapped()
        return all(
            struct.unpack_from("<q", board, one * CELL_BYTES)[0] >= value for one in local_ranks
        )

    def _mapped(self) -> mmap.mmap:
        if self._board is None:
            # This may enlarge the file, and never shrinks it.
            os.posix_fallocate(self._descriptor, 0, self._board_bytes)
            self._board = mmap.mmap(self._descriptor, self._board_bytes)
        return self._board

    def close(self) -> None:
        """Close the board and the file."""
        board, self._board = self._board, None
        if board is not None:
            board.close()
        os.close(self._descriptor)


def newest_of(places: Sequence[Place], step: int) -> tuple[Place, Header] | None:
    """Return the newest of a rank's places that hold ``step``; None if there is none."""
    found = [(place, header) for place in places if (header := place.header()) is not None]
    of_step = [one for one in found if one[1].step == step]
    return max(of_step, key=lambda one: one[1].count) if of_step else None
