"""A curve in one line of a terminal. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def sparkline(points: Sequence[tuple[int, float]], *, width: int, levels: str) -> str:
    """One character for each of at most ``width`` equal stretches of steps: the mean of their values.

    Empty with fewer than two points. A stretch without a point is as the one before it. The lowest
    level is the lowest mean, so that a curve that is flat is low, not in the middle.
    """
    if len(points) < 2 or width < 2:
        return ""
    first, last = points[0][0], points[-1][0]
    columns = min(width, len(points))
    stretches: list[list[float]] = [[] for _ in range(columns)]
    for step, value in points:
        place = (step - first) * columns // max(1, last - first)
        stretches[min(columns - 1, place)].append(value)
    means: list[float] = []
    for values in stretches:
        means.append(sum(values) / len(values) if values else means[-1])
    low, high = min(means), max(means)
    top = len(levels) - 1
    return "".join(
        levels[round((one - low) / (high - low) * top) if high > low else 0] for one in means
    )
