"""Declares commands: options, help and action of each are one value in the command's module.

A row leads there, of ``cli/commands.py`` or of a feature's ``words.py``. Also the only way from a command to the terminal.
"""

from __future__ import annotations

import difflib
import sys
import textwrap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ddp_runner.core.settings.declaration import Option
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.exits import ExitCode
from ddp_runner.observe.format import printable

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Iterator, Mapping, Sequence

HELP_COLUMNS = 79
_INDENT = 28
HELP = "--help"
# Options that several commands have; each says what they mean for it, where that differs.
LOG_DIR = Option("--log-dir", short="-l", metavar="DIR", says="log folder of the run")
CHECKPOINT_DIR = Option(
    "--checkpoint-dir", short="-c", metavar="DIR", says="folder of the checkpoints"
)
NAME = Option("--name", metavar="NAME", says="name of the run, in logs/NAME [the newest run]")
JSON = Option("--json", says="print one JSON object per line, for programs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instead:
    """An option of ``train`` that asks for something else than training; ``INSTEAD`` of a feature's ``words.py``.

    ``value``: its value where that is a word of its own; None for a switch. The module's
    ``perform(plan, arguments, is_rank=)`` does what is asked for.
    """

    option: Option
    module: str
    value: re.Pattern[str] | None = None


class Command(Protocol):
    """A word of the command line. Its module holds one as ``DECLARATION``."""

    def help(self) -> str:
        """Return the text of ``--help``. Each line fits 80 columns."""

    def run(self, words: Sequence[str]) -> int:
        """Do what the words behind the command ask for, and return the exit code. Raises BadInputError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Words in order, values by long option, switches that were given."""

    words: tuple[str, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)
    switches: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainCommand:
    """A command whose options are settings: its module parses the words and makes the help of their tables."""

    help: Callable[[], str]
    run: Callable[[Sequence[str]], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallCommand:
    """A command with a few options, which are no settings: the parser and the help are made of them.

    ``usage`` comes before the options in the help, ``closing`` after them. An option without a metavar is a switch,
    and so is one with a metavar of several words: these are words of the command. One that says nothing
    is explained in ``usage``, and one with a ``key`` is an option of ``train``, shown here. ``takes_rest``: all words
    but its own options are left in order, for ``train`` to parse.
    """

    usage: str
    perform: Callable[[Arguments], int]
    options: tuple[Option, ...] = ()
    closing: str = ""
    words_max: int = 0
    takes_rest: bool = False

    def help(self) -> str:
        """Return the text of ``--help``."""
        lines = [self.usage, *([""] if self.options else [])]
        for option in self.options:
            lines += option_lines(option) if option.says else ()
        return "\n".join([*lines, *(["", self.closing] if self.closing else [])])

    def run(self, words: Sequence[str]) -> int:
        """Print the help, or do what is asked for; the exit code. Raises BadInputError."""
        arguments = self.parse(words)
        if HELP in arguments.switches:
            print(self.help())
            return ExitCode.DONE
        return self.perform(arguments)

    def parse(self, words: Sequence[str]) -> Arguments:
        """Sort ``words``; underscores work as dashes. Raises BadInputError."""
        own = [one for one in self.options if not one.key]
        takes_value = {one.long for one in own if one.metavar and " " not in one.metavar}
        known = [*(one.long for one in own), HELP]
        long_of = {one.short: one.long for one in own if one.short} | {"-h": HELP}
        found: list[str] = []
        values: dict[str, str] = {}
        given: set[str] = set()
        rest = list(words)
        while rest:
            word = rest.pop(0)
            written, has_value, value = word.partition("=")
            long = long_of.get(written, written.replace("_", "-"))
            if not word.startswith("-") or (self.takes_rest and long not in known):
                if len(found) == self.words_max and not self.takes_rest:
                    raise BadInputError(word, "", "unexpected word; --help shows the usage")
                found.append(word)
                continue
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
        return Arguments(words=tuple(found), values=values, switches=frozenset(given))


def option_lines(option: Option, says: str = "") -> Iterator[str]:
    """Yield the lines of the help about one option. ``says``: in place of the option's own words."""
    flags = f"  {option.short}, {option.long}" if option.short else f"      {option.long}"
    return entry(f"{flags} {option.metavar}" if option.metavar else flags, says or option.says)


def entry(left: str, right: str) -> Iterator[str]:
    """``left`` in its column and ``right`` wrapped beside it, or below when ``left`` is long."""
    lines = [
        line for part in right.split("\n") for line in textwrap.wrap(part, HELP_COLUMNS - _INDENT)
    ]
    if len(left) >= _INDENT - 1:
        yield left
        left = ""
    for line in lines:
        yield f"{left:<{_INDENT}}{line}"
        left = ""


def show(text: str) -> None:
    """Print ``text``, from a file, a path or an exception, as one line that no terminal obeys.

    What standard output cannot encode is written out, too.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    line = printable(text).replace("\n", "\\n")
    print(line.encode(encoding, errors="backslashreplace").decode(encoding))


def is_unicode() -> bool:
    """Return whether standard output takes more than ASCII."""
    return "utf" in (getattr(sys.stdout, "encoding", None) or "utf-8").lower()
