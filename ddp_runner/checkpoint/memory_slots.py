"""Copies of a state in memory that outlives whoever made them: two places, one of which is always whole.

The memory has no name and belongs to the supervisor, which hands it to every rank of its machine: a
rank that is killed leaves it as it is. Never touches a disk; never decides when.
"""

from __future__ import annotations

import errno
import io
import mmap
import os
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp_runner.checkpoint.file_hash import SUMS, FileHash
from ddp_runner.checkpoint.manifest import CheckpointFacts, Manifest
from ddp_runner.checkpoint.slot_header import EMPTY_HEADER as _EMPTY
from ddp_runner.checkpoint.slot_header import HEADER_BYTES as _HEADER_BYTES
from ddp_runner.checkpoint.slot_header import SlotHeader
from ddp_runner.checkpoint.store import Loaded
from ddp_runner.kernel.system.threads import THREADS_MAX, in_threads
from ddp_runner.kernel.values.nested import STORED, put_back, take_out

_ALIGNED_TO = 64

_COPIED_BYTES = 16 * 1024 * 1024  # by one thread in a row
_ALONE_BYTES = 1024 * 1024  # a smaller piece takes a thread less time than a hand-over


class _Slot:
    """A file in memory: a header, the bytes of the tensors, and a description of the state around them."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._memory: mmap.mmap | None = None
        self._sizes: tuple[int, ...] = ()
        self._pieces: list[torch.UntypedStorage] = []
        self._begin = self._end = 0  # addresses of the mapped payload
        self._is_pinned = False

    @property
    def header(self) -> SlotHeader | None:
        """None where there is nothing whole."""
        return SlotHeader.from_bytes(os.pread(self._descriptor, _HEADER_BYTES, 0))

    @property
    def size_bytes(self) -> int:
        """The machine's memory in use, in bytes."""
        return os.fstat(self._descriptor).st_blocks * 512

    @property
    def written_s(self) -> float:
        """The wall time at which its header was written; before that, at which it was made."""
        return os.fstat(self._descriptor).st_mtime

    def clear(self) -> None:
        """Mark the slot as empty."""
        if os.fstat(self._descriptor).st_size:
            os.pwrite(self._descriptor, _EMPTY, 0)

    def release(self) -> None:
        """Hold nothing, and give the memory back; nobody may read what lay in it."""
        self._unpin()
        self._pieces, self._memory, self._sizes = [], None, ()
        os.ftruncate(self._descriptor, 0)

    def make_room(self, sizes: Sequence[int]) -> list[torch.UntypedStorage]:
        """A piece of memory for each size, the same ones as last time where the sizes are the same.

        Raises OSError where the machine has no memory for it.
        """
        self.clear()
        held_bytes = 0 if self._memory is None else len(self._memory)
        # Another process may have given the memory back since then.
        if tuple(sizes) == self._sizes and 0 < held_bytes <= os.fstat(self._descriptor).st_size:
            return self._pieces
        self._unpin()
        self._pieces, self._memory, self._sizes = [], None, ()
        places, end = _places(sizes)
        # Asked for now: memory that is not there would end this process when it is written to.
        os.posix_fallocate(self._descriptor, 0, end)
        os.ftruncate(self._descriptor, end)
        memory = mmap.mmap(self._descriptor, end)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self._begin, self._end = whole.data_ptr(), whole.data_ptr() + end
        self._pieces = [
            _piece(memory, place, size) for place, size in zip(places, sizes, strict=True)
        ]
        self._memory, self._sizes = memory, tuple(sizes)
        self._pin()
        return self._pieces

    def _pin(self) -> None:
        """Pin the memory for a GPU's state, so that it copies at the speed of its bus and computes meanwhile."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            size = self._end - self._begin
            driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            status = driver.cudaHostRegister(self._begin, size, 0)
            self._is_pinned = int(status) == 0  # else it copies more slowly

    def _unpin(self) -> None:
        """Unpin the memory before it is replaced."""
        if self._is_pinned:
            driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            driver.cudaHostUnregister(self._begin)
            self._is_pinned = False

    def seal(
        self,
        content: Mapping[str, Any],
        *,
        step: int,
        sealed: int,
    ) -> None:
        """Say that the pieces hold ``content``, which is of ``step``, and nothing will change them.

        What of it lies elsewhere is added. Raises OSError where there is no memory for that.
        """
        assert self._memory is not None, "seal() follows make_room()"
        text = _described(content, begin=self._begin, end=self._end).getbuffer()
        payload_bytes = len(self._memory)
        written = 0
        while written < len(text):
            written += os.pwrite(self._descriptor, text[written:], payload_bytes + written)
        header = SlotHeader(
            step=step,
            sealed=sealed,
            payload_bytes=payload_bytes,
            described_bytes=len(text),
            checksum=_checksum_of(self._memory, text),
        )
        # INVARIANT sealed-last: a slot says what it holds only once all of that is in it.
        # Broken if: the header is written before the last piece, or stays while a piece is written.
        # Guarded by: test_a_copy_that_is_cut_short_leaves_the_other_one,
        # test_a_slot_says_nothing_from_the_first_write_to_the_last.
        os.pwrite(self._descriptor, header.to_bytes(), 0)

    def lent(self) -> tuple[dict[str, Any], Callable[[], str]]:
        """Return the content, not copied, and a function that checks afterwards that it has not changed.

        That function reads all of it and returns an empty text, or a reason. Raises OSError if the slot holds
        nothing complete, or if the description of the tensors has changed.
        """
        header = self.header
        end = 0 if header is None else header.payload_bytes + header.described_bytes
        if header is None or os.fstat(self._descriptor).st_size < end:
            raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
        memory = mmap.mmap(self._descriptor, end)  # which ends with the last tensor in it
        text = bytearray(memory[header.payload_bytes :])
        if _sum_of(text) != header.checksum.split()[-1]:
            raise OSError(errno.EIO, _OTHER_BYTES)

        def wrong() -> str:
            with memoryview(memory) as whole, whole[: header.payload_bytes] as payload:
                is_same = _checksum_of(payload, text) == header.checksum
            if not is_same:
                return _OTHER_BYTES
            return "" if self.header == header else "it was given up"

        return _built(text, memory, lends=True), wrong

    def read(self) -> tuple[SlotHeader, dict[str, Any]] | str:
        """Return a copy of the content; or the reason why it is of no use."""
        header = self.header
        if header is None:
            return "it is empty, or was being written"
        end = header.payload_bytes + header.described_bytes
        if os.fstat(self._descriptor).st_size < end:
            return "it is shorter than it says"
        memory = mmap.mmap(self._descriptor, end)
        text = bytearray(memory[header.payload_bytes :])
        with memoryview(memory) as whole, whole[: header.payload_bytes] as payload:
            if _checksum_of(payload, text, threads_max=THREADS_MAX) != header.checksum:
                return _OTHER_BYTES
        return header, _built(text, memory)


class MemorySlots:
    """The two slots of a machine. Ranks of one machine may all have them; one at a time writes."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self.descriptors = tuple(descriptors)
        self._slots = [_Slot(one) for one in descriptors]
        self._writing: _Slot | None = None

    @property
    def newest_step(self) -> int | None:
        """The step of the newest complete copy, as far as its header says; None if there is none."""
        found = self._by_age()
        return None if not found else found[-1][0].step

    @property
    def age_s(self) -> float:
        """The age of the newest complete copy; without one, that of the slot that was not yet filled."""
        by_age = self._by_age()
        written_s = by_age[-1][1].written_s if by_age else min(s.written_s for s in self._slots)
        return max(0.0, time.time() - written_s)

    @property
    def size_bytes(self) -> int:
        """The machine's memory in use by both slots, in bytes."""
        return sum(slot.size_bytes for slot in self._slots)

    def make_room(self, sizes: Sequence[int]) -> list[torch.UntypedStorage]:
        """Memory for the next copy, a piece for each size; the newest whole copy stays as it is.

        Raises OSError where the machine has none.
        """
        by_age = self._by_age()
        newest = by_age[-1][1] if by_age else None
        self._writing = next(slot for slot in self._slots if slot is not newest)
        return self._writing.make_room(sizes)

    def reserve(self, sizes: Sequence[int]) -> None:
        """Make room for the next copies, ahead of them. Raises OSError where the machine has none."""
        by_age = self._by_age()
        for slot in self._slots:
            if not by_age or slot is not by_age[-1][1]:
                slot.make_room(sizes)

    def seal(self, content: Mapping[str, Any], facts: CheckpointFacts) -> int:
        """The copy in hand is whole, and sound; the number that it has from now on."""
        slot, self._writing = self._writing, None
        assert slot is not None, "seal() follows make_room()"
        sealed = time.monotonic_ns()  # later than any before it, also where all were given up
        described = {**content, _FACTS: facts}
        slot.seal(described, step=facts.step, sealed=sealed)
        return sealed

    def has(self, sealed: int) -> bool:
        """Return True if the copy of that number has not been given up."""
        return any(header.sealed == sealed for header, _ in self._by_age())

    def lent(self, sealed: int) -> Lent:
        """The copy of that number. Raises OSError where it is not there, or not whole."""
        for header, slot in self._by_age():
            if header.sealed == sealed:
                content, wrong = slot.lent()
                return Lent(facts=content.pop(_FACTS), state=content, wrong=wrong)
        raise OSError(errno.ENODATA, "the copy in memory was given up before it was written")

    def clear(self) -> None:
        """Mark both slots as empty: no run may resume from them."""
        for slot in self._slots:
            slot.clear()

    def release(self) -> None:
        """Clear the slots like :meth:`clear`, and give all memory back to the machine."""
        for slot in self._slots:
            slot.release()

    def load(self) -> tuple[Loaded | None, list[str]]:
        """The newest copy that is whole, of which nothing is theirs; and what is wrong with newer ones.

        Those hold nothing any more: the next copy is made there, and not in the place of the one that is whole.
        """
        wrong: list[str] = []
        for header, slot in reversed(self._by_age()):
            found = slot.read()
            if isinstance(found, str):
                wrong.append(f"the copy in memory of step {header.step} is of no use: {found}")
                slot.clear()
                continue
            _, content = found
            facts = content.pop(_FACTS)
            manifest = Manifest.of(facts)
            where = Path(f"memory of step {header.step}")
            return Loaded(state=content, manifest=manifest, path=where), wrong
        return None, wrong

    def _by_age(self) -> list[tuple[SlotHeader, _Slot]]:
        found = [(slot.header, slot) for slot in self._slots]
        whole = [(header, slot) for header, slot in found if header is not None]
        return sorted(whole, key=lambda one: one[0].sealed)


