"""Moves a nested state of tensors and plain values from one rank to others, in large flat pieces."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_runner.collective.group import Group

PIECE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Hole:
    """Stands in the skeleton where a tensor was."""

    index: int


@dataclass(frozen=True, slots=True)
class _Description:
    """What the receiver must allocate: dtype, shape, and whether it lived on an accelerator."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    on_device: bool


def _take_out(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return _Hole(len(tensors) - 1)
    if isinstance(value, dict):
        return {key: _take_out(item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_take_out(item, tensors) for item in value)
    return value


def _put_back(value: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(value, _Hole):
        return tensors[value.index]
    if isinstance(value, dict):
        return {key: _put_back(item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_put_back(item, tensors) for item in value)
    return value


def _as_bytes(tensor: Tensor) -> Tensor:
    """A flat uint8 view of a contiguous tensor's memory."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _pieces(total_bytes: int) -> Iterator[tuple[int, int]]:
    for start in range(0, total_bytes, PIECE_BYTES):
        yield start, min(start + PIECE_BYTES, total_bytes)


def _wire_device(group: Group) -> torch.device:
    return group.device if "nccl" in dist.get_backend() else torch.device("cpu")


def send_state(group: Group, state: dict[str, Any], *, to: Sequence[int]) -> int:
    """Send ``state`` to the ranks ``to``; returns the bytes sent to each.

    Each of ``to`` must call :func:`receive_state`; nobody else takes part. Blocking.
    """
    tensors: list[Tensor] = []
    skeleton = _take_out(state, tensors)
    described = [
        _Description(tensor.dtype, tuple(tensor.shape), tensor.device.type != "cpu")
        for tensor in tensors
    ]
    header = pickle.dumps((skeleton, described))
    device = _wire_device(group)
    total_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    sizes = torch.tensor([len(header), total_bytes], dtype=torch.int64, device=device)
    _send(sizes, to)
    _send(torch.frombuffer(bytearray(header), dtype=torch.uint8).to(device), to)
    flat = _Packer(tensors, device)
    for start, end in _pieces(total_bytes):
        _send(flat.take(end - start), to)
    return total_bytes


class _Packer:
    """Hands out the concatenated bytes of many tensors, a piece at a time, with one piece of memory."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self._device = device
        self._views = (_as_bytes(tensor) for tensor in tensors if tensor.numel())
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, size_bytes: int) -> Tensor:
        piece = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        filled = 0
        while filled < size_bytes:
            if self._rest.numel() == 0:
                self._rest = next(self._views)
            count = min(size_bytes - filled, self._rest.numel())
            piece[filled : filled + count].copy_(self._rest[:count])
            self._rest = self._rest[count:]
            filled += count
        return piece


def _send(tensor: Tensor, to: Sequence[int]) -> None:
    for work in [dist.isend(tensor, rank) for rank in to]:
        if work is not None:
            work.wait()


class _OwnTypes(pickle.Unpickler):
    """Reads a header from a peer of this very run; refuses every type that a header has no use for."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name == __name__ and global_name in ("_Hole", "_Description"):
            return super().find_class(module_name, global_name)
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(f"{module_name}.{global_name} in a state header")


def receive_state(group: Group, *, source: int) -> dict[str, Any]:
    """The state that ``source`` sends, on the CPU or on this rank's device as it was at the source."""
    device = _wire_device(group)
    sizes = torch.empty(2, dtype=torch.int64, device=device)
    dist.recv(sizes, source)
    header_bytes, total_bytes = (int(size) for size in sizes.tolist())
    header = torch.empty(header_bytes, dtype=torch.uint8, device=device)
    dist.recv(header, source)
    skeleton, described = _OwnTypes(io.BytesIO(header.cpu().numpy().tobytes())).load()
    tensors = [
        torch.empty(d.shape, dtype=d.dtype, device=group.device if d.on_device else "cpu")
        for d in described
    ]
    _fill(tensors, total_bytes, source, device)
    state = _put_back(skeleton, tensors)
    if not isinstance(state, dict):
        raise TypeError(f"received a {type(state).__name__} where a state dict was due")
    return state


def _fill(tensors: Sequence[Tensor], total_bytes: int, source: int, device: torch.device) -> None:
    views = (_as_bytes(tensor) for tensor in tensors if tensor.numel())
    rest = torch.empty(0, dtype=torch.uint8)
    for start, end in _pieces(total_bytes):
        piece = torch.empty(end - start, dtype=torch.uint8, device=device)
        dist.recv(piece, source)
        while piece.numel():
            if rest.numel() == 0:
                rest = next(views)
            count = min(piece.numel(), rest.numel())
            rest[:count].copy_(piece[:count])
            rest, piece = rest[count:], piece[count:]
