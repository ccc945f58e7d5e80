"""Turns messages into bytes and back, by the types of their fields. Knows no message and touches no socket.

Wire form: one JSON object, ``{"v": 1, "type": "Form", ...fields}``, and behind a line feed the field that is
``bytes``, if a message has one: it passes through unread. Unknown fields of a newer sender are dropped; an unknown
type or version is an error, never a guess.
"""

from __future__ import annotations

import enum
import json
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

WIRE_VERSION = 1
_HEAD = b'{"v": %d, "type": "' % WIRE_VERSION

Read = Callable[[Any], Any]


class WireError(ValueError):
    """A packet is not a message that this version understands."""


def by_name(kinds: Any) -> dict[str, type[Any]]:
    """The classes of a union, by their names: what one side takes."""
    return {kind.__name__: kind for kind in get_args(kinds)}


def encode(message: Any) -> bytes:
    """The bytes of a message, which is a dataclass."""
    kind = type(message)
    form = _form_of(kind)
    body: dict[str, object] = {"v": WIRE_VERSION, "type": kind.__name__}
    for name in form.names:
        body[name] = getattr(message, name)
    head = json.dumps(body, default=_plain).encode()
    return head if form.raw is None else b"%b\n%b" % (head, getattr(message, form.raw))


def name_of(packet: bytes) -> str:
    """The name of a message's class, without a look at the rest; empty where it is not written as here."""
    begin = len(_HEAD)
    return packet[begin : packet.find(b'"', begin)].decode() if packet.startswith(_HEAD) else ""


def decode(packet: bytes, kinds: Mapping[str, type[Any]]) -> Any:
    """The message in ``packet``, of one of these classes by name. Raises :class:`WireError` if it is none."""
    head, _, raw = packet.partition(b"\n")
    try:
        body = json.loads(head)
        version, name = body.pop("v"), body.pop("type")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise WireError(f"not a message: {packet[:80]!r}") from error
    if version != WIRE_VERSION:
        raise WireError(f"message version {version!r}, this side speaks {WIRE_VERSION}")
    kind = kinds.get(name) if isinstance(name, str) else None
    if kind is None:
        raise WireError(f"not a message for this side: {name!r}")
    form = _form_of(kind)
    if form.raw is not None:
        body[form.raw] = raw
    elif raw:
        raise WireError(f"bad {name}: {len(raw)} bytes behind it")
    try:
        return form.built(body)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise WireError(f"bad {name}: {error}") from error


def built(kind: type[Any], record: Mapping[str, Any]) -> Any:
    """A dataclass of what came as JSON. Raises KeyError, TypeError and ValueError if it is none."""
    return _form_of(kind).built(record)


@dataclass(frozen=True, slots=True)
class _Form:
    """The wire form of a class. ``reads``: converters of the fields that JSON changes."""

    kind: type[Any]
    names: tuple[str, ...]
    reads: Mapping[str, Read]
    raw: str | None  # the field that is bytes

    def built(self, record: Mapping[str, Any]) -> Any:
        """One of that class. Raises KeyError, TypeError and ValueError for what is none."""
        known = {name: record[name] for name in self.names if name in record}
        for name, read in self.reads.items():
            if name in known:
                known[name] = read(known[name])
        if self.raw is not None:
            known[self.raw] = record[self.raw]
        return self.kind(**known)


_FORMS: dict[type[Any], _Form] = {}  # of the classes that have been met


def _form_of(kind: type[Any]) -> _Form:
    form = _FORMS.get(kind)
    if form is None:
        form = _FORMS[kind] = _new_form(kind)
    return form


def _new_form(kind: type[Any]) -> _Form:
    hints = get_type_hints(kind)
    found = {one.name: hints[one.name] for one in fields(kind)}
    raw = next((name for name, hint in found.items() if hint is bytes), None)
    names = tuple(name for name in found if name != raw)
    reads = {name: read for name in names if (read := _reader(found[name])) is not None}
    return _Form(kind, names, reads, raw)


def _reader(hint: Any) -> Read | None:
    """Return a converter from JSON to a value of this type; None if JSON has such values."""
    origin, of = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        reads = [_reader(one) for one in of if one is not type(None)]
        return _unless_none(reads[0]) if len(reads) == 1 and reads[0] is not None else None
    if origin is tuple:
        return _each(_reader(of[0]))
    if origin is dict:
        return _by_key(int if of[0] is int else None, _reader(of[1]))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint
    if isinstance(hint, type) and is_dataclass(hint):
        return lambda value: built(hint, value)
    return None


def _unless_none(read: Read) -> Read:
    return lambda value: None if value is None else read(value)


def _each(read: Read | None) -> Read:
    return tuple if read is None else lambda value: tuple(map(read, value))


def _by_key(read_key: Read | None, read: Read | None) -> Read | None:
    if read_key is None and read is None:
        return None
    key, value = read_key or _same, read or _same
    return lambda found: {key(name): value(one) for name, one in found.items()}


def _same(value: Any) -> Any:
    return value


def _plain(value: object) -> object:
    if isinstance(value, enum.Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: getattr(value, one.name) for one in fields(value)}
    raise TypeError(f"{type(value).__name__} has no wire form")
