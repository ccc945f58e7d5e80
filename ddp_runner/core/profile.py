"""Parses ``--profile``, which names the steps to profile. Values only."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ddp_runner.kernel.rules.errors import BadInputError

OPTION = "--profile"
_STEPS = re.compile(r"steps=(\d{1,12})(?::(\d{1,12}))?")
_MEMORY = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileAsked:
    """Steps ``first`` to ``last``, counted from 1 and both included; with the allocator's ``memory`` or not."""

    first: int
    last: int
    memory: bool = False

    def begins_before(self, step: int) -> bool:
        """Return whether the next step is profiled, given that ``step`` steps are committed."""
        return self.first <= step + 1 <= self.last


def parse_profile(text: str | None) -> ProfileAsked | None:
    """``steps=10:15``, ``steps=10``, either with ``,memory``; None for nothing. Raises BadInputError."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    found = [match for word in words if (match := _STEPS.fullmatch(word))]
    others = [word for word in words if not _STEPS.fullmatch(word)]
    if len(found) != 1 or others not in ([], [_MEMORY]):
        expected = "must be steps=FIRST:LAST, such as steps=10:15, and may end with ,memory"
        raise BadInputError(OPTION, text, expected)
    first, last = int(found[0][1]), int(found[0][2] or found[0][1])
    if first < 1:
        raise BadInputError(OPTION, text, "must begin with step 1 or a later one")
    if last < first:
        expected = f"ends before it begins: write steps={last}:{first}"
        raise BadInputError(OPTION, text, expected)
    return ProfileAsked(first=first, last=last, memory=bool(others))


def refuse_beyond_end(asked: ProfileAsked | None, *, text: str | None, total_steps: int) -> None:
    """Raise BadInputError where the run has ended before ``asked`` ends. ``text``: as written."""
    if asked is not None and asked.last > total_steps:
        expected = f"is beyond the end of the run, which has {total_steps:,} steps"
        raise BadInputError(OPTION, text or "", expected)
