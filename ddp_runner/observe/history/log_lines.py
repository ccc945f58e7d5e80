"""The end of a run's text log, or the lines in it that have a word. Reads; never raises for a file."""

from __future__ import annotations

import os
from pathlib import Path

from ddp_runner.observe.format import printable, without_styles
from ddp_runner.observe.history.json_lines import opened, read_at

LINES_MAX = 400
_TAIL_BYTES = 256 * 1024
SEARCHED_BYTES = 8 * 1024 * 1024
_LINE_CHARACTERS_MAX = 2_000


def last_lines(path: Path, *, search: str = "") -> list[str]:
    """The newest lines, as plain text without what a terminal would obey; with ``search`` those that have it."""
    size = SEARCHED_BYTES if search else _TAIL_BYTES
    with opened(path) as descriptor:
        if descriptor is None:
            return []
        end = os.fstat(descriptor).st_size
        begin = max(0, end - size)
        data = read_at(descriptor, begin, size)
    lines = data.decode(errors="replace").split("\n")
    if begin:
        del lines[0]
    if lines and not lines[-1]:
        del lines[-1]
    if search:
        wanted = search.casefold()
        lines = [line for line in lines if wanted in line.casefold()]
    return [
        printable(without_styles(line.rpartition("\r")[2] or line)[:_LINE_CHARACTERS_MAX])
        for line in lines[-LINES_MAX:]
    ]
