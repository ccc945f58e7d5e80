"""Prints what a command has found, whatever stands in it. The only way to the terminal from here."""

from __future__ import annotations

import sys

from ddp_runner.observe.format import printable


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
