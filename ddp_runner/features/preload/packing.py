"""A sample as one piece of bytes, and back, equal in type and bits. Never loads a sample.

Tensors and arrays lie in it as they are, behind a pickle of what is around them (PEP 574): nothing
that is large is parsed.
"""

from __future__ import annotations

import io
import pickle
import struct
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes, of a sample and of each tensor in it, as torch's own allocator has it
_HEADER = struct.Struct("<II")  # how many tensors and arrays; bytes of the pickle
_PLACE = struct.Struct("<QQ")  # of each: where it begins, and how long it is
# A tensor's type is written as its place here.
_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.complex64, torch.complex128),
)
_NUMBER_OF = {dtype: number for number, dtype in enumerate(_DTYPES)}


def aligned(size_bytes: int) -> int:
    """The next whole multiple of :data:`ALIGNMENT`."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


class _Packer(pickle.Pickler):
    """Hands plain tensors to ``buffer_callback``, as arrays do by themselves; others pickle as they do."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or not _is_plain(value):
            return NotImplemented
        stride = None
        if not value.is_contiguous():
            value, stride = (
                (value, value.stride()) if _is_dense(value) else (value.contiguous(), None)
            )
        flat = value.as_strided((value.numel(),), (1,))
        content = pickle.PickleBuffer(flat.view(torch.uint8).numpy())
        return _tensor, (content, _NUMBER_OF[value.dtype], tuple(value.shape), stride)


def _tensor(
    content: memoryview, number: int, size: tuple[int, ...], stride: tuple[int, ...] | None
) -> Tensor:
    if not len(content):
        return torch.empty(size, dtype=_DTYPES[number])
    flat = torch.frombuffer(content, dtype=_DTYPES[number])
    if stride is not None:
        return flat.as_strided(size, stride)
    return flat if len(size) == 1 else flat.view(size)


def pack(sample: Any) -> bytearray:
    """``sample`` as bytes, a multiple of :data:`ALIGNMENT`. Raises what a type raises that cannot be pickled."""
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Packer(file, protocol=5, buffer_callback=buffers.append).dump(sample)
    body, views = file.getvalue(), [one.raw() for one in buffers]
    begin = _HEADER.size + len(views) * _PLACE.size
    end = begin + len(body)
    places = []
    for view in views:
        places.append((aligned(end), view.nbytes))
        end = aligned(end) + view.nbytes
    packed = bytearray(aligned(end))
    _HEADER.pack_into(packed, 0, len(views), len(body))
    packed[begin : begin + len(body)] = body
    for number, (place, view) in enumerate(zip(places, views, strict=True)):
        _PLACE.pack_into(packed, _HEADER.size + number * _PLACE.size, *place)
        packed[place[0] : sum(place)] = view
    return packed


def unpack(packed: memoryview) -> Any:
    """The sample. Its tensors and arrays lie in ``packed``, which is to be nobody else's."""
    count, size = _HEADER.unpack_from(packed)
    at, buffers = _HEADER.size, []
    for _ in range(count):
        begin, length = _PLACE.unpack_from(packed, at)
        buffers.append(packed[begin : begin + length])
        at += _PLACE.size
    return pickle.loads(packed[at : at + size], buffers=buffers)  # noqa: S301 - packed by this run


def new_memory(size_bytes: int) -> memoryview:
    """Memory for :func:`unpack`, aligned."""
    memory: memoryview = torch.empty(size_bytes, dtype=torch.uint8).numpy().data
    return memory


def _is_plain(tensor: Tensor) -> bool:
    """Return True if type, shape and bytes describe ``tensor`` completely."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.dtype in _NUMBER_OF
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or tensor.is_nested)
        and not vars(tensor)
    )


def _is_dense(tensor: Tensor) -> bool:
    """Return True if the elements are contiguous, each once, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
