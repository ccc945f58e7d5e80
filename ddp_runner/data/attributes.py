"""Numbers that a dataset counts up in its attributes as it is read.

Looked into are objects of the task's own classes and datasets and samplers of any library; what other
libraries hold inside their objects is theirs.
"""

from __future__ import annotations

import contextlib
import re
import sys
import sysconfig
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from datetime import date, timedelta
from enum import Enum
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from ddp_runner.kernel.rules.classify import lacks_memory
from ddp_runner.values.generators import GENERATOR_TYPES
from ddp_runner.values.object_graph import Walk

Path = tuple[Any, ...]  # names of attributes, places in lists, keys of dicts
Numbers = dict[Path, int | float]

_HOLDERS_MAX = 500
_ENTRIES_LOOKED_INTO_MAX = 64  # of a list or dict: is there a generator, a dataset, a list in it?
COUNTED_LOADS = 6  # until it is said which numbers they count up

_LEAVES = (type(None), bool, int, float, complex, str, bytes, np.generic, Enum)
_ARRAYS = (np.ndarray, torch.Tensor)
_GENERATORS = tuple(GENERATOR_TYPES.values())
_CONTAINERS = {list, dict, tuple, set, frozenset, deque, Counter, OrderedDict, defaultdict}
_PASSED_OVER = (  # they do not change, or are trained
    *(type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, torch.nn.Module),
    *(torch.dtype, torch.device, np.dtype, range, slice, PurePath, re.Pattern, date, timedelta),
)
_LIBRARIES = ("site-packages", "dist-packages")
_STANDARD = sysconfig.get_paths()["stdlib"]


class CountedReads:
    """Finds the numbers that reads of a map-style dataset count up in its attributes.

    In whichever process reads it. What else reads change, as a cache or a file that is opened late, says
    nothing about its samples.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._looks: list[tuple[Numbers, Numbers]] = []  # before and after each load
        self.names: tuple[str, ...] = ()

    @contextlib.contextmanager
    def around_load(self) -> Iterator[None]:
        """Look at the dataset before and after a load: between loads a loss or a hook may count in it."""
        if len(self._looks) == COUNTED_LOADS:
            yield
            return
        before = self._numbers()
        yield
        self._looks.append((before, self._numbers()))
        if len(self._looks) == COUNTED_LOADS:
            self.names = tuple(".".join(map(str, path)) for path in before if self._grows(path))

    def _grows(self, path: Path) -> bool:
        pairs: list[tuple[Any, Any]] = [
            # From the second load on: until then a number may stand in its class alone.
            (one.get(path), other.get(path))
            for one, other in self._looks[1:]
        ]
        if any(None in pair for pair in pairs):
            return False
        return all(one < other for one, other in pairs) or all(one > other for one, other in pairs)

    def _numbers(self) -> Numbers:
        try:
            found = _WALK.over([((), self._dataset)]) if _has_attributes(self._dataset) else ()
            return {path: value for path, value, _ in found if type(value) in (int, float)}
        except Exception as error:  # of an object that cannot even be asked for its class
            if lacks_memory(error):
                raise
            return {}


def _inside(above: Path, holder: Any) -> list[tuple[Path, Any]] | None:
    """What hangs on an object of the data's, or stands in a container; numbers in a container do not count."""
    if type(holder) in _CONTAINERS:
        entries = [pair for pair in _entries(holder) if not isinstance(pair[1], _LEAVES)]
    elif _has_attributes(holder):
        entries = [*vars(holder).items()]
    else:
        return None
    return [((*above, key), one) for key, one in entries if not isinstance(one, _PASSED_OVER)]


def _entries(holder: Any) -> list[tuple[Any, Any]]:
    if isinstance(holder, (set, frozenset)) or len(holder) > _ENTRIES_LOOKED_INTO_MAX:
        return []
    if not isinstance(holder, dict):
        return list(enumerate(holder))
    return [(key, value) for key, value in holder.items() if isinstance(key, (str, int))]


def _has_attributes(value: Any) -> bool:
    """Whether it is an object to look into."""
    if isinstance(value, (*_LEAVES, *_GENERATORS, *_ARRAYS)) or not hasattr(value, "__dict__"):
        return False
    if isinstance(value, (Dataset, Sampler)):
        return True
    module = sys.modules.get(type(value).__module__)
    file = getattr(module, "__file__", None)
    if file is None:
        return type(value).__module__ == "__main__"
    return not file.startswith(_STANDARD) and not any(part in file for part in _LIBRARIES)


_WALK = Walk(inside=_inside, breadth_first=True, objects_max=_HOLDERS_MAX)
