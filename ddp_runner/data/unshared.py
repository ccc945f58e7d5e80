"""Batches that are none of the dataset's own memory, as those of loader workers are. Never loads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import numpy as np
from torch import Tensor

from ddp_runner.values.object_graph import LEAVES, Walk

_CHANGEABLE = (dict, list, set, bytearray, Tensor, np.ndarray)
_LOOKS = 16  # at batches of a collate function, until it is known to make new ones


class Unshared:
    """A task's own ``collate``, for loading in the rank itself.

    One that hands samples on may hand on what the dataset keeps. A loss that changes its batch would
    change the dataset: for the next epoch, for a step that is done again, and in one rank only.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate
        self._looks_left = _LOOKS
        self._shares = False

    def __call__(self, samples: list[Any]) -> Any:
        """The batch, copied if it shares memory with ``samples``, where that can be."""
        given = list(samples)
        batch = self._collate(samples)
        if self._looks_left and not self._shares:
            self._looks_left -= 1
            self._shares = _share(given, batch, besides=samples)
        if not self._shares:
            return batch
        try:
            return copy.deepcopy(batch)
        except Exception:  # noqa: BLE001 - whatever a type of the task's own raises; then it is shared
            return batch


def _share(samples: list[Any], batch: Any, *, besides: Any) -> bool:
    """Whether an object that can be changed, or some memory, is part of both."""
    objects, regions = set(), set()
    for value in _parts(samples):
        objects.add(id(value))
        regions.update(_region(value))
    objects -= {id(besides)}
    of_batch = set()
    for value in _parts(batch):
        if value is not besides and id(value) in objects:
            return True
        of_batch.update(_region(value))
    return any(
        begin < other_end and other < end for begin, end in of_batch for other, other_end in regions
    )


def _parts(value: Any) -> Iterator[Any]:
    """Everything in it that can be changed."""
    return (one for _, one, _ in _WALK.over([(None, value)]) if _may_change(one))


def _inside(_path: None, value: Any) -> list[tuple[None, Any]] | None:
    """The entries of a list, tuple or dict, without numbers and texts; an object's attributes are the object's."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return None
    return [(None, one) for one in value if type(one) not in LEAVES]


def _may_change(value: Any) -> bool:
    return isinstance(value, _CHANGEABLE) or (
        hasattr(value, "__dict__") and not isinstance(value, (type, Enum)) and not callable(value)
    )


def _region(value: Any) -> list[tuple[int, int]]:
    """From which address to which it lies, where that is known; a view as what it is a view of."""
    if isinstance(value, Tensor):
        try:
            storage = value.untyped_storage()
            begin, size = storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError):  # it has none
            return []
    elif isinstance(value, np.ndarray):
        while isinstance(value.base, np.ndarray):
            value = value.base
        begin, size = value.__array_interface__["data"][0], value.nbytes
    else:
        return []
    return [(begin, begin + size)] if size else []


_WALK = Walk(inside=_inside)
