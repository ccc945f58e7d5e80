"""How long a rank waits for the others in a step's reduction, by whose clock that can be measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch


class WaitClock(Protocol):
    """Of one rank; the three calls come once a step, in this order."""

    def own_is_done(self) -> None:
        """The rank's own share of the backward ends here."""
        ...

    def is_reduced(self) -> None:
        """The sums over ranks are there from here on."""
        ...

    def waited_ns(self) -> int:
        """From the one to the other; on a device only once something that comes after them was read."""
        ...


class HostClock:
    """Where the CPU computes, and waits."""

    def __init__(self) -> None:
        self._own_ns = self._reduced_ns = time.monotonic_ns()

    def own_is_done(self) -> None:
        """Now."""
        self._own_ns = time.monotonic_ns()

    def is_reduced(self) -> None:
        """Now."""
        self._reduced_ns = time.monotonic_ns()

    def waited_ns(self) -> int:
        """By the host's clock."""
        return self._reduced_ns - self._own_ns


class DeviceClock:
    """Where a device computes: the host only gives it work, long before that is done.

    By the host's clock all ranks would take equally long, since each waits for the slowest where it
    reads the sums. Two events on the device's stream show what of that was this rank's own.
    """

    def __init__(self, make_event: Callable[[], Any]) -> None:
        self._own, self._reduced = make_event(), make_event()
        self._is_whole = False

    def own_is_done(self) -> None:
        """When the device comes here."""
        self._own.record()

    def is_reduced(self) -> None:
        """When the device comes here."""
        self._reduced.record()
        self._is_whole = True

    def waited_ns(self) -> int:
        """By the device's clock; 0 before a step was reduced."""
        return int(self._own.elapsed_time(self._reduced) * 1e6) if self._is_whole else 0


def wait_clock(device: torch.device) -> WaitClock:
    """The clock for ranks that compute on ``device``."""
    if device.type != "cuda":
        return HostClock()
    return DeviceClock(
        lambda: torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    )
