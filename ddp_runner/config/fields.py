"""Every setting, as the notes at its field in ``core.settings`` declare it, and the names that it has. Never reads files.

The words of a message come from the notes that check a value, because a person must be shown the option, the value
and what would be right, in the same words for YAML, environment, command line and Python.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from ddp_runner.config.foreign import ANSWERS, REMOVED
from ddp_runner.config.suggest import nearest
from ddp_runner.core.settings import Settings
from ddp_runner.core.settings.declaration import (
    DERIVED,
    NAMES,
    PER_MACHINE,
    PER_STAGE,
    TEXT,
    Alias,
    DeviceDefault,
    Limit,
    OnResume,
    Option,
    ReadBy,
    Written,
    legal,
)
from ddp_runner.kernel.rules.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

TASK_SECTION = "task"
STAGES = "stages"  # a list, which only files and Python give
BUILT_IN_TASKS = ("bytes", "synthetic")
_MEANT = {"mode": "run.mode"}  # of those that have that last name
_NONE = frozenset({"none", "null", "off", "~"})
_Note = TypeVar("_Note")


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSpec:
    """One setting: its name and default, its type, and the notes that its annotation has.

    ``hint``: that annotation; ``written``: how its values are written, None where they are only words; ``words``: what may be given beside
    numbers, or instead of them; ``limits``: of its numbers; ``optional``: it may be None.
    """

    hint: Any
    section: str
    name: str
    default: object
    written: Written | None
    words: tuple[str, ...]
    limits: tuple[str, ...]
    optional: bool
    notes: tuple[object, ...]

    @property
    def key(self) -> str:
        """The dotted name."""
        return f"{self.section}.{self.name}"

    @property
    def on_resume(self) -> OnResume:
        """The meaning of a changed value for a resumed run. Every setting must declare one."""
        return self.notes_of(OnResume)[0]

    @property
    def is_derived(self) -> bool:
        """True if the run's record holds what follows from the value instead of the value itself."""
        return DERIVED in self.notes

    @property
    def per_machine(self) -> bool:
        """True if each machine has its own value; otherwise the coordinator's value holds for all machines."""
        return PER_MACHINE in self.notes

    @property
    def per_stage(self) -> bool:
        """True if a stage may have its own value."""
        return PER_STAGE in self.notes

    @property
    def options(self) -> tuple[Option, ...]:
        """Its options besides ``--SECTION.NAME``."""
        return tuple(dataclasses.replace(one, key=self.key) for one in self.notes_of(Option))

    @property
    def read_by(self) -> tuple[str, ...]:
        """The built-in tasks that read it; empty where it is not a task's business."""
        return next((one.tasks for one in self.notes_of(ReadBy)), ())

    def notes_of(self, kind: type[_Note]) -> tuple[_Note, ...]:
        """The notes of one kind."""
        return tuple(note for note in self.notes if isinstance(note, kind))

    def expected(self) -> str:
        """Return a description of the legal values, for messages."""
        if self.written is None or self.written is NAMES:
            kind = "one of" if self.written is None else NAMES.words
            found = f"{kind} {', '.join(self.words)}"
        else:
            limits = f", {' and '.join(self.limits)}" if self.limits else ""
            found = ", or ".join((self.written.words + limits, *self.words))
        return f"{found}, or none" if self.optional else found

    def parse(self, value: object) -> Any:
        """The setting's value for ``value``, text or native. Raises ValueError or OverflowError if it is none.

        The words that a setting has may be given in any case.
        """
        word = value.strip().lower() if isinstance(value, str) else None
        # YAML reads a bare `off` as False, so for a setting that can be off both mean None.
        if self.optional and (value is None or value is False or word in _NONE):
            return None
        if value is False and "off" in self.words:
            return "off"
        if word in self.words and self.written not in (TEXT, NAMES):
            return word
        return legal(self.hint, value)


@cache
def sections() -> Mapping[str, type]:
    """Section name -> its dataclass, in the order of ``Settings``; without the free ``task``, and stages."""
    return {
        field.name: field.type
        for field in dataclasses.fields(Settings)
        if isinstance(field.type, type) and dataclasses.is_dataclass(field.type)
    }


@cache
def known_fields() -> Mapping[str, FieldSpec]:
    """Dotted key -> spec of every setting but the free ``task.X``."""
    specs = (
        _spec(section, field)
        for section, owner in sections().items()
        for field in dataclasses.fields(owner)
    )
    return {spec.key: spec for spec in specs}


