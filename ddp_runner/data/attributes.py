"""What a dataset holds in its attributes, its random generators above all: noted, and put back later.

An iterable dataset without a state of its own carries them from one epoch to the next. ``AttributeStates`` is
what is no longer as it was built; whoever puts it back has built the same dataset. What is no plain value, such
as an open file, cannot be kept, and is named. Looked into are objects of the task's own classes and
datasets and samplers of any library; what other libraries hold inside their objects is theirs.
"""

from __future__ import annotations

import copy
import re
import sys
import sysconfig
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from enum import Enum
from itertools import pairwise
from operator import is_
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from ddp_runner.core.faults import BadInputError
from ddp_runner.data.generators import GENERATORS, generator_of, set_state, state_of
from ddp_runner.data.stream_state import from_plain, to_plain

Path = tuple[Any, ...]  # names of attributes, places in lists, keys of dicts
AttributeStates = dict[Path, tuple[str, Any]]

_HOLDERS_MAX = 500
_ENTRIES_LOOKED_INTO_MAX = 64  # of a list or dict: is there a generator, a dataset, a list in it?
_ENTRIES_KEPT_MAX = 100_000  # of a list or dict that is kept by its values
COUNTED_LOADS = 6  # until it is said which numbers they count up
_ARRAY_BYTES_MAX = 16 * 1024 * 1024
_VALUE, _GENERATOR, _MOVED, _GONE, _UNKNOWN = "value", "generator", "moved", "gone", "unknown"

_LEAVES = (type(None), bool, int, float, complex, str, bytes, np.generic, Enum)
_ARRAYS = (np.ndarray, torch.Tensor)
_CONTAINERS = {list, dict, tuple, set, frozenset, deque, Counter, OrderedDict, defaultdict}
_FIXED = (tuple, frozenset)
_PASSED_OVER = (  # they do not change, or are trained
    *(type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, torch.nn.Module),
    *(torch.dtype, torch.device, np.dtype, range, slice, PurePath, re.Pattern, date, timedelta),
)
_LIBRARIES = ("site-packages", "dist-packages")
_STANDARD = sysconfig.get_paths()["stdlib"]


@dataclass(frozen=True, slots=True)
class _Held:
    """What was found at a place when the dataset was built, and a copy of what it held.

    ``owner``: whose attribute it is; None for what is in a list or dict, which is put back with that.
    """

    owner: Any
    value: Any
    copy: Any
    is_first: bool  # of the places where it hangs


