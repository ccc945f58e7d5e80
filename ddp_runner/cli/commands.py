"""The commands by name, and how one is run: wrong input becomes one line and exit 2.

Each is declared in its module, which is imported when it is asked for. Features bring commands of their own.
"""

from __future__ import annotations

import difflib
import errno
import os
import shutil
import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from ddp_runner import installed, start
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.exits import ExitCode
from ddp_runner.observe.format import printable
from ddp_runner.observe.terminal import fitted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Leads to a command. ``module``: holds its ``DECLARATION``; ``says``: its line in the list of commands.

    ``place``: its place in that list. The ``COMMANDS`` of a feature's ``words.py`` are rows by name. ``aliases``:
    other names, which no list shows.
    """

    module: str
    says: str
    place: int
    aliases: tuple[str, ...] = ()


_OWN = {
    "train": Row(module="ddp_runner.cli.train", says="train (the default command)", place=10),
    "checkpoints": Row(
        module="ddp_runner.cli.checkpoints",
        says="list, verify, show, export or prune checkpoints",
        place=30,
    ),
    "configure": Row(
        module="ddp_runner.cli.configure",
        says="ask for the most important settings and write them to a file",
        place=60,
    ),
    "docs": Row(
        module="ddp_runner.cli.docs", says="show the documentation in a browser", place=100
    ),
    "kill": Row(
        module="ddp_runner.cli.kill",
        says="kill a rank of a run, to see it replaced: kill 1",
        place=120,
    ),
}


@cache
def commands() -> Mapping[str, Row]:
    """Return all commands by name, in the order in which the help lists them: ours, and those of features."""
    found = dict(_OWN)
    for words in installed.parts("words"):
        found |= getattr(words, "COMMANDS", {})
    return dict(sorted(found.items(), key=lambda one: one[1].place))


def main(argv: Sequence[str], *, is_this_process: bool = False) -> int:
    """Run the command line ``argv``; the exit code. ``is_this_process``: no other program has called this."""
    try:
        _refuse_lost_folder()
        name, words = split_command(list(argv))
        if name == "train" and is_this_process:
            return _train(words)
        command = import_module((_OWN.get(name) or commands()[name]).module).DECLARATION
        start.interrupts_raise()
        return _all_printed(int(command.run(words)))
    except BadInputError as error:
        columns = shutil.get_terminal_size().columns if sys.stderr.isatty() else None
        for line in printable(str(error)).split("\n"):
            shown = fitted(f"ddp_runner: error: {line}", "INFO", columns)
            print("\n".join(shown), file=sys.stderr)
        return ExitCode.BAD_USAGE
    except KeyboardInterrupt:
        print("ddp_runner: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is gone; keep the interpreter from flushing into it at exit.
        sys.stdout = None
        return ExitCode.FAILED
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        # Where it is what cannot be written, Python would say so again at its end.
        sys.stdout = None
        where = f" {printable(str(error.filename))}" if error.filename else ""
        print(f"ddp_runner: error: cannot write{where}: {error.strerror}", file=sys.stderr)
        return ExitCode.FAILED


def _all_printed(code: int) -> int:
    """Return the exit code. Raises OSError for output that cannot be written, before Python finds it at its end."""
    if sys.stdout is not None:
        sys.stdout.flush()
    return code


def _refuse_lost_folder() -> None:
    """Raise BadInputError where the shell's folder was removed, as by a script that makes it again."""
    try:
        os.getcwd()  # noqa: PTH109 - pathlib takes 5 ms
    except FileNotFoundError as error:
        raise BadInputError("working folder", "", "is gone: cd to one that exists") from error


def _train(words: list[str]) -> int:
    """Train while torch is being imported, which takes longer than to check what was asked for."""
    ahead = import_module("ddp_runner.cli.preimport").start(words, os.environ)
    try:
        module = import_module(_OWN["train"].module)
        start.interrupts_raise()
        return int(module.run(words, ahead))
    finally:
        if ahead is not None:
            ahead.end()


def split_command(words: list[str]) -> tuple[str, list[str]]:
    """Return the command and its words. Without a command word, ``train``. Raises BadInputError."""
    if not words or words[0].startswith("-") or "=" in words[0]:
        return "train", words
    word, rest = words[0], words[1:]
    if word == "help":
        return "train", ["--help"]
    if word in _OWN or word in commands():
        return word, rest
    for name, row in commands().items():
        if word in row.aliases:
            return name, rest
    if os.path.exists(word):  # noqa: PTH110 - pathlib takes 5 ms
        as_script = f"run {word} (a script), or " if "run" in commands() else ""
        raise BadInputError(f"{word} is a file", "", f"{as_script}--task {word} (a task)")
    near = difflib.get_close_matches(word, commands(), n=1)
    hint = f"did you mean {near[0]}?" if near else "the commands are " + ", ".join(commands())
    raise BadInputError(word, "", f"unknown command; {hint}")
