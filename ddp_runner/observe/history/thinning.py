"""Fewer points that look the same, and smooth ones. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

Points = tuple[list[float], list[float]]


def thinned(xs: Sequence[float], ys: Sequence[float], *, points_max: int) -> Points:
    """At most ``points_max`` of the points: first, lowest, highest and last of each stretch.

    So a single spike among a million points is still there, at its place.
    """
    if len(xs) <= points_max:
        return list(xs), list(ys)
    stretches = max(1, points_max // 4)
    kept: list[int] = []
    for stretch in range(stretches):
        begin = stretch * len(xs) // stretches
        end = (stretch + 1) * len(xs) // stretches
        known = [i for i in range(begin, end) if not math.isnan(ys[i])]
        if not known:
            kept.append(begin)  # a gap stays one
            continue
        lowest, highest = min(known, key=ys.__getitem__), max(known, key=ys.__getitem__)
        kept += sorted({known[0], lowest, highest, known[-1]})
    return [xs[i] for i in kept], [ys[i] for i in kept]


def smoothed(ys: Sequence[float], share: float) -> list[float]:
    """An exponential average that begins at the first value: each counts ``1 - share``; 0 changes nothing."""
    if share <= 0:
        return list(ys)
    found, weight, total = [], 0.0, 0.0
    for y in ys:
        if math.isnan(y):
            found.append(y)
            continue
        total = share * total + (1 - share) * y
        weight = share * weight + (1 - share)
        found.append(total / weight)
    return found
