"""Makes what a loop draws between its steps the same in a replacement as in an older process, and names data that it changes."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ddp_runner.kernel.rules.classify import lacks_memory
from ddp_runner.system.code_files import is_users_file
from ddp_runner.training.exactness.held_values import DataWatch, watched_in
from ddp_runner.training.own_loop.batches import (
    BETWEEN,
    generators_in,
    have_new_iterator,
    have_new_workers,
    keeps_iterator,
    programs_seed,
    seed_pass,
)
from ddp_runner.training.own_loop.static_values import within_wrappers
from ddp_runner.values.generators import seed_offset, seed_step
from ddp_runner.values.object_graph import (
    CONTAINERS,
    Walk,
    attributes_of,
    global_names,
    own_classes,
)

_OBJECTS_MAX = 1_000  # that are looked through for data
_ENTRIES_MAX = 64  # of a list or dict: a longer one holds samples
_LOOKED_MIN_S, _LOOKED_SHARE = 0.05, 0.01  # of the time, for looks at data that functions reach
_Loader = DataLoader[Any]


class _HasSteps(Protocol):
    @property
    def step_number(self) -> int: ...


class BetweenSteps:
    """Makes random draws between steps depend on the step and the rank alone, not on what this process did before.

    ``is_kept``, ``note``: as of :class:`DataWatch`, for data that such a function changes.
    """

    def __init__(
        self,
        *,
        seed: int,
        rank: int,
        is_kept: Callable[[Any], bool],
        note: Callable[[list[str]], object],
    ) -> None:
        self._seed, self._rank = seed, rank
        self._is_kept, self._note = is_kept, note
        # Of loaders that a function has made: their generators, as they were at the first pass.
        self._made: WeakKeyDictionary[_Loader, list[tuple[torch.Generator, Any]]] = (
            WeakKeyDictionary()
        )
        # Of loaders that the loop itself goes through; the first look finds nothing.
        self._watches: WeakKeyDictionary[_Loader, DataWatch] = WeakKeyDictionary()
        self._training: Any = None  # the batches of the steps, whose iterator goes on
        self._is_in_function = False
        # By function, the loaders that it reaches and that keep their iterator.
        self._keeping: dict[int, list[ref[_Loader]]] = {}
        self._began_s, self._looked_s = time.monotonic(), 0.0

    @contextlib.contextmanager
    def drawing(self, step: int, function: Any = None) -> Iterator[None]:
        """Seed the block. Each pass of it over a DataLoader begins with new workers and a generator seeded alike.

        ``function``: what the block calls; data that it reaches by its names is looked at as well.
        """
        begin, make = DataLoader.__iter__, DataLoader.__init__
        known: set[int] = set()  # loaders whose generators are set
        held: list[_Loader] = []  # so that no other one gets the id
        new: set[int] = set()  # loaders that the block has made
        seed_step(seed=self._seed, step=step, rank=self._rank, micro_step=BETWEEN)
        reached = {} if function is None else self._reached(function)
        seen = {id(one) for one in reached.values()}
        with contextlib.ExitStack() as behind:
            behind.enter_context(self._look(reached))

            @functools.wraps(make)
            def made(loader: _Loader, *args: Any, **named: Any) -> None:
                new.add(id(loader))
                held.append(loader)
                make(loader, *args, **named)

            @functools.wraps(begin)
            def begun(loader: _Loader) -> Any:
                have_new_workers(loader)
                if id(loader) not in known:
                    known.add(id(loader))
                    held.append(loader)
                    is_new = id(loader) in new
                    looks_at = {} if is_new or id(loader.dataset) in seen else watched_in(loader)
                    behind.enter_context(self._look(looks_at))
                    behind.enter_context(self._pass_over(loader, step, is_new=is_new))
                return begin(loader)

            for loader in (one() for one in self._keeping.get(id(function), ())):
                if loader is not None:
                    known.add(id(loader))
                    behind.enter_context(self._pass_over(loader, step, is_new=False))
                    have_new_iterator(loader)
            seed_step(seed=self._seed, step=step, rank=self._rank, micro_step=BETWEEN)
            DataLoader.__iter__, DataLoader.__init__ = begun, made  # type: ignore[method-assign, assignment]
            self._is_in_function = True
            try:
                yield
            finally:
                self._is_in_function = False
                DataLoader.__iter__, DataLoader.__init__ = begin, make  # type: ignore[method-assign]

    @contextlib.contextmanager
    def around_loop(self, batches: Any, run: _HasSteps) -> Iterator[None]:
        """Begin the loop's own passes over DataLoaders, and those within its batches, in the same way in each process.

        ``batches``: of the steps of ``run``. A loader that the block makes is left as it is.
        """
        given = self._training = getattr(batches, "given", None)
        if type(given).__module__.startswith("ddp_runner."):
            yield  # a framework's are seeded where they are drawn
            return
        begin, make = DataLoader.__iter__, DataLoader.__init__
        new: WeakSet[_Loader] = WeakSet()

        @functools.wraps(make)
        def made(loader: _Loader, *args: Any, **named: Any) -> None:
            new.add(loader)
            make(loader, *args, **named)

        @functools.wraps(begin)
        def begun(loader: _Loader) -> Any:
            drawn = getattr(batches, "at_step", -1)
            is_training = loader is given and drawn >= 0
            if not (self._is_in_function or is_training or loader in new):
                have_new_workers(loader)
                with self._look_since(loader) if drawn < 0 else contextlib.nullcontext():
                    for one in generators_in(loader):
                        seed_pass(one, run.step_number if drawn < 0 else drawn)
            return begin(loader)

        DataLoader.__iter__, DataLoader.__init__ = begun, made  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            DataLoader.__iter__, DataLoader.__init__ = begin, make  # type: ignore[method-assign]

    def _reached(self, function: Any) -> dict[str, Any]:
        """Return the data that ``function`` reaches by its names, with these, and note its loaders that keep their iterator."""
        if id(function) in self._keeping and self._is_slow():
            return {}
        found, keeping = {}, []
        for name, data in data_of(function):
            if not isinstance(data, DataLoader):
                found[name] = data
                continue
            found |= {f"{name}.{key}": one for key, one in watched_in(data).items()}
            if keeps_iterator(data) and data is not self._training:
                keeping.append(data)
        self._keeping[id(function)] = [*map(ref, keeping)]
        return found

    @contextlib.contextmanager
    def _look_since(self, loader: _Loader) -> Iterator[None]:
        """Note what has changed of its data since its last pass, except for what the block sets again."""
        if self._is_slow():
            yield
            return
        began_s = time.monotonic()
        if loader not in self._watches:
            watch = DataWatch(watched_in(loader), is_kept=self._is_kept, note=self._note_evaluated)
            self._watches[loader] = watch
        self._watches[loader].pass_ends()
        yield
        self._watches[loader].pass_begins()
        self._looked_s += time.monotonic() - began_s

    def _is_slow(self) -> bool:
        passed_s = time.monotonic() - self._began_s
        return self._looked_s > _LOOKED_MIN_S + _LOOKED_SHARE * passed_s

    @contextlib.contextmanager
    def _look(self, owners: Mapping[str, Any]) -> Iterator[None]:
        """Note what the block changes of these, as long as looks take little of the time."""
        if not owners or self._is_slow():
            yield
            return
        began_s = time.monotonic()
        watch = DataWatch(owners, is_kept=self._is_kept, note=self._note_evaluated)
        with watch.around_call():
            called_s = time.monotonic()
            yield
            self._looked_s -= time.monotonic() - called_s
        self._looked_s += time.monotonic() - began_s

    @contextlib.contextmanager
    def _pass_over(self, loader: _Loader, step: int, *, is_new: bool) -> Iterator[None]:
        """Seed its generators, and give them back as they were.

        One that a function has made begins with the generators as they were then, since a new process makes it again.
        """
        generators = generators_in(loader)
        states = [(one, one.get_state()) for one in generators]
        if is_new:
            self._made[loader] = states
            yield
            return
        first = {id(one): state for one, state in self._made.get(loader, ())}
        for one in generators:
            if id(one) not in first:
                seed_offset(one, first=programs_seed(one), offset=step)
            elif torch.Generator().set_state(first[id(one)]).initial_seed() == one.initial_seed():
                one.set_state(first[id(one)])
        try:
            yield
        finally:
            for one, state in states:
                one.set_state(state)

    def _note_evaluated(self, names: list[str]) -> None:
        self._note([f"{name} of an evaluation" for name in names])


def data_of(function: Any) -> list[tuple[str, Any]]:
    """Return the datasets and DataLoaders that ``function`` of the program's reaches by names, each with one of these."""
    walk = Walk(inside=_within, breadth_first=True, objects_max=_OBJECTS_MAX)
    found = walk.over([("", function)])
    return [(name, at) for name, at, _ in found if issubclass(type(at), (Dataset, DataLoader))]


