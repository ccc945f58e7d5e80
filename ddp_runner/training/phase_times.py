"""Measures how long each part of a step takes, by the stamps on the board; waits for a device at each."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ddp_runner.core.board import Slot
from ddp_runner.core.phases import NAME_OF_PHASE, Phase


class TimedSlot(Slot):
    """A view of the same cells that also sums up what lies between two stamps."""

    __slots__ = ("_await_device", "_phase", "_since_ns", "_sums_ns")

    def __init__(self, slot: Slot, await_device: Callable[[], None]) -> None:
        super().__init__(slot._ints, slot._floats, 0)  # noqa: SLF001 - another view of the same cells
        self._base = slot._base  # noqa: SLF001
        self._await_device = await_device
        self._phase = Phase.IDLE
        self._since_ns = time.monotonic_ns()
        self._sums_ns = dict.fromkeys(NAME_OF_PHASE, 0)

    def stamp(self, phase: Phase, now_ns: int) -> None:
        """Stamp once the device has completed the previous phase, so that each phase gets its own time."""
        self._await_device()
        now_ns = max(now_ns, time.monotonic_ns())
        self._close(now_ns)
        self._phase = phase
        super().stamp(phase, now_ns)

    def take(self) -> dict[Phase, int]:
        """Nanoseconds of each phase since the last call; what comes until the next stamp is of none."""
        self._await_device()
        self._close(time.monotonic_ns())
        self._phase = Phase.IDLE
        taken, self._sums_ns = self._sums_ns, dict.fromkeys(NAME_OF_PHASE, 0)
        return taken

    def _close(self, now_ns: int) -> None:
        if self._phase in self._sums_ns:
            self._sums_ns[self._phase] += now_ns - self._since_ns
        self._since_ns = now_ns


def timed(slot: Slot, device: str) -> Slot:
    """``slot``, with times; one that injects faults stays what it is."""
    if type(slot) is not Slot:
        return slot
    return TimedSlot(slot, torch.cuda.synchronize if device != "cpu" else lambda: None)


def phase_values(slot: Slot, steps: int) -> dict[str, float]:
    """Milliseconds a step of each part, over the last ``steps``; nothing where they are not timed."""
    if not isinstance(slot, TimedSlot):
        return {}
    return {
        NAME_OF_PHASE[phase]: taken / 1e6 / max(1, steps) for phase, taken in slot.take().items()
    }
