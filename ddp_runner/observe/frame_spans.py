"""What lines of the live display are made of: coloured spans, and what a state looks like. Draws nothing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Role(Enum):
    """What a span means; the painter gives each meaning one colour."""

    PLAIN = "plain"
    QUIET = "quiet"  # labels and what is as expected
    STRONG = "strong"
    GOOD = "good"
    BUSY = "busy"  # on its way to being good
    CARE = "care"  # being repaired, or worth a look
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of one line."""

    text: str
    role: Role = Role.PLAIN


Line = list[Span]

ROLE_OF_STATE = {
    "running": Role.GOOD,
    "training": Role.GOOD,
    "done": Role.GOOD,
    "finished": Role.GOOD,
    "waiting": Role.QUIET,
    "starting": Role.BUSY,
    "ready": Role.BUSY,
    "forming": Role.BUSY,
    "stopping": Role.BUSY,
    "saving": Role.BUSY,
    "recovering": Role.CARE,
    "restarting": Role.CARE,
    "faulted": Role.BAD,
    "dead": Role.BAD,
    "lost": Role.BAD,
    "failed": Role.BAD,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    """What a progress bar is made of, and whether a curve may be of more than ASCII."""

    full: str
    half: str
    rest: str
    unicode: bool


UNICODE = Glyphs(full="━", half="╸", rest="━", unicode=True)
ASCII = Glyphs(full="=", half="-", rest=".", unicode=False)


def spread(left: Line, right: Line, width: int) -> Line:
    """``left`` and ``right`` at the two ends; what does not fit is cut from the end of ``left``."""
    room = width - sum(len(span.text) for span in right) - 1
    kept = cut(left, max(0, room))
    used = sum(len(span.text) for span in kept)
    return [*kept, Span(" " * (room - used + 1)), *right]


def cut(line: Line, width: int) -> Line:
    """The begin of a line, at most so many columns of it."""
    kept: Line = []
    for span in line:
        text = span.text[: max(0, width)]
        kept.append(Span(text, span.role))
        width -= len(text)
    return kept
