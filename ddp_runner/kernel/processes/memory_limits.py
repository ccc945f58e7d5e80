"""Reads the container's memory limit, its use and its kills from cgroup v2 or v1, and what is free. Sets nothing.

Every function of cgroups takes the root of the file system, so that a test can lay out a container as a
folder. A machine without cgroups, or a file that is missing, gives None: there is no limit to know.
Source: kernel Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOT = Path("/")
# v1 writes "no limit" as the largest multiple of the page size below 2**63; no machine has 2**60.
_UNLIMITED_BYTES = 2**60


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The smallest memory limit above this process. ``source`` names the file, for people."""

    bytes: int
    source: str
    directory: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class _Version:
    """The files in which one cgroup version keeps the values that we read."""

    mounts: tuple[str, ...]
    limits: tuple[str, ...]
    usage: str
    cache_key: str  # in memory.stat: page cache that the kernel can drop at once
    kills: str


_V2 = _Version(
    mounts=("sys/fs/cgroup", "sys/fs/cgroup/unified"),
    limits=("memory.max", "memory.high"),
    usage="memory.current",
    cache_key="inactive_file",
    kills="memory.events",
)
_V1 = _Version(
    mounts=("sys/fs/cgroup/memory",),
    limits=("memory.limit_in_bytes",),
    usage="memory.usage_in_bytes",
    cache_key="total_inactive_file",
    kills="memory.oom_control",
)


def container_limit(root: Path = _ROOT) -> Limit | None:
    """The smallest limit on the way from this process's cgroup up to the root; None if unlimited.

    ``memory.high`` counts as a limit: beyond it the kernel does not kill, but stalls every
    allocation, which a training run cannot distinguish from a hang.
    """
    found = [
        Limit(bytes=size, source=str(directory / name), directory=directory)
        for version, directory in _directories(root)
        for name in version.limits
        if (size := _read_size(directory / name)) is not None
    ]
    return min(found, key=lambda limit: limit.bytes, default=None)


def container_usage(limit: Limit) -> int | None:
    """Bytes in use in the cgroup of ``limit``, without page cache that the kernel can drop."""
    for version in (_V2, _V1):
        used = _read_size(limit.directory / version.usage)
        if used is not None:
            dropped = _read_table(limit.directory / "memory.stat").get(version.cache_key, 0)
            return max(0, used - dropped)
    return None


def free_bytes(limit: Limit | None) -> int:
    """Return the free bytes of this machine, or of this container if it has a ``limit`` and less is left of it."""
    machine = int(psutil.virtual_memory().available)
    used = None if limit is None else container_usage(limit)
    return machine if limit is None or used is None else min(machine, max(0, limit.bytes - used))


def oom_kill_count(root: Path = _ROOT) -> int | None:
    """Return how many processes of this cgroup the kernel has killed for memory; None if unknown.

    The count only grows and includes every cgroup below: compare it with an earlier one.
    """
    for version, directory in _directories(root):
        count = _read_table(directory / version.kills).get("oom_kill")
        if count is not None:
            return count
    return None


def _directories(root: Path) -> Iterator[tuple[_Version, Path]]:
    """The memory cgroup of this process and all above it, nearest first; v2 before v1."""
    for version, path in _own_paths(root):
        for mount in version.mounts:
            base = root / mount
            # Inside a container the path may name folders of the host that are not mounted here;
            # missing folders give no reading, and the mount itself is then the container's cgroup.
            parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..", ".")]
            for depth in range(len(parts), -1, -1):
                yield version, base.joinpath(*parts[:depth])


def _own_paths(root: Path) -> Iterator[tuple[_Version, str]]:
    """The lines ``hierarchy:controllers:path`` of /proc/self/cgroup that concern memory."""
    lines = (_read_text(root / "proc/self/cgroup") or "").splitlines()
    fields = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    yield from ((_V2, path) for _, controllers, path in fields if controllers == "")
    yield from ((_V1, path) for _, names, path in fields if "memory" in names.split(","))


def _read_text(path: Path) -> str | None:
    """The text of a kernel file, or None where this system, or this user, has no such file."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None


def _read_size(path: Path) -> int | None:
    """A size in bytes; None for no such file, ``max``, or a number that stands for "no limit"."""
    text = (_read_text(path) or "").strip()
    if not text.isdecimal() or int(text) >= _UNLIMITED_BYTES:
        return None
    return int(text)


def _read_table(path: Path) -> dict[str, int]:
    """The lines ``name number`` of a kernel file."""
    rows = (line.split() for line in (_read_text(path) or "").splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}


# Tearing down a process of many gigabytes takes the kernel seconds, from its kill to its end.
CLAIM_WITHIN_S = 10.0
LOOK_EVERY_S = 1.0


class KernelKills:
    """Counts kills as they come; each is claimed by one process that ended of SIGKILL."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._known = oom_kill_count(root)
        self._looked_s = 0.0
        self._unclaimed: deque[float] = deque()  # when each was noticed

    def look_sometimes(self, now_s: float) -> None:
        """Notice kills near the time they happen, so that an old one is not taken for a new one."""
        if now_s >= self._looked_s + LOOK_EVERY_S:
            self._look(now_s)

    def claim(self, now_s: float, *, before_it: int = 0) -> bool:
        """Return whether a process that has just ended by SIGKILL was most likely killed for memory.

        ``before_it``: the number of other processes that are likelier victims and have not claimed a kill yet.
        """
        self._look(now_s)
        if len(self._unclaimed) <= before_it:
            return False
        self._unclaimed.popleft()
        return True

    def _look(self, now_s: float) -> None:
        self._looked_s = now_s
        count = oom_kill_count(self._root)
        if count is None:
            return
        self._unclaimed.extend([now_s] * (count - (self._known or 0)))
        self._known = count
        while self._unclaimed and now_s > self._unclaimed[0] + CLAIM_WITHIN_S:
            self._unclaimed.popleft()