_FACTS = "facts of the copy"
_OTHER_BYTES = "its bytes are not those that were written"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lent:
    """A copy where it lies. ``wrong``: asked afterwards, whether it was what had been sealed (empty), or what not."""

    facts: CheckpointFacts
    state: dict[str, Any]
    wrong: Callable[[], str]


def _described(content: Mapping[str, Any], *, begin: int, end: int) -> io.BytesIO:
    """Return a pickled description of the state; tensors that lie from ``begin`` to ``end`` only by place."""

    def lies_there(tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            return False
        return begin <= tensor.untyped_storage().data_ptr() < end

    tensors: list[Tensor] = []
    skeleton = take_out(dict(content), tensors, STORED, once=False, where=lies_there)
    text = io.BytesIO()
    pickle.dump((skeleton, [_place_of(one, begin) for one in tensors]), text, protocol=4)
    return text


def _place_of(tensor: Tensor, begin: int) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()
    kind = str(tensor.dtype).removeprefix("torch.")
    place = storage.data_ptr() - begin
    offset = tensor.storage_offset()
    return place, storage.nbytes(), kind, offset, tuple(tensor.shape), tensor.stride()


def _built(text: bytearray, memory: mmap.mmap, *, lends: bool = False) -> dict[str, Any]:
    """The state; tensors that shared memory share it again. ``lends``: it stays where it is."""
    skeleton, places = pickle.loads(text)  # noqa: S301 - written by a process of this run
    sizes = {place: size for place, size, *_ in places}
    storages = {place: _piece(memory, place, size) for place, size in sizes.items()}
    if not lends:
        storages = _copies(storages)
    tensors = []
    for place, _, kind, offset, shape, stride in places:
        empty = torch.empty(0, dtype=getattr(torch, kind))
        tensors.append(empty.set_(storages[place], offset, shape, stride))
    state: dict[str, Any] = put_back(skeleton, tensors, STORED)
    return state


def _copies(pieces: Mapping[int, torch.UntypedStorage]) -> dict[int, torch.UntypedStorage]:
    """The same bytes in memory of this process, which torch's allocator has in large pages."""
    copies = {place: torch.empty(one.nbytes(), dtype=torch.uint8) for place, one in pieces.items()}
    large = []
    for place, one in pieces.items():
        to, of = copies[place].numpy(), torch.empty(0, dtype=torch.uint8).set_(one).numpy()
        if one.nbytes() < _ALONE_BYTES:
            np.copyto(to, of)
            continue
        starts = range(0, one.nbytes(), _COPIED_BYTES)
        large += [(to[at : at + _COPIED_BYTES], of[at : at + _COPIED_BYTES]) for at in starts]
    in_threads(lambda part: np.copyto(*part), large, name="copy")
    return {place: one.untyped_storage() for place, one in copies.items()}


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the begin of each piece, and the end of the last one."""
    places, end = [], _HEADER_BYTES
    for size in sizes:
        places.append(end)
        end += -(-size // _ALIGNED_TO) * _ALIGNED_TO
    return places, end


def _piece(memory: mmap.mmap, place: int, size: int) -> torch.UntypedStorage:
    if size == 0:
        return torch.empty(0, dtype=torch.uint8).untyped_storage()
    found = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=place)
    return found.untyped_storage()


def _checksum_of(payload: Any, text: bytearray | memoryview, *, threads_max: int = 0) -> str:
    """Return the checksums of all but the header, which holds them."""
    parts = (memoryview(payload)[_HEADER_BYTES:], memoryview(text))
    return " ".join(_sum_of(part, threads_max=threads_max) for part in parts if len(part))


def _sum_of(part: bytearray | memoryview, *, threads_max: int = 0) -> str:
    found = FileHash(SUMS, threads_max=threads_max)
    found.begin(memoryview(part))
    found.wait()
    return found.close()
