"""The command: finds which command is meant, and turns wrong input into one line and exit 2."""

from __future__ import annotations

import difflib
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from ddp_runner import start
from ddp_runner.core.errors import BadInputError
from ddp_runner.core.exits import ExitCode
from ddp_runner.observe.format import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

_MODULE_OF_COMMAND = {
    "train": "ddp_runner.cli.train",
    "checkpoints": "ddp_runner.cli.checkpoints",
    "report": "ddp_runner.cli.report",
    "doctor": "ddp_runner.cli.doctor",
    "configure": "ddp_runner.cli.configure",
    "demo": "ddp_runner.cli.demo",
    "check": "ddp_runner.cli.check",
    "bench": "ddp_runner.cli.bench",
    "docs": "ddp_runner.cli.docs",
    "page": "ddp_runner.cli.page",
    "run": "ddp_runner.cli.run",
    "kill": "ddp_runner.cli.kill",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: this process's); the exit code."""
    if argv is None:  # as `ddp-runner` or `python -m ddp_runner`, not by start.py
        start.leave_script_folder()
        start.open_standard_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    if words == sys.argv[1:]:  # no other program has called this
        start.read_names_as_utf8()
    try:
        command, rest = split_command(words)
        if command == "train" and words == sys.argv[1:]:
            return _train(rest)
        module = import_module(_MODULE_OF_COMMAND[command])
        start.interrupts_raise()
        return int(module.run(rest))
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
    """With torch being imported from now on, which takes longer than to judge what was asked for."""
    ahead = import_module("ddp_runner.cli.ahead").start(words, os.environ)
    try:
        module = import_module(_MODULE_OF_COMMAND["train"])
        start.interrupts_raise()
        return int(module.run(words, ahead))
    finally:
        if ahead is not None:
            ahead.end()


def split_command(words: list[str]) -> tuple[str, list[str]]:
    """The command and its words. Without a command word, ``train``. Raises BadInputError."""
    if not words or words[0].startswith("-") or "=" in words[0]:
        return "train", words
    word, rest = words[0], words[1:]
    if word == "help":
        return "train", ["--help"]
    if word in _MODULE_OF_COMMAND:
        return word, rest
    if os.path.exists(word):  # noqa: PTH110 - pathlib takes 5 ms
        raise BadInputError(
            f"{word} is a file", "", f"run {word} (a script), or --task {word} (a task)"
        )
    near = difflib.get_close_matches(word, _MODULE_OF_COMMAND, n=1)
    hint = f"did you mean {near[0]}?" if near else "the commands are " + _listed()
    raise BadInputError(word, "", f"unknown command; {hint}")


def _listed() -> str:
    return ", ".join(_MODULE_OF_COMMAND)


if __name__ == "__main__":
    sys.exit(main())
