"""What a name of another trainer, with the value given to it, is in our own. Reads nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddp_runner.config.fields import normal_name, parse_switch, removed
from ddp_runner.config.foreign import ALWAYS, SAID, SWITCHES, WORDS
from ddp_runner.core.errors import BadInputError

if TYPE_CHECKING:
    from ddp_runner.config.sources import Assignment


def is_foreign_switch(name: str) -> bool:
    """Whether ``name`` is a switch elsewhere, which as an option needs no value."""
    return normal_name(name) in {*ALWAYS, *SWITCHES}


def in_our_values(given: Assignment) -> Assignment | None:
    """``given`` with the value that its setting takes; None where it asks for what is so anyway.

    Raises BadInputError where it asks to turn off what is always done.
    """
    name = normal_name(given.name)
    gone = removed(name)
    if gone is not None and str(given.value).strip().lower() == gone[0]:
        return None
    if name in ALWAYS:
        if not _is_on(given):
            raise BadInputError(given.written, "false", f"cannot be turned off: {ALWAYS[name]}")
        return None
    if name in SWITCHES:
        value = SWITCHES[name][0 if _is_on(given) else 1]
        return None if value is None else replace(given, value=value)
    word = str(given.value).strip().lower()
    return replace(given, value=WORDS.get(name, {}).get(word, given.value))


def note_on(given: Assignment) -> str:
    """What there is to say to a person who asked for what is always done; mostly nothing."""
    name = normal_name(given.name)
    return f"{given.written}: {ALWAYS[name]}" if name in SAID else ""


def _is_on(given: Assignment) -> bool:
    try:
        return parse_switch(given.value)
    except ValueError:
        raise BadInputError(given.written, given.value, "must be true or false") from None
