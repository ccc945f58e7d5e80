"""The options that look for a setting instead of training, split from the words of the runs that they start."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_runner.core.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

BATCH_SIZE, LEARNING_RATE = "--find-batch-size", "--find-lr"
# Each with what its value looks like where that is a word of its own.
_VALUE = {
    BATCH_SIZE: re.compile(r"-?\d*\.?\d+%?"),
    LEARNING_RATE: re.compile(r"[\d.eE+-]+:[\d.eE+:-]+"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The search that is asked for. ``option``: its name, "" for none; ``value``: its text; ``words``: all other words."""

    option: str = ""
    value: str = ""
    words: tuple[str, ...] = ()


NOTHING = Finding()


def split_off_finding(words: Sequence[str]) -> Finding:
    """Find such an option. Raises BadInputError for two of them, and for an empty value."""
    option, value = "", ""
    others: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        written, has_value, attached = word.partition("=")
        long = written.replace("_", "-").lower()
        if word == "--":
            others += [word, *rest]
            break
        if long not in _VALUE:
            others.append(word)
            continue
        if option and long != option:
            raise BadInputError(long, "", f"and {option} are two commands: give one of them")
        if has_value and not attached:
            raise BadInputError(long, "''", "is empty; give a value, or leave it out")
        if not has_value and rest and _VALUE[long].fullmatch(rest[0]):
            attached = rest.pop(0)
        option, value = long, attached
    return Finding(option=option, value=value, words=tuple(others))
