"""Whether something has been used or changed that is too large to be kept, or cannot be looked into.

Of much, hashes of its pieces: all are compared where there is time, else the next ones at each look. Of an
iterator, its position where that can be read without moving it. Calls no method of a user's own class.

This module does not use ``object_graph.Walk``: it hashes pieces of 500 entries in their order, numbers and texts too,
stops in the middle of a list of a million entries, and continues there at the next look.
"""

from __future__ import annotations

import inspect
import io
import itertools
import operator
import types
from array import array
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp_runner.training.exactness.kept_kinds import GeneratorState
from ddp_runner.values.generators import generator_kind
from ddp_runner.values.object_graph import CONTAINERS, LEAVES, attributes_of

_COST_OF_A_LOOK, _COST_AT_ONCE = 1_500, 250_000  # of objects, about 5 us each
_PIECE, _PIECE_BYTES = 500, 1024 * 1024
_NUMBERS_FOR_ONE = 50  # that cost what an object does
_BYTES_FOR_ONE = 5_000
_COUNTED: tuple[Any, ...] = (
    type(iter([])),
    type(iter(())),
    type(iter(range(0))),
    type(reversed([])),
)
_POSITIONS = (types.GeneratorType, itertools.count, *_COUNTED, enumerate, io.IOBase, SimpleQueue)


class Trace:
    """The trace of ``value`` as it is now."""

    def __init__(self, value: Any) -> None:
        self._position = _position(value)
        self._hashes: list[int] = []
        self._is_complete = False  # all pieces have been seen once
        self._at = 0
        self._pieces: Iterator[tuple[int, int]] | None = None
        self._of: Any = value
        self.is_of(value, whole=True)

    def is_of(self, value: Any, *, whole: bool = False) -> bool:
        """Return True if ``value`` is unchanged, as far as is seen; without ``whole`` only the next pieces are."""
        if isinstance(value, _POSITIONS) or hasattr(type(value), "__next__"):
            return self._position is not None and _position(value) == self._position
        if whole or self._pieces is None or value is not self._of:
            self._pieces, self._at, self._of = _pieces_of(value), 0, value
        left = _COST_AT_ONCE if whole else _COST_OF_A_LOOK
        try:
            for piece, cost in self._pieces:
                if not self._is_next(piece):
                    return False
                left -= cost
                if left < 0:
                    return True
        except RuntimeError:  # a dict has other keys than when it was looked at in part
            return False
        self._pieces, self._is_complete = None, True
        return self._at == len(self._hashes)

    def _is_next(self, piece: int) -> bool:
        self._at += 1
        if self._at > len(self._hashes) and not self._is_complete:
            self._hashes.append(piece)
        return self._at <= len(self._hashes) and self._hashes[self._at - 1] == piece


def _position(value: Any) -> Any:  # noqa: PLR0911 - one return a type
    """Return the position of an iterator; None if that is unknown."""
    if isinstance(value, types.GeneratorType):
        state = inspect.getgeneratorstate(value)
        return state if state in (inspect.GEN_CREATED, inspect.GEN_CLOSED) else None
    if isinstance(value, itertools.count):
        return repr(value)
    if type(value) in _COUNTED:
        return operator.length_hint(value)
    if isinstance(value, enumerate):
        return value.__reduce__()[1][1]
    if isinstance(value, SimpleQueue):
        return "empty" if value.empty() else None
    if isinstance(value, io.IOBase) and type(value).__module__ in ("io", "_io"):
        try:
            return value.tell()
        except (OSError, ValueError):  # a pipe; a text that is read line by line
            return None
    return None


def _pieces_of(value: Any) -> Iterator[tuple[int, int]]:
    """A hash of each piece, and what it costs to make; objects by what their attributes hold."""
    seen: set[int] = set()
    is_plain = type(value) in CONTAINERS  # then it may be another list of the same things
    pending: list[Iterator[Any]] = [_within(value) if is_plain else iter([value])]
    while pending:
        piece = [*itertools.islice(pending[-1], _PIECE)]
        if not piece:
            pending.pop()
            continue
        if set(map(type, piece)) <= LEAVES:
            yield hash(tuple(piece)), 1 + len(piece) // _NUMBERS_FOR_ONE
            continue
        found: list[Any] = []
        for one in piece:
            flat = _flat(one)
            if flat is not None:
                found += flat
                continue
            found.append(id(one))
            if id(one) in seen:
                continue
            seen.add(id(one))
            if issubclass(type(one), (np.ndarray, bytearray, array)):
                for raw in _raw_pieces(one):
                    yield hash(raw), len(raw) // _BYTES_FOR_ONE
            else:
                pending.append(_within(one))
        yield hash(tuple(found)), len(piece)


def _flat(one: Any) -> tuple[Any, ...] | None:
    """Return a key for a number, a tensor, or a short row of numbers, as there may be a million; else None."""
    kind = type(one)
    if kind in LEAVES:
        return (one,)
    if issubclass(kind, Tensor):  # isinstance() would ask the object
        place = one.data_ptr() if one.layout is torch.strided else 0
        return id(one), one._version, place  # noqa: SLF001 - as autograd
    if kind not in (tuple, list, dict) or len(one) > _PIECE:
        return None
    if not set(map(type, one.values() if kind is dict else one)) <= LEAVES:
        return None
    return id(one), *(one.items() if kind is dict else one)


def _raw_pieces(value: Any) -> Iterator[bytes]:
    array = np.atleast_1d(
        value if isinstance(value, np.ndarray) else np.frombuffer(value, np.uint8)
    )
    rows = max(1, _PIECE_BYTES * len(array) // max(1, array.nbytes))
    for begin in range(0, len(array), rows):
        yield array[begin : begin + rows].tobytes()


def _within(one: Any) -> Iterator[Any]:
    """A dict's keys and values, a list's entries, an object's attributes; where a generator stands."""
    if name := generator_kind(one):
        return iter([repr(GeneratorState.of(name, one).digest())])
    for kind in CONTAINERS:
        if issubclass(type(one), kind):
            pairs = kind is dict
            return itertools.chain.from_iterable(dict.items(one)) if pairs else kind.__iter__(one)
    if issubclass(type(one), (type, types.ModuleType)):
        return iter(())
    return iter(attributes_of(one).values())
