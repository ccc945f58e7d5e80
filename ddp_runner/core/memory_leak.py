"""Decides whether memory grows slowly and steadily, as a leak does. Never measures memory.

A leak differs from the three growths that every training run has: a sawtooth comes back to its
floor, a jump happens once, and warm-up slows down. So a leak must raise the floor of nearly every
part of the window, with no part holding most of the growth and no slowing towards the end. Linear
warm-up that lasts for more than four fifths of a window looks the same and is suspected too.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp_runner.core.settings import MemorySettings

SAMPLES_MAX = 64
_BLOCKS = 8
SAMPLES_MIN = 2 * _BLOCKS
_RISES_MIN = _BLOCKS - 2  # of the _BLOCKS - 1 changes between neighbours: one may be flat
_LARGEST_RISE_SHARE = 0.5  # more in one change is a jump
_LATE_SHARE = 0.4  # of the growth, in the second half; 0.5 when steady, less when it slows down
_LAST_BLOCKS_SHARE = 0.18  # of the growth, in the last 2 of 7 changes; 0.29 when steady
_LAST_RISE_SHARE = 0.05  # of the growth, in the last change; 0.14 when steady
_MB = 1_000_000

Sample = tuple[int, int]  # (step, bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeakSuspicion:
    """Steady growth since ``since_step``, in bytes per 1000 steps."""

    rate_bytes_per_1000_steps: float
    since_step: int


def suspected_leak(samples: Sequence[Sample], settings: MemorySettings) -> LeakSuspicion | None:
    """Judge one window of (step, bytes) samples, oldest first, evenly spaced in steps.

    Returns None below ``SAMPLES_MIN`` samples: too few to distinguish growth from noise. Costs O(n^2) in
    the number of samples, which :class:`LeakWindow` bounds by ``SAMPLES_MAX``.
    """
    if len(samples) < SAMPLES_MIN:
        return None
    slope = _theil_sen(samples)
    if slope * 1000 < settings.leak_mb_per_1000_steps * _MB or not _grows_steadily(samples, slope):
        return None
    return LeakSuspicion(rate_bytes_per_1000_steps=slope * 1000, since_step=samples[0][0])


def _theil_sen(samples: Sequence[Sample]) -> float:
    """The median of the slopes of all pairs, in bytes per step; outliers do not move it.

    Source: P. K. Sen, "Estimates of the regression coefficient based on Kendall's tau", 1968.
    """
    return median(
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for index, earlier in enumerate(samples)
        for later in samples[index + 1 :]
    )


def _grows_steadily(samples: Sequence[Sample], slope: float) -> bool:
    """Return whether the minima of the window's blocks rise in nearly every block, and keep rising."""
    bounds = [len(samples) * block // _BLOCKS for block in range(_BLOCKS + 1)]
    floors = [min(size for _, size in samples[start:end]) for start, end in pairwise(bounds)]
    changes = [later - earlier for earlier, later in pairwise(floors)]
    growth = floors[-1] - floors[0]
    steps_per_block = (samples[-1][0] - samples[0][0]) / (_BLOCKS - 1 / len(samples))
    if growth <= 0 or sum(change > slope * steps_per_block / 4 for change in changes) < _RISES_MIN:
        return False
    late = floors[-1] - (floors[3] + floors[4]) / 2
    last = floors[-1] - floors[-3]
    return (
        max(changes) <= _LARGEST_RISE_SHARE * growth
        and late >= _LATE_SHARE * growth
        and last >= _LAST_BLOCKS_SHARE * growth
        and changes[-1] >= _LAST_RISE_SHARE * growth
    )


class LeakWindow:
    """The newest samples of one measure, bounded; reports a suspicion at most once per window."""

    def __init__(self, settings: MemorySettings) -> None:
        self._settings = settings
        # A window must hold enough samples to judge, however rarely they are taken.
        self._window_steps = max(
            settings.leak_window_steps, SAMPLES_MIN * settings.memory_check_interval
        )
        self._spacing_steps = -(-self._window_steps // SAMPLES_MAX)
        self._samples: deque[Sample] = deque(maxlen=SAMPLES_MAX + 1)
        self._judged_step = 0

    def __len__(self) -> int:
        return len(self._samples)

    def observe(self, *, step: int, size_bytes: int) -> LeakSuspicion | None:
        """Add a sample; judge the window when it is full and a quarter of it is new."""
        if self._samples and step <= self._samples[-1][0]:
            self._restart(step)  # the run was rolled back: older samples no longer line up
        if self._samples and step - self._samples[-1][0] < self._spacing_steps:
            return None
        if not self._samples:
            self._judged_step = step
        self._samples.append((step, size_bytes))
        while step - self._samples[0][0] > self._window_steps:
            self._samples.popleft()
        if not self._is_due(step):
            return None
        self._judged_step = step
        suspicion = suspected_leak(tuple(self._samples), self._settings)
        if suspicion is not None:
            self._restart(step)
        return suspicion

    def _is_due(self, step: int) -> bool:
        """Return whether the window is full but for one sample, and enough of it has not been judged."""
        span = step - self._samples[0][0]
        slack = max(self._spacing_steps, self._settings.memory_check_interval)
        return (
            span + slack > self._window_steps
            and step - self._judged_step >= self._window_steps // 4
        )

    def _restart(self, step: int) -> None:
        self._samples.clear()
        self._judged_step = step
