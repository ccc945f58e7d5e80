"""Which live process holds a run's folder, as the kernel's list of locks has it. Takes no lock, signals only its holder."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from ddp_runner.system.run_directories import LOG_LOCK_NAME

_LOCKS = Path("/proc/locks")


def holder_of(folder: Path) -> int | None:
    """The pid that holds the log folder's lock; None where nobody on this machine does."""
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
    if pid <= 1:
        return False
    try:
        pinned = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if holder_of(folder) != pid:
            return False
        signal.pidfd_send_signal(pinned, number)
    except OSError:
        return False
    finally:
        os.close(pinned)
    return True
