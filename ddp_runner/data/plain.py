"""A dataset's own state as plain values that can be stored, sent and given back. Never loads anything.

Checkpoints and the wire know numbers, strings, tensors, lists, tuples and dicts. What numpy holds,
generators of its kind above all, travels as bytes in numpy's own format.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import numpy as np
import torch

from ddp_runner.core.faults import BadInputError

_ARRAY, _SCALAR = "ddp_runner:array", "ddp_runner:scalar"
_LEAVES = (type(None), bool, int, float, str, bytes)


def to_plain(value: Any, *, where: str = "state_dict()") -> Any:
    """``value`` copied, with what numpy holds as bytes. Raises BadInputError that names what it cannot keep."""
    kind = type(value)
    if kind in _LEAVES:
        return value
    if kind in (torch.Tensor, torch.nn.Parameter):
        return value.detach().clone()
    if kind in (dict, OrderedDict):
        return {
            _plain_key(key, where): to_plain(item, where=f"{where}[{key!r}]")
            for key, item in value.items()
        }
    if kind in (list, tuple):
        return kind(to_plain(item, where=f"{where}[{i}]") for i, item in enumerate(value))
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return {_SCALAR: _packed(np.asarray(value))}
    if kind is np.ndarray and not value.dtype.hasobject:
        return {_ARRAY: _packed(value)}
    raise BadInputError(
        "--task",
        "",
        f"its stream's {where} is a {kind.__module__}.{kind.__qualname__}; a state can hold numbers, "
        "strings, bytes, tensors, numpy arrays, lists, tuples and dicts",
    )


def _plain_key(key: Any, where: str) -> Any:
    if isinstance(key, np.generic):
        return key.item()  # equal, and of the same hash
    return to_plain(key, where=f"a key of {where}")


def from_plain(value: Any) -> Any:
    """What was given to :func:`to_plain`, copied."""
    kind = type(value)
    if kind is torch.Tensor:
        return value.clone()
    if kind is dict:
        if len(value) == 1 and _ARRAY in value:
            return _unpacked(value[_ARRAY])
        if len(value) == 1 and _SCALAR in value:
            return _unpacked(value[_SCALAR])[()]
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
