"""What is sent ahead of a state's tensors: how it is built of them, and what each of them is. Sends nothing."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Hole:
    """Stands in the skeleton where a tensor was."""

    index: int

    def __reduce__(self) -> tuple[type[Hole], tuple[int]]:
        # A state may have ten thousands: the way of dataclasses takes ten times as long.
        return Hole, (self.index,)


@dataclass(frozen=True, slots=True)
class Description:
    """What the receiver must allocate: dtype, shape, and whether it lived on an accelerator."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    on_device: bool

    def __reduce__(self) -> tuple[type[Description], tuple[Any, ...]]:
        return Description, (self.dtype, self.shape, self.on_device)


def take_out(value: Any, tensors: list[Tensor]) -> Any:
    """``value`` with holes for its tensors, which are collected: one that stands twice, as tied weights do, once."""
    holes: dict[int, list[Hole]] = {}  # by where they begin in memory

    def taken(value: Any) -> Any:
        if isinstance(value, Tensor):
            there = holes.setdefault(value.data_ptr(), [])
            for hole in there:
                if _are_one(value, tensors[hole.index]):
                    return hole
            there.append(Hole(len(tensors)))
            tensors.append(value.detach() if value.requires_grad else value)
            return there[-1]
        if isinstance(value, dict):
            return {key: taken(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(taken(item) for item in value)
        return value

    return taken(value)


def _are_one(value: Tensor, other: Tensor) -> bool:
    """Of two that begin at one place in memory."""
    return (
        value.dtype == other.dtype
        and value.shape == other.shape
        and value.stride() == other.stride()
        and value.device == other.device
    )


def described_as(tensors: Sequence[Tensor]) -> list[Description]:
    """One object for those that are alike: of ten thousands few are not."""
    known: dict[tuple[object, ...], Description] = {}
    found = []
    for tensor in tensors:
        key = tensor.dtype, tensor.shape, tensor.is_cpu
        if key not in known:
            known[key] = Description(tensor.dtype, tuple(tensor.shape), not tensor.is_cpu)
        found.append(known[key])
    return found


def own_places(skeleton: Any, own: Any, found: dict[int, list[Tensor]]) -> None:
    """Collect the tensors of ``own`` that stand where ``skeleton`` has holes, by the holes' numbers."""
    if isinstance(skeleton, Hole):
        if isinstance(own, Tensor):
            found.setdefault(skeleton.index, []).append(own.detach())
    elif isinstance(skeleton, dict):
        if isinstance(own, Mapping):
            for key in skeleton.keys() & own.keys():
                own_places(skeleton[key], own[key], found)
    elif isinstance(skeleton, (list, tuple)) and isinstance(own, (list, tuple)):
        for item, of_own in zip(skeleton, own, strict=False):
            own_places(item, of_own, found)


def put_back(value: Any, tensors: Sequence[Tensor]) -> Any:
    """The inverse of :func:`take_out`."""
    if isinstance(value, Hole):
        return tensors[value.index]
    if isinstance(value, dict):
        return {key: put_back(item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(put_back(item, tensors) for item in value)
    return value


def size_bytes_of(described: Description) -> int:
    """Of such a tensor."""
    return math.prod(described.shape) * described.dtype.itemsize


class OwnTypes(pickle.Unpickler):
    """Reads a header from a peer of this very run; refuses every type that a header has no use for."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """As of every unpickler. Raises UnpicklingError."""
        if module_name == __name__ and global_name in ("Hole", "Description"):
            return super().find_class(module_name, global_name)
        if module_name == "torch" and global_name in ("Size", "device"):
            return super().find_class(module_name, global_name)
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(f"{module_name}.{global_name} in a state header")
