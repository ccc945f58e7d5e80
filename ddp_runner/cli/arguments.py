"""The few options of the small commands. Not for ``train``, whose options are settings."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddp_runner.core.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LOG_DIR = ("--log-dir", "-l")
CHECKPOINT_DIR = ("--checkpoint-dir", "-c")
JSON = "--json"


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallArguments:
    """Words in order, values by long option, switches that were given."""

    words: tuple[str, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)
    switches: frozenset[str] = frozenset()

    @property
    def wants_help(self) -> bool:
        """Whether the help was asked for."""
        return "--help" in self.switches


def parse_small(
    words: Sequence[str],
    *,
    valued: Sequence[tuple[str, str]] = (),
    switches: Sequence[str] = (),
    words_max: int = 0,
) -> SmallArguments:
    """Parse ``words``; underscores work as dashes. Raises BadInputError."""
    long_of = {short: long for long, short in valued} | {"-h": "--help"}
    takes_value = {long for long, _ in valued}
    known = [*takes_value, *switches, "--help"]
    found_words: list[str] = []
    values: dict[str, str] = {}
    given: set[str] = set()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            if len(found_words) == words_max:
                raise BadInputError(word, "", "unexpected word; --help shows the usage")
            found_words.append(word)
            continue
        written, has_value, value = word.partition("=")
        long = long_of.get(written, written.replace("_", "-"))
        if long not in known:
            near = difflib.get_close_matches(long, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "--help shows the usage"
            raise BadInputError(written, "", f"unknown option; {hint}")
        if long not in takes_value:
            given.add(long)
        elif has_value or rest:
            values[long] = value if has_value else rest.pop(0)
        else:
            raise BadInputError(long, "", "needs a value")
    return SmallArguments(words=tuple(found_words), values=values, switches=frozenset(given))
