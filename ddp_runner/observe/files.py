"""Files of the log directory that outlive a full or failing disk. Never raises for one.

Losing log lines is a nuisance, losing a run over them is a fault of ours: each failure is counted,
one warning goes out per outage, and the end of the outage says how much is missing.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from enum import Enum
from typing import TYPE_CHECKING

from ddp_runner.kernel.system.run_files import (
    is_named,
    not_written,
    open_to_append_anywhere,
    reading,
)

if TYPE_CHECKING:
    from pathlib import Path

Warn = Callable[[str], None]
_TAIL_BYTES = 64 * 1024


def encode_record(record: Mapping[str, object]) -> bytes:
    """Return one line of strict JSON with its newline; figures that are not finite become ``null``."""
    return json.dumps(_plain(record), separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _plain(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return _plain(value.value)
    return str(value)


class Outage:
    """Counts what a file lost in a row and reports the outage once, through ``warn``."""

    def __init__(self, path: Path, warn: Warn | None) -> None:
        self._path = path
        self._warn = warn
        self._lost_now = 0
        self.lost_total = 0

    def failed(self, error: OSError) -> None:
        """Note one lost write."""
        self._lost_now += 1
        self.lost_total += 1
        if self._lost_now == 1 and self._warn is not None:
            self._warn(not_written(self._path, error))

    def ended(self) -> int:
        """Note a write that worked; the number of writes lost just before it."""
        lost, self._lost_now = self._lost_now, 0
        if lost and self._warn is not None:
            self._warn(f"{self._path} is written again; {lost} writes were lost")
        return lost


class LineFile:
    """Appends whole lines, each by one write(2), so that several writers never interleave."""

    def __init__(self, path: Path, *, warn: Warn | None = None) -> None:
        self._path = path
        self._outage = Outage(path, warn)
        self._fd: int | None = None
        # INVARIANT whole-lines: a line begins at the start of a line, also after a torn one.
        # Broken if: a write that came up short, or a crash in the middle of one, is not followed
        # by a newline before the next record.
        # Guarded by: test_a_torn_last_line_does_not_swallow_the_next_record,
        # test_a_disk_that_has_room_again_is_used_again.
        self._torn = False

    @property
    def lines_lost(self) -> int:
        """The number of lines given up so far."""
        return self._outage.lost_total

    def append(self, line: bytes) -> bool:
        """Append ``line``, which ends with a newline; False where it was given up."""
        try:
            if self._fd is not None and not is_named(self._fd, self._path):
                self.close()  # removed, or moved away: whoever looks for it finds a new one
            if self._fd is None:
                self._open()
            self._write(line)
        except OSError as error:
            self._outage.failed(error)
            return False
        self._outage.ended()
        return True

    def close(self) -> None:
        """Close the file; a later append opens it again."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> None:
        self._torn = ends_torn(self._path)
        self._fd = open_to_append_anywhere(self._path)

    def _write(self, line: bytes) -> None:
        assert self._fd is not None
        data = b"\n" + line if self._torn else line
        written = os.write(self._fd, data)
        self._torn = written < len(data)
        if self._torn:
            raise OSError(f"only {written} of {len(data)} bytes were written")


def ends_torn(path: Path) -> bool:
    """Return True if the file ends in the middle of a line; False if there is no such file."""
    tail = read_tail(path, 1)
    return bool(tail) and tail != b"\n"


def read_tail(path: Path, size_bytes: int = _TAIL_BYTES) -> bytes:
    """The last ``size_bytes`` of a file; empty where it cannot be read."""
    try:
        with reading(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size_bytes))
            return file.read(size_bytes)
    except OSError:
        return b""  # an absent or unreadable file has no tail to go on from
