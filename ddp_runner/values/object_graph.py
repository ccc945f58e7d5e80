"""The one walker of object graphs, and what an object holds, whatever kind of object it is.

:class:`Walk` is the walker: who uses it says what a value holds, which limits there are, and how paths are made.

:func:`attributes_of` reads attributes in ``__dict__`` and in ``__slots__``, those of a class of the user's, and what a
function keeps: the variables of the one around it, its attributes, its defaults. :func:`state_in` is the rule for a
walk over all state that a step may change. It looks into libraries' objects as well, except for those of torch, numpy
and the like, whose attributes are their own business. This module decides nothing about what is kept.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import contextvars
import enum
import functools
import io
import itertools
import queue
import sys
import threading
import types
import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn
from torch.utils.data import Dataset

from ddp_runner.kernel.rules.classify import lacks_memory
from ddp_runner.system.code_files import is_users_file

_EXTRA = "extra state"
_UNREADABLE = object()
CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
# Types of values that hold no others.
LEAVES = frozenset({type(None), bool, int, float, complex, str, bytes})
CONTAINERS_DEEP = 20  # one in another
SCANNED_MAX = 10_000  # entries of all containers of one attribute, as values.SEEN_NODES_MAX
OBJECTS_MAX = 1_000  # among them
LONG = 100_000  # a list that is not even read through for objects
_OF_MODULES = frozenset(vars(nn.Module())) | {
    "_compiled_call_impl",
    "_flat_weights",
    "_flat_weights_names",
    "_all_weights",
}
_NOT_WALKED = frozenset(sys.stdlib_module_names) | {
    "torch",
    "numpy",
    "ddp_runner",
    "rich",
    "pydantic",
}
# Of the standard library, what people keep their own things in.
_HOLDERS = (
    types.SimpleNamespace,
    argparse.Namespace,
    collections.UserDict,
    collections.UserList,
    collections.UserString,
    collections.ChainMap,
    queue.Queue,
    threading.local,  # of this thread, which makes the steps
    *(weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet),
)
# Where such an object has the things themselves, for one whose other attributes change with each use.
_CONTENTS: dict[type, str] = {
    collections.UserDict: "data",
    collections.UserList: "data",
    collections.ChainMap: "maps",
    queue.Queue: "queue",
    weakref.WeakKeyDictionary: "data",
    weakref.WeakValueDictionary: "data",
}
_BARE = frozenset({list, tuple, dict, collections.deque})  # without attributes, and never opaque
_PLAIN = (*CONTAINERS, str, bytes, bytearray, int, float, complex)
_NAMES = (str, int, float, bytes, tuple, type(None))  # what is written alike in all processes
_BEFORE_STEPS = ("build_model", "build_datasets", "__init__")
_DEFAULTS = ("__defaults__", "__kwdefaults__")
_T = TypeVar("_T")


class Reach(enum.Enum):
    """How far a walk goes at a value."""

    LEAF = "it is not looked into"
    ENTERED = "the walk goes on to what it holds"
    PASSED = "the same, and it does not count towards the limit"
    LEFT = "a limit keeps the walk from what it holds"


class Found(NamedTuple):
    """A value that a walk has come to."""

    path: Any  # as ``inside`` has made it
    value: Any
    reach: Reach


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """The rules of a walk over values that hold each other.

    ``inside(path, value)``: a pair of path and value for each one that ``value`` holds, or None for a leaf. A walk
    goes into a value once, and yields it by the path that has led there first; it yields a leaf by each of its paths.

    ``objects_max``: the most values that a walk goes into, of those that ``counts`` is true of. ``depth_max``: the most
    steps from a root to a value that it goes into. ``without``: ids of values that it neither yields nor goes into.

    The value that was found last comes next, so roots come from the last to the first. With ``breadth_first`` the
    value that was found first comes next.
    """

    inside: Callable[[Any, Any], Iterable[tuple[Any, Any]] | None]
    breadth_first: bool = False
    objects_max: int = sys.maxsize
    counts: Callable[[Any], bool] | None = None  # None: all of them
    depth_max: int = sys.maxsize
    without: Container[int] = frozenset()

    def over(self, roots: Iterable[tuple[Any, Any]]) -> Iterator[Found]:
        """Yield what can be reached from ``roots``, pairs of path and value, and these too."""
        pending = collections.deque((path, value, 0) for path, value in roots)
        take = pending.popleft if self.breadth_first else pending.pop
        inside, counts, without = self.inside, self.counts, self.without
        known: dict[int, Any] = {}  # by id, which no other value can get while this one is here
        left = self.objects_max
        while pending:
            path, value, depth = take()
            if id(value) in known or id(value) in without:
                continue
            parts = inside(path, value)
            if parts is None:
                yield Found(path, value, Reach.LEAF)
                continue
            known[id(value)] = value
            if left <= 0 or depth > self.depth_max:
                yield Found(path, value, Reach.LEFT)
                continue
            is_counted = counts is None or counts(value)
            left -= is_counted
            yield Found(path, value, Reach.ENTERED if is_counted else Reach.PASSED)
            pending += [(where, one, depth + 1) for where, one in parts]


def _once_a_kind(judge: Callable[[type], _T]) -> Callable[[type], _T]:
    """Remember what ``judge`` says of a class."""
    remembered = functools.lru_cache(maxsize=4096)(judge)

    def judged(kind: type) -> _T:
        try:
            return remembered(kind)
        except TypeError:  # of a metaclass that does not hash
            return judge(kind)

    return judged


class Closed(NamedTuple):
    """A value that is not looked into: ``value`` is opaque, or there is too much in it."""

    value: Any


def attributes_of(at: Any) -> dict[str, Any]:
    """Name -> value, as they are now; without what a module of torch has for itself."""
    if isinstance(at, type):
        return {key: value for key, value in vars(at).items() if _is_class_state(key, value)}
    if isinstance(at, types.FunctionType):
        return _of_function(at)
    if isinstance(at, threading.local):
        return dict(vars(at))
    found = {}
    for name in _slots_of(type(at)):
        with contextlib.suppress(AttributeError):  # it was never set
            found[name] = object.__getattribute__(at, name)  # not by the user's __getattr__
    if _has_dict(type(at)):
        found.update(object.__getattribute__(at, "__dict__"))
    if isinstance(at, nn.Module):
        for name in _OF_MODULES & found.keys():
            del found[name]
    return found


def content_of(value: Any) -> Any:
    """Return what an object of the standard library has of a program's, as the list in a queue; another one itself."""
    kind = type(value)
    if kind is contextvars.ContextVar:
        return value.get(None)
    if kind is memoryview:
        return value.tobytes()
    names = (name for one, name in _CONTENTS.items() if issubclass(kind, one))
    return attributes_of(value).get(next(names, ""), value)


