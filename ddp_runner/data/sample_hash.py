"""A hash of what a sample holds, the same in every process. Never loads a sample."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import hashlib
import pathlib
import uuid
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor, strided, uint8

_CHARACTERS = 16
# Of these the text says all that there is.
_TEXTS = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray, decimal.Decimal),
    *(fractions.Fraction, dt.date, dt.time, dt.timedelta),
    *(pathlib.PurePath, uuid.UUID, range, slice),
)


class _UnknownTypeError(Exception):
    """Something in a sample has a type whose content is not known."""


def sample_hash(sample: Any) -> str:
    """16 hex digits over every value in ``sample``; empty where something in there cannot be compared.

    Tensors, arrays and what gives its content as an array (an image), numbers and texts, in lists,
    tuples, sets, mappings and dataclasses. The order in a set or a mapping does not count: that of a
    set of texts is another one in each process.
    """
    try:
        return _digest(sample).hex()[:_CHARACTERS]
    except (_UnknownTypeError, RecursionError):
        return ""


def _digest(value: Any) -> bytes:  # noqa: PLR0911 - one return a type
    if isinstance(value, Tensor):
        return _of_array(_array_of(value), str(value.dtype))
    if isinstance(value, (np.ndarray, np.generic)):
        return _of_array(np.asarray(value), "")
    if isinstance(value, enum.Enum):
        return _of_text(value, value.name)
    if isinstance(value, _TEXTS):
        return _of_text(value, repr(value))
    if isinstance(value, Mapping):
        return _of_parts("mapping", sorted(_digest(pair) for pair in value.items()))
    if isinstance(value, (set, frozenset)):
        return _of_parts("set", sorted(map(_digest, value)))
    if isinstance(value, (list, tuple, deque)):
        return _of_parts("sequence", map(_digest, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        return _of_parts("record", [_digest((name, getattr(value, name))) for name in names])
    if hasattr(value, "__array__") or hasattr(value, "__array_interface__"):
        return _of_array(np.asarray(value), "")
    raise _UnknownTypeError


def _array_of(tensor: Tensor) -> np.ndarray[Any, Any]:
    if tensor.layout is not strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested:
        raise _UnknownTypeError
    host = tensor.detach().as_subclass(Tensor).cpu().resolve_conj().resolve_neg().contiguous()
    shape = (*host.shape, host.element_size())
    array: np.ndarray[Any, Any] = host.reshape(-1).view(uint8).numpy().reshape(shape)
    return array


def _of_array(array: np.ndarray[Any, Any], kind: str) -> bytes:
    if array.dtype.hasobject or array.dtype.names:  # pointers; gaps between fields
        return _of_parts(f"array {array.shape}", [_digest(array.tolist())])
    digest = hashlib.sha256(f"array {kind or array.dtype.str} {array.shape}".encode())
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.digest()


def _of_text(value: object, text: str) -> bytes:
    return hashlib.sha256(f"{type(value).__name__} {text}".encode(errors="replace")).digest()


def _of_parts(kind: str, parts: Any) -> bytes:
    return hashlib.sha256(kind.encode() + b"".join(parts)).digest()
