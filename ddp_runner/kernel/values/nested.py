"""Nested values: which containers are looked into, what they become, and tensors apart from the rest.

The one codec for what is sent, copied to host memory, lent from a slot of memory, moved to a device and counted. A user
says by a :class:`Containers` what it looks into. It copies, sends and stores nothing itself.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Hole:
    """Stands in the skeleton where a tensor was."""

    index: int

    def __reduce__(self) -> tuple[type[Hole], tuple[int]]:
        # A state may have ten thousands: the way of dataclasses takes ten times as long.
        return Hole, (self.index,)


# Of these nobody asks whether they are containers: most of what a state holds.
_LEAVES = frozenset({Tensor, torch.nn.Parameter, Hole, type(None), bool, int, float, str, bytes})


class Records(Enum):
    """The handling of a dataclass."""

    CLOSED = "it is left as it is"
    COPIED = "a copy, with every field replaced"
    MADE = "another one of its class, made of the fields that its class takes"


class _Opened(NamedTuple):
    parts: Iterable[Any]
    closed: Callable[[list[Any]], Any]  # the container again, of other parts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Containers:
    """The containers that are looked into besides a dict, list or tuple of exactly that type.

    ``mappings``: those of these classes; ``keeps_mappings``: they are copied with their type and attributes, else
    they become dicts. ``subclasses``: any of list and tuple, made of their entries; named tuples have their own word.
    ``attributes``: of any other object, those that are tensors; of a SimpleNamespace all. The object is copied.
    """

    mappings: tuple[type[Mapping[Any, Any]], ...] = ()
    keeps_mappings: bool = True
    named_tuples: bool = True
    subclasses: bool = False
    records: Records = Records.CLOSED
    attributes: bool = False

    def opened(self, value: Any) -> _Opened | None:
        """Return the content of ``value``, which is no plain dict, list or tuple; None if it is not looked into."""
        if isinstance(value, (Tensor, type)):
            return None
        if isinstance(value, self.mappings):
            again = _kept_mapping if self.keeps_mappings else _plain_mapping
            return _Opened(value.values(), lambda items: again(value, items))
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return _Opened(value, lambda items: type(value)(*items)) if self.named_tuples else None
        if self.subclasses and isinstance(value, (list, tuple)):
            return _Opened(value, type(value))
        if self.records is not Records.CLOSED and dataclasses.is_dataclass(value):
            return _record(value, self.records)
        return _with_attributes(value) if self.attributes else None


# What a file has: torch gives each of them back as it is. An OrderedDict has torch's metadata.
STORED = Containers(mappings=(OrderedDict,), named_tuples=False)
SENT = Containers(mappings=(dict,), keeps_mappings=False, subclasses=True)
# What a forward returns. DDP itself trains what it cannot look into; signals have to be tied to its tensors.
OF_FORWARD = Containers(mappings=(Mapping,), records=Records.COPIED, attributes=True)
OF_BATCH = Containers(
    mappings=(Mapping,), keeps_mappings=False, subclasses=True, records=Records.MADE
)
IN_BATCH = dataclasses.replace(OF_BATCH, records=Records.COPIED)  # to be looked at: all fields
PLAIN = Containers()


def rebuilt(
    value: Any,
    use: Callable[[Any], Any],
    containers: Containers,
    *,
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """``value`` in new containers, with what ``use`` returns for each leaf: whatever is not looked into.

    ``is_leaf`` closes a container of another type than dict, list and tuple, too.
    """
    leaves = _LEAVES  # a state may have ten thousands of them

    def again(value: Any) -> Any:
        kind = type(value)
        if kind is dict:
            return {
                key: use(item) if type(item) in leaves else again(item)
                for key, item in value.items()
            }
        if kind is list or kind is tuple:
            return kind([use(item) if type(item) in leaves else again(item) for item in value])
        if kind in leaves:
            return use(value)
        opened = None
        if is_leaf is None or not is_leaf(value):
            opened = containers.opened(value)
        if opened is None:
            return use(value)
        return opened.closed([again(item) for item in opened.parts])

    return again(value)


def leaves_in(value: Any, containers: Containers) -> Iterator[Any]:
    """Yield every leaf, in the order in which :func:`rebuilt` reaches them."""
    kind = type(value)
    parts: Iterable[Any] = value
    if kind is dict:
        parts = value.values()
    elif kind is not list and kind is not tuple:
        opened = None if kind in _LEAVES else containers.opened(value)
        if opened is None:
            yield value
            return
        parts = opened.parts
    for part in parts:
        if type(part) in _LEAVES:
            yield part
        else:
            yield from leaves_in(part, containers)


def tensors_in(value: Any, containers: Containers) -> Iterator[Tensor]:
    """Yield every tensor, in the same order; one that occurs twice is yielded twice."""
    return (leaf for leaf in leaves_in(value, containers) if isinstance(leaf, Tensor))


# Tensors apart from the rest.


def take_out(
    value: Any,
    tensors: list[Tensor],
    containers: Containers,
    *,
    once: bool,
    where: Callable[[Tensor], bool] | None = None,
) -> Any:
    """``value`` with holes for its tensors, which are collected.

    ``once``: a tensor that is there twice, as tied weights are, is collected once. ``where``: the others stay.
    """
    holes: dict[int, list[Hole]] = {}  # by where they begin in memory

    def taken(value: Any) -> Any:
        if not isinstance(value, Tensor) or (where is not None and not where(value)):
            return value
        new = Hole(len(tensors))
        if once:
            there = holes.setdefault(value.data_ptr(), [])
            for hole in there:
                if _are_one(value, tensors[hole.index]):
                    return hole
            there.append(new)
        tensors.append(value.detach() if value.requires_grad else value)
        return new

    return rebuilt(value, taken, containers)


def put_back(skeleton: Any, tensors: Sequence[Tensor], containers: Containers) -> Any:
    """The inverse of :func:`take_out`."""
    return rebuilt(
        skeleton, lambda leaf: tensors[leaf.index] if type(leaf) is Hole else leaf, containers
    )


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


def _are_one(value: Tensor, other: Tensor) -> bool:
    """Return True if two tensors that begin at one place in memory are the same tensor."""
    return (
        value.dtype == other.dtype
        and value.shape == other.shape
        and value.stride() == other.stride()
        and value.device == other.device
    )


def _kept_mapping(value: Any, items: list[Any]) -> Any:
    made = copy.copy(value)
    for key, item in zip(value, items, strict=True):
        made[key] = item
    return made


def _plain_mapping(value: Any, items: list[Any]) -> Any:
    return dict(zip(value, items, strict=True))


def _record(value: Any, how: Records) -> _Opened:
    fields = dataclasses.fields(value)
    if how is Records.MADE:
        fields = tuple(one for one in fields if one.init)
    names = [one.name for one in fields]

    def made(items: list[Any]) -> Any:
        return dataclasses.replace(value, **dict(zip(names, items, strict=True)))

    closed = made if how is Records.MADE else _copied_with(value, names)
    return _Opened([getattr(value, name) for name in names], closed)


def _with_attributes(value: Any) -> _Opened | None:
    """Return only the tensors of an object that is no namespace: others may lead back to it."""
    held = getattr(value, "__dict__", {})
    if not isinstance(value, SimpleNamespace):
        held = {name: one for name, one in held.items() if isinstance(one, Tensor)}
    return _Opened(held.values(), _copied_with(value, list(held))) if held else None


def _copied_with(value: Any, names: list[str]) -> Callable[[list[Any]], Any]:
    def closed(items: list[Any]) -> Any:
        copied = copy.copy(value)
        for name, item in zip(names, items, strict=True):
            object.__setattr__(copied, name, item)
        return copied

    return closed
