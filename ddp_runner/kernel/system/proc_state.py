"""Finds out what a process does: whether the system holds it stopped, and, by a signal, where it is. Ends nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

_STAT_BYTES_MAX = 4096  # 52 numbers and a short name
_BLINK_S = 1.0  # between two looks: this process may have been stopped with the others


@dataclass(slots=True, kw_only=True)
class _Stop:
    since_s: float
    seen_s: float


class StoppedWatch:
    """Owned by a node of the supervisor; asked about the same processes at each tick."""

    def __init__(self, is_stopped: Callable[[int | None], bool]) -> None:
        self._is_stopped = is_stopped
        self._stops: dict[int, _Stop] = {}

    def stopped_s(self, pid: int | None, now_s: float) -> float:
        """Return how long the process has been seen stopped without a break; 0.0 if it is not stopped now."""
        if pid is None or not self._is_stopped(pid):
            self._stops.pop(pid or 0, None)
            return 0.0
        stop = self._stops.get(pid)
        if stop is None or now_s - stop.seen_s > _BLINK_S:
            stop = self._stops[pid] = _Stop(since_s=now_s, seen_s=now_s)
        stop.seen_s = now_s
        return now_s - stop.since_s


def is_stopped(pid: int | None) -> bool:
    """Return whether a signal has stopped the process (state T, not a debugger's t)."""
    return stat_fields(pid)[:1] == ["T"]


def waits_for_disk(pid: int) -> bool:
    """Return whether the process waits for a device (state D); no signal ends it before the device answers."""
    return stat_fields(pid)[:1] == ["D"]


def cpu_ticks(pid: int) -> int | None:
    """Time that all threads of the process have computed, in ticks (SC_CLK_TCK); None where there is none."""
    fields = stat_fields(pid)
    return int(fields[11]) + int(fields[12]) if len(fields) > 12 else None


def stat_fields(pid: int | None) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on, see proc(5); empty if the process does not exist."""
    try:
        number = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        text = os.read(number, _STAT_BYTES_MAX)
    except OSError:  # it has ended since
        return []
    finally:
        os.close(number)
    return text.rpartition(b")")[2].decode("ascii", errors="replace").split()
