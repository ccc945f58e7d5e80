"""A real memory cgroup for a whole run, where this machine lets us make one (v1 or v2, root)."""

from __future__ import annotations

import contextlib
import time
import uuid
from pathlib import Path

ROOTS = {
    Path("/sys/fs/cgroup/memory"): "memory.limit_in_bytes",  # v1
    Path("/sys/fs/cgroup"): "memory.max",  # v2
}


class Cgroup:
    """One folder."""

    def __init__(self, folder, limit):
        self.folder = folder
        self._limit = limit

    def leave_room(self, room_bytes):
        """Limit it to what its processes use now, page cache not counted, and ``room_bytes``."""
        table = dict(
            line.split() for line in (self.folder / "memory.stat").read_text().splitlines()
        )
        used = int(table["total_rss"] if "total_rss" in table else table["anon"])
        self._limit.write_text(str(used + room_bytes))


@contextlib.contextmanager
def memory_cgroup():
    """A cgroup of its own; None where none can be made."""
    name = f"ddp_runner_{uuid.uuid4().hex}"
    for root, limit in ROOTS.items():
        folder = root / name
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            yield Cgroup(folder, folder / limit) if (folder / limit).exists() else None
        finally:
            for _ in range(200):  # an exited process leaves it a moment later
                with contextlib.suppress(OSError):
                    folder.rmdir()
                if not folder.exists():
                    break
                time.sleep(0.01)
        return
    yield None