def write_attribute(at: Any, key: str, value: Any) -> None:
    """Set it, also where the object's class forbids that (a frozen dataclass)."""
    if isinstance(at, types.FunctionType) and key in at.__code__.co_freevars:
        _cells(at)[key].cell_contents = value
        return
    try:
        setattr(at, key, value)
    except Exception:  # noqa: BLE001 - a class of the user's says no in its own way
        (type if isinstance(at, type) else object).__setattr__(at, key, value)


def remove_attribute(at: Any, key: str) -> None:
    """Delete it; of a function, empty the variable."""
    if isinstance(at, types.FunctionType) and key in at.__code__.co_freevars:
        del _cells(at)[key].cell_contents
        return
    try:
        delattr(at, key)
    except Exception:  # noqa: BLE001 - as above
        (type if isinstance(at, type) else object).__delattr__(at, key)


def own_classes(at: Any) -> tuple[type, ...]:
    """The classes of an object that are the user's own, whose attributes all its objects share."""
    bases = [one for one in at.__mro__ if one is not at] if isinstance(at, type) else []
    return (*filter(_is_users, bases), *_own_bases(type(at)))


@_once_a_kind
def _own_bases(kind: type) -> tuple[type, ...]:
    return tuple(filter(_is_users, kind.__mro__))


