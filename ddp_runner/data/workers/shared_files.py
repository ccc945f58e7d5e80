"""Finds that loader workers read a file through a position that they share. Runs in a worker."""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

LOADS_WATCHED = 3  # of each worker: a dataset that reads by a position does so at once
_STANDARD_STREAMS = range(3)
_MEMORY = "/memfd:"


class _OpenFile(NamedTuple):
    path: str
    watched: int  # a descriptor of the same open file description, which has the position
    offset: int


class InheritedFiles:
    """The regular files that a worker has inherited open for reading, and whether it moves their positions.

    A forked worker shares the position with its rank and all other workers. Each such file is opened
    again under its number, at the same position: from then on nobody else moves it, and what another
    process reads is never taken for this worker's. A file that the dataset opens again, or reads
    without a position (``pread``, memory maps), does not move. Logs, which are appended to, are left alone.
    """

    def __init__(self) -> None:
        self._loads = 0
        each = [_opened_again(number, mode) for number, mode in _readable().items()]
        self._files = [file for file in each if file is not None]

    def moved(self) -> str:
        """The path of a file whose position this worker's loads have moved; empty: there is none."""
        if self._loads < LOADS_WATCHED:
            self._loads += 1
            for file in self._files:
                if os.lseek(file.watched, 0, os.SEEK_CUR) != file.offset:
                    return file.path.removesuffix(" (deleted)")
            if self._loads == LOADS_WATCHED:
                for file in self._files:
                    os.close(file.watched)
        return ""


def _readable() -> dict[int, int]:
    """The descriptors of regular files that are open for reading, and not to append; with their access modes."""
    found: dict[int, int] = {}
    for number in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        with suppress(OSError):  # closed since it was listed
            flags = fcntl.fcntl(number, fcntl.F_GETFL)
            is_file = stat.S_ISREG(os.fstat(number).st_mode) and number not in _STANDARD_STREAMS
            if is_file and flags & os.O_ACCMODE != os.O_WRONLY and not flags & os.O_APPEND:
                found[number] = flags & os.O_ACCMODE
    return found


def _opened_again(number: int, mode: int) -> _OpenFile | None:
    with suppress(OSError):  # it may not be opened by whom this process runs as now
        path = Path("/proc/self/fd", str(number))
        name, offset = str(path.readlink()), os.lseek(number, 0, os.SEEK_CUR)
        if name.startswith(_MEMORY):  # of the rank's own: the board, the stacks of hung workers
            return None
        watched = os.open(path, mode)
        os.lseek(watched, offset, os.SEEK_SET)
        os.dup2(watched, number, inheritable=os.get_inheritable(number))
        return _OpenFile(name, watched, offset)
    return None
