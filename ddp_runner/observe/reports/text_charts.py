"""Curves and bars of characters, one line each. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

_BLOCKS = "▁▂▃▄▅▆▇█"
_PLAIN = "_.-~=+*#"  # for terminals without Unicode
_EIGHTHS = " ▏▎▍▌▋▊▉"


def sparkline(values: Sequence[float], *, columns: int, unicode: bool = True) -> str:
    """One character for each stretch of ``values``, by its mean between the lowest and the highest mean.

    A stretch without a finite value is a blank. Fewer values than ``columns`` give as many characters.
    """
    marks = _BLOCKS if unicode else _PLAIN
    stretches = min(columns, len(values))
    means = [
        _mean(values[i * len(values) // stretches : (i + 1) * len(values) // stretches])
        for i in range(stretches)
    ]
    known = [mean for mean in means if mean is not None]
    if not known:
        return " " * stretches
    low, high = min(known) / 2, max(known) / 2  # halves: their difference is finite
    top = len(marks) - 1

    def mark(mean: float) -> str:
        share = (mean / 2 - low) / (high - low) if high > low else 0.5
        return marks[round(share * top)]

    return "".join(" " if mean is None else mark(mean) for mean in means)


def bar(share: float, *, columns: int, unicode: bool = True) -> str:
    """A bar over ``share`` of the columns; what is more than nothing shows."""
    share = min(1.0, max(0.0, share)) if math.isfinite(share) else 0.0
    if not unicode:
        return "#" * max(round(share * columns), int(share > 0))
    eighths = max(round(share * columns * 8), int(share > 0))
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip()


def _mean(values: Sequence[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    mean = sum(value / len(finite) for value in finite) if finite else math.nan
    return mean if math.isfinite(mean) else None
