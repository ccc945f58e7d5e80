"""Looks at what objects hold, to find what has changed between two looks. Copies no large data.

:class:`DataWatch` looks at the data of a program: its datasets, samplers and collate function. A replaced rank has these
objects as the program has made them. In a loop of the program's own it loads its epoch (a pass over the batches) again
up to its step. So a replaced rank lacks what earlier passes, the body of the loop, or the loss and hooks of a task have
changed in them.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import time
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from queue import SimpleQueue
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor, nn, strided, uint8
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ddp_runner.kernel.rules.classify import lacks_memory
from ddp_runner.training.exactness.traces import Trace
from ddp_runner.training.exactness.values import kept_of
from ddp_runner.values.object_graph import (
    LEAVES,
    Closed,
    Reach,
    Walk,
    attributes_of,
    content_of,
    own_classes,
    state_in,
)

_BYTES_MAX = 1 << 20  # of arrays that are compared whole
_ENTRIES_MAX = 10_000
_NUMBERS_MAX = 1_000_000  # of numbers and texts alone
_OBJECTS_MAX = 1_000  # in the values of one name
_DATASETS_MAX = 64  # in one list or dict: a longer one holds samples
CURE_IN_LOOP = (
    "set it in set_epoch(), or draw from the global generators, which are seeded for each epoch"
)
_LOOKS_IN_A_ROW = 4  # at steps; then at every power of two
_LOOKED_MIN_S, _LOOKED_SHARE = 0.05, 0.01  # of the time, for looks at much data
_OFTEN_SHARE = 0.002  # of the time, for a look at each step
_WHOLE_MAX = 256  # entries that are compared with what is in them
_WITHIN_MAX = 100_000  # values in them
_PARTS_MAX = 8  # of a sample in a cache: its tensors and its label
_CACHES = (dict, OrderedDict, defaultdict, list)
_OF_DATA = LEAVES - {type(None)}
_DATA = (Tensor, np.ndarray, list, tuple, dict, set, frozenset, deque)
Look = Callable[[Any], bool]  # whether a value is the one that was looked at, unchanged


class HeldValues:
    """Values that objects hold: ``values`` gives them by name, as they are now.

    Objects in them are looked into, except those that ``is_apart`` is true of.
    """

    def __init__(
        self, values: Callable[[], Mapping[str, Any]], *, is_apart: Callable[[Any], bool]
    ) -> None:
        self._values = values
        self._is_apart = is_apart
        self._looks: dict[str, dict[str, Look]] = {}  # of a name, by the path of each part
        self._found: set[str] = set()

    def look(self) -> list[str]:
        """Return the names whose values, or parts of them, have changed since the last look; each once."""
        found = self.changed()
        self.forget(found)
        return [f"`{name}`" for name in found]

    def changed(self) -> list[str]:
        """Return the same without backquotes; a name is returned each time that it changes."""
        found = []
        for name, value in self._values().items():
            if name in self._found:
                continue
            try:
                if self._has_changed(name, value):
                    found.append(name)
            except Exception as error:  # one that cannot even be asked for its class
                if lacks_memory(error):
                    raise
                self.forget([name])
        return found

    def _has_changed(self, name: str, value: Any) -> bool:
        if self._is_apart(value):
            return False
        before, parts = self._looks.get(name, {}), dict(self._parts(value))
        has_changed = any(path in before and not before[path](one) for path, one in parts.items())
        self._looks.pop(name, None)
        del before  # before the next copies are made
        self._looks[name] = {path: self._look_of(one) for path, one in parts.items()}
        return has_changed

    def forget(self, names: Iterable[str]) -> None:
        """Look at these no more."""
        for name in names:
            self._found.add(name)
            self._looks.pop(name, None)

    def _parts(self, value: Any) -> Iterator[tuple[str, Any]]:
        """Yield ``value`` and what its objects hold, by path; one that is not looked into as :class:`Closed`."""
        walk = Walk(inside=self._inside, objects_max=_OBJECTS_MAX)
        for path, at, reach in walk.over([("", SimpleNamespace(value=value))]):
            if reach is Reach.ENTERED:
                held = {**_of_classes(at), **attributes_of(at)}
                if isinstance(at, nn.Module):
                    held |= {**at._parameters, **at._buffers}  # noqa: SLF001 - without a call of the program's code
                for key, one in held.items():
                    yield f"{path}.{key}", one
            else:
                yield path, at if isinstance(at, Closed) else Closed(at)

    def _inside(self, path: str, at: Any) -> list[tuple[str, Any]] | None:
        inner = state_in(path, at)
        if inner is None:
            return None
        return [
            (where, one)
            for where, one in inner
            if not isinstance(one, (type, FunctionType)) and not self._is_apart(one)
        ]

    def _look_of(self, value: Any) -> Look:
        if isinstance(value, Closed):
            trace = Trace(value.value)
            return lambda now: isinstance(now, Closed) and trace.is_of(now.value, whole=True)
        return whole_look(value, skipped=self._is_apart)


def whole_look(value: Any, *, skipped: Callable[[Any], bool], closely: bool = False) -> Look:
    """Return a comparison with ``value`` as it is now; of much data, with a part of it.

    ``closely``: a tensor that was written through ``.data`` counts as changed, too.
    """
    if isinstance(value, (Iterator, SimpleQueue)):
        trace = Trace(value)
        return lambda now: now is value and trace.is_of(now, whole=True)
    if (content := content_of(value)) is not value:
        look = whole_look(content, skipped=skipped, closely=closely)
        return lambda now: type(now) is type(value) and look(content_of(now))
    if issubclass(type(value), np.ndarray) and value.nbytes > _BYTES_MAX:
        return _sampled(value)
    if type(value) in (list, tuple) and _ENTRIES_MAX < len(value) <= _NUMBERS_MAX:
        copied = tuple(value)
        if set(map(type, copied)) <= LEAVES:
            return lambda now: type(now) is type(value) and tuple(now) == copied
    kind = _container_kind(value)
    if kind is not None and _entries(value, most=_ENTRIES_MAX) > _ENTRIES_MAX:
        size = kind.__len__(value)
        return lambda now: now is value and kind.__len__(value) == size
    return kept_of(value, with_contents=False, closely=closely, skipped=skipped).is_in


def _sampled(value: np.ndarray[Any, Any], *, count: int = _ENTRIES_MAX) -> Look:
    if not value.flags.writeable:
        return lambda now: now is value  # to read parts of a file would wait for its disk
    every = math.ceil(value.size / count) or 1

    def some() -> bytes:
        # Not by reshape(), which copies an array whose rows are not in order.
        return value.flat[::every].tobytes()

    before = some()
    return lambda now: now is value and some() == before


def _container_kind(value: Any) -> Any:
    """Return the class of Python's that a list, dict or the like is of, or is derived from; None for others."""
    return next((one for one in (list, tuple, dict, set) if issubclass(type(value), one)), None)


