"""Says what an object holds, and writes what was loaded into the objects that are there, which stay the program's.

Never pickles, and never decides when.
"""

from __future__ import annotations

import copyreg
import operator
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ddp_runner.values.generators import generator_kind, read_generator, set_generator

PROTOCOL = 5
_ENTRIES_MAX = 1_000  # of a list whose entries are written in place
CONSTANT = (int, float, complex, str, bytes, tuple, frozenset, type(None))
_PLAIN = (dict, list, deque, set, bytearray)
_ENTRIES = (OrderedDict, dict, list, deque, set)  # the more special class first
_ATOMS = {int, float, complex, str, bytes, bool, type(None)}
# Pickle names these; it does not copy them.
_OF_PROGRAM = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
_NEW = (copyreg.__newobj__, copyreg.__newobj_ex__, copyreg._reconstructor)  # type: ignore[attr-defined] # noqa: SLF001


class NotInPlaceError(TypeError):
    """Raised for an object that cannot take the content of another one."""


def reduced_of(value: Any) -> Any:
    """Return how pickle takes ``value`` apart."""
    return value.__reduce_ex__(PROTOCOL)


def content_of(value: Any) -> tuple[str, Any]:
    """Return the way in which ``value`` is restored, and its content; never the object itself."""
    if isinstance(value, (np.ndarray, Tensor, *_PLAIN)):
        return _content_of_plain(value)
    if _has_state(value):
        return "state_dict", value.state_dict()
    if kind := generator_kind(value):
        return "generator", (kind, read_generator(kind, value))
    reduced = reduced_of(value)
    is_made_empty = reduced[0] in _NEW or (reduced[0] is type(value) and not reduced[1])
    if isinstance(reduced, str) or not is_made_empty:
        raise NotInPlaceError
    state = reduced[2] if len(reduced) > 2 else None
    # A copy: the pickle must not hold the object's own dict as another one.
    return "object", dict(state) if type(state) is dict else state


def _content_of_plain(value: Any) -> tuple[str, Any]:
    """Return the same for arrays, tensors, lists, dicts and the like, and their subclasses."""
    if _has_state(value):
        return "state_dict", value.state_dict()
    if type(value) is np.ndarray:
        return "array", value.view()
    if type(value) is Tensor:
        return "tensor", value.detach()
    if type(value) in _PLAIN and type(value) is not set:  # whose copy has another order
        return "plain", value.copy()
    if isinstance(value, (dict, list, set, deque)):
        base = _base_of(value)
        entries = list(base.items(value) if issubclass(base, dict) else base.__iter__(value))
        return "entries", (entries, dict(getattr(value, "__dict__", {})), _slots_of(value))
    raise NotInPlaceError


def _has_state(value: Any) -> bool:
    names = ("state_dict", "load_state_dict")
    return not isinstance(value, type) and all(
        callable(getattr(type(value), name, None)) for name in names
    )


