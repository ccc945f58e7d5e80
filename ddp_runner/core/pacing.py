"""How long to wait between saves: from what a save costs and how often a fault has needed one.

``SavePace`` is fed with times and figures; it reads no clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

FIRST_INTERVAL_S = 60.0  # while no save has been measured
INTERVAL_MIN_S = 1.0
INTERVAL_MAX_S = 1800.0
STEPS_MIN = 10
WRITING_SHARE_MAX = 0.5  # of the time: a disk that is busy with one save must be free for the next
PRIOR_FAULT_S = 4 * 3600.0  # one fault in so long is assumed beside those seen
_NEWEST_SHARE = 0.5  # of the newest cost in the smoothed one


def mean_time_between_faults_s(*, faults: int, observed_s: float) -> float:
    """With one assumed fault in :data:`PRIOR_FAULT_S`, so that no fault yet does not mean never."""
    return (observed_s + PRIOR_FAULT_S) / (faults + 1)


def save_interval_s(
    *, blocked_s: float, write_s: float, step_s: float, between_faults_s: float
) -> float:
    """The interval that loses least time: W = sqrt(2 C M), within bounds.

    C is the time that a save takes from training and M the mean time between faults that need a
    checkpoint: each interval costs C, and each fault loses half an interval on average. Source: J. W.
    Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974; J. T. Daly,
    FGCS 22(3), 2006, for the terms that are left out here, which matter where C is not far below M.
    """
    best_s = math.sqrt(2.0 * max(0.0, blocked_s) * between_faults_s)
    least_s = max(INTERVAL_MIN_S, STEPS_MIN * step_s, write_s / WRITING_SHARE_MAX)
    return max(least_s, min(best_s, INTERVAL_MAX_S))


class SavePace:
    """When the next save is due, where the interval is chosen and not given."""

    def __init__(self, *, now_s: float) -> None:
        self.faults = 0
        self._began_s = now_s
        self._observed_before_s = 0.0
        self._blocked_s: float | None = None
        self._write_s = 0.0
        self._last_s = now_s
        self._told_s = 0.0

    def is_due(self, *, now_s: float, step_s: float) -> bool:
        """Whether the interval since the last save, or since the start, is over."""
        return now_s - self._last_s >= self.interval_s(now_s=now_s, step_s=step_s)

    def began(self, *, now_s: float) -> None:
        """A save has begun, or was tried, for whatever reason."""
        self._last_s = now_s

    def measured(self, *, blocked_s: float, write_s: float) -> None:
        """A save has taken so long of training, and so long in all."""
        if self._blocked_s is None:
            self._blocked_s, self._write_s = blocked_s, write_s
            return
        self._blocked_s += _NEWEST_SHARE * (blocked_s - self._blocked_s)
        self._write_s += _NEWEST_SHARE * (write_s - self._write_s)

    def interval_s(self, *, now_s: float, step_s: float) -> float:
        """The interval by what is known now."""
        if self._blocked_s is None:
            return max(FIRST_INTERVAL_S, STEPS_MIN * step_s)
        return save_interval_s(
            blocked_s=self._blocked_s,
            write_s=self._write_s,
            step_s=step_s,
            between_faults_s=mean_time_between_faults_s(
                faults=self.faults, observed_s=self._observed_s(now_s)
            ),
        )

    def news(self, *, now_s: float, step_s: float) -> str:
        """The choice in words when it is new, or has doubled or halved since; else empty."""
        interval_s = self.interval_s(now_s=now_s, step_s=step_s)
        if self._blocked_s is None or self._told_s / 2 < interval_s < self._told_s * 2:
            return ""
        self._told_s = interval_s
        hours = self._observed_s(now_s) / 3600
        return (
            f"saving every {interval_s:.0f} s (save_every_steps=auto): a save takes"
            f" {self._blocked_s:.3f} s from training and {self._write_s:.2f} s in all;"
            f" {self.faults} faults in {hours:.1f} h needed one"
        )

    def _observed_s(self, now_s: float) -> float:
        return self._observed_before_s + now_s - self._began_s

    def to_record(self, *, now_s: float) -> dict[str, float]:
        """What a later process goes on from."""
        return {"faults": self.faults, "observed_s": self._observed_s(now_s)}

    def go_on_from(self, record: Mapping[str, float], *, after_fault: bool) -> None:
        """Add what the process before has seen; ``after_fault``: that it was lost without a last save."""
        self.faults += int(record.get("faults", 0)) + int(after_fault)
        self._observed_before_s += float(record.get("observed_s", 0.0))