def _within(name: str, at: Any) -> Iterable[tuple[str, Any]] | None:
    try:
        return _parts_of(name, at)
    except Exception as error:  # an object that cannot even be asked for its class
        if lacks_memory(error):
            raise
        return None


def _parts_of(name: str, at: Any) -> Iterable[tuple[str, Any]] | None:  # noqa: PLR0911 - a row for each kind
    kind = type(at)
    if issubclass(kind, (Dataset, DataLoader, ModuleType, torch.Tensor)):
        return None
    if kind is functools.partial:
        return [(name, one) for one in (at.func, *at.args, *at.keywords.values())]
    if kind is MethodType:
        return [(name, at.__func__), ("self", at.__self__)]
    if kind is FunctionType:
        inner = within_wrappers(at)
        if type(inner) is not FunctionType:  # such as a module that torch.compile has wrapped
            return [(name, inner)]
        return _of_function(inner) if is_users_file(inner.__code__.co_filename) else None
    if issubclass(kind, CONTAINERS):
        is_map = isinstance(at, dict)
        if len(at) > _ENTRIES_MAX or (is_map and kind is not dict):
            return None
        return [(f"{name}[{key!r}]", one) for key, one in (at.items() if is_map else enumerate(at))]
    if isinstance(at, type):
        return _functions_of(at.__mro__)
    if issubclass(kind, nn.Module) or own_classes(at):
        held = [(f"{name}.{key}", one) for key, one in attributes_of(at).items()]
        return [*held, *_functions_of(own_classes(at))]
    return None


def _functions_of(classes: Iterable[type]) -> list[tuple[str, Any]]:
    pairs = [(name, one) for kind in classes for name, one in vars(kind).items()]
    return [(name, one) for name, one in pairs if type(one) is FunctionType]


def _of_function(function: FunctionType) -> list[tuple[str, Any]]:
    found = [*attributes_of(function).items()]
    names = global_names(function.__code__)
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType) and is_users_file(getattr(value, "__file__", None) or ""):
            found += [(f"{name}.{one}", vars(value)[one]) for one in names if one in vars(value)]
        elif value is not None:
            found.append((name, value))
    return found
