"""Remembers the content of an attribute, to compare it later, restore it, or make it plain.

Handles lists, tuples, sets, deques and dicts of what ``kept_kinds`` knows, and objects with a state dict.
Any other object is known by its identity, and one that is too large, or cannot be read, by a trace
(``traces``). None of a class's own methods is called to read a list or dict: they may do anything.
"""

from __future__ import annotations

import copy
import functools
import gc
import types
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from itertools import chain
from multiprocessing.sharedctypes import SynchronizedBase
from operator import is_
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ddp_runner.kernel.rules.classify import lacks_memory
from ddp_runner.training.exactness.kept_kinds import (
    BUFFER,
    C_VALUES,
    GENERATOR,
    MEMBER,
    Array,
    Buffer,
    GeneratorState,
    GivingBack,
    Kept,
    Leaf,
    Member,
    NotPlainError,
    Received,
    Seen,
    TensorCopy,
    has_pointers,
)
from ddp_runner.training.exactness.traces import Trace
from ddp_runner.training.local_state.by_value import Pickled, handed_over, taken_over
from ddp_runner.values.generators import generator_kind
from ddp_runner.values.object_graph import LEAVES
from ddp_runner.values.plain import from_plain

ENTRIES_MAX = 100_000  # of one list or dict that is kept
NODES_MAX = 250_000  # of what is kept under one name, numbers in a list of numbers aside
SEEN_NODES_MAX = 10_000  # the same of what is only looked at
ARRAY_BYTES_MAX = 128 * 1024 * 1024
_SEEN_ARRAY_BYTES_MAX = 16 * 1024 * 1024
_SET, _DEQUE = "ddp_runner:set", "ddp_runner:deque"
_PAIRS, _STATEFUL = "ddp_runner:pairs", "ddp_runner:state_dict"
_OBJECTS, _SHELL, _SHARED = "ddp_runner:objects", "ddp_runner:shell", "ddp_runner:shared"
_MADE = "ddp_runner:made"
_BYTEARRAY = "ddp_runner:bytearray"  # in files of earlier versions
# What two objects may both hold although only one of them is sent.
_FREELY_SHARED = (
    *(*LEAVES, tuple, frozenset, range, slice, Enum, np.generic, functools.partial),
    *(type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_CONTAINERS = (OrderedDict, dict, list, tuple, set, frozenset, deque)


class _Sequence(Kept):
    """A list, tuple, set or deque."""

    def __init__(self, kind: type, items: list[Kept], *, maxlen: int | None = None) -> None:
        self._kind = kind
        self.items = items
        self._maxlen = maxlen

    def is_in(self, value: Any) -> bool:
        if type(value) is not self._kind:
            return False
        there = _ordered(value)
        if len(there) != len(self.items):
            return False
        return all(kept.is_in(one) for kept, one in zip(self.items, there, strict=True))

    def put_into(self, live: Any, giving: GivingBack | None) -> Any:
        is_alike = type(live) is self._kind or isinstance(live, tuple)
        there: list[Any] = _ordered(live) if is_alike else []
        there += [None] * (len(self.items) - len(there))
        items = [kept.given_back(one, giving) for kept, one in zip(self.items, there, strict=False)]
        if type(live) is self._kind and isinstance(live, (list, deque, set)):
            _refill(live, items)
            return live
        if (
            isinstance(live, tuple)
            and len(items) == len(live)
            and _are_same(tuple.__iter__(live), items)
        ):
            return live  # put back in what it holds
        if isinstance(live, tuple) and hasattr(live, "_fields") and issubclass(self._kind, tuple):
            return type(live)(*items)
        if self._kind is deque:
            return deque(items, self._maxlen)
        return self._kind(*items) if hasattr(self._kind, "_fields") else self._kind(items)

    def parts(self) -> Iterable[Kept]:
        return self.items

    def plain(self) -> Any:
        items = [wired(kept) for kept in self.items]
        if self._kind is deque:
            return {_DEQUE: (items, self._maxlen)}
        if self._kind in (set, frozenset):
            return {_SET: (self._kind.__name__, items)}
        return tuple(items) if issubclass(self._kind, tuple) else items

    def digest(self) -> Any:
        parts = [kept.digest() for kept in self.items]
        return sorted(map(repr, parts)) if self._kind in (set, frozenset) else parts


class _Numbers(_Sequence):
    """A list or deque of numbers and texts alone, of which there may be many."""

    def __init__(self, kind: type, values: tuple[Any, ...], *, maxlen: int | None = None) -> None:
        self._kind = kind
        self._values = values
        self._maxlen = maxlen

    @functools.cached_property
    def items(self) -> list[Kept]:  # type: ignore[override]
        return [Leaf(value) for value in self._values]

    def is_in(self, value: Any) -> bool:
        if type(value) is not self._kind or _size(value) != len(self._values):
            return False
        return all(map(is_, _entries(value), self._values)) or super().is_in(value)

    def parts(self) -> Iterable[Kept]:
        return ()


class _Objects(Kept):
    """An array of numpy's that holds objects."""

    def __init__(self, shape: tuple[int, ...], items: list[Kept]) -> None:
        self._shape = shape
        self.items = items

    def is_in(self, value: Any) -> bool:
        if type(value) is not np.ndarray or value.dtype != object or value.shape != self._shape:
            return False
        return all(kept.is_in(one) for kept, one in zip(self.items, value.flat, strict=True))

    def put_into(self, live: Any, giving: GivingBack | None) -> Any:
        fits = isinstance(live, np.ndarray) and live.dtype == object and live.shape == self._shape
        into = live if fits else np.empty(self._shape, dtype=object)
        for place, (kept, one) in enumerate(zip(self.items, list(into.flat), strict=True)):
            into.flat[place] = kept.given_back(one, giving)
        return into

    def parts(self) -> Iterable[Kept]:
        return self.items

    def plain(self) -> Any:
        return {_OBJECTS: (self._shape, [wired(kept) for kept in self.items])}

    def digest(self) -> Any:
        return self._shape, [kept.digest() for kept in self.items]


class _Dict(Kept):
    def __init__(self, kind: type, items: dict[Any, Kept]) -> None:
        self._kind = kind
        self.items = items

    def is_in(self, value: Any) -> bool:
        if type(value) is not self._kind or not isinstance(value, dict):
            return False
        if list(_entries(value)) != list(self.items):
            return False
        return all(kept.is_in(dict.get(value, key)) for key, kept in self.items.items())

    def put_into(self, live: Any, giving: GivingBack | None) -> Any:
        if not isinstance(live, dict):
            live = {} if self._kind is dict else self._kind()
        items = {
            key: kept.given_back(dict.get(live, key), giving) for key, kept in self.items.items()
        }
        _refill(live, items)
        return live

    def parts(self) -> Iterable[Kept]:
        return self.items.values()

    def plain(self) -> Any:
        return {_PAIRS: [(kept_of(k).plain(), wired(kept)) for k, kept in self.items.items()]}

    def digest(self) -> Any:
        return [(repr(key), kept.digest()) for key, kept in self.items.items()]


class _Shell(Kept):
    """An object that stays as it is around another one that changes: a bound method, a view of a dict."""

    def __init__(self, kind: type, name: str, inner: Kept) -> None:
        self._kind = kind
        self._name = name
        self.inner = inner

    def is_in(self, value: Any) -> bool:
        if type(value) is not self._kind or _name_of(value) != self._name:
            return False
        return self.inner.is_in(_inside(value))

    def put_into(self, live: Any, giving: GivingBack | None) -> Any:
        before = _inside(live)
        if before is None or _name_of(live) != self._name:
            raise NotPlainError(f"{self._kind.__name__} that is not there yet")
        if self.inner.given_back(before, giving) is not before:
            raise NotPlainError(f"what a {self._kind.__name__} is around")
        return live

    def parts(self) -> Iterable[Kept]:
        return (self.inner,)

    def plain(self) -> Any:
        return {_SHELL: (self._name, wired(self.inner))}

    def digest(self) -> Any:
        return self._name, self.inner.digest()


class Stateful(Kept):
    """An object with ``state_dict`` and ``load_state_dict``, as an optimizer of the task's own."""

    def __init__(self, state: Kept) -> None:
        self.state = state

    def is_in(self, value: Any) -> bool:
        """See :meth:`Kept.is_in`."""
        return is_stateful(value) and self.state.is_in(value.state_dict())

    def put_into(self, live: Any, giving: GivingBack | None) -> Any:  # noqa: ARG002 - it is copied
        """See :meth:`Kept.put_into`."""
        if not is_stateful(live):
            raise NotPlainError("an object that is not there yet")
        # Not put back in what it gives: one that empties itself before it loads would find nothing there.
        live.load_state_dict(state_for(live.state_dict(), self.state))
        return live

    def plain(self) -> Any:
        """See :meth:`Kept.plain`."""
        return {_STATEFUL: self.state.plain()}

    def digest(self) -> Any:
        """See :meth:`Kept.digest`."""
        return self.state.digest()


class Made(Kept):
    """An object that a step has created, as bytes: it is built again where nothing stands in its place."""

    def __init__(self, pickled: Pickled, device: str) -> None:
        """``device``: where the model is that it was made beside."""
        self._pickled = pickled
        self._device = device

    def built(self, *, like: nn.Module) -> Any:
        """Return a new object, beside the model ``like``.

        Raises UnpicklingError for a class that this does not consist of and a file may not build.
        """
        return taken_over(self._pickled, like=like, moved={self._device: device_of(like)})

    def put_into(self, live: Any, giving: GivingBack | None) -> Any:  # noqa: ARG002
        """See :meth:`Kept.put_into`."""
        raise NotPlainError("an object that is built, not written")

    def plain(self) -> Any:
        """See :meth:`Kept.plain`."""
        buffers = [bytes(one) for one in self._pickled.buffers]
        return {_MADE: (self._pickled.text, buffers, self._device)}


class NotKept(Kept):
    """A value that is too large to be kept, or cannot be read. ``trace``: of its former content."""

    def __init__(self, value: Any, *, trace: Trace | None = None) -> None:
        super().__init__(value)
        self._trace = trace

    def is_in(self, value: Any) -> bool:
        """See :meth:`Kept.is_in`; of a large value, each call compares the next part."""
        return value is self._value and (self._trace is None or self._trace.is_of(value))

    def is_wholly_in(self, value: Any) -> bool:
        """See :meth:`Kept.is_wholly_in`."""
        is_it = value is self._value
        return is_it and (self._trace is None or self._trace.is_of(value, whole=True))

    def put_into(self, live: Any, giving: GivingBack | None) -> Any:  # noqa: ARG002
        """See :meth:`Kept.put_into`."""
        raise NotPlainError(type(self._value).__qualname__)


def kept_of(
    value: Any,
    *,
    before: Kept | None = None,
    with_contents: bool = True,
    on_host: bool = False,
    closely: bool = False,
    skipped: Callable[[Any], bool] = lambda _: False,
) -> Kept:
    """``value`` as it is now. ``before``: what was kept of it, whose memory may be used again.

    Without contents a tensor is known by torch's count of its changes, ``closely`` also by some of its numbers, and
    what is large by a trace. What is ``skipped`` is known as the object that it is.
    """
    seen = functools.partial(Seen, closely=closely)
    keeping = _Keeping(None if with_contents else seen, on_host, skipped)
    try:
        kept = keeping.keep(value, before)
        if not keeping.leaves_objects_unseen:
            return kept
    except Exception as error:  # methods of the user's objects raise what they like
        if lacks_memory(error):
            raise
    return NotKept(value, trace=None if with_contents else Trace(value))


def device_of(model: nn.Module) -> str:
    """Return the name of the device of its first parameter."""
    return str(next(model.parameters()).device)


def made_of(value: Any, *, beside: nn.Module, held: Iterable[Any]) -> Made | None:
    """Return an object that a step has created, for a process that lacks it; None if it cannot be sent.

    ``beside``: the model. ``held``: all other objects that are held. If one of them is a part of ``value``, this cannot
    be sent, because two would be made of that part: of the weights of a shallow copy, or of what an optimizer updates.
    """
    those = [*_with_contents(held)]  # alive until the end: no new object has the id of one of them
    ids = {id(one) for one in those if not isinstance(one, _FREELY_SHARED)}
    memory = {_memory_of(one) for one in those if isinstance(one, Tensor)}

    def is_anothers(one: Any) -> bool:
        return id(one) in ids or (isinstance(one, Tensor) and _memory_of(one) in memory)

    try:
        return Made(handed_over(value, is_anothers=is_anothers), device_of(beside))
    except Exception as error:  # methods of the user's objects raise what they like
        if lacks_memory(error):
            raise
        return None


def _with_contents(values: Iterable[Any]) -> Iterator[Any]:
    """Yield each value, and those in lists, dicts, optimizers and the like, and what a function is bound to; each once."""
    seen: set[int] = set()
    pending = [*values]
    while pending:
        one = pending.pop()
        if type(one) in LEAVES or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, dict):
            pending += [*dict.keys(one), *dict.values(one)]
        elif isinstance(one, (list, tuple, set, frozenset, deque)):
            pending += _entries(one)
        elif isinstance(one, functools.partial):
            pending += [one.func, one.args, one.keywords]
        elif isinstance(one, types.MethodType):
            pending.append(one.__self__)
        elif is_stateful(one):
            pending += getattr(one, "__dict__", {}).values()


def _memory_of(tensor: Tensor) -> tuple[str, int]:
    """Return where the memory of a tensor begins; its views share that."""
    if tensor.layout is not torch.strided:
        return "", id(tensor)
    return str(tensor.device), tensor.untyped_storage().data_ptr() or id(tensor)


def mark_shared(values: Iterable[Kept]) -> None:
    """Number the objects that are there more than once, so that they are one again where these arrive."""
    found: dict[int, list[Kept]] = {}
    for kept in _all_parts(values):
        if kept.ident:
            found.setdefault(kept.ident, []).append(kept)
    for number, those in enumerate((t for t in found.values() if len(t) > 1), start=1):
        for kept in those:
            kept.number = number


def objects_in(kept: Kept) -> list[int]:
    """Return the ids of objects that are known only by identity: the state in one of them has names of its own."""
    return [id(one.put_into(None, None)) for one in _all_parts([kept]) if type(one) is Kept]


def idents(values: Iterable[Kept]) -> frozenset[int]:
    """The ids of all objects that were kept."""
    return frozenset(kept.ident for kept in _all_parts(values)) - {0}


def wired(kept: Kept) -> Any:
    """Return :meth:`Kept.plain` with the numbers of :func:`mark_shared`."""
    return {_SHARED: (kept.number, kept.plain())} if kept.number else kept.plain()


def _all_parts(values: Iterable[Kept]) -> Iterator[Kept]:
    pending = [*values]
    while pending:
        kept = pending.pop()
        yield kept
        pending += kept.parts()


class _TooMuchError(Exception):
    """Raised for a value with more parts than are kept, or looked at."""


class _Keeping:
    """Keeps a value in one pass over it."""

    def __init__(
        self,
        seen: Callable[[Tensor], Kept] | None,
        on_host: bool,
        skipped: Callable[[Any], bool],
    ) -> None:
        self._seen = seen  # how a tensor is known without its contents; None: with them
        self._with_contents = with_contents = seen is None
        self._on_host = on_host
        self._skipped = skipped
        self._open: set[int] = set()  # the containers that are being looked into
        self._left = NODES_MAX if with_contents else SEEN_NODES_MAX
        self._has_objects = False

    @property
    def leaves_objects_unseen(self) -> bool:
        """True if objects are in so many things that they are not looked into."""
        return self._has_objects and self._with_contents and self._left < NODES_MAX - SEEN_NODES_MAX

    def keep(self, value: Any, before: Kept | None) -> Kept:
        if type(value) in LEAVES or issubclass(type(value), (np.generic, Enum)):
            return Member(value) if isinstance(value, Enum) else Leaf(value)
        if self._skipped(value) or id(value) in self._open:  # which holds itself
            return Kept(value)
        for kind, keep in self._WAYS:
            if issubclass(type(value), kind):  # isinstance() would ask the object
                self._open.add(id(value))
                kept = keep(self, value, before)
                self._open.discard(id(value))
                if not isinstance(kept, _Shell) and not isinstance(value, (tuple, frozenset)):
                    kept.ident = id(value)
                return kept
        if name := generator_kind(value):
            kept = GeneratorState.of(name, value)
            kept.ident = id(value)
            return kept
        if is_stateful(value):
            old = before.state if isinstance(before, Stateful) else None
            return Stateful(self.keep(value.state_dict(), old))
        self._has_objects = True
        return Kept(value)

    def _count(self, entries: int) -> None:
        self._left -= entries
        if entries > ENTRIES_MAX or self._left < 0:
            raise _TooMuchError

    def _tensor(self, value: Tensor, before: Kept | None) -> Kept:
        if value.layout is not torch.strided or value.is_meta:
            return Kept(value)
        if self._seen is not None:
            return self._seen(value)
        return TensorCopy(value, on_host=self._on_host, before=before)

    def _array(self, value: Any, before: Kept | None) -> Kept:
        if value.dtype == object:
            self._count(value.size)
            had = before.items if isinstance(before, _Objects) else []
            return _Objects(value.shape, self._kept_each(list(value.flat), had))
        if isinstance(value, np.memmap) and not value.flags.writeable:
            return Kept(value)
        limit = ARRAY_BYTES_MAX if self._with_contents else _SEEN_ARRAY_BYTES_MAX
        if value.nbytes > limit or isinstance(value, np.ma.MaskedArray):
            raise _TooMuchError
        return Array(value)

    def _buffer(self, value: Any, _: Kept | None) -> Kept:
        is_large = memoryview(value).nbytes > ARRAY_BYTES_MAX
        if is_large or (isinstance(value, C_VALUES) and has_pointers(type(value))):
            raise _TooMuchError
        return Buffer.of(value)

    def _sequence(self, value: Any, before: Kept | None) -> Kept:
        maxlen = getattr(value, "maxlen", None)
        if _size(value) > ENTRIES_MAX:
            raise _TooMuchError
        if isinstance(value, (list, deque)) and set(map(type, _entries(value))) <= LEAVES:
            return _Numbers(type(value), tuple(_entries(value)), maxlen=maxlen)
        self._count(_size(value))
        had = before.items if isinstance(before, _Sequence) else []
        return _Sequence(type(value), self._kept_each(_ordered(value), had), maxlen=maxlen)

    def _kept_each(self, values: list[Any], had: list[Kept]) -> list[Kept]:
        olds = chain(had, [None] * (len(values) - len(had)))
        return [self.keep(one, old) for one, old in zip(values, olds, strict=False)]

    def _dict(self, value: dict[Any, Any], before: Kept | None) -> Kept:
        self._count(_size(value))
        known = before.items if isinstance(before, _Dict) else {}
        items = {key: self.keep(dict.get(value, key), known.get(key)) for key in _entries(value)}
        return _Dict(type(value), items)

    def _shell(self, value: Any, before: Kept | None) -> Kept:
        inside = _inside(value)
        if inside is None:
            return Kept(value)
        old = before.inner if isinstance(before, _Shell) else None
        return _Shell(type(value), _name_of(value), self.keep(inside, old))

    _WAYS: ClassVar[list[tuple[Any, Callable[..., Kept]]]] = [
        (Tensor, _tensor),
        (np.ndarray, _array),
        ((bytearray, array, *C_VALUES), _buffer),
        ((list, tuple, set, frozenset, deque), _sequence),
        (dict, _dict),
        (
            (
                *(types.MappingProxyType, types.MethodType, types.BuiltinMethodType),
                *(functools.partial, SynchronizedBase),
            ),
            _shell,
        ),
    ]


def from_wire(plain: Any) -> Kept:
    """The inverse of :meth:`Kept.plain`, to be given back to what is there."""
    if isinstance(plain, Tensor):
        return Received(plain)
    if type(plain) in (list, tuple):
        return _Sequence(type(plain), [from_wire(one) for one in plain])
    if type(plain) is dict:
        ((tag, packed),) = plain.items()
        return _UNPACKERS[tag](packed) if tag in _UNPACKERS else _from_numpy(from_plain(plain))
    return Leaf(plain)


def _from_numpy(value: Any) -> Kept:
    return Array(value) if type(value) is np.ndarray else Leaf(value)


def _from_shared(packed: Any) -> Kept:
    kept = from_wire(packed[1])
    kept.ident = packed[0]
    return kept


_UNPACKERS: dict[str, Callable[[Any], Kept]] = {
    _PAIRS: lambda packed: _Dict(
        dict, {from_wire(key).given_back(None): from_wire(one) for key, one in packed}
    ),
    GENERATOR: lambda packed: GeneratorState(str(packed[0]), from_plain(packed[1]), *packed[2:]),
    MEMBER: Member,
    _DEQUE: lambda packed: _Sequence(
        deque, [from_wire(one) for one in packed[0]], maxlen=packed[1]
    ),
    _SET: lambda packed: _Sequence(
        frozenset if packed[0] == "frozenset" else set, [from_wire(one) for one in packed[1]]
    ),
    _STATEFUL: lambda packed: Stateful(from_wire(packed)),
    _BYTEARRAY: lambda packed: Buffer(bytearray, "", bytes(packed)),
    BUFFER: Buffer.from_plain,
    _OBJECTS: lambda packed: _Objects(tuple(packed[0]), [from_wire(one) for one in packed[1]]),
    _SHELL: lambda packed: _Shell(object, str(packed[0]), from_wire(packed[1])),
    _SHARED: _from_shared,
    _MADE: lambda packed: Made(
        Pickled(bytes(packed[0]), [memoryview(bytes(one)) for one in packed[1]]), str(packed[2])
    ),
}


def is_stateful(value: Any) -> bool:
    """Return True if ``value`` has methods to give and take a state; modules are looked into instead."""
    has_both = all(
        callable(getattr(type(value), f"{verb}state_dict", None)) for verb in ("", "load_")
    )
    return has_both and not issubclass(type(value), (torch.nn.Module, type))


def _inside(value: Any) -> Any:
    """Return the object that a shell wraps; None if that does not change."""
    if isinstance(value, types.MappingProxyType):
        held = gc.get_referents(value)[0]
        return None if "__module__" in held else held  # a class, which is looked into as such
    if isinstance(value, functools.partial):
        return (value.args, value.keywords)
    if isinstance(value, SynchronizedBase):
        return value.get_obj()
    held = getattr(value, "__self__", None)
    return None if isinstance(held, (types.ModuleType, type)) else held


def _name_of(shell: Any) -> str:
    return str(getattr(shell, "__name__", ""))


def _base(container: Any) -> Any:
    """The class of Python's that a list, dict or the like is of, or is derived from."""
    return next(kind for kind in _CONTAINERS if isinstance(container, kind))


def _size(container: Any) -> int:
    return int(_base(container).__len__(container))


def _entries(container: Any) -> Iterator[Any]:
    """A dict's keys, anything else's entries."""
    return iter(_base(container).__iter__(container))


def _are_same(values: Iterable[Any], others: Iterable[Any]) -> bool:
    """Return True if they are the same objects, or equal numbers and texts."""
    return all(
        one is other or (type(one) is type(other) and type(one) in LEAVES and one == other)
        for one, other in zip(values, others, strict=False)
    )


def _refill(live: Any, items: Any) -> None:
    kind = _base(live)
    kind.clear(live)
    (kind.extend if kind in (list, deque) else kind.update)(live, items)


def _ordered(values: Any) -> list[Any]:
    """A set's entries in an order that equal sets have alike, as far as there is one."""
    if isinstance(values, (set, frozenset)):
        return sorted(_entries(values), key=repr)
    return list(_entries(values))


def state_for(live: Any, kept: Kept) -> Any:
    """Return a kept state, for the object whose state is ``live`` now: on its devices, in containers of its classes.

    A sent state has its tensors in host memory, in plain containers. A kept one lacks what a class has
    besides its entries, as a defaultdict's factory.
    """
    return _of_kinds_in(live, kept.given_back(None))


def _of_kinds_in(live: Any, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(live.device) if isinstance(live, Tensor) else value
    if isinstance(value, dict) and isinstance(live, dict):
        items = {
            key: _of_kinds_in(dict.get(live, key), dict.get(value, key)) for key in _entries(value)
        }
        is_one_of_them = type(value) in (dict, type(live)) and type(live) is not dict
        into = copy.copy(live) if is_one_of_them else value
        _refill(into, items)  # not by its own update(): a Counter's adds
        return into
    if isinstance(value, list) and isinstance(live, list):
        value[: len(live)] = map(_of_kinds_in, live, value)
    elif type(value) is tuple and isinstance(live, tuple):
        found = [*map(_of_kinds_in, live, value), *value[len(live) :]]
        is_named = hasattr(live, "_fields") and len(live) == len(found)
        return type(live)(*found) if is_named else tuple(found)
    return value
