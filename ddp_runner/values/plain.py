"""A dataset's own state as plain values that can be stored, sent and given back. Never loads anything.

Checkpoints and the wire know numbers, strings, tensors, lists, tuples and dicts. What numpy holds,
generators of its kind above all, travels as bytes in numpy's own format; an OrderedDict, a Counter or
a deque as what it holds. Of a number or string of a type of its own, such as an enum, the value is kept.
"""

from __future__ import annotations

import io
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ddp_runner.kernel.rules.errors import BadInputError

_ARRAY, _SCALAR = "ddp_runner:array", "ddp_runner:scalar"
_ORDERED, _COUNTER, _DEQUE = "ddp_runner:ordered", "ddp_runner:counter", "ddp_runner:deque"
_LEAVES = (type(None), bool, int, float, str, bytes)
# What a subclass, such as an enum, is equal to; without what it may have made of ``int(value)``.
_VALUES: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
}


def to_plain(value: Any, *, where: str = "state_dict()") -> Any:
    """``value`` copied, with what numpy holds as bytes. Raises BadInputError that names what it cannot keep."""
    kind = type(value)
    if kind in _LEAVES:
        return value
    if kind is dict:
        return {
            _plain_key(key, where): to_plain(item, where=f"{where}[{key!r}]")
            for key, item in value.items()
        }
    if kind in (list, tuple):
        return kind(to_plain(item, where=f"{where}[{i}]") for i, item in enumerate(value))
    return _converted(value, where)


def _converted(value: Any, where: str) -> Any:
    """Convert a value that is no leaf, dict, list or tuple."""
    kind = type(value)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return value.detach().clone()
    if kind in (OrderedDict, Counter):
        tag = _ORDERED if kind is OrderedDict else _COUNTER
        return {tag: to_plain(dict(value), where=where)}
    if kind is deque:
        return {_DEQUE: (to_plain(list(value), where=where), value.maxlen)}
    if (kind is np.ndarray or isinstance(value, np.generic)) and not value.dtype.hasobject:
        return {_ARRAY if kind is np.ndarray else _SCALAR: _packed(np.asarray(value))}
    for base, value_of in _VALUES.items():
        if isinstance(value, base):
            return value_of(value)
    raise BadInputError(
        "--task",
        "",
        f"its stream's {where} is a {kind.__module__}.{kind.__qualname__}; a state can hold numbers, "
        "strings, bytes, tensors, numpy arrays, lists, tuples, dicts, deques and Counters: convert it "
        "in state_dict() and back in load_state_dict()",
    )


def _plain_key(key: Any, where: str) -> Any:
    if isinstance(key, np.generic):
        return key.item()  # equal, and of the same hash
    return to_plain(key, where=f"a key of {where}")


def from_plain(value: Any) -> Any:
    """Return a copy of the value that was given to :func:`to_plain`."""
    kind = type(value)
    if kind is torch.Tensor:
        return value.clone()
    if kind is dict and len(value) == 1:
        (tag,) = value
        if tag in _UNPACKERS:
            return _UNPACKERS[tag](value[tag])
    if kind is dict:
        return {key: from_plain(item) for key, item in value.items()}
    if kind in (list, tuple):
        return kind(from_plain(item) for item in value)
    return value


def _packed(array: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, allow_pickle=False)
    return file.getvalue()


def _unpacked(packed: bytes) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = np.lib.format.read_array(io.BytesIO(packed), allow_pickle=False)
    return array


def _deque(plain: tuple[list[Any], int | None]) -> deque[Any]:
    items, maxlen = plain
    return deque(from_plain(items), maxlen)


_UNPACKERS: dict[Any, Callable[[Any], Any]] = {
    _ARRAY: _unpacked,
    _SCALAR: lambda packed: _unpacked(packed)[()],
    _ORDERED: lambda plain: OrderedDict(from_plain(plain)),
    _COUNTER: lambda plain: Counter(from_plain(plain)),
    _DEQUE: _deque,
}
