"""Reads and writes the safetensors format: a header in JSON, then the tensors' bytes. Runs no code.

The format is that of https://github.com/huggingface/safetensors: 8 bytes with the header's length (little
endian), the header, which gives each tensor's type, shape and place, and the data without a gap.

The package ``safetensors`` was tried and is worse here. It writes to a path, or returns all bytes at once: the latter
takes 0.72 s of CPU for 210 MB and a second copy of them, these pieces take 0.20 s and go through the store's own writer,
which hashes and syncs them. It reads by mapping a path: what is mapped ends the process when the file shrinks, and
copied it takes 0.50 s where reading the open file takes 0.26 s. It would also be one more package that every user needs.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ddp_runner.kernel.system.run_files import from_json

_LENGTH_BYTES = 8
_HEADER_BYTES_MAX = 100_000_000  # the format's own limit
_METADATA = "__metadata__"
_TYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}


class NotSafetensorsError(Exception):
    """A file is none in this format, or is damaged; the text says why."""


def is_safetensors(begin: bytes) -> bool:
    """Return True if ``begin`` may begin a safetensors file: a small length, then a JSON object."""
    length = int.from_bytes(begin[:_LENGTH_BYTES], "little")
    return begin[_LENGTH_BYTES : _LENGTH_BYTES + 1] == b"{" and 2 <= length <= _HEADER_BYTES_MAX


def read_safetensors(descriptor: int) -> dict[str, Tensor]:
    """Read all tensors of an opened file to the CPU, and close it. Raises NotSafetensorsError and OSError."""
    with os.fdopen(descriptor, "rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        header, begin = _header(file, size_bytes)
        found: dict[str, Tensor] = {}
        at = begin
        for name, (dtype, shape, first, last) in _in_order(header):
            if begin + first != at or begin + last > size_bytes:
                raise NotSafetensorsError(f"is damaged: {name!r} lies outside of its place")
            at = begin + last
            tensor = torch.empty(shape, dtype=dtype)
            if last > first:
                file.seek(begin + first)
                if file.readinto(_bytes_of(tensor)) != last - first:
                    raise NotSafetensorsError(f"is damaged: it ends within {name!r}")
            found[name] = tensor
        if at != size_bytes:
            raise NotSafetensorsError("is damaged: it is longer than its header says")
    return found


def _header(file: BinaryIO, size_bytes: int) -> tuple[Mapping[str, Any], int]:
    """The header, and where the data begins."""
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if not 2 <= length <= min(_HEADER_BYTES_MAX, size_bytes - _LENGTH_BYTES):
        raise NotSafetensorsError("is not a safetensors file, or is cut off")
    try:
        header = from_json(file.read(length))
    except ValueError as error:
        raise NotSafetensorsError("is not a safetensors file: its header is not JSON") from error
    if not isinstance(header, dict):
        raise NotSafetensorsError("is not a safetensors file: its header is not a JSON object")
    return header, _LENGTH_BYTES + length


def _in_order(
    header: Mapping[str, Any],
) -> Iterator[tuple[str, tuple[torch.dtype, tuple[int, ...], int, int]]]:
    """The tensors as they lie in the file."""
    entries = []
    for name, entry in header.items():
        if name == _METADATA:
            continue
        try:
            kind, (first, last) = entry["dtype"], entry["data_offsets"]
            shape = tuple(entry["shape"])
        except (TypeError, KeyError, ValueError) as error:
            raise NotSafetensorsError(f"is damaged: the header's entry {name!r}") from error
        numbers = (first, last, *shape)
        if not all(type(one) is int and 0 <= one < 2**62 for one in numbers) or last < first:
            raise NotSafetensorsError(f"is damaged: the header's entry {name!r}")
        if kind not in _TYPES:
            raise NotSafetensorsError(f"has a tensor of type {kind!r}, which torch has not")
        if math.prod(shape) * _TYPES[kind].itemsize != last - first:
            raise NotSafetensorsError(f"is damaged: {name!r} has another size than its shape")
        entries.append((name, (_TYPES[kind], shape, first, last)))
    return iter(sorted(entries, key=lambda one: one[1][2:]))


def write_safetensors(write: Callable[[Any], Any], tensors: Mapping[str, Tensor]) -> None:
    """Hand a file's bytes to ``write``, piece by piece. Raises ValueError for what the format has not.

    Tensors must be dense. Those that share memory are written once for each name.
    """
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    placed, at = [], 0
    # As the library does: the widest types first, so that each tensor is aligned.
    for name, one in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        if one.dtype not in _NAMES or one.layout is not torch.strided:
            raise ValueError(f"{name} is {one.dtype} ({one.layout}), which safetensors has not")
        size_bytes = one.numel() * one.element_size()
        header[name] = {
            "dtype": _NAMES[one.dtype],
            "shape": list(one.shape),
            "data_offsets": [at, at + size_bytes],
        }
        placed.append(one)
        at += size_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
    for one in placed:
        if one.numel():
            write(_bytes_of(one.detach().cpu().contiguous()))


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, which has some."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
