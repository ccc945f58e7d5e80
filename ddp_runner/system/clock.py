"""The clock that whoever measures or waits is handed, so that a test can pass another one."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """As the ``time`` module has it: never goes back, and says nothing about the date."""

    def monotonic(self) -> float:
        """Seconds since some moment, the same one for every process of this machine."""

    def monotonic_ns(self) -> int:
        """The same in nanoseconds, as the board has it."""


SYSTEM_CLOCK: Clock = time
