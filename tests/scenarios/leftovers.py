"""What a job may leave behind on a Linux machine, read from /proc and /dev/shm. Removes nothing."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
_LISTEN = "0A"
# Under which glibc makes a semaphore before it gets its name: a process that is killed within those
# microseconds leaves 32 bytes that nobody can tell from a user's own semaphore, and so nobody removes.
_HALF_MADE = re.compile(r"sem\.[A-Za-z0-9]{6}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A living process: its id and its name for ``ps``."""

    pid: int
    name: str


def processes_with(variable):
    """Every living process that was started with ``NAME=value`` in its environment."""
    wanted = variable.encode()
    found = []
    for pid in _pids():
        with contextlib.suppress(OSError):
            base = Path("/proc", str(pid))
            if wanted in (base / "environ").read_bytes().split(b"\0"):
                found.append(Found(pid=pid, name=(base / "comm").read_text().strip()))
    return found


def listening_inodes(pids):
    """The inodes of listening TCP sockets: those that ``pids`` hold, or all of them for None."""
    listening = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN:
                    listening.add(fields[9])
    if pids is None:
        return listening
    held = set()
    for pid in pids:
        for target in _open_files(pid):
            if target.startswith("socket:["):
                held.add(target[len("socket:[") : -1])
    return listening & held


def shared_memory():
    """The names of all entries of /dev/shm, but for semaphores that were never finished."""
    names = {path.name for path in _SHARED_MEMORY.iterdir()}
    return {name for name in names if not _HALF_MADE.fullmatch(name)}


def ownerless_shared_memory(names):
    """Those entries of /dev/shm, of ``names``, that no living process has open or mapped."""
    if not names:
        return set()
    held = set()
    for pid in _pids():
        targets = list(_open_files(pid))
        with contextlib.suppress(OSError):
            targets += Path("/proc", str(pid), "maps").read_text(errors="replace").split()
        held |= {name for name in names if str(_SHARED_MEMORY / name) in targets}
    return {name for name in names - held if (_SHARED_MEMORY / name).exists()}


def _pids():
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _open_files(pid):
    with contextlib.suppress(OSError):
        for link in Path("/proc", str(pid), "fd").iterdir():
            with contextlib.suppress(OSError):
                yield str(link.readlink())
