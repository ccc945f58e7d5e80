"""The command: readies this process, and hands its words to ``cli/commands.py``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ddp_runner import start
from ddp_runner.cli import commands

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: this process's); the exit code."""
    if argv is None:  # as `ddp-runner` or `python -m ddp_runner`, not by start.py
        start.forget_inspection()
        start.leave_script_folder()
        start.open_standard_streams()
        start.answer_signals_of_a_run()
    words = list(sys.argv[1:] if argv is None else argv)
    is_this_process = words == sys.argv[1:]
    if is_this_process:
        start.read_names_as_utf8()
    return commands.main(words, is_this_process=is_this_process)


if __name__ == "__main__":
    sys.exit(main())
