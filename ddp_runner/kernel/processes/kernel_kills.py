"""Notices when the kernel has killed a process of this container for memory. Reads counters only."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from ddp_runner.kernel.processes.memory_limits import oom_kill_count

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
