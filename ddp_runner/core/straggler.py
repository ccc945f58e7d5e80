"""Which rank is persistently slower than the others. Reports, and never decides anything else."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

FACTOR = 1.5  # over the median of all ranks
WINDOWS = 3  # in a row, so that slowness that wanders is nobody's


class StragglerWatch:
    """Fed once a window with each rank's own seconds per step, collectives left out."""

    def __init__(self) -> None:
        self._row: dict[int, int] = {}
        self._reported: set[int] = set()

    def observe(self, own_s: Mapping[int, float]) -> dict[int, float]:
        """The ranks that are found persistently slow by this window: rank -> factor, each once."""
        if len(own_s) < 2:
            return {}
        usual_s = median(own_s.values()) if len(own_s) > 2 else min(own_s.values())
        found = {}
        for rank, seconds in own_s.items():
            factor = seconds / usual_s if usual_s > 0 else 1.0
            self._row[rank] = self._row.get(rank, 0) + 1 if factor >= FACTOR else 0
            if self._row[rank] >= WINDOWS and rank not in self._reported:
                self._reported.add(rank)
                found[rank] = factor
        return found