class Merging:
    """Writes loaded content into the program's objects: each live object takes the content of one loaded object.

    The step that is given up may have made two names one object. First each loaded object is matched with the live one at its place. Then everything is written, and each reference
    to a loaded object that was matched becomes one to its live object. So what was one object is one object again.
    """

    def __init__(self, kept: Iterable[Any]) -> None:
        """``kept``: the objects that are written separately, even if another object holds them."""
        # id of a loaded object -> the object that stands for it
        self._final: dict[int, Any] = {id(one): one for one in kept}
        self._taken = set(self._final)  # ids of live objects that stand for a loaded one
        self._matched: list[tuple[Any, Any]] = []  # live, loaded
        self._own: list[Any] = []  # loaded objects that stand for themselves
        self._held: list[Any] = []  # so that no id is reused

    def give_back(self, pairs: Iterable[tuple[Any, tuple[str, Any]]]) -> None:
        """Write each content, as :func:`content` has returned it, into its live object."""
        pairs = list(pairs)
        self._held.append(pairs)
        places: deque[tuple[Any, Any]] = deque()
        for live, content in pairs:
            places += places_of_content(live, content)
        self._match(places)
        self._write_numbers(pairs)
        for live, content in pairs:
            self._write_content(live, content)
        for live, new in self._matched:
            self._write(live, new)
        self._settle()

    def _match(self, places: deque[tuple[Any, Any]]) -> None:
        """Match the objects at the same places, those nearest to a kept object first."""
        while places:
            live, new = places.popleft()
            if type(live) is not type(new) or live is new or id(new) in self._final:
                continue
            if isinstance(new, tuple):
                places += zip(live, new, strict=False)
            elif id(live) not in self._taken and _can_take(live, new):
                self._final[id(new)] = live
                self._taken.add(id(live))
                self._matched.append((live, new))
                places += _places(live, new)

    def _write_numbers(self, pairs: list[tuple[Any, tuple[str, Any]]]) -> None:
        """Write all arrays and tensors; then leave out those whose memory has taken other content: views."""
        inner = [pair for pair in self._matched if isinstance(pair[0], (np.ndarray, Tensor))]
        outer = [(live, held) for live, (way, held) in pairs if way in ("array", "tensor")]
        for live, new in (*inner, *outer):
            _write_numbers(live, new)
        for live, new in inner:
            if not _is_same(live, new):
                self._final[id(new)] = new
                self._own.append(new)

    def _write_content(self, live: Any, content: tuple[str, Any]) -> None:
        way, held = content
        if way == "state_dict":
            live.load_state_dict(self._settled(held))
        elif way == "generator":
            set_generator(held[0], live, held[1])
        elif way == "entries":
            entries, attributes, *slots = held
            self._fill_entries(live, entries)
            self._fill_attributes(live, attributes, *slots)
        elif way == "object":
            if hasattr(live, "__setstate__"):
                if held is not None:
                    live.__setstate__(self._settled(held))
            else:
                attributes, slots = held if isinstance(held, tuple) else (held, None)
                self._fill_attributes(live, attributes or {}, slots or {})
        else:
            self._write(live, held)

    def _settled(self, loaded: Any) -> Any:
        """Return ``loaded``, with references to the live objects in it."""
        found = self._of(loaded)
        self._settle()
        return found

    def _settle(self) -> None:
        """Let loaded objects that stand for themselves refer to the live ones."""
        while self._own:
            new = self._own.pop()
            self._write(new, new)

    def _of(self, new: Any) -> Any:
        """Return the object that stands for ``new`` from now on."""
        if type(new) in _ATOMS:
            return new
        if id(new) in self._final:
            return self._final[id(new)]
        found = new
        if type(new) is frozenset or isinstance(new, tuple):
            inner = [self._of(one) for one in new]
            if any(one is not old for one, old in zip(inner, new, strict=True)):
                kind: Any = type(new)
                found = frozenset(inner) if kind is frozenset else tuple.__new__(kind, inner)
        else:
            self._own.append(new)
        self._held.append(new)
        self._final[id(new)] = found
        return found

    def _write(self, live: Any, new: Any) -> None:
        """Write ``new`` into ``live``, which may be the same object."""
        if isinstance(live, (Tensor, *_OF_PROGRAM)):
            return  # tensors are written already
        if isinstance(live, np.ndarray):
            self._fill_objects(live)
        elif live is not new and (kind := generator_kind(live)):
            set_generator(kind, live, read_generator(kind, new))
        elif live is not new and isinstance(live, nn.Module):
            live.load_state_dict(new.state_dict())
        elif isinstance(live, bytearray):
            if live != new:
                live[:] = new
        else:
            base = _base_of(live)
            if base is not None:
                entries = base.items(new) if issubclass(base, dict) else base.__iter__(new)
                self._fill_entries(live, list(entries))
            if type(live) is not base:
                self._fill_attributes(live, getattr(new, "__dict__", {}), _slots_of(new))

    def _fill_objects(self, live: Any) -> None:
        """Let an array of objects refer to the live ones."""
        if live.dtype == object and live.flags.writeable:
            for place in np.ndindex(live.shape):
                found = self._of(live[place])
                if found is not live[place]:
                    live[place] = found

    def _fill_entries(self, live: Any, entries: list[Any]) -> None:
        """Replace the entries of a dict, list, set or deque, by the methods of that class and not of a subclass."""
        base: Any = _base_of(live)
        if issubclass(base, dict):
            entries = [(self._of(key), self._of(one)) for key, one in entries]
            flat = [part for pair in entries for part in pair]
            if _are_same([part for pair in base.items(live) for part in pair], flat):
                return
            base.clear(live)
            for key, one in entries:
                base.__setitem__(live, key, one)
            return
        entries = [self._of(one) for one in entries]
        if issubclass(base, set):
            if not _is_same_set(list(base.__iter__(live)), entries):
                base.clear(live)
                base.update(live, entries)
        elif not _are_same(list(base.__iter__(live)), entries):
            base.clear(live)
            base.extend(live, entries)

    def _fill_attributes(
        self, live: Any, attributes: Mapping[str, Any], slots: Mapping[str, Any] | None = None
    ) -> None:
        """Replace the attributes. ``slots``: of ``__slots__``; None: unknown, they stay."""
        if hasattr(live, "__dict__"):
            self._fill_entries(vars(live), list(attributes.items()))
        if slots is None:
            return
        for name in _slots_of(live):
            if name not in slots:
                object.__delattr__(live, name)
        for name, one in slots.items():
            found = self._of(one)
            if getattr(live, name, _OF_PROGRAM) is not found:
                object.__setattr__(live, name, found)


