"""Reads lines of files of a run: JSON lines of one that grows, is cut off in a line or replaced, and the end of its log.

Never raises for a file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ddp_runner.kernel.system.run_files import from_json, open_to_read
from ddp_runner.observe.format import printable, without_styles

READ_BYTES_MAX = 8 * 1024 * 1024  # in one call
LINE_BYTES_MAX = 1024 * 1024  # a longer line is none of ours, and is passed over
LINES_MAX = 400
_TAIL_BYTES = 256 * 1024
SEARCHED_BYTES = 8 * 1024 * 1024
_LINE_CHARACTERS_MAX = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class NewLines:
    """The new records of a file. ``is_fresh``: the file was replaced, and these are its first lines."""

    records: list[dict[str, Any]]
    is_fresh: bool = False


@contextmanager
def opened(path: Path) -> Iterator[int | None]:
    """A descriptor to read from; None where there is no such file, or it is none of a run's."""
    try:
        descriptor = open_to_read(path)
    except OSError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class GrowingLines:
    """A cursor; each call takes what is whole by then, READ_BYTES_MAX at most."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = (0, 0)
        self.offset = 0

    def read(self) -> NewLines:
        """The records since the last call. A line without an end is left for the next one."""
        with opened(self._path) as descriptor:
            if descriptor is None:
                return NewLines(records=[])
            stat = os.fstat(descriptor)
            is_fresh = (stat.st_dev, stat.st_ino) != self._file or stat.st_size < self.offset
            if is_fresh:
                self._file, self.offset = (stat.st_dev, stat.st_ino), 0
            data = read_at(descriptor, self.offset, READ_BYTES_MAX)
        whole = data.rfind(b"\n") + 1
        if not whole and len(data) > LINE_BYTES_MAX:
            whole = len(data)
        self.offset += whole
        return NewLines(records=parsed(data[:whole]), is_fresh=is_fresh)


def read_at(descriptor: int, offset: int, size_bytes: int) -> bytes:
    """Return the bytes; fewer at the end of the file, none if it cannot be read."""
    try:
        return os.pread(descriptor, size_bytes, offset)
    except OSError:
        return b""


def parsed(data: bytes) -> list[dict[str, Any]]:
    """The objects among the lines; what a crash has torn, or nobody of us wrote, is left out."""
    records = []
    for line in data.splitlines():
        try:
            record = from_json(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def epoch_s(utc: object) -> float | None:
    """``2026-11-20T18:47:20.123Z`` as seconds since 1970; None for anything else."""
    try:
        return datetime.fromisoformat(str(utc).replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError):
        return None


def whole(value: object, default: int = -1) -> int:
    """``value`` where it is a whole number."""
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def number(value: object) -> float | None:
    """``value`` where it is a number."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number else None  # type: ignore[arg-type]


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
