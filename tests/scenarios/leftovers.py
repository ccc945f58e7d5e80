"""What a job may leave behind on a Linux machine, read from /proc and /dev/shm. Removes nothing."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
_CLOSE_WAIT = "08"
_LISTEN = "0A"
# Of netlink(7) and sock_diag(7).
_NETLINK_SOCK_DIAG = 4
_BY_FAMILY = 20
_REQUEST, _DUMP = 0x1, 0x300
_ERROR, _DONE = 2, 3
_LISTENING = 1 << 10
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_INODE_AT = _HEADER.size + 68
# Under which glibc makes a semaphore before it gets its name: a process that is killed within those
# microseconds leaves 32 bytes that nobody can distinguish from a user's own semaphore, and so nobody removes.
_HALF_MADE = re.compile(r"sem\.[A-Za-z0-9]{6}")
# That name is what its maker's maps show, so a rank's semaphores say whose they are by the other one.
_OF_RANK = re.compile(r"sem\.ddp([0-9]+)-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A living process: its id and its name for ``ps``."""

    pid: int
    name: str


def processes_with(variable):
    """Every living process that was started with ``NAME=value`` in its environment."""
    wanted = b"\0%s\0" % variable.encode()
    found = []
    for pid in _pids():
        with contextlib.suppress(OSError):
            # Not cut into its parts: hundreds of processes have a hundred each.
            if wanted in b"\0%s\0" % _content(f"/proc/{pid}/environ"):
                name = _content(f"/proc/{pid}/comm").decode(errors="replace").strip()
                found.append(Found(pid=pid, name=name))
    return found


def _content(path):
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - of each process, many times in a run
        return file.readall()


def listening_inodes(pids):
    """The inodes of listening TCP sockets: those that ``pids`` hold, or all of them for None."""
    try:
        listening = {
            inode for family in (socket.AF_INET, socket.AF_INET6) for inode in _asked(family)
        }
    except OSError:  # a kernel without sock_diag
        listening = {inode for inode, state, _ in _connections() if state == _LISTEN}
    return listening if pids is None else listening & set().union(*map(_sockets_of, pids))


def _asked(family):
    """The inodes of one family's listening sockets, without a look at all connections, which takes 4 ms."""
    wanted = struct.pack("=BBBBI48x", family, socket.IPPROTO_TCP, 0, 0, _LISTENING)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as link:
        size = _HEADER.size + len(wanted)
        link.send(_HEADER.pack(size, _BY_FAMILY, _REQUEST | _DUMP, 1, 0) + wanted)
        while True:
            packet, begin = link.recv(1 << 16), 0
            while begin < len(packet):
                size, kind, _, _, _ = _HEADER.unpack_from(packet, begin)
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    raise OSError(-struct.unpack_from("=i", packet, begin + _HEADER.size)[0], "")
                yield str(struct.unpack_from("=I", packet, begin + _INODE_AT)[0])
                begin += (size + 3) & ~3


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
    left = {name for name in names if not _is_of_living_rank(name)}
    for pid in reversed(_pids()):  # the owners of what other tests have just made are young, too
        if not left:
            break
        targets = "".join(f"{target}\n" for target in _open_files(pid))
        with contextlib.suppress(OSError):
            targets += _content(f"/proc/{pid}/maps").decode(errors="replace")
        left -= {name for name in left if _stands_in(str(_SHARED_MEMORY / name), targets)}
    return {name for name in left if (_SHARED_MEMORY / name).exists()}


def _is_of_living_rank(name):
    found = _OF_RANK.match(name)
    return found is not None and Path(f"/proc/{found[1]}").exists()


def _stands_in(path, targets):
    """Whether a path is one of these words, and not the beginning of a longer one."""
    return path in targets and path in targets.split()


def _pids():
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - as above


def _open_files(pid):
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208 - as above
            with contextlib.suppress(OSError):
                yield os.readlink(f"/proc/{pid}/fd/{number}")  # noqa: PTH115 - as above
