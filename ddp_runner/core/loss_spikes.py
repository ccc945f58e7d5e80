"""How far above its recent past a number must be to be an explosion. Values only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

# Both must be exceeded: many times the usual spread (of noise, as the median absolute deviation
# shows it), and a factor of the usual value, because a quiet run has hardly any spread.
SPREADS = 20.0


def explosion_limit(recent: Sequence[float], *, factor: float) -> float:
    """Above this a value does not belong to ``recent``; robust against outliers among them.

    Infinite for an empty past. For a median of 0 or below the spread alone decides.
    """
    if not recent:
        return math.inf
    middle = median(recent)
    spread = median(abs(value - middle) for value in recent)
    return max(middle * factor, middle + SPREADS * spread) if middle > 0 or spread else math.inf


def broken_gradients(norms: Sequence[float], *, limit: float) -> tuple[int, ...]:
    """The ranks whose own gradient is not finite, or would be above ``limit`` were all like it.

    ``norms``, by rank, are of the gradients before they are summed.
    """
    return tuple(
        rank
        for rank, norm in enumerate(norms)
        if not math.isfinite(norm) or norm * len(norms) > limit
    )
