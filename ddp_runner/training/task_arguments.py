"""Whether a task's arguments are of the types that its constructor names. Changes none of them.

An annotation is believed; without one the type of a default is a hint, and only what can hardly be
meant is refused. What has no plain meaning (a class of the user's own, a type variable) is let by.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

_LISTS = (list, tuple, set, frozenset, Sequence, Iterable, Collection)
_MAPPINGS = (dict, Mapping, MutableMapping)


def parameters_of(factory: Callable[..., Any]) -> list[inspect.Parameter]:
    """Its parameters, annotations as objects; left out where one names what is not there."""
    made = getattr(factory, "__init__", None) if inspect.isclass(factory) else factory
    names = getattr(inspect.unwrap(made), "__globals__", {}) if callable(made) else {}
    return [_evaluated(one, names) for one in inspect.signature(factory).parameters.values()]


def _evaluated(parameter: inspect.Parameter, names: dict[str, Any]) -> inspect.Parameter:
    if not isinstance(parameter.annotation, str):
        return parameter
    try:
        found = eval(parameter.annotation, names)  # noqa: S307 - as Python would, of the same file
    except Exception:  # noqa: BLE001 - any code; what only a type checker imports is not there
        found = parameter.empty
    return parameter.replace(annotation=found)


def unfit(value: object, parameter: inspect.Parameter) -> str:
    """What ``value`` should be for ``parameter``, in words; empty where it fits."""
    annotation, default = parameter.annotation, parameter.default
    if annotation is not parameter.empty:
        return "" if _fits(value, annotation) or value is default else _in_words(annotation)
    if default is parameter.empty or value is None:
        return ""
    hint = {bool: bool, int: float, float: float}.get(type(default))
    if hint is None or _fits(value, hint):
        return ""
    return f"{_in_words(hint)}, as its default {default!r} is"


def _fits(value: object, wanted: Any) -> bool:  # noqa: PLR0911 - one row a form of annotation
    origin, inner = get_origin(wanted), get_args(wanted)
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in inner)
    if wanted in (None, type(None)):
        return value is None
    if wanted is bool:
        return isinstance(value, bool)
    if wanted is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if wanted is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if wanted in (str, Path):
        return isinstance(value, (str, wanted))
    kind = origin or wanted
    if kind in _LISTS:
        is_list = isinstance(value, (list, tuple))
        items: Iterable[object] = value if isinstance(value, (list, tuple)) else ()
        return is_list and all(_fits_some(item, inner) for item in items)
    if kind in _MAPPINGS:
        return isinstance(value, Mapping)
    return True


def _fits_some(item: object, inner: tuple[Any, ...]) -> bool:
    return not inner or any(one is Ellipsis or _fits(item, one) for one in inner if one is not ...)


def _in_words(wanted: Any) -> str:
    origin, inner = get_origin(wanted), get_args(wanted)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_in_words(one) for one in inner))
    if origin is Literal:
        return f"one of {', '.join(str(one) for one in inner)}"
    words: Mapping[Any, str] = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text (write '\"123\"' for digits)",
        Path: "a path",
        None: "null",
        type(None): "null",
    }
    if wanted in words:
        return words[wanted]
    return "a mapping, {key: value}" if (origin or wanted) in _MAPPINGS else "a list, [a, b]"
