"""Computes the time between saves, from the cost of a save and the rate of faults that needed one.

``CheckpointInterval`` is fed with times and figures; it reads no clock.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, fields

FIRST_INTERVAL_S = 60.0  # while no save has been measured
INTERVAL_MIN_S = 1.0
INTERVAL_MAX_S = 1800.0
STEPS_MIN = 10
WRITING_SHARE_MAX = 0.5  # of the time: a disk that is busy with one save must be free for the next
PRIOR_FAULT_S = 4 * 3600.0  # one fault in so long is assumed beside those seen
USUAL_STEPS = 64  # the newest without a save beside them, whose mean is the usual one
USUAL_STEPS_MIN = 8
COPY_SHARE_MAX = 0.005  # of the time, for copies in memory that are no files
FIRST_COPY_S = 5.0
COPY_COSTS = (
    5  # the newest, whose median counts: a step beside a copy may be slow for another reason
)
COPY_COSTS_MIN = 3
UNSURE_COPY_MAX_S = 60.0  # until that many are known
_NEWEST_SHARE = 0.5  # of the newest cost in the smoothed one


def mean_time_between_faults_s(*, faults: int, observed_s: float) -> float:
    """Return the mean time between faults in seconds, with a prior of one fault in :data:`PRIOR_FAULT_S`.

    The prior keeps a run without faults from expecting none at all.
    """
    return (observed_s + PRIOR_FAULT_S) / (faults + 1)


def save_interval_s(
    *, cost_s: float, write_s: float, step_s: float, between_faults_s: float
) -> float:
    """The interval that loses least time: W = sqrt(2 C M), within bounds.

    C is the time that a save takes from training and M the mean time between faults that need a
    checkpoint: each interval costs C, and each fault loses half an interval on average. Source: J. W.
    Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974; J. T. Daly,
    FGCS 22(3), 2006, for the terms that are left out here, which matter where C is not far below M.
    """
    best_s = math.sqrt(2.0 * max(0.0, cost_s) * between_faults_s)
    least_s = max(INTERVAL_MIN_S, STEPS_MIN * step_s, write_s / WRITING_SHARE_MAX)
    return max(least_s, min(best_s, INTERVAL_MAX_S))


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCost:
    """The cost of a save in seconds: training that waits, steps that the write slows down, and the write."""

    compare_s: float
    blocked_s: float
    slowed_s: float
    write_s: float

    @property
    def training_s(self) -> float:
        """The time that a save takes from training, in seconds."""
        return self.compare_s + self.blocked_s + self.slowed_s

    def towards(self, newest: SaveCost) -> SaveCost:
        """Smoothed with a newer one."""
        return SaveCost(
            **{
                each.name: (1.0 - _NEWEST_SHARE) * getattr(self, each.name)
                + _NEWEST_SHARE * getattr(newest, each.name)
                for each in fields(self)
            }
        )


class CheckpointInterval:
    """When the next save is due, where the interval is chosen and not given."""

    def __init__(self, *, now_s: float) -> None:
        self.faults = 0
        self._began_s = now_s
        self._cost: SaveCost | None = None
        self._compare_s = 0.0
        self._usual_s: deque[float] = deque(maxlen=USUAL_STEPS)
        self._beside_s = 0.0  # of the steps beside the save under way
        self._beside_steps = 0
        self._last_s = now_s
        self._reported_s = 0.0

    def is_due(self, *, now_s: float, step_s: float) -> bool:
        """Return whether the interval since the last save, or since the start, is over."""
        return now_s - self._last_s >= self.interval_s(now_s=now_s, step_s=step_s)

    def began(self, *, now_s: float) -> None:
        """A save has begun, or was tried, for whatever reason."""
        self._last_s = now_s
        self._beside_s, self._beside_steps = 0.0, 0

    def compared(self, compare_s: float) -> None:
        """The replicas were compared ahead of a save."""
        self._compare_s = compare_s

    def stepped(self, step_s: float, *, beside_save: bool) -> None:
        """Note the time of a step, less what it waited for a save."""
        if beside_save:
            self._beside_s += step_s
            self._beside_steps += 1
        else:
            self._usual_s.append(step_s)

    def measured(self, *, blocked_s: float, write_s: float) -> None:
        """Note the time that a save took from training, and in all; the steps during it are known."""
        newest = SaveCost(
            compare_s=self._compare_s,
            blocked_s=blocked_s,
            # A write cannot cost more than its own time: more than that is noise.
            slowed_s=min(self._slowed_s(), write_s),
            write_s=write_s,
        )
        self._learn(newest)
        self._beside_s, self._beside_steps = 0.0, 0

    def _learn(self, newest: SaveCost) -> None:
        self._cost = newest if self._cost is None else self._cost.towards(newest)

    def _slowed_s(self) -> float:
        """Return how much longer the steps during the save took than as many steps without one."""
        if len(self._usual_s) < USUAL_STEPS_MIN:
            return 0.0
        usual_s = sum(self._usual_s) / len(self._usual_s)
        return max(0.0, self._beside_s - self._beside_steps * usual_s)

    def interval_s(self, *, now_s: float, step_s: float) -> float:
        """Return the interval that follows from the measurements so far."""
        if self._cost is None:
            return max(FIRST_INTERVAL_S, STEPS_MIN * step_s)
        return save_interval_s(
            cost_s=self._cost.training_s,
            write_s=self._cost.write_s,
            step_s=step_s,
            between_faults_s=mean_time_between_faults_s(
                faults=self.faults, observed_s=now_s - self._began_s
            ),
        )

    def news(self, *, now_s: float, step_s: float) -> str:
        """The choice in words when it is new, or has doubled or halved since; else empty."""
        interval_s = self.interval_s(now_s=now_s, step_s=step_s)
        cost = self._cost
        if cost is None or self._reported_s / 2 < interval_s < self._reported_s * 2:
            return ""
        self._reported_s = interval_s
        hours = (now_s - self._began_s) / 3600
        faults = (
            f"{self.faults} faults in {hours:.1f} h needed one"
            if self.faults
            else "no fault needed one yet"
        )
        return (
            f"saving every {interval_s:.0f} s (auto): a save costs training"
            f" {cost.training_s * 1e3:.0f} ms (waiting {cost.blocked_s * 1e3:.0f}, slower steps"
            f" {cost.slowed_s * 1e3:.0f}, comparing ranks {cost.compare_s * 1e3:.0f}) and takes {cost.write_s:.2f} s"
            f" in all; {faults}"
        )


class CopyInterval(CheckpointInterval):
    """When the next copy in memory is due: so seldom that all of them cost a small share of the time."""

    def __init__(self, *, now_s: float) -> None:
        super().__init__(now_s=now_s)
        self._costs_s: deque[float] = deque(maxlen=COPY_COSTS)
        self._usual_cost_s = 0.0

    def _learn(self, newest: SaveCost) -> None:
        self._costs_s.append(newest.training_s)
        self._usual_cost_s = statistics.median(self._costs_s)

    def interval_s(self, *, now_s: float, step_s: float) -> float:
        """Return the interval that follows from the measurements so far."""
        del now_s
        if not self._costs_s:
            return max(FIRST_COPY_S, STEPS_MIN * step_s)
        best_s = self._usual_cost_s / COPY_SHARE_MAX
        if len(self._costs_s) < COPY_COSTS_MIN:
            best_s = min(best_s, UNSURE_COPY_MAX_S)
        return max(INTERVAL_MIN_S, STEPS_MIN * step_s, best_s)
