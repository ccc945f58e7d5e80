"""Finds files that loader workers inherited open and read through one common position. Never reads them."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

LOADS_WATCHED = 3  # of a worker's first ones: who reads a file does so from the first sample on
_STANDARD_STREAMS = frozenset({"0", "1", "2"})


class _Position(NamedTuple):
    path: str
    offset: int


class InheritedFiles:
    """What a worker has inherited open for reading from ``rank_pid``, and where each file stood.

    The rank's table shows the same position where a file is shared. A file that the worker opened
    again, or reads without a position (``pread``, memory maps), does not move there.
    """

    def __init__(self, *, rank_pid: int) -> None:
        self._rank = Path("/proc", str(rank_pid))
        self._looks = 0
        self._before = self._positions()

    def moved(self) -> str:
        """The path of a shared file whose position has moved since; empty: there is none."""
        if self._looks == LOADS_WATCHED:
            return ""
        self._looks += 1
        for number, before in self._before.items():
            here, there = (_position(where, number) for where in (Path("/proc/self"), self._rank))
            if here is None or there is None or {here.path, there.path} != {before.path}:
                continue
            if before.offset not in (here.offset, there.offset):
                return before.path.removesuffix(" (deleted)")
        return ""

    def _positions(self) -> dict[str, _Position]:
        found: dict[str, _Position] = {}
        for number in [entry.name for entry in Path("/proc/self/fd").iterdir()]:
            position = _position(Path("/proc/self"), number)
            if position is not None and number not in _STANDARD_STREAMS:
                found[number] = position
        return found


def _position(process: Path, number: str) -> _Position | None:
    """Of a regular file that is open for reading; None for any other, and where nobody may look."""
    with suppress(OSError):  # closed since it was listed, or another process's that may not be read
        if not stat.S_ISREG((process / "fd" / number).stat().st_mode):
            return None
        lines = (process / "fdinfo" / number).read_text(encoding="ascii").splitlines()
        info = dict(line.split(":", 1) for line in lines if line.startswith(("pos:", "flags:")))
        flags = int(info["flags"], 8)
        if flags & os.O_ACCMODE != os.O_WRONLY and not flags & os.O_APPEND:
            path = str((process / "fd" / number).readlink())
            return _Position(path, int(info["pos"]))
    return None