def _entries(value: Any, *, most: int, depth: int = 4) -> int:
    """About how many values there are within, numbers of arrays too; beyond ``most`` they are not counted."""
    if issubclass(type(value), np.ndarray):
        return int(value.size)
    kind = _container_kind(value)
    if kind is None:
        return 1
    count = int(kind.__len__(value))
    if not depth:
        return count
    for one in kind.values(value) if kind is dict else kind.__iter__(value):
        if count > most:
            break
        if type(one) not in LEAVES:
            count += _entries(one, most=most - count, depth=depth - 1)
    return count


class DataWatch:
    """Names changes in the data of one process that a replaced rank would lack.

    ``owners``: the objects that are looked at, by name. ``note`` is called with the names of what has changed.
    ``is_kept``: finds objects that are kept with the run's state. ``loads_here``: says whether this process loads samples
    itself: that may change data, too. ``sampled``: how often this process has drawn from the owner ``sampler``: the same.
    """

    def __init__(
        self,
        owners: Mapping[str, Any],
        *,
        is_kept: Callable[[Any], bool] = lambda _: False,
        loads_here: Callable[[], bool] = lambda: True,
        sampled: Callable[[], int] = lambda: 0,
        note: Callable[[list[str]], object],
    ) -> None:
        ids = {id(one) for one in owners.values() if _container_kind(one) is None}
        # A framework may have called set_epoch() itself before the pass, with the same number.
        self._set_by_epoch = {
            f"{name}.epoch"
            for name, owner in owners.items()
            if callable(getattr(owner, "set_epoch", None))
        }

        def is_apart(value: Any) -> bool:
            is_open = issubclass(type(value), (DataLoader, io.IOBase))
            return id(value) in ids or is_open or is_kept(value)

        def values() -> dict[str, Any]:
            return _values_of(with_inner_datasets(owners), is_kept=is_kept)

        self._note = note
        self._loads_here = loads_here
        self._sampled, self._samplings = sampled, 0
        self._between_passes = _Remembered(values, is_apart=is_apart)
        self._between_draws = _Remembered(values, is_apart=is_apart)
        self._left: list[str] = []  # changed in the pass that has ended
        self._draws = 0
        self._began_s, self._looked_s = time.monotonic(), 0.0
        self._has_looked = False  # after the newest draw

    def pass_ends(self) -> None:
        """Look before ``set_epoch()`` and the seeds of the next pass."""
        self._has_looked = False
        changed = self._between_passes.changed()
        self._left = [name for name in changed if name not in self._set_by_epoch]

    def pass_begins(self) -> None:
        """Look after ``set_epoch()`` and the seeds: every process sets what they set."""
        # INVARIANT pass-leaves-nothing: data that a pass has changed makes a run inexact once a new process begins a later pass.
        # Broken if: it is compared only within a pass, which a replacement loads again from its beginning.
        # Guarded by: test_what_a_pass_leaves_behind_is_named.
        again = {*self._between_passes.changed()}
        self._note_names([name for name in self._left if name not in again])

    def draws(self) -> None:
        """Look before a draw, if the look after the one before was made: the loop's body was between them."""
        if self._has_looked:
            self._has_looked = False
            began_s = time.monotonic()
            self._note_names(self._changed_by_program())
            self._looked_s += time.monotonic() - began_s

    def drawn(self) -> None:
        """Look after some of the draws."""
        self._draws += 1
        count, now_s = self._draws, time.monotonic()
        passed_s = now_s - self._began_s
        is_due = count <= _LOOKS_IN_A_ROW or not count & (count - 1)
        is_due |= self._looked_s <= _OFTEN_SHARE * passed_s
        if is_due and self._looked_s <= _LOOKED_MIN_S + _LOOKED_SHARE * passed_s:
            self._look_before()
            self._has_looked = True
            self._looked_s += time.monotonic() - now_s

    @contextlib.contextmanager
    def around_call(self) -> Iterator[None]:
        """Look before and after a call of the program's code that draws nothing."""
        self._look_before()
        yield
        self._has_looked = False
        self._note_names(self._changed_by_program())

    def _look_before(self) -> None:
        """Look before the program's code is called; if no sample was loaded here, only that has changed data so far."""
        found = self._changed_by_program()
        if not self._loads_here():
            self._note_names(found)

    def _changed_by_program(self) -> list[str]:
        found, before = self._between_draws.changed(), self._samplings
        self._samplings = self._sampled()
        if self._samplings == before:
            return found
        return [name for name in found if name.partition(".")[0] != "sampler"]

    def _note_names(self, names: list[str]) -> None:
        if names:
            for one in (self._between_passes, self._between_draws):
                one.forget(names)
            self._note([f"`{name}`" for name in names])


