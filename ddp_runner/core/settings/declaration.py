"""The notes that stand at the field of a setting, and the types that its values have. Reads nothing.

A setting is declared once: its annotation holds its type and range, what a resume makes of a change,
whether machines or stages may differ in it, its option, and the names that others have for it. ``config.fields``
reads these notes, and everything else asks ``config.fields``.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, fields
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

_YES = frozenset({"true", "yes", "on", "1"})
_NO = frozenset({"false", "no", "off", "0"})
_SPAN = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_CLOCK = re.compile(r"(?:(\d+):)?(\d+):(\d+):(\d+)")


class OnResume(Enum):
    """The meaning of a setting that differs from the resumed run's. Each setting has one of these."""

    REFUSED = "another run"  # part of resume_key()
    REPORTED = (
        "goes on, with other steps"  # part of recipe(); what is computed alike is not reported
    )
    CANNOT_MATTER = "the same steps"


class Mark(Enum):
    """Further properties of a setting."""

    PER_MACHINE = "on several machines each has its own value; else the coordinator's holds for all"
    PER_STAGE = "a stage may have its own value; else the value belongs to the run"
    DERIVED = "the record of a run has what follows from the value, which config.identity says"
    OF_RATE = "it acts through the learning rate alone"


REFUSED, REPORTED, CANNOT_MATTER = OnResume.REFUSED, OnResume.REPORTED, OnResume.CANNOT_MATTER
PER_MACHINE, PER_STAGE = Mark.PER_MACHINE, Mark.PER_STAGE
DERIVED, OF_RATE = Mark.DERIVED, Mark.OF_RATE


class OptionGroup(Enum):
    """The headings of ``--help``, in its order."""

    WHAT = "What to train"
    HOW_LONG = "How long and how much"
    WHERE = "Where it computes"
    MACHINES = "Several machines: the same command on each"
    FILES = "Files"
    KEEPING_GOING = "Keeping going"
    TRYING_OUT = "Trying out"
    HELP = "Help"


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a command. ``key`` is the setting that it assigns, "" where it is not a setting.

    ``metavar`` is "" for a switch, which assigns ``constant``. ``default`` is how the help shows the setting's,
    where that depends on other settings. ``aliases``: other spellings of ``long``. At a field ``key`` is left out.
    """

    long: str
    _: KW_ONLY
    says: str
    group: OptionGroup | None = None
    short: str = ""
    metavar: str = ""
    constant: str = "true"
    default: str = ""
    aliases: tuple[str, ...] = ()
    key: str = ""


class Alias:
    """Names that other launchers and trainers have for a setting.

    Where they are switches there, ``on`` and ``off`` are the setting's values for true and false; None: it
    stays as it is.
    """

    __slots__ = ("names", "off", "on")

    def __init__(self, *names: str, on: str | None = None, off: str | None = None) -> None:
        self.names, self.on, self.off = names, on, off

    @property
    def is_switch(self) -> bool:
        """True if true and false are translated to values of the setting, as for a switch."""
        return self.on is not None or self.off is not None


class ReadBy:
    """The built-in tasks that read the setting. A user's own task reads it if it is given all settings."""

    __slots__ = ("tasks",)

    def __init__(self, *tasks: str) -> None:
        self.tasks = tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDefault:
    """The default on GPUs, or on the CPU, where it is another one there; None: it is not."""

    gpu: object = None
    cpu: object = None


@dataclass(frozen=True, slots=True)
class Written:
    """The written form of a type's values: the words for it in messages, and the function that reads them.

    ``read`` takes text or a native value, and raises ValueError.
    """

    words: str
    read: Callable[[object], object]


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit of a number: the words for it in messages, and the function that tests it."""

    words: str
    holds: Callable[[float], bool]


@dataclass(frozen=True, slots=True)
class EmptyAs:
    """The word that stands for an empty text."""

    word: str


def at_least(bound: float) -> Limit:
    """Return the limit that includes ``bound`` as the lowest number."""
    return Limit(f"{bound:g} or more", lambda number: number >= bound)


def at_most(bound: float) -> Limit:
    """Return the limit that includes ``bound`` as the highest number."""
    return Limit(f"at most {bound:g}", lambda number: number <= bound)


def above(bound: float) -> Limit:
    """Return the limit that excludes ``bound`` and lower numbers."""
    return Limit(f"above {bound:g}", lambda number: number > bound)


def below(bound: float, words: str = "") -> Limit:
    """Return the limit that excludes ``bound`` and higher numbers. ``words``: for ``bound``."""
    return Limit(f"below {words or f'{bound:g}'}", lambda number: number < bound)


def legal(hint: Any, value: object) -> Any:
    """Return the setting's value for ``value``, text or native. Raises ValueError or OverflowError if it is none.

    ``hint``: the annotation of the field, with its notes.
    """
    notes: Sequence[object] = ()
    if get_origin(hint) is Annotated:
        hint, *notes = get_args(hint)
    for note in notes:
        if isinstance(note, Written):
            value = note.read(value)
    found = _of_type(hint, value)
    for note in notes:
        if isinstance(note, Limit) and not note.holds(found):
            raise ValueError(value)
        if isinstance(note, EmptyAs) and found == note.word:
            return ""
    return found


def _of_type(hint: Any, value: object) -> Any:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        for part in parts:
            with suppress(ValueError, OverflowError):
                return legal(part, value)
    elif origin is Literal:
        if value in parts:
            return value
    elif origin is tuple:
        if isinstance(value, (list, tuple)):
            return tuple(legal(parts[0], item) for item in value)
    elif isinstance(value, origin or hint) and (hint is bool or not isinstance(value, bool)):
        return _bare(value)
    raise ValueError(value)


def _bare(value: object) -> object:
    """Return the plain value of one whose type is derived from a plain one, as numpy's numbers and members of enums."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return value if isinstance(value, bool) else int(value)
    return float(value) if isinstance(value, float) else value


