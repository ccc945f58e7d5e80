"""Finds the live process that holds a run's folder in the kernel's list of locks. Takes no lock, signals only its holder."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from ddp_runner.kernel.system.proc_state import stat_fields
from ddp_runner.system.run_directories import LOG_LOCK_NAME

_LOCKS = Path("/proc/locks")


def holder_of(folder: Path) -> int | None:
    """Return the pid that holds the log folder's lock; None if no process on this machine does."""
    try:
        found = (folder / LOG_LOCK_NAME).lstat()
        locks = _LOCKS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    place = f":{found.st_ino}"
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
    for line in locks:
        words = line.split()  # 1: FLOCK ADVISORY WRITE 4242 fe:00:131 0 EOF
        if len(words) >= 8 and words[1] == "FLOCK" and words[5] == device + place:
            return int(words[4]) if words[4].isdigit() else None
    return None


def signal_holder(folder: Path, pid: int, number: signal.Signals) -> bool:
    """Send the signal to ``pid`` if that process holds the run's folder now. Whether it was sent."""
    # INVARIANT only-the-holder: a pid from a file is signalled only while its process holds the lock.
    # Broken if: the lock is looked up before the process is pinned, or by the number alone.
    # Guarded by: test_who_does_not_hold_the_folder_is_never_signalled.
    return _signal_pinned(pid, number, lambda: holder_of(folder) == pid)


def signal_below_holder(folder: Path, holder: int, pid: int, number: signal.Signals) -> bool:
    """The same to a child of ``holder``, or a child of such a one: a rank, or a process that loads for it."""

    def is_below() -> bool:
        parents = (parent := _parent(pid), _parent(parent))
        return holder > 1 and holder in parents and holder_of(folder) == holder

    return _signal_pinned(pid, number, is_below)


def _parent(pid: int) -> int:
    fields = stat_fields(pid) if pid > 1 else []
    return int(fields[1]) if len(fields) > 1 else 0


def _signal_pinned(pid: int, number: signal.Signals, is_it: Callable[[], bool]) -> bool:
    if pid <= 1:
        return False
    try:
        pinned = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not is_it():
            return False
        signal.pidfd_send_signal(pinned, number)
    except OSError:
        return False
    finally:
        os.close(pinned)
    return True
