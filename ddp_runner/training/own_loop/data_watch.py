"""Watches the state of a loop's own data: its dataset, samplers and collate function.

A replaced rank begins an epoch (a pass over the batches) with these objects as the program has made them, and loads the
pass again up to its step. So a replaced rank lacks what earlier passes, or the body of the loop, have changed in them.
"""

from __future__ import annotations

import io
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader

from ddp_runner.training.exactness.values import kept_of
from ddp_runner.training.own_loop.loop_variables import ENTRIES_MAX, HeldValues, Look
from ddp_runner.values.object_graph import LEAVES, attributes_of, own_classes

CURE = "set it in set_epoch(), or draw from the global generators, which are seeded for each epoch"
_LOOKS_IN_A_ROW = 4  # at steps; then at every power of two
_WHOLE_MAX = 256  # entries that are compared with what is in them
_OF_DATA = LEAVES - {type(None)}
_DATA = (Tensor, np.ndarray, list, tuple, dict, set, frozenset, deque)


class DataWatch:
    """Names changes in the data of one process's loop that a replaced rank would lack.

    ``note`` is called with the names. ``is_kept``: finds objects that are kept with the loop's state.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        *,
        is_kept: Callable[[Any], bool],
        note: Callable[[list[str]], object],
    ) -> None:
        owners = owners_of(batches)
        if not own_classes(batches):  # a library's loader counts its passes
            del owners["batches"]
        ids = set(map(id, owners.values()))
        # A framework may have called set_epoch() itself before the pass, with the same number.
        self._set_anew = {
            f"{name}.epoch"
            for name, owner in owners.items()
            if callable(getattr(owner, "set_epoch", None))
        }

        def is_apart(value: Any) -> bool:
            return id(value) in ids or isinstance(value, (DataLoader, io.IOBase)) or is_kept(value)

        def values() -> dict[str, Any]:
            return _values_of(owners)

        self._note = note
        self._between_passes = _Remembered(values, is_apart=is_apart)
        self._between_draws = _Remembered(values, is_apart=is_apart)
        self._left: list[str] = []  # changed in the pass that has ended
        self._draws = 0
        self._has_looked = False  # after the newest draw

    def pass_ends(self) -> None:
        """Look before ``set_epoch()`` and the seeds of the next pass."""
        self._has_looked = False
        changed = self._between_passes.changed()
        self._left = [name for name in changed if name not in self._set_anew]

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
            self._note_names(self._between_draws.changed())

    def drawn(self) -> None:
        """Look after some of the draws."""
        self._draws += 1
        count = self._draws
        if count <= _LOOKS_IN_A_ROW or not count & (count - 1):
            self._between_draws.changed()
            self._has_looked = True

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


def _values_of(owners: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, owner in owners.items():
        at = owner.__self__ if isinstance(owner, MethodType) else owner
        found |= {f"{name}.{key}": value for key, value in attributes_of(at).items()}
    return found


class _Remembered(HeldValues):
    """Looks at data; a cache that fills and a file that is opened on first use do not count as state."""

    def _look_of(self, value: Any) -> Look:
        if value is None:
            return lambda now: type(now) not in _OF_DATA and not isinstance(now, _DATA)
        if type(value) in (dict, list):
            return _filling(value)
        return super()._look_of(value)


def _filling(value: dict[Any, Any] | list[Any]) -> Look:
    """Return a comparison that lets a dict gain entries, and None become a value."""
    every = math.ceil(len(value) / ENTRIES_MAX) or 1
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    before = [(key, one) for key, one in itertools.islice(pairs, 0, None, every) if one is not None]
    looks = [(key, _entry_look(one, is_whole=len(before) <= _WHOLE_MAX)) for key, one in before]
    size = len(value)

    def is_same(now: Any) -> bool:
        if type(now) is not type(value) or (isinstance(now, list) and len(now) != size):
            return False
        try:
            return all(look(now[key]) for key, look in looks)
        except KeyError:
            return False

    return is_same


def _entry_look(value: Any, *, is_whole: bool) -> Look:
    if is_whole:
        return kept_of(value, with_contents=False).is_in
    if type(value) in LEAVES:
        return lambda now: type(now) is type(value) and now == value
    return lambda now: now is value
