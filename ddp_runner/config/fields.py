"""Every setting as a name, a kind and a legal range, read off ``core.settings``. Never reads files.

Values are parsed here and not by pydantic, because a person must be shown the option, the value
and what would be right, in the same words for YAML, environment, command line and Python.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import types
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Annotated, Literal, Union, get_args, get_origin, get_type_hints

from pydantic.fields import FieldInfo

from ddp_runner.config.foreign import ALIASES, ANSWERS, REMOVED
from ddp_runner.config.suggest import nearest
from ddp_runner.core.errors import BadInputError
from ddp_runner.core.settings import PER_MACHINE, Settings
from ddp_runner.core.stopping import seconds_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

TASK_SECTION = "task"
STAGES = "stages"  # a list, which only files and Python give
BUILT_IN_TASKS = ("bytes", "synthetic")
_YES = frozenset({"true", "yes", "on", "1"})
_NO = frozenset({"false", "no", "off", "0"})
_MEANT = {"mode": "run.mode"}  # of those that have that last name
_NONE = frozenset({"none", "null", "off", "~"})


class Kind(Enum):
    """How a setting's value is written; the value is its name in messages."""

    INTEGER = "a whole number"
    NUMBER = "a number"
    SWITCH = "true or false"
    TEXT = "text"
    CHOICE = "one of"
    INTEGERS = "whole numbers separated by commas"
    TEXTS = "a list of texts"
    CHOICES = "names separated by commas, of"
    DURATION = "a time such as 23h30m, 90m or 3600 (seconds)"
    STEPS = "a whole number, 0 or more, or a share between 0 and 1"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FieldSpec:
    """One setting. ``choices`` are words allowed beside (or, for a CHOICE, instead of) numbers.

    ``per_machine``: on several machines each has its own value; else the coordinator's holds for all.
    """

    key: str
    kind: Kind
    default: object
    optional: bool = False
    per_machine: bool = False
    choices: tuple[str, ...] = ()
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def expected(self) -> str:
        """What a legal value is, in words."""
        parts = [self.kind.value]
        if self.kind is Kind.STEPS:
            return ", or ".join((str(self.kind.value), *self.choices))
        if self.kind is Kind.DURATION:
            return f"{self.kind.value}, or none"
        if self.kind in (Kind.CHOICE, Kind.CHOICES):
            parts.append(" " + ", ".join(self.choices))
        else:
            parts.append(self._range_words())
            parts.extend(f", or {word}" for word in self.choices)
        if self.optional:
            parts.append(", or none")
        return "".join(parts)

    def _range_words(self) -> str:
        words = []
        if self.at_least is not None:
            words.append(f"{self.at_least:g} or more")
        if self.above is not None:
            words.append(f"above {self.above:g}")
        if self.at_most is not None:
            words.append(f"at most {self.at_most:g}")
        if self.below is not None:
            words.append(f"below {self.below:g}" if self.below < 2**53 else "below 2**63")
        return ", " + " and ".join(words) if words else ""

    def contains(self, number: float) -> bool:
        """Whether ``number`` lies in the legal range."""
        return (
            math.isfinite(number)
            and (self.at_least is None or number >= self.at_least)
            and (self.above is None or number > self.above)
            and (self.at_most is None or number <= self.at_most)
            and (self.below is None or number < self.below)
        )

    def parse(self, value: object) -> object:
        """The setting's value for ``value``, text or native. Raises ValueError if it is none."""
        word = value.strip().lower() if isinstance(value, str) else None
        # YAML reads a bare `off` as False, so for a setting that can be off both mean None.
        if self.optional and (value is None or value is False or word in _NONE):
            return None
        if value is False and "off" in self.choices:
            return "off"
        if self.kind not in (Kind.TEXT, Kind.CHOICES) and word in self.choices:
            return word
        parse = {
            Kind.INTEGER: self._integer,
            Kind.NUMBER: self._number,
            Kind.SWITCH: parse_switch,
            Kind.TEXT: _text,
            Kind.CHOICE: _no_choice,
            Kind.INTEGERS: self._integers,
            Kind.TEXTS: _texts,
            Kind.CHOICES: self._choices,
            Kind.STEPS: _steps,
            Kind.DURATION: _duration,
        }[self.kind]
        return parse(value)

    def _integer(self, value: object) -> int:
        number = _whole(value)
        if not self.contains(number):
            raise ValueError(number)
        return number

    def _number(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError(value)  # noqa: TRY004 - see _whole
        number = float(value)
        if not self.contains(number):
            raise ValueError(number)
        return number

    def _integers(self, value: object) -> tuple[int, ...]:
        if isinstance(value, str):
            items: Sequence[object] = value.split(",") if value.strip() else ()
        else:
            items = value if isinstance(value, (list, tuple)) else (value,)
        return tuple(self._integer(item) for item in items)

    def _choices(self, value: object) -> tuple[str, ...]:
        """Each once, in the order in which they were given."""
        if isinstance(value, str):
            value = [word for word in value.split(",") if word.strip()]
        names = [name.strip().lower() for name in _texts(value)]
        if set(names) - set(self.choices):
            raise ValueError(value)
        return tuple(dict.fromkeys(names))


def _whole(value: object) -> int:
    if isinstance(value, bool):
        raise ValueError(value)  # noqa: TRY004 - every unfit value is the one error parse() names
    if isinstance(value, int):
        return value
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            value = float(value)  # 1e4 is a whole number too
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    raise ValueError(value)


def _steps(value: object) -> float:
    """A number of steps as an int, a share of them as a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(value)  # noqa: TRY004 - see _whole
    number = float(value)
    if 0 < number < 1:
        return number
    steps = _whole(value)
    if steps < 0:
        raise ValueError(value)
    return steps


def _duration(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(value)  # noqa: TRY004 - see _whole
    return seconds_of(str(value))


def parse_switch(value: object) -> bool:
    """Whether ``value``, text or native, means on. Raises ValueError if it is neither."""
    word = str(value).strip().lower()
    if not isinstance(value, (bool, int, str)) or word not in _YES | _NO:
        raise ValueError(value)
    return word in _YES


def _text(value: object) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise ValueError(value)
    return value


def _texts(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,) if value.strip() else ()
    if not isinstance(value, (list, tuple)):
        raise ValueError(value)  # noqa: TRY004 - see _whole
    return tuple(_text(item) for item in value)


def _no_choice(value: object) -> object:
    raise ValueError(value)


@cache
def sections() -> Mapping[str, type]:
    """Section name -> its dataclass, in the order of ``Settings``; without the free ``task``, and stages."""
    hints = get_type_hints(Settings)
    others = (TASK_SECTION, STAGES, "stage")
    return {name: kind for name, kind in hints.items() if name not in others}


@cache
def known_fields() -> Mapping[str, FieldSpec]:
    """Dotted key -> spec of every setting but the free ``task.X``."""
    found = {}
    for section, owner in sections().items():
        hints = get_type_hints(owner, include_extras=True)
        defaults = owner()
        for name, hint in hints.items():
            key = f"{section}.{name}"
            found[key] = _spec(key, hint, getattr(defaults, name))
    return found


def _spec(key: str, hint: object, default: object) -> FieldSpec:
    per_machine, hint = _without_mark(hint)
    plain: list[object] = []
    choices: list[str] = []
    limits: dict[str, float] = {}
    optional = False
    for part in _union_parts(hint):
        if part is type(None):
            optional = True
        elif get_origin(part) is Literal:
            choices.extend(get_args(part))
        elif get_origin(part) is tuple and get_origin(get_args(part)[0]) is Literal:
            choices.extend(get_args(get_args(part)[0]))
            plain.append("choices")
        else:
            bare, found = _bare_and_limits(part)
            plain.append(bare)
            limits.update(found)
    kinds = {
        int: Kind.INTEGER,
        float: Kind.NUMBER,
        bool: Kind.SWITCH,
        str: Kind.TEXT,
        (int,): Kind.INTEGERS,
        (str,): Kind.TEXTS,
        "duration": Kind.DURATION,
        "choices": Kind.CHOICES,
    }
    kind = kinds[plain[0]] if plain else Kind.CHOICE
    return FieldSpec(
        key=key,
        kind=Kind.STEPS if plain == [int, float] else kind,
        default=default,
        optional=optional,
        per_machine=per_machine,
        choices=tuple(choices),
        at_least=limits.get("ge"),
        above=limits.get("gt"),
        at_most=limits.get("le"),
        below=limits.get("lt"),
    )


def _without_mark(hint: object) -> tuple[bool, object]:
    """Whether ``hint`` has the mark of a machine's own settings, and the hint without it."""
    if get_origin(hint) is not Annotated:
        return False, hint
    bare, *notes = get_args(hint)
    others = tuple(note for note in notes if note != PER_MACHINE)
    return len(others) < len(notes), Annotated[(bare, *others)] if others else bare


def _union_parts(hint: object) -> Iterator[object]:
    if get_origin(hint) in (Union, types.UnionType):
        yield from get_args(hint)
    else:
        yield hint


def _bare_and_limits(hint: object) -> tuple[object, dict[str, float]]:
    """``Annotated[int, Field(ge=1)]`` -> ``int, {"ge": 1}``; a tuple of T becomes ``(T,)``."""
    if get_origin(hint) is tuple:
        bare, limits = _bare_and_limits(get_args(hint)[0])
        return (bare,), limits
    if get_origin(hint) is not Annotated:
        return hint, {}
    bare, *notes = get_args(hint)
    bare = "duration" if "duration" in notes else bare
    limits = {}
    for note in notes:
        for rule in note.metadata if isinstance(note, FieldInfo) else ():
            for name in ("ge", "gt", "le", "lt"):
                if hasattr(rule, name):
                    limits[name] = getattr(rule, name)
    return bare, limits


class ForeignNameError(BadInputError):
    """A name of another launcher's or trainer's, which has an answer."""


def normal_name(name: str) -> str:
    """``name`` in small letters and with underscores; the free names of a task stay as they are."""
    return name if name.startswith(f"{TASK_SECTION}.") else name.lower().replace("-", "_")


def removed(name: str) -> tuple[str, str] | None:
    """The entry of ``REMOVED`` for a setting by its dotted or its last name."""
    return next((REMOVED[key] for key in REMOVED if name in (key, key.partition(".")[2])), None)


def find_key(written: str, name: str, known: Sequence[str]) -> str:
    """The dotted key among ``known`` that ``name`` means.

    A last name that only one section has needs no section, and ``mode`` is that of the run. ``task.X``
    is free. Raises BadInputError, naming what the user wrote, for an unknown or ambiguous name.
    """
    name = normal_name(name)
    if name in known or (name.startswith("task.") and len(name) > len("task.")):
        return name
    if name in _MEANT and _MEANT[name] in known:
        return _MEANT[name]
    matches = [key for key in known if key.rpartition(".")[2] == name]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise BadInputError(written, "", f"could be {' or '.join(matches)}; write the whole name")
    if name in ALIASES:
        return ALIASES[name]
    if name in ANSWERS:
        raise ForeignNameError(written, "", f"unknown setting; {ANSWERS[name]}")
    if (gone := removed(name)) is not None:
        raise ForeignNameError(written, "", f"is no setting any more; {gone[1]}")
    raise BadInputError(written, "", f"unknown setting{_did_you_mean(name, known)}")


def whose_value(name: str, value: object) -> str:
    """For a last name that means one setting of several: the other one that takes ``value``, in words."""
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
