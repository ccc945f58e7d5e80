"""What a job may leave behind on a Linux machine, read from /proc and /dev/shm. Removes nothing."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
_CLOSE_WAIT = "08"
_LISTEN = "0A"
# Under which glibc makes a semaphore before it gets its name: a process that is killed within those
# microseconds leaves 32 bytes that nobody can distinguish from a user's own semaphore, and so nobody removes.
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
    listening = {inode for inode, state, _ in _connections() if state == _LISTEN}
    return listening if pids is None else listening & set().union(*map(_sockets_of, pids))


def unread_bytes(pid):
    """How much lies in this process's TCP connections that it has not read yet."""
    held = _sockets_of(pid)
    return sum(
        unread for inode, state, unread in _connections() if inode in held and state != _LISTEN
    )


def has_lost_a_peer(pid):
    """Whether the other end of one of this process's TCP connections is closed."""
    held = _sockets_of(pid)
    return any(inode in held and state == _CLOSE_WAIT for inode, state, _ in _connections())


def is_idle(pid):
    """Whether every thread of this process waits for something."""
    states = []
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            states.append(path.read_text().rpartition(")")[2].split()[0])
    return all(state == "S" for state in states)


def _connections():
    """Inode, state and unread bytes of every TCP socket of this machine."""
    found = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                found.append((fields[9], fields[3], int(fields[4].partition(":")[2], 16)))
    return found


def _sockets_of(pid):
    """The inodes of the sockets that a process holds."""
    open_files = (target for target in _open_files(pid) if target.startswith("socket:["))
    return {target[len("socket:[") : -1] for target in open_files}


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