class Attributes:
    """Those of ``dataset``, which has just been built."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._built: dict[Path, _Held] = {}
        self._paths: dict[int, Path] = {}  # of what was built, by id; ``_built`` keeps them alive
        for path, owner, value in self._walk():
            is_first = isinstance(value, _LEAVES) or self._paths.setdefault(id(value), path) == path
            kept = _copy_of(value) if is_first else None
            self._built[path] = _Held(owner, value, kept, is_first)

    def note(self) -> AttributeStates:
        """What is not as it was built."""
        noted: AttributeStates = {}
        there = set()
        for path, _, value in self._walk():
            there.add(path)
            built = self._built.get(path)
            if built is None or not _is_as_built(value, built):
                noted[path] = _noted(value, built)
        noted |= {
            path: (_GONE, None)
            for path, held in self._built.items()
            if path not in there and held.owner is not None
        }
        return noted

    def put_back(self, noted: AttributeStates) -> None:
        """Have the dataset as it was when that was noted, as far as that is known."""
        for path, owner, _ in [*self._walk()]:
            if owner is not None and path not in self._built and path not in noted:
                vars(owner).pop(path[-1], None)
        for path, held in self._built.items():
            how, plain = noted.get(path, ("", None))
            if how == _GONE:
                vars(held.owner).pop(path[-1], None)
            elif how != _UNKNOWN:
                value = _brought_back(held, how, plain)
                if held.owner is not None:
                    vars(held.owner)[path[-1]] = value
        for path, (how, plain) in noted.items():
            parent = self._built.get(path[:-1])
            owner = self._dataset if len(path) == 1 else parent.value if parent else None
            if path not in self._built and _has_attributes(owner) and how in (_VALUE, _GENERATOR):
                vars(owner)[path[-1]] = _made(how, plain)

    def _walk(self) -> Iterator[tuple[Path, Any, Any]]:
        return _walked(self._dataset, self._paths)


def _walked(dataset: Any, paths: Mapping[int, Path]) -> Iterator[tuple[Path, Any, Any]]:
    """Path, owner and value of all that hangs on the dataset; of what is in ``paths``, by id, that path."""
    pending: deque[tuple[Path, Any]] = deque([((), dataset)])
    seen = {id(dataset)}
    for _ in range(_HOLDERS_MAX):
        if not pending:
            return
        above, holder = pending.popleft()
        is_object = type(holder) not in _CONTAINERS
        for key, value in _entries(holder):
            if isinstance(value, _PASSED_OVER):
                continue
            path = (*above, key)
            if not is_object:
                if isinstance(value, _LEAVES):
                    continue  # part of what the list or dict is compared by
                path = paths.get(id(value), path)  # it may have been moved
            yield path, holder if is_object else None, value
            if id(value) not in seen and (type(value) in _CONTAINERS or _has_attributes(value)):
                seen.add(id(value))
                pending.append((path, value))


class CountedReads:
    """Finds the numbers that reads of a map-style dataset count up in its attributes.

    In whichever process reads it. What else reads change, as a cache or a file that is opened late, says
    nothing about its samples.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._looks = [self._numbers()]
        self.names: tuple[str, ...] = ()

    def note_load(self) -> None:
        """Look at the dataset again; call this after each load."""
        if len(self._looks) > COUNTED_LOADS:
            return
        self._looks.append(self._numbers())
        if len(self._looks) > COUNTED_LOADS:
            first = self._looks[0]
            self.names = tuple(".".join(map(str, path)) for path in first if self._grows(path))

    def _grows(self, path: Path) -> bool:
        values = [look.get(path) for look in self._looks]
        if None in values:
            return False
        pairs: list[tuple[Any, Any]] = [*pairwise(values)]
        return all(one < other for one, other in pairs) or all(one > other for one, other in pairs)

    def _numbers(self) -> dict[Path, int | float]:
        if not _has_attributes(self._dataset):
            return {}
        return {
            path: value
            for path, _, value in _walked(self._dataset, {})
            if type(value) in (int, float)
        }


def unknown_in(noted: AttributeStates) -> list[str]:
    """The names of what could not be kept."""
    return sorted({str(path[0]) for path, (how, _) in noted.items() if how == _UNKNOWN})


def _entries(holder: Any) -> list[tuple[Any, Any]]:
    if type(holder) not in _CONTAINERS:
        return list(vars(holder).items())
    if isinstance(holder, (set, frozenset)) or len(holder) > _ENTRIES_LOOKED_INTO_MAX:
        return []
    if not isinstance(holder, dict):
        return list(enumerate(holder))
    return [(key, value) for key, value in holder.items() if isinstance(key, (str, int))]


def _has_attributes(value: Any) -> bool:
    """Whether it is an object to look into."""
    if isinstance(value, (*_LEAVES, *GENERATORS, *_ARRAYS)) or not hasattr(value, "__dict__"):
        return False
    if isinstance(value, (Dataset, Sampler)):
        return True
    module = sys.modules.get(type(value).__module__)
    file = getattr(module, "__file__", None)
    if file is None:
        return type(value).__module__ == "__main__"
    return not file.startswith(_STANDARD) and not any(part in file for part in _LIBRARIES)


