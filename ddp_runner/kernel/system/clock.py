"""The clock as an argument, so that a test can pass another one."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock, as in the ``time`` module: it never goes back, and does not know the date."""

    def monotonic(self) -> float:
        """Seconds since some moment, the same one for every process of this machine."""

    def monotonic_ns(self) -> int:
        """Nanoseconds since that moment, the unit of the board."""


class LeaseClock(Clock, Protocol):
    """A clock that also knows how long the machine was suspended."""

    def boottime_ns(self) -> int:
        """Nanoseconds since the machine started, also those in which it was suspended."""


class _SystemClock:
    """The operating system's."""

    monotonic = staticmethod(time.monotonic)
    monotonic_ns = staticmethod(time.monotonic_ns)

    @staticmethod
    def boottime_ns() -> int:
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


SYSTEM_CLOCK: LeaseClock = _SystemClock()
