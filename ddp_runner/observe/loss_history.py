"""The course of the loss over a whole run in a bounded number of points, for a line in the terminal."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

POINTS_MAX = 240


class LossHistory:
    """Owned by the supervisor's loop. Every rank reports the same loss of a step; the last word counts."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._losses: list[float] = []

    def add(self, step: int, loss: float) -> None:
        """A logged step. Those from it on that were done before are done again, and count no more."""
        if not math.isfinite(loss):
            return
        first = bisect_left(self._steps, step)
        del self._steps[first:], self._losses[first:]
        self._steps.append(step)
        self._losses.append(loss)
        if len(self._steps) > POINTS_MAX:  # every second one goes, and the newest stays
            self._steps[:-1] = self._steps[:-1:2]
            self._losses[:-1] = self._losses[:-1:2]

    def points(self) -> tuple[tuple[int, float], ...]:
        """Steps and their losses, oldest first."""
        return tuple(zip(self._steps, self._losses, strict=True))


def by_steps(points: Sequence[tuple[int, float]], *, stretches: int) -> list[float]:
    """The mean loss of each of at most so many equal stretches of steps; one without a point is as the one before."""
    first, last = points[0][0], points[-1][0]
    columns = min(stretches, len(points))
    found: list[list[float]] = [[] for _ in range(columns)]
    for step, value in points:
        place = (step - first) * columns // max(1, last - first)
        found[min(columns - 1, place)].append(value)
    means: list[float] = []
    for values in found:
        means.append(sum(values) / len(values) if values else means[-1])
    return means