class Owner:
    """An object whose attributes are read, compared and written by their names.

    ``is_models``: of a module, its parameters and saved buffers are the model's own state, and none of these.
    """

    def __init__(self, path: str, of: Any, *, is_models: bool) -> None:
        self.path = path
        self.of = of
        self.is_models = is_models
        self.has_extra = isinstance(of, nn.Module) and (
            type(of).get_extra_state is not nn.Module.get_extra_state
        )
        self._recomputed = _recomputed_names(of)

    def entries(self) -> Iterator[tuple[str, Any]]:
        """Yield names and values of attributes, as they are now; of a parameter, without those of libraries."""
        is_tensor = isinstance(self.of, Tensor)
        for key, value in attributes_of(self.of).items():
            if key not in self._recomputed and not (is_tensor and key.startswith("_")):
                yield key, value
        if isinstance(self.of, nn.Module):
            unsaved = self.of._non_persistent_buffers_set  # noqa: SLF001 - there is no other way
            for key, buffer in self.of._buffers.items():  # noqa: SLF001
                if key in unsaved or not self.is_models:
                    yield key, buffer
            if not self.is_models:
                yield from self.of._parameters.items()  # noqa: SLF001
        if self.has_extra:
            yield _EXTRA, self._extra()

    def _extra(self) -> Any:
        try:
            return self.of.get_extra_state()
        except Exception as error:
            if lacks_memory(error):
                raise
            return _UNREADABLE

    def read(self, key: str) -> Any:
        """Return an attribute as it is now; None where there is none."""
        if key == _EXTRA and self.has_extra:
            return self._extra()
        if isinstance(self.of, nn.Module):
            return getattr(self.of, key, None)
        return attributes_of(self.of).get(key)

    def write(self, key: str, value: Any) -> None:
        """Set it. What the user's class raises passes."""
        if key == _EXTRA and self.has_extra:
            self.of.set_extra_state(value)
        elif self.read(key) is not value or not self.has(key):
            write_attribute(self.of, key, value)

    def remove(self, key: str) -> None:
        """Delete it, if it is there."""
        if key in attributes_of(self.of):
            remove_attribute(self.of, key)

    def has(self, key: str) -> bool:
        """Return True if it has an attribute of this name."""
        if key == _EXTRA and self.has_extra:
            return True
        is_module = isinstance(self.of, nn.Module)
        return hasattr(self.of, key) if is_module else key in attributes_of(self.of)


def _recomputed_names(of: Any) -> frozenset[str]:
    """Return what hooks compute from parameters before each forward: torch's old spectral and weight norm."""
    if not isinstance(of, nn.Module):
        return frozenset()
    hooks = of._forward_pre_hooks.values()  # noqa: SLF001
    names = [getattr(hook, "name", None) for hook in hooks]
    return frozenset(name for name in names if isinstance(name, str))


def is_opaque(value: Any) -> bool:
    """Return True if use changes ``value`` and it cannot be looked into: an iterator, a file that is read."""
    kind = type(value)
    if issubclass(kind, (set, frozenset)):  # of objects: two processes have no common order of them
        return 1 < len(value) <= SCANNED_MAX and any(map(_may_change, value))
    if not _may_be_opaque(kind):
        return False
    return not isinstance(value, io.IOBase) or (not value.closed and value.readable())


@_once_a_kind
def _may_be_opaque(kind: type) -> bool:
    if issubclass(kind, (io.IOBase, queue.SimpleQueue)):
        return True
    advance = getattr(kind, "__next__", None)
    if advance is None or issubclass(kind, nn.Module):
        return False
    return not (isinstance(advance, types.FunctionType) and _is_users(kind))


def state_in(path: str, at: Any) -> Iterator[tuple[str, Any]] | None:
    """What :class:`Walk` finds inside a user's object: other objects that may change, and classes of the user's.

    None for a :class:`Closed` one, and for one that :func:`is_opaque`.
    """
    if isinstance(at, Closed) or is_opaque(at):
        return None
    return itertools.chain(
        ((kind.__qualname__, kind) for kind in own_classes(at)), objects_in(at, path)
    )


