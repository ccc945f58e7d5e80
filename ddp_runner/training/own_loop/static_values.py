"""Reads what objects of a program hold by name, without a call of the program's code."""

from __future__ import annotations

import functools
import inspect
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from ddp_runner.system.code_files import is_users_file

NOTHING = object()
ABOVE = "super() of "  # before the name of a class: what super() gives there
_ELEMENTS_MAX = 16  # objects in a list that are looked at one by one
_WRAPPERS_MAX = 8


def attribute_of(value: Any, name: str) -> Any:
    """Return the attribute ``name`` of ``value``; the object at that key, in a list or dict of the program's own objects.

    Of a function, a name that is no attribute is a parameter: its default, which all calls share.
    """
    if isinstance(value, _Above):
        return value.attribute(name)
    if name.startswith(ABOVE):
        return _Above(value, name.removeprefix(ABOVE))
    own: Any = getattr(value, "__dict__", {})
    if name in own and not isinstance(own[name], (classmethod, staticmethod)):
        return own[name]
    parts = _parts_of(value)
    return parts[name] if name in parts else _of_class(value, name)


def _parts_of(value: Any) -> dict[str, Any]:
    """Return what a module, a function or a container holds by name, beside its attributes."""
    if isinstance(value, nn.Module):
        return {**value._parameters, **value._buffers, **value._modules}  # noqa: SLF001 - without a call
    if isinstance(value, (FunctionType, MethodType)):
        return _defaults(value)
    if (
        isinstance(value, dict) and type(value) is not dict
    ):  # which may give its entries as attributes
        return {key: one for key, one in dict.items(value) if isinstance(key, str)}
    return {str(key): value[key] for key in own_objects(value)}


def _of_class(value: Any, name: str) -> Any:
    """Return what ``value`` has from its class, a function bound as an access would bind it; of a property nothing."""
    found = inspect.getattr_static(value, name, NOTHING)
    if isinstance(found, staticmethod):
        return found.__func__
    if isinstance(found, (FunctionType, classmethod)):
        return MethodType(found.__func__ if isinstance(found, classmethod) else found, value)
    if inspect.ismemberdescriptor(found):  # of __slots__
        return getattr(value, name, NOTHING)
    return NOTHING if isinstance(found, property) else found


def own_objects(value: Any) -> tuple[int | str, ...]:
    """Return the keys of a list, tuple or dict whose values are modules, or the program's own objects and functions."""
    if type(value) not in (dict, list, tuple) or not 0 < len(value) <= _ELEMENTS_MAX:
        return ()
    keys = tuple(value) if type(value) is dict else tuple(range(len(value)))
    return tuple(key for key in keys if type(key) in (int, str) and _is_own(value[key]))


def _is_own(value: Any) -> bool:
    if isinstance(value, functools.partial):
        value = value.func
    is_function = isinstance(value, (FunctionType, MethodType))
    kinds = (value,) if is_function else vars(type(value)).values()
    functions = (one for one in kinds if isinstance(one, (FunctionType, MethodType)))
    is_module = isinstance(value, nn.Module)
    return is_module or any(is_users_file(one.__code__.co_filename) for one in functions)


def _defaults(function: FunctionType | MethodType) -> dict[str, Any]:
    """Return the defaults of a function's parameters by their names."""
    code, values = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    in_order = zip(
        reversed(names), reversed(values), strict=False
    )  # a program may set more of them
    by_name: dict[str, Any] = getattr(function, "__kwdefaults__", None) or {}
    return {**dict(in_order), **by_name}


def within_wrappers(function: Any) -> Any:
    """Return the program's function that a library's decorator, such as ``torch.no_grad()``, calls."""
    for _ in range(_WRAPPERS_MAX):
        within = inspect.getattr_static(function, "__wrapped__", None)
        is_own = isinstance(function, FunctionType) and is_users_file(function.__code__.co_filename)
        if within is None or is_own:
            break
        function = within
    return function


class _Above:
    """Stands for ``super()`` of ``value`` in a method of the class that has this name."""

    def __init__(self, value: Any, name: str) -> None:
        self._value = value
        order = type(value).__mro__
        at = next((at for at, one in enumerate(order) if one.__qualname__ == name), len(order))
        self._classes = order[at + 1 :]

    def attribute(self, name: str) -> Any:
        for one in self._classes:
            if isinstance(found := vars(one).get(name), FunctionType):
                return MethodType(found, self._value)
        return NOTHING
