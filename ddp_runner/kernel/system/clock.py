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


SYSTEM_CLOCK: Clock = time
