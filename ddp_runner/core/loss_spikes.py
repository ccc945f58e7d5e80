"""Detects values that explode above their recent past. Values only."""

from __future__ import annotations

import math
import sys
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Sequence

# All must be exceeded: many times the usual spread (of noise, as the median absolute deviation
# shows it), a factor of the usual value, because a quiet run has hardly any spread, and the spread of
# the logarithms, because the losses of a model that is good already may differ by orders of magnitude.
SPREADS = 20.0
SPREADS_OF_LOGS = 8.0  # 5.4 standard deviations of a log-normal distribution
_LOG_MAX = math.log(sys.float_info.max)


class RecentValues:
    """The newest ``window`` values, also in order of size: asked for their limit in every step."""

    def __init__(self, window: int, values: Iterable[float] = ()) -> None:
        self._by_age = deque(values, maxlen=window)
        self._by_size = sorted(self._by_age)

    def add(self, value: float) -> None:
        """Take in the newest value, which is finite; the oldest one leaves where there are too many."""
        if len(self._by_age) == self._by_age.maxlen:
            if not self._by_age:
                return
            del self._by_size[bisect_left(self._by_size, self._by_age[0])]
        self._by_age.append(value)
        insort(self._by_size, value)

    def __len__(self) -> int:
        return len(self._by_age)

    def oldest_first(self) -> list[float]:
        """All of them."""
        return list(self._by_age)

    def explosion_limit(self, *, factor: float) -> float:
        """Above this a value does not belong to them; robust against outliers among them.

        Infinite for an empty past. For a median of 0 or below the spread alone decides.
        """
        if not self._by_size:
            return math.inf
        middle, spread = _median(self._by_size), 0.0
        # Where most values are so near, their spread says less than the factor; it takes ten times as long.
        near = 0.99 * (factor - 1.0) * middle / SPREADS
        if middle <= 0 or not self._are_most_between(middle - near, middle + near):
            spread = _median(sorted([abs(value - middle) for value in self._by_size]))
        is_known = middle > 0 or spread > 0
        limit = max(middle * factor, middle + SPREADS * spread) if is_known else math.inf
        near = factor ** (0.99 / SPREADS_OF_LOGS)
        if self._by_size[0] <= 0 or self._are_most_between(middle / near, middle * near):
            return limit
        logs = [math.log(value) for value in self._by_size]
        middle = _median(logs)
        log_limit = middle + SPREADS_OF_LOGS * _median(sorted([abs(one - middle) for one in logs]))
        return max(limit, math.exp(log_limit)) if log_limit < _LOG_MAX else math.inf

    def _are_most_between(self, low: float, high: float) -> bool:
        return self._number_between(low, high) > len(self._by_size) // 2

    def _number_between(self, low: float, high: float) -> int:
        return bisect_right(self._by_size, high) - bisect_left(self._by_size, low)


def _median(ordered: Sequence[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def broken_gradients(norms: Sequence[float], *, limit: float) -> tuple[int, ...]:
    """The ranks whose own gradient is not finite, or would be above ``limit`` were all like it.

    ``norms``, by rank, are of the gradients before they are summed.
    """
    return tuple(
        rank
        for rank, norm in enumerate(norms)
        if not math.isfinite(norm) or norm * len(norms) > limit
    )
