"""Evaluates a range test of the learning rate: its end and the suggested rate. Values only.

Sources: L. Smith, Cyclical Learning Rates for Training Neural Networks (2015), arXiv:1506.01186, section
3.3, for the test; fastai's ``callback/schedule.py`` for smoothing, end and both suggestions.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

DECAY = 0.98  # of the mean of the losses, as fastai has it
EXPLODED = 4.0  # times the lowest smoothed loss, as fastai has it
FALL_MIN = 1e-3  # of the loss at the begin; less is none
SLOPE_SHARE = 0.05  # of the points, to each side of the one whose slope it is
SETTLED = 10  # points until the mean is one of so many: a few samples by chance are no lowest loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A step of the test. ``loss`` is None where it was not finite."""

    rate: float
    loss: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Smoothed:
    """A point of the curve."""

    rate: float
    loss: float
    smoothed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The points up to the explosion, which ``exploded`` says there was."""

    points: tuple[Smoothed, ...]
    exploded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """The rates that a curve suggests.

    ``steepest``: where the loss falls fastest; ``valley``: within its longest fall; ``tenth``: a tenth of the
    rate at which it is lowest.
    """

    steepest: float
    valley: float
    tenth: float

    @property
    def rate(self) -> float:
        """The middle one of the three, to two digits: each is misled by another kind of curve."""
        return float(f"{sorted((self.steepest, self.valley, self.tenth))[1]:.1e}")


def curve_of(points: Sequence[Point]) -> Curve:
    """Smooth the losses by a mean that forgets, corrected for its begin, and stop where they explode.

    Adding a point never changes those before it.
    """
    found: list[Smoothed] = []
    mean, lowest = 0.0, math.inf
    for number, point in enumerate(points, start=1):
        if point.loss is None or not math.isfinite(point.loss):
            return Curve(points=tuple(found), exploded=True)
        mean = DECAY * mean + (1 - DECAY) * point.loss
        smoothed = mean / (1 - DECAY**number)
        if _is_exploded(smoothed, lowest):
            return Curve(points=tuple(found), exploded=True)
        if number >= SETTLED:
            lowest = min(lowest, smoothed)
        found.append(Smoothed(rate=point.rate, loss=point.loss, smoothed=smoothed))
    return Curve(points=tuple(found), exploded=False)


def _is_exploded(smoothed: float, lowest: float) -> bool:
    """A loss that may be below zero is held against its distance from zero."""
    if not math.isfinite(lowest):
        return False
    return smoothed > (EXPLODED * lowest if lowest > 0 else lowest + EXPLODED * abs(lowest) + 1.0)


def suggestion(curve: Curve) -> Suggestion | None:
    """Return the rates that the curve suggests; None if the loss has not fallen.

    The slope is that of the smoothed loss over the logarithm of the rate, before the lowest point, measured
    between points a little apart.
    """
    points = curve.points[SETTLED - 1 :]
    if len(points) < 3:
        return None
    bottom = min(range(len(points)), key=lambda place: points[place].smoothed)
    fallen = points[0].smoothed - points[bottom].smoothed
    if fallen <= FALL_MIN * abs(points[0].smoothed):
        return None
    reach = max(1, int(SLOPE_SHARE * len(points)))

    def slope(place: int) -> float:
        before, after = points[max(0, place - reach)], points[min(bottom, place + reach)]
        return (after.smoothed - before.smoothed) / math.log(after.rate / before.rate)

    steepest = min(range(bottom), key=slope)
    return Suggestion(
        steepest=points[steepest].rate,
        valley=points[_valley([one.smoothed for one in points])].rate,
        tenth=points[bottom].rate / 10,
    )


def _valley(losses: Sequence[float]) -> int:
    """Return the place within the longest fall, ignoring rises in between, as fastai does.

    The fall ends where the longest falling subsequence does, and is taken to begin as many points before as that has.
    """
    tails: list[
        float
    ] = []  # the highest end of a falling subsequence of each length, with its sign changed
    longest, end = 0, 0
    for place, loss in enumerate(losses):
        length = bisect_left(tails, -loss) + 1
        tails[length - 1 : length] = [-loss]
        if length > longest:
            longest, end = length, place
    begin = end - longest
    section = (end - begin) / 3
    return max(0, begin) + int(section) + int(section / 2)
