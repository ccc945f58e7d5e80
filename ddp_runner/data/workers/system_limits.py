"""Two limits that end loader workers in riddles: open files and ``/dev/shm``. Never lowers any."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path

import torch

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where locks between processes are made


def raise_open_file_limit() -> tuple[int, int]:
    """Raise the soft limit of open files to the hard one; ``(before, after)``.

    Every tensor that a worker sends costs the rank an open file while it is alive.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard in {soft, resource.RLIM_INFINITY}:
        # An unlimited hard limit is none that a process may claim: the kernel's own cap decides.
        return soft, soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft, hard


def open_file_limit() -> str:
    """Return a message that the limit of open files is reached, with the limit."""
    return f"too many open files (ulimit -n is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]})"


def shared_memory_room(path: Path = SHARED_MEMORY) -> str:
    """Return a description of the free space for shared memory, in which locks between processes are made."""
    usage = shutil.disk_usage(path)
    return f"{path} has {in_mb(usage.free)} free of {in_mb(usage.total)}"


def can_pin() -> bool:
    """Return True if there is a device for whose copies memory can be pinned."""
    return torch.cuda.is_available()


def in_mb(size_bytes: int) -> str:
    """``size_bytes`` for people."""
    return f"{size_bytes / 2**20:.1f} MB"