def places_of_content(live: Any, content: tuple[str, Any]) -> list[tuple[Any, Any]]:
    """Return what is at the same places in ``live`` and in ``content``. Raises NotInPlaceError if one cannot take it."""
    way, held = content
    if way in ("array", "tensor", "plain"):
        if type(live) is not type(held) or not _can_take(live, held):
            raise NotInPlaceError(f"{type(live).__name__} of another shape or type")
        return _places(live, held)
    if way == "entries" and isinstance(live, dict):
        entries, attributes, *_ = held
        found = [(dict.get(live, key), one) for key, one in entries]
        return found + _places(getattr(live, "__dict__", {}), attributes)
    if way == "object" and not hasattr(live, "__setstate__"):
        attributes, slots = held if isinstance(held, tuple) else (held, None)
        return [
            *_places(getattr(live, "__dict__", {}), attributes or {}),
            *_places(_slots_of(live), slots or {}),
        ]
    return []


def _places(live: Any, new: Any) -> list[tuple[Any, Any]]:
    """Return what is at the same places in two objects of one type."""
    if type(live) is dict:
        return [(live[key], one) for key, one in new.items() if key in live]
    if type(live) is list:
        return list(zip(live, new, strict=False)) if len(new) <= _ENTRIES_MAX else []
    if isinstance(live, nn.Module):
        return [
            *zip(live.parameters(), new.parameters(), strict=False),
            *zip(live.buffers(), new.buffers(), strict=False),
        ]
    return _places(vars(live), vars(new)) if _is_plain_object(live) else []


def _can_take(live: Any, new: Any) -> bool:
    """Return True if ``live`` can take the content of ``new``, which is of the same type."""
    if isinstance(live, Tensor):
        names = ("shape", "dtype", "device", "layout", "requires_grad")
        return all(getattr(live, name) == getattr(new, name) for name in names)
    if isinstance(live, np.ndarray):
        is_plain = type(live) is np.ndarray and live.flags.writeable
        return bool(is_plain and live.shape == new.shape and live.dtype == new.dtype)
    if type(live) is deque:
        return bool(live.maxlen == new.maxlen)
    if generator_kind(live):
        bits = [type(getattr(one, "bit_generator", None)) for one in (live, new)]
        return bits[0] is bits[1] and bool(getattr(live, "device", 0) == getattr(new, "device", 0))
    return isinstance(live, nn.Module) or type(live) in _PLAIN or _is_plain_object(live)


def _write_numbers(live: Any, new: Any) -> None:
    if isinstance(live, Tensor):
        with torch.no_grad():
            live.detach().copy_(new.detach())
    else:
        np.copyto(live, new)


def _is_same(live: Any, new: Any) -> bool:
    """Return True if arrays or tensors of one shape and type have the same bits."""
    if isinstance(live, np.ndarray):
        return bool(live.tobytes() == new.tobytes())
    if live.layout is not torch.strided or live.is_meta:
        return True
    pair = [one.detach().contiguous().reshape(-1).view(torch.uint8) for one in (live, new)]
    return torch.equal(*pair)


def _are_same(present: list[Any], wanted: list[Any]) -> bool:
    return len(present) == len(wanted) and all(map(operator.is_, present, wanted))


def _is_same_set(live: list[Any], wanted: list[Any]) -> bool:
    """Return True if a set has not changed since ``wanted`` was pickled, also not in its order."""
    if _are_same(live, wanted):
        return True
    if not all(isinstance(one, (*CONSTANT, bool)) for one in wanted):
        return False
    # Pickle builds new sets, in another order than that of a set that has become smaller. So does this.
    built: set[Any] = set()
    for one in live:
        built.add(one)
    return [(type(one), one) for one in built] == [(type(one), one) for one in wanted]


def _base_of(value: Any) -> Any:
    """Return the class whose methods read and write the entries of ``value``; None for what has no entries."""
    return next((one for one in _ENTRIES if isinstance(value, one)), None)


def _slots_of(value: Any) -> dict[str, Any]:
    """Return the values of ``__slots__`` that are set."""
    names = copyreg._slotnames(type(value))  # type: ignore[attr-defined] # noqa: SLF001
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _is_plain_object(value: Any) -> bool:
    """Return True if ``value`` has no content but its attributes."""
    kind: Any = type(value)
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, type)
        and not hasattr(kind, "__setstate__")
        and kind.__reduce__ is object.__reduce__
        and kind.__reduce_ex__ is object.__reduce_ex__
        and not any("__slots__" in vars(one) and vars(one)["__slots__"] for one in kind.__mro__)
        and not isinstance(value, (dict, list, set, deque))
    )


def inside_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects inside ``value``, each with its path from there."""
    entries: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict):
        entries = ((f"[{key!r}]", one) for key, one in list(value.items()))
    elif isinstance(value, (list, tuple, deque)):
        entries = ((f"[{number}]", one) for number, one in enumerate(list(value)))
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        entries = ((f".{key}", one) for key, one in list(vars(value).items()))
    yield from entries
