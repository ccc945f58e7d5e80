"""What an object holds, whatever kind of object it is: read, written, and followed to what is inside.

Attributes in ``__dict__`` and in ``__slots__``, those of a class of the user's, and the variables that a function
keeps from the one around it. Libraries' objects are looked into as well, except for those of torch, numpy and the
like, whose attributes are their own business. Decides nothing about what is kept.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import enum
import functools
import io
import sys
import types
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from ddp_runner.training.exactness.values import ENTRIES_MAX

CONTAINERS_DEEP = 6  # one in another
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
)
_CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
_PLAIN = (*_CONTAINERS, str, bytes, bytearray, int, float, complex)
_NAMES = (str, int, float, bytes, tuple, type(None))  # what is written alike in all processes
_INSTALLED = ("site-packages", "dist-packages")


def attributes_of(at: Any) -> dict[str, Any]:
    """Name -> value, as they are now; without what a module of torch has for itself."""
    if isinstance(at, type):
        return {key: value for key, value in vars(at).items() if _is_class_state(key, value)}
    if isinstance(at, types.FunctionType):
        return _closed_over(at)
    found = {}
    for name in ("__dict__", *_slots_of(type(at))):
        with contextlib.suppress(AttributeError):  # it has none, or it was never set
            found[name] = object.__getattribute__(at, name)  # not by the user's __getattr__
    found.update(found.pop("__dict__", {}))
    if isinstance(at, nn.Module):
        for name in _OF_MODULES & found.keys():
            del found[name]
    return found


def write_attribute(at: Any, key: str, value: Any) -> None:
    """Set it, also where the object's class forbids that (a frozen dataclass)."""
    if isinstance(at, types.FunctionType):
        _cells(at)[key].cell_contents = value
        return
    try:
        setattr(at, key, value)
    except AttributeError:
        object.__setattr__(at, key, value)


def remove_attribute(at: Any, key: str) -> None:
    """Delete it; of a function, empty the variable."""
    if isinstance(at, types.FunctionType):
        del _cells(at)[key].cell_contents
        return
    try:
        delattr(at, key)
    except AttributeError:
        object.__delattr__(at, key)


def own_classes(at: Any) -> Iterator[type]:
    """The classes of an object that are the user's own, whose attributes all its objects share."""
    if isinstance(at, (type, types.FunctionType)):
        return
    for kind in type(at).__mro__:
        if _is_users(kind):
            yield kind


def is_opaque(value: Any) -> bool:
    """Whether it changes when it is used and cannot be looked into: an iterator, a file that is read."""
    if isinstance(value, io.IOBase):
        return not value.closed and value.readable()
    if isinstance(
        value, (set, frozenset)
    ):  # of objects: two processes have no common order of them
        return 1 < len(value) <= ENTRIES_MAX and any(map(_may_change, value))
    return hasattr(type(value), "__next__") and not isinstance(value, nn.Module)


def objects_in(at: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The objects in attributes of ``at``, also in its lists and dicts, whose attributes may change."""
    if isinstance(at, nn.Module):
        for key, module in at._modules.items():  # noqa: SLF001
            if module is not None:
                yield f"{path}.{key}", module
    for key, value in attributes_of(at).items():
        yield from _objects(value, f"{path}.{key}", 0)
    if isinstance(at, _CONTAINERS):  # one with attributes of its own
        yield from _entries(at, path, 0)


def _objects(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, functools.partial):
        yield from _objects((value.func, value.args, value.keywords), path, depth)
    elif isinstance(value, types.MethodType):
        yield from _objects(value.__self__, f"{path}.__self__", depth)
    elif _is_walked(value) or is_opaque(value):
        yield path, value
    elif isinstance(value, _CONTAINERS):
        yield from _entries(value, path, depth)


def _entries(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    if depth >= CONTAINERS_DEEP or len(value) > ENTRIES_MAX:
        return
    if isinstance(value, dict):
        pairs: Any = (
            (key if isinstance(key, _NAMES) else n, one)
            for n, (key, one) in enumerate(value.items())
        )
    elif isinstance(value, (set, frozenset)):
        pairs = enumerate(value if len(value) == 1 else ())  # see is_opaque
    else:
        pairs = enumerate(value)
    for place, one in pairs:
        if not isinstance(one, (str, int, float, bytes)):
            yield from _objects(one, f"{path}[{place!r}]", depth + 1)


def _may_change(value: Any) -> bool:
    settings = getattr(type(value), "__dataclass_params__", None)
    is_fixed = isinstance(value, enum.Enum) or (settings is not None and settings.frozen)
    return _is_walked(value) and not is_fixed


def _is_walked(value: Any) -> bool:
    if isinstance(value, (nn.Module, *_HOLDERS)):
        return True
    if isinstance(value, types.FunctionType):
        return bool(value.__closure__) and _root(value.__module__) not in _NOT_WALKED
    if isinstance(value, _PLAIN):  # its content is kept; perhaps it has attributes beside
        return _has_dict(value) and (bool(vars(value)) or _is_users(type(value)))
    return not isinstance(value, (type, Dataset)) and _has_followed_attributes(value)


def _has_dict(value: Any) -> bool:
    return type(value).__dictoffset__ != 0


def _has_followed_attributes(value: Any) -> bool:
    kind = type(value)
    if not (_has_dict(value) or any(_slots_of(kind))):
        return False
    if callable(getattr(kind, "load_state_dict", None)):
        return False  # it gives its state itself
    is_data = hasattr(kind, "__getitem__") and hasattr(kind, "__len__")
    if is_data and not _is_users(kind):
        return False  # of a library: a frame, a table
    root = _root(kind.__module__)
    return root not in _NOT_WALKED or root == "__main__"


def _is_users(kind: type) -> bool:
    """Whether a class stands in a file of the user's, and not among installed packages."""
    root = _root(kind.__module__)
    if root == "__main__":
        return True
    if root in _NOT_WALKED:
        return False
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is None or not any(folder in file for folder in _INSTALLED)


def _is_class_state(key: str, value: Any) -> bool:
    """Whether a class's attribute is something that its methods may count or collect in."""
    if key.startswith(("__", "_abc_")):
        return False
    is_code = isinstance(value, (type, types.FunctionType, staticmethod, classmethod, property))
    return not is_code and not hasattr(type(value), "__get__")


def _root(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _slots_of(kind: type) -> Iterator[str]:
    for one in kind.__mro__:
        names = one.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name in ("__dict__", "__weakref__"):
                continue
            is_private = name.startswith("__") and not name.endswith("__")
            yield f"_{one.__name__.lstrip('_')}{name}" if is_private else name


def _cells(function: types.FunctionType) -> dict[str, types.CellType]:
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def _closed_over(function: types.FunctionType) -> dict[str, Any]:
    found = {}
    for name, cell in _cells(function).items():
        with contextlib.suppress(ValueError):  # empty
            found[name] = cell.cell_contents
    return found
