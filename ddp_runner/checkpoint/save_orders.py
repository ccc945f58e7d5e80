"""Which copy in memory is to become a file, and what came of it: a record beside the copy. Writes no file.

Who has made the copy orders the file, the process that writes answers. The record is in memory that outlives
both, so that no end of theirs loses it: who comes next reads there what is left to do. Imports no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_runner.core.settings import JsonValue

HEADER_BYTES = 2048  # of what says what the memory file holds; the order comes behind it
ORDER_BYTES = 2048
TRIES_MAX = 3  # of writers that end over one order
ANSWER_ROOM_BYTES = 64 * 1024  # held for an answer, so that no file is written again for want of it
_LOOKS = 4  # at a record that somebody may be writing just now
_LOOK_AGAIN_S = 0.001


def as_record(values: dict[str, Any], size_bytes: int) -> bytes:
    """``values`` as bytes of that size, which say of themselves whether they are whole."""
    text = json.dumps(values).encode()
    sealed = hashlib.sha256(text).hexdigest().encode() + b" " + text + b"\n"
    assert len(sealed) <= size_bytes, "a record is longer than its place"
    return sealed.ljust(size_bytes, b"\0")


def from_record(record: bytes) -> dict[str, Any] | None:
    """What :func:`as_record` was given; None where nothing whole is there."""
    digest, _, text = record.rstrip(b"\0\n").partition(b" ")
    if not text or hashlib.sha256(text).hexdigest().encode() != digest:
        return None
    values: dict[str, Any] = json.loads(text)
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOrder:
    """``sealed`` is the number of the copy, no two have the same. ``tries``: how many have begun to write it.

    ``answer_bytes`` of answer lie at ``answer_at`` in the memory file; 0: there is none yet.
    """

    sealed: int
    step: int
    answer_at: int
    tries: int = 0
    answer_bytes: int = 0

    @property
    def is_open(self) -> bool:
        """Whether the file is still to be written."""
        return not self.answer_bytes


def place(descriptor: int, order: SaveOrder) -> None:
    """Write down an order: it counts from when the memory file says that it holds that copy."""
    os.pwrite(descriptor, as_record(asdict(order), ORDER_BYTES), HEADER_BYTES)


def read(descriptor: int) -> SaveOrder | None:
    """The order for the copy that the memory file holds; None where there is none."""
    for _ in range(_LOOKS):
        page = os.pread(descriptor, HEADER_BYTES + ORDER_BYTES, 0)
        parts = page[:HEADER_BYTES], page[HEADER_BYTES:]
        header, found = map(from_record, parts)
        if header is not None and found is not None:
            return SaveOrder(**found) if found["sealed"] == header["sealed"] else None
        if not all(part.strip(b"\0") for part in parts):
            return None
        time.sleep(_LOOK_AGAIN_S)  # half of it was written at that moment, or its writer has ended
    return None


def open_orders(descriptors: Sequence[int]) -> list[tuple[SaveOrder, int]]:
    """What is still to be written, with its memory file, oldest first."""
    found = [(read(one), one) for one in descriptors]
    waiting = [(order, one) for order, one in found if order is not None and order.is_open]
    return sorted(waiting, key=lambda pair: pair[0].sealed)


def begin(descriptor: int, order: SaveOrder) -> SaveOrder:
    """Note that a writer begins with it."""
    begun = replace(order, tries=order.tries + 1)
    place(descriptor, begun)
    return begun


def answer(descriptor: int, order: SaveOrder, values: dict[str, JsonValue]) -> None:
    """Note what came of it, unless it was withdrawn. Raises OSError where there is no memory for that."""
    text = json.dumps(values).encode()
    if read(descriptor) != order:
        return
    os.pwrite(descriptor, text, order.answer_at)
    place(descriptor, replace(order, answer_bytes=len(text)))


def answer_of(descriptor: int, order: SaveOrder) -> dict[str, Any]:
    """What :func:`answer` was given."""
    values: dict[str, Any] = json.loads(os.pread(descriptor, order.answer_bytes, order.answer_at))
    return values


def is_written(descriptors: Sequence[int]) -> bool:
    """Whether somebody works at one of the orders just now."""
    for descriptor in descriptors:
        with held(descriptor, waits=False) as is_free:
            if not is_free:
                return True
    return False


@contextlib.contextmanager
def held(descriptor: int, *, waits: bool) -> Iterator[bool]:
    """Be the only one who works at the order; whether it is so. The kernel frees it when the holder ends."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except BlockingIOError:
        yield False
        return
    try:
        yield True
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