@dataclass(frozen=True, slots=True)
class Section:
    """Makes each value of a section of settings legal, and refuses one that cannot be."""

    def __post_init__(self) -> None:
        """Raise ValueError for the first field whose value is not legal."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value is field.default:
                continue
            try:
                object.__setattr__(self, field.name, legal(field.type, value))
            except (ValueError, OverflowError):
                raise ValueError(
                    f"{type(self).__name__}.{field.name}: {value!r} is not legal"
                ) from None


def read_switch(value: object) -> bool:
    """Return True if ``value``, text or native, means on. Raises ValueError if it is neither on nor off."""
    word = str(value).strip().lower()
    if not isinstance(value, (bool, int, str)) or word not in _YES | _NO:
        raise ValueError(value)
    return word in _YES


def _whole(value: object) -> int:
    if isinstance(value, bool):
        raise ValueError(value)  # noqa: TRY004 - the one error of a value that is not legal
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


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(value)  # noqa: TRY004 - see _whole
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(value)
    return number


def _steps_or_share(value: object) -> float:
    """A number of steps as an int, a share of them as a float."""
    number = _number(value)
    if 0 < number < 1:
        return number
    steps = _whole(value)
    if steps < 0:
        raise ValueError(value)
    return steps


def seconds_of(text: str) -> float:
    """``23h30m``, ``90m``, ``1d2h``, ``23:30:00``, ``3600``. Raises ValueError for anything else, and for 0."""
    word = text.strip().lower()
    found = _SPAN.fullmatch(word) or _CLOCK.fullmatch(word)
    if found is not None and any(found.groups()):
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
        total: float = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    else:
        total = float(word)
    if not 0 < total < math.inf:
        raise ValueError(text)
    return total


def _duration(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(value)  # noqa: TRY004 - see _whole
    return float(seconds_of(str(value)))


def _text(value: object) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise ValueError(value)
    return value


def _texts(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (_text(value),) if value.strip() else ()
    if not isinstance(value, (list, tuple)):
        raise ValueError(value)  # noqa: TRY004 - see _whole
    return tuple(_text(item) for item in value)


def _items(value: object) -> Sequence[object]:
    if isinstance(value, str):
        return value.split(",") if value.strip() else ()
    return value if isinstance(value, (list, tuple)) else (value,)


def _names(value: object) -> tuple[str, ...]:
    """Each once, in the order in which they were given."""
    if isinstance(value, str):
        value = [word for word in value.split(",") if word.strip()]
    return tuple(dict.fromkeys(name.strip().lower() for name in _texts(value)))


def _plain_values(value: object) -> dict[str, object]:
    """Arguments of a user's own task, with lists for tuples as in a record of them."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ValueError(value)
    return {name: _plain(item) for name, item in value.items()}


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (list, tuple)):
        return list(value)
    if value is not None and not isinstance(value, (str, int, float)):
        raise ValueError(value)
    return _bare(value)


WHOLE = Written("a whole number", _whole)
WHOLES = Written("whole numbers separated by commas", _items)
NUMBER = Written("a number", _number)
SWITCH = Written("true or false", read_switch)
TEXT = Written("text", _text)
TEXTS = Written("a list of texts", _texts)
NAMES = Written("names separated by commas, of", _names)
DURATION = Written("a time such as 23h30m, 90m or 3600 (seconds)", _duration)
FREE = Written("a mapping of plain values", _plain_values)
STEPS = Written("a whole number, 0 or more, or a share between 0 and 1", _steps_or_share)

Switch = Annotated[bool, SWITCH]
Text = Annotated[str, TEXT]
Texts = Annotated[tuple[str, ...], TEXTS]
Positive = Annotated[int, at_least(1), WHOLE]
NonNegative = Annotated[int, at_least(0), WHOLE]
Positives = Annotated[tuple[Positive, ...], WHOLES]
Number = Annotated[float, NUMBER]
AtLeast0 = Annotated[float, at_least(0), NUMBER]
Above0 = Annotated[float, above(0), NUMBER]
Above1 = Annotated[float, above(1), NUMBER]
Between0And1 = Annotated[float, above(0), below(1), NUMBER]
Below1 = Annotated[float, at_least(0), below(1), NUMBER]
Share = Annotated[float, at_least(0), at_most(1), NUMBER]
Duration = Annotated[float, DURATION]
StepsOrShare = Annotated[int | float, STEPS]