def owners_of(batches: Iterable[Any]) -> dict[str, Any]:
    """Return the objects that determine the batches, each once: loader, dataset, samplers and collate function."""
    batch_sampler = getattr(batches, "batch_sampler", None)
    found = {
        "batches": batches,
        "dataset": getattr(batches, "dataset", None),
        "sampler": getattr(batches, "sampler", None),
        "batch_sampler": batch_sampler,
        "batch_sampler.sampler": getattr(batch_sampler, "sampler", None),
        "collate_fn": getattr(batches, "collate_fn", None),
    }
    first = {id(one): name for name, one in reversed(found.items())}
    return {name: one for name, one in found.items() if one is not None and first[id(one)] == name}


def watched_in(batches: Iterable[Any]) -> dict[str, Any]:
    """Return those of them that only the program changes: a library's loader counts its passes."""
    owners = owners_of(batches)
    if not own_classes(batches):
        del owners["batches"]
    return owners


def with_inner_datasets(owners: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``owners`` and the datasets that these wrap, as a ``Subset`` does, by name."""
    walk = Walk(inside=_datasets_inside, breadth_first=True, objects_max=_OBJECTS_MAX)
    inner = [found for pair in owners.items() for found in walk.over([pair])]
    return {**owners, **{path: at for path, at, _ in inner if issubclass(type(at), Dataset)}}


def _datasets_inside(path: str, at: Any) -> list[tuple[str, Any]] | None:
    kind = _container_kind(at)
    if kind is None:
        inner = [(f"{path}.{key}", one) for key, one in attributes_of(at).items()]
    elif kind is set or kind.__len__(at) > _DATASETS_MAX:
        return None
    else:
        pairs = kind.items(at) if kind is dict else enumerate(kind.__iter__(at))
        inner = [(f"{path}[{key!r}]", one) for key, one in pairs]
    return [
        (where, one)
        for where, one in inner
        if issubclass(type(one), Dataset) or _container_kind(one) in (list, tuple, dict)
    ]


def _values_of(owners: Mapping[str, Any], *, is_kept: Callable[[Any], bool]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    known: set[int] = set()
    for name, owner in owners.items():
        at = owner.__self__ if type(owner) is MethodType else owner
        if id(at) in known or is_kept(at):
            continue
        known.add(id(at))
        if _container_kind(at) is not None:
            found[name] = at
        held = {**_of_classes(at), **attributes_of(at)}
        # A loop's loader that keeps its iterator gets a new one for each pass.
        kept = _BaseDataLoaderIter if isinstance(at, DataLoader) else ()
        pairs = [pair for pair in held.items() if not isinstance(pair[1], kept)]
        found |= {f"{name}.{key}": value for key, value in pairs}
    return found


def _of_classes(at: Any) -> dict[str, Any]:
    """Return what attributes of ``at`` are until they are set."""
    return {
        key: value
        for kind in reversed(own_classes(at))
        for key, value in attributes_of(kind).items()
        if type(value) in _OF_DATA
    }


class _Remembered(HeldValues):
    """Looks at data; a cache that fills and a file that is opened on first use do not count as state."""

    def _look_of(self, value: Any) -> Look:
        if value is None:
            return lambda now: type(now) not in _OF_DATA and not isinstance(now, _DATA)
        is_plain = type(value) is list and len(value) <= _NUMBERS_MAX
        if is_plain and set(map(type, value)) <= _OF_DATA:
            return whole_look(value, skipped=self._is_apart)
        if type(value) in _CACHES:
            return _filling(value)
        return super()._look_of(value)


def _filling(value: dict[Any, Any] | list[Any]) -> Look:
    """Return a comparison that lets None become a value, and a dict gain entries, also in the place of others."""
    every = math.ceil(len(value) / _ENTRIES_MAX) or 1
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    before = [(key, one) for key, one in itertools.islice(pairs, 0, None, every) if one is not None]
    is_whole = len(before) <= _WHOLE_MAX and _entries(value, most=_WITHIN_MAX) <= _WITHIN_MAX
    numbers = 0 if is_whole else _ENTRIES_MAX // max(1, len(before))
    looks = [(key, _entry_look(one, numbers=numbers)) for key, one in before]
    size = len(value)

    def is_same(now: Any) -> bool:
        if type(now) is not type(value) or (isinstance(now, list) and len(now) != size):
            return False
        there = now if isinstance(now, dict) else range(size)
        kept = [(key, look) for key, look in looks if key in there]
        has_shrunk = len(kept) < len(looks) and len(now) < size
        return not has_shrunk and all(look(now[key]) for key, look in kept)

    return is_same


def _entry_look(value: Any, *, numbers: int) -> Look:
    """``numbers``: how many of a tensor or an array are compared; 0: all that is in ``value``."""
    kind = type(value)
    if kind in LEAVES:
        return kept_of(value).is_in
    if kind in (tuple, list) and len(value) <= _PARTS_MAX:
        looks = [_entry_look(one, numbers=numbers) for one in value]
        return lambda now: (
            type(now) is kind
            and len(now) == len(looks)
            and all(look(one) for look, one in zip(looks, now, strict=True))
        )
    if kind is Tensor:
        return _tensor_look(value, numbers=numbers or _ENTRIES_MAX)
    if not numbers:
        return kept_of(value, with_contents=False).is_in
    if kind is np.ndarray:
        return _sampled(value, count=numbers)
    return lambda now: now is value


def _tensor_look(value: Tensor, *, numbers: int) -> Look:
    """Return a comparison of a tensor that a cache may have loaded again since: with the same numbers."""
    is_it, original = kept_of(value, with_contents=False).is_in, weakref.ref(value)
    before = _some_of(value, numbers)
    return lambda now: (
        is_it(now)
        or (
            before is not None
            and type(now) is Tensor
            and now is not original()
            and _some_of(now, numbers) == before
        )
    )


def _some_of(tensor: Tensor, count: int) -> tuple[Any, ...] | None:
    """Return shape, type and some of the numbers; None if to read them is not cheap."""
    if tensor.device.type != "cpu" or tensor.layout is not strided or not tensor.is_contiguous():
        return None
    every = math.ceil(tensor.numel() / count) or 1
    some = tensor.detach().reshape(-1)[::every].clone().view(uint8)
    return tensor.shape, tensor.dtype, some.numpy().tobytes()
