"""Suggests the known name that an unknown one most likely stands for. Compares whole words."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

# Words that say little: two names that share only these have nothing in common.
_WEAK = frozenset({"num", "n", "max", "min", "per", "every", "of", "use", "the", "s", "mb", "gb"})
_ALIKE = 0.8  # of letters, for a slip of the finger


def nearest(written: str, known: Iterable[str]) -> str:
    """The name among ``known`` that ``written`` may stand for; empty if none is near.

    Either it is spelled almost like it (``batchsize``), or most of its words are in it (``warmup``).
    Sections and dashes do not count.
    """
    words = _words(written)
    if not words:
        return ""
    scored = [
        (
            _likeness(words, other),
            len({*words} & {*other}),
            name,
        )  # whole words decide between equals
        for name, other in ((name, _words(name)) for name in known)
    ]
    best, _, name = max(scored, key=lambda one: one[:2], default=(0.0, 0, ""))
    return name if best > 0 else ""


def _words(name: str) -> list[str]:
    last = name.rpartition(".")[2]
    return [word for word in re.split(r"[_\W]+", last.lower()) if word]


def _likeness(words: list[str], other: list[str]) -> float:
    """Above 1 where the letters are alike; up to 1 the share of common words; 0 for strangers."""
    letters = _ratio("".join(words), "".join(other))
    if letters >= _ALIKE:
        return 1.0 + letters
    shared = [word for word in words if any(_ratio(word, one) >= _ALIKE for one in other)]
    if not set(shared) - _WEAK:
        return 0.0
    # Half of the words of both: `warmup` for warmup_steps, not `data_format` for data.path.
    share = 2 * len(shared) / (len(words) + len(other))
    return share if share > 0.5 else 0.0


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()