def _copy_of(value: Any) -> Any:
    """What is needed to see a change, and to take it back."""
    if isinstance(value, GENERATORS):
        return state_of(value)
    if isinstance(value, np.ndarray):
        return value.copy() if value.nbytes <= _ARRAY_BYTES_MAX else None
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if _bytes_of(value) <= _ARRAY_BYTES_MAX else None
    if type(value) in _CONTAINERS:
        return value.copy() if not isinstance(value, _FIXED) else value
    return value


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _is_as_built(value: Any, built: _Held) -> bool:  # noqa: PLR0911 - one return a type
    if type(value) is not type(built.value):
        return False
    if not built.is_first or (isinstance(value, _ARRAYS) and built.copy is None):
        return value is built.value
    if isinstance(value, GENERATORS):
        state = state_of(value)
        return state is not None and bool(state == built.copy)
    if isinstance(value, _ARRAYS):
        return _are_equal(value, built.copy)
    if type(value) in _CONTAINERS:
        return _same_entries(value, built.copy)
    if isinstance(value, _LEAVES):
        return bool(value == built.copy) or (value != value and built.copy != built.copy)  # noqa: PLR0124
    return _has_attributes(value)  # these are compared one by one; of others nothing is known


def _same_entries(some: Any, others: Any) -> bool:
    if isinstance(some, (set, frozenset)):
        return bool(some == others)
    if len(some) != len(others) or not all(map(is_, some, others)):
        return False
    return not isinstance(some, dict) or all(map(is_, some.values(), others.values()))


def _are_equal(array: Any, other: Any) -> bool:
    if array.shape != other.shape or array.dtype != other.dtype:
        return False
    if isinstance(array, torch.Tensor):
        return torch.equal(array, other)
    return bool(array.tobytes() == other.tobytes())


def _noted(value: Any, built: _Held | None) -> tuple[str, Any]:
    if isinstance(value, GENERATORS):
        state = state_of(value)
        return (_UNKNOWN, None) if state is None else (_GENERATOR, state)
    if isinstance(value, list) and built is not None and type(built.value) is list:
        order = _order_of(value, built.copy)
        if order is not None:
            return _MOVED, to_plain(np.asarray(order, dtype=np.int32))
    is_long = isinstance(value, np.ndarray) and value.nbytes > _ARRAY_BYTES_MAX
    is_long |= isinstance(value, torch.Tensor) and _bytes_of(value) > _ARRAY_BYTES_MAX
    is_long |= type(value) in _CONTAINERS and len(value) > _ENTRIES_KEPT_MAX
    if is_long or isinstance(value, Enum):
        return _UNKNOWN, None
    try:
        return _VALUE, to_plain(value)
    except (BadInputError, RecursionError):
        return _UNKNOWN, None


def _order_of(moved: list[Any], built: list[Any]) -> list[int] | None:
    """Where each entry was when the list was built; None where it is no other order of the same ones."""
    if len(moved) != len(built):
        return None
    places: dict[int, list[int]] = {}
    for place in range(len(built) - 1, -1, -1):
        places.setdefault(id(built[place]), []).append(place)
    try:
        return [places[id(entry)].pop() for entry in moved]
    except (KeyError, IndexError):
        return None


def _brought_back(held: _Held, how: str, plain: Any) -> Any:
    """What was built, holding what was noted, or, where nothing was, what it held then."""
    if how == _MOVED:
        held.value[:] = [held.copy[place] for place in from_plain(plain).tolist()]
        return held.value
    if how:
        return _filled(held.value, _made(how, plain))
    if not held.is_first or held.copy is None:
        return held.value
    is_generator = isinstance(held.value, GENERATORS)
    return _filled(held.value, generator_of(held.copy) if is_generator else held.copy)


def _made(how: str, plain: Any) -> Any:
    return generator_of(plain) if how == _GENERATOR else from_plain(plain)


def _filled(value: Any, made: Any) -> Any:
    """``value`` with all that is in ``made``, so that whoever shares it has it too; else a copy."""
    if type(value) is not type(made):
        return made
    if isinstance(value, GENERATORS):
        state = state_of(made)
        assert state is not None
        set_state(value, state)
    elif isinstance(value, (list, deque)):
        value.clear()
        value.extend(made)
    elif isinstance(value, (dict, set)):
        value.clear()
        value.update(made)
    elif not isinstance(value, _ARRAYS):
        return made
    elif value.shape != made.shape or value.dtype != made.dtype:
        return copy.deepcopy(made)
    else:
        with torch.no_grad():
            value[...] = made
    return value
