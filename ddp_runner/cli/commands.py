"""The commands by name, and how one is run: wrong input becomes one line and exit 2.

Each is declared in its module, which is imported when it is asked for.
"""

from __future__ import annotations

import difflib
import os
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from ddp_runner import start
from ddp_runner.core.errors import BadInputError
from ddp_runner.core.exits import ExitCode
from ddp_runner.observe.format import printable

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Row:
    """The module whose ``DECLARATION`` it is, and a line for the list of commands."""

    module: str
    says: str


COMMANDS = {
    "train": Row("ddp_runner.cli.train", "train; what happens when no command is given"),
    "run": Row(
        "ddp_runner.cli.run", "any script that torchrun starts, supervised: run train.py ARGS"
    ),
    "checkpoints": Row(
        "ddp_runner.cli.checkpoints", "list, verify, show, export or prune checkpoints"
    ),
    "report": Row("ddp_runner.cli.report", "what happened in a run, for people"),
    "doctor": Row("ddp_runner.cli.doctor", "can this machine train, and if not, what to do"),
    "configure": Row(
        "ddp_runner.cli.configure",
        "asks for the settings that matter most, and writes them to a file",
    ),
    "check": Row(
        "ddp_runner.cli.check", "is your own task exact under every kill? a table of what holds"
    ),
    "demo": Row(
        "ddp_runner.cli.demo", "watch ranks being killed, and the weights come out the same"
    ),
    "bench": Row(
        "ddp_runner.cli.bench", "what a step's time is made of, what bounds it, what to try"
    ),
    "docs": Row("ddp_runner.cli.docs", "show the documentation in a browser"),
    "page": Row("ddp_runner.cli.page", "watch runs in a browser while they train"),
    "kill": Row("ddp_runner.cli.kill", "end a rank of a run, to see it replaced: kill 1"),
}


def main(argv: Sequence[str], *, is_this_process: bool = False) -> int:
    """Run the command line ``argv``; the exit code. ``is_this_process``: no other program has called this."""
    try:
        name, words = split_command(list(argv))
        if name == "train" and is_this_process:
            return _train(words)
        command = import_module(COMMANDS[name].module).DECLARATION
        start.interrupts_raise()
        return int(command.run(words))
    except BadInputError as error:
        for line in printable(str(error)).split("\n"):
            print(f"ddp_runner: error: {line}", file=sys.stderr)
        return ExitCode.BAD_USAGE
    except KeyboardInterrupt:
        print("ddp_runner: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is gone; keep the interpreter from flushing into it at exit.
        sys.stdout = None
        return ExitCode.FAILED


def _train(words: list[str]) -> int:
    """Train while torch is being imported, which takes longer than to check what was asked for."""
    ahead = import_module("ddp_runner.cli.preimport").start(words, os.environ)
    try:
        module = import_module(COMMANDS["train"].module)
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
    if word in COMMANDS:
        return word, rest
    if os.path.exists(word):  # noqa: PTH110 - pathlib takes 5 ms
        raise BadInputError(
            f"{word} is a file", "", f"run {word} (a script), or --task {word} (a task)"
        )
    near = difflib.get_close_matches(word, COMMANDS, n=1)
    hint = f"did you mean {near[0]}?" if near else "the commands are " + ", ".join(COMMANDS)
    raise BadInputError(word, "", f"unknown command; {hint}")