def objects_in(at: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The objects in attributes of ``at``, also in its lists and dicts, whose attributes may change.

    :class:`Closed` around an attribute with too many of them, or that cannot be read.
    """
    if isinstance(at, nn.Module):
        for key, module in at._modules.items():  # noqa: SLF001
            if module is not None:
                yield f"{path}.{key}", module
    for key, value in attributes_of(at).items():
        if type(value) not in LEAVES:
            yield from _Scan().objects(value, f"{path}.{key}")
    if isinstance(at, CONTAINERS):  # one with attributes of its own
        yield from _Scan().objects(_Plain(at), path)
    yield from _code_in(at, path)


class _Plain(NamedTuple):
    """A container, without the attributes that it has besides."""

    of: Any


class _TooManyError(Exception):
    """Raised for more objects than are looked at in one attribute."""


class _Scan:
    """The scan of one attribute."""

    def __init__(self) -> None:
        self._left = SCANNED_MAX

    def objects(self, value: Any, path: str) -> list[tuple[str, Any]]:
        """Return the objects in ``value`` with their paths."""
        found: list[tuple[str, Any]] = []
        try:
            for one in self._in(value, path, 0):
                found.append(one)
                if len(found) > OBJECTS_MAX:
                    raise _TooManyError  # noqa: TRY301 - as from within
        except _TooManyError:
            return [(path, Closed(value.of if isinstance(value, _Plain) else value))]
        except Exception:  # noqa: BLE001 - an object of the user's that cannot even be asked for its class
            return [(path, Closed(value))]
        return found

    def _in(self, value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
        if isinstance(value, _Plain):
            yield from self._entries(value.of, path, depth)
        elif type(value) in _BARE:  # most of what there is: nothing below need be asked
            yield from self._entries(value, path, depth)
        elif isinstance(value, functools.partial):
            yield from self._in((value.func, value.args, value.keywords), path, depth)
        elif isinstance(value, (types.MethodType, types.BuiltinMethodType)):
            yield from self._in(value.__self__, f"{path}.__self__", depth)
        elif isinstance(value, (staticmethod, classmethod)):
            yield from self._in(value.__func__, path, depth)
        elif _is_walked(value) or is_opaque(value):
            yield path, value
        elif isinstance(value, CONTAINERS):
            yield from self._entries(value, path, depth)
        elif isinstance(value, types.MappingProxyType):
            yield from self._in(dict(value), path, depth)

    def _entries(self, value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
        kind = next(kind for kind in CONTAINERS if isinstance(value, kind))
        length = kind.__len__(value)
        if length > LONG:
            return  # then the whole attribute is known by a trace, with all that is in it
        inner = dict.values(value) if kind is dict else kind.__iter__(value)
        if set(map(type, inner)) <= LEAVES:
            return
        self._left -= length
        if depth >= CONTAINERS_DEEP:
            yield path, Closed(value)
        if self._left < 0 or depth >= CONTAINERS_DEEP:
            return
        if kind is dict:
            pairs: Any = (
                (key if isinstance(key, _NAMES) else n, one)
                for n, (key, one) in enumerate(dict.items(value))
            )
        elif kind in (set, frozenset):
            pairs = enumerate(value if length == 1 else ())  # see is_opaque
        else:
            pairs = enumerate(kind.__iter__(value))
        for place, one in pairs:
            if type(one) not in LEAVES:
                yield from self._in(one, f"{path}[{place!r}]", depth + 1)


def _code_in(at: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Functions and classes of the user's: those of a class, and those that a function calls by name."""
    if isinstance(at, types.FunctionType):
        yield from _called_by(at, path)
    elif isinstance(at, type):
        for key, value in vars(at).items():
            inner = () if key in _BEFORE_STEPS else _functions_of(value)
            yield from ((f"{path}.{key}", one) for one in inner if _is_walked(one))


def _called_by(function: types.FunctionType, path: str) -> Iterator[tuple[str, Any]]:
    if _is_foreign(function):
        for inner in _wrapped_by(function):
            yield f"{path}.__wrapped__", inner
        return
    for name in global_names(function.__code__):
        one = function.__globals__.get(name)
        if isinstance(one, (types.FunctionType, type)) and _is_walked(one):
            yield one.__qualname__, one


def _is_foreign(function: types.FunctionType) -> bool:
    """Return True if its code is of a library that is not looked into, whatever name it has."""
    name = function.__globals__.get("__name__")
    return isinstance(name, str) and name != "__main__" and _root(name) in _NOT_WALKED


def _wrapped_by(function: types.FunctionType) -> Iterator[types.FunctionType]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # empty
            if type(cell.cell_contents) is types.FunctionType:
                yield cell.cell_contents


def _functions_of(value: Any) -> tuple[Any, ...]:
    """Return the functions in an entry of a class."""
    if isinstance(value, (types.FunctionType, type)):
        return (value,)
    if isinstance(value, (staticmethod, classmethod)):
        return _functions_of(value.__func__)
    if isinstance(value, property):
        return tuple(one for one in (value.fget, value.fset) if isinstance(one, types.FunctionType))
    if isinstance(value, (functools.partialmethod, functools.cached_property)):
        return _functions_of(getattr(value, "func"))  # noqa: B009 - for mypy
    return ()


@functools.lru_cache(maxsize=4096)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of globals and attributes in ``code``, and in functions that it defines."""
    inner = [
        name
        for one in code.co_consts
        if isinstance(one, types.CodeType)
        for name in global_names(one)
    ]
    return tuple(dict.fromkeys((*code.co_names, *inner)))


def _may_change(value: Any) -> bool:
    settings = getattr(type(value), "__dataclass_params__", None)
    return _is_walked(value) and not (settings is not None and settings.frozen)


def _is_walked(value: Any) -> bool:
    if isinstance(value, types.FunctionType):
        if _is_users_module(value.__module__ or "__main__"):
            return True
        return bool(value.__closure__) and _root(value.__module__) not in _NOT_WALKED
    if isinstance(value, type):
        return not issubclass(value, (Dataset, enum.Enum)) and _is_users(value)
    kind = type(value)
    if issubclass(kind, _PLAIN):  # its content is kept; perhaps it has attributes beside
        return _has_dict(kind) and (bool(vars(value)) or _is_users(kind))
    return _has_followed_attributes(kind)


def _has_dict(kind: type) -> bool:
    return kind.__dictoffset__ != 0


@_once_a_kind
def _has_followed_attributes(kind: type) -> bool:
    if issubclass(kind, (nn.Module, *_HOLDERS)):
        return True
    if issubclass(kind, (Dataset, enum.Enum)) or not (_has_dict(kind) or _slots_of(kind)):
        return False
    if callable(getattr(kind, "load_state_dict", None)):
        return False  # it gives its state itself
    is_data = hasattr(kind, "__getitem__") and hasattr(kind, "__len__")
    if is_data and not _is_users(kind):
        return False  # of a library: a frame, a table
    root = _root(kind.__module__)
    return root not in _NOT_WALKED or root == "__main__"


def _is_users(kind: type) -> bool:
    """Return True if a class is defined in a user's file, not in an installed package."""
    return _is_users_module(kind.__module__)


@functools.lru_cache(maxsize=4096)
def _is_users_module(name: str) -> bool:
    root = _root(name)
    if root == "__main__":
        return True
    if root in _NOT_WALKED:
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is None or is_users_file(file)


def _is_class_state(key: str, value: Any) -> bool:
    """Return True if methods of a class may count or collect in this attribute of it."""
    if key.startswith(("__", "_abc_")):
        return False
    is_code = isinstance(value, (type, types.FunctionType, staticmethod, classmethod, property))
    return not is_code and not hasattr(type(value), "__get__")


def _root(module: str | None) -> str:
    return (module or "").partition(".")[0]


@_once_a_kind
def _slots_of(kind: type) -> tuple[str, ...]:
    return tuple(_slot_names(kind))


def _slot_names(kind: type) -> Iterator[str]:
    for one in kind.__mro__:
        names = one.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name in ("__dict__", "__weakref__"):
                continue
            is_private = name.startswith("__") and not name.endswith("__")
            yield f"_{one.__name__.lstrip('_')}{name}" if is_private else name


def _cells(function: types.FunctionType) -> dict[str, types.CellType]:
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def _of_function(function: types.FunctionType) -> dict[str, Any]:
    """Return a function's attributes, the variables of its enclosing function, and defaults that may change.

    Nothing of a wrapper of a library's, as of ``torch.no_grad`` or ``singledispatch``: its caches are no state.
    """
    if _is_foreign(function):
        return {}
    found = {key: value for key, value in vars(function).items() if not key.startswith("__")}
    for name in _DEFAULTS:
        held = getattr(function, name) or ()
        values = held.values() if isinstance(held, dict) else held
        if not set(map(type, values)) <= LEAVES:
            found[name] = held
    wrapped = vars(function).get("__wrapped__")
    if wrapped is not None:
        found["__wrapped__"] = wrapped
    for name, cell in _cells(function).items():
        with contextlib.suppress(ValueError):  # empty
            found[name] = cell.cell_contents
    return found