def _spec(section: str, field: dataclasses.Field[Any]) -> FieldSpec:
    bare, *notes = get_args(field.type)
    parts = tuple(_parts(bare, tuple(notes)))
    written = [one for _, beside in parts for one in beside if isinstance(one, Written)]
    return FieldSpec(
        hint=field.type,
        section=section,
        name=field.name,
        default=field.default,
        written=written[-1] if written else None,  # of a list, and not of one of its items
        words=tuple(word for part, _ in parts for word in _words_of(part)),
        limits=tuple(one.words for _, beside in parts for one in beside if isinstance(one, Limit)),
        optional=any(part is type(None) for part, _ in parts),
        notes=tuple(notes),
    )


def _parts(hint: object, notes: tuple[object, ...]) -> Iterator[tuple[object, tuple[object, ...]]]:
    """The types that ``hint`` is made of, each with its notes: those in a union or a list, and the whole as the last."""
    if get_origin(hint) is Annotated:
        bare, *inner = get_args(hint)
        yield from _parts(bare, (*inner, *notes))
        return
    if get_origin(hint) in (Union, types.UnionType, tuple):
        for part in get_args(hint):
            yield from _parts(part, ())
    yield hint, notes


def _words_of(hint: object) -> tuple[str, ...]:
    return get_args(hint) if get_origin(hint) is Literal else ()


# Name of another launcher's or trainer's -> the setting that means the same.
ALIASES: Mapping[str, str] = {
    name: spec.key
    for spec in known_fields().values()
    for alias in spec.notes_of(Alias)
    for name in alias.names
}
# Of these, the switches -> the values of the setting for true and for false; None: leaves it as it is.
SWITCHES: Mapping[str, tuple[str | None, str | None]] = {
    name: (alias.on, alias.off)
    for spec in known_fields().values()
    for alias in spec.notes_of(Alias)
    if alias.is_switch
    for name in alias.names
}


def device_defaults(device: Literal["gpu", "cpu"]) -> Mapping[str, object]:
    """Dotted key -> default on this device, of the settings that have another one there."""
    return {
        spec.key: getattr(note, device)
        for spec in known_fields().values()
        for note in spec.notes_of(DeviceDefault)
        if getattr(note, device) is not None
    }


class ForeignNameError(BadInputError):
    """A name of another launcher's or trainer's, which has an answer."""


def normal_name(name: str) -> str:
    """``name`` in small letters and with underscores; the free names of a task stay as they are."""
    return name if name.startswith(f"{TASK_SECTION}.") else name.lower().replace("-", "_")


def removed(name: str) -> tuple[str, str] | None:
    """The entry of ``REMOVED`` for a setting by its dotted or its last name."""
    return next((REMOVED[key] for key in REMOVED if name in (key, key.partition(".")[2])), None)


def key_of(name: str, known: Sequence[str]) -> str:
    """Return the dotted key among ``known`` that ``name`` means; empty for an unknown or ambiguous name."""
    name = normal_name(name)
    if name in known or (name.startswith("task.") and len(name) > len("task.")):
        return name
    if name in _MEANT and _MEANT[name] in known:
        return _MEANT[name]
    matches = _with_last_name(name, known)
    return matches[0] if len(matches) == 1 else "" if matches else ALIASES.get(name, "")


def _with_last_name(name: str, known: Sequence[str]) -> list[str]:
    return [key for key in known if key.rpartition(".")[2] == name]


def find_key(written: str, name: str, known: Sequence[str]) -> str:
    """Return the dotted key among ``known`` that ``name`` means.

    A last name that only one section has needs no section, and ``mode`` is that of the run. ``task.X``
    is free. Raises BadInputError, naming what the user wrote, for an unknown or ambiguous name.
    """
    name = normal_name(name)
    if found := key_of(name, known):
        return found
    if matches := _with_last_name(name, known):
        raise BadInputError(written, "", f"could be {' or '.join(matches)}; write the whole name")
    if name in ANSWERS:
        raise ForeignNameError(written, "", f"unknown setting; {ANSWERS[name]}")
    if (gone := removed(name)) is not None:
        raise ForeignNameError(written, "", f"is no longer a setting; {gone[1]}")
    raise BadInputError(written, "", f"unknown setting{_did_you_mean(name, known)}")


def whose_value(name: str, value: object) -> str:
    """Return a hint at the other setting with this last name, if that one accepts ``value``; else ""."""
    name = normal_name(name)
    for key, spec in known_fields().items() if name in _MEANT else ():
        if key.rpartition(".")[2] == name and key != _MEANT[name]:
            with contextlib.suppress(ValueError, OverflowError):
                spec.parse(value)
                return f"; {key}={value} is another setting"
    return ""


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    last = name.rpartition(".")[2]
    if last in ALIASES:  # in a section where it is not
        return f"; did you mean {ALIASES[last]}?"
    found = nearest(name, [*known, *ALIASES])
    return f"; did you mean {ALIASES.get(found, found)}?" if found else ""
