"""What each loader worker is loading right now, in memory that outlives the worker.

A worker stamps before every sample, with plain stores; the rank reads after the worker's death.
Without it only the oldest undelivered batch is known, and a worker that dies takes finished ones
with it that were not sent yet.
"""

from __future__ import annotations

import mmap

_CELLS = 2  # of 8 bytes: batch number, sample index
_NOTHING = -1


class LoadStamps:
    """The cells of all workers of a pool, in an anonymous shared map: made before the fork."""

    def __init__(self, workers: int) -> None:
        self._cells = memoryview(mmap.mmap(-1, workers * _CELLS * 8)).cast("q")
        for worker in range(workers):
            self.end(worker)

    def begin(self, worker: int, number: int) -> None:
        """Worker: batch ``number`` is begun; no sample of it yet."""
        self._cells[worker * _CELLS + 1] = _NOTHING
        self._cells[worker * _CELLS] = number

    def sample(self, worker: int, index: int) -> None:
        """Worker: the sample at ``index`` is loaded next."""
        self._cells[worker * _CELLS + 1] = index

    def end(self, worker: int) -> None:
        """Worker: nothing is being loaded."""
        self._cells[worker * _CELLS] = _NOTHING
        self._cells[worker * _CELLS + 1] = _NOTHING

    def read(self, worker: int) -> tuple[int | None, int | None]:
        """Rank: ``(batch number, sample index)``, None for what is unknown or not there."""
        number, index = self._cells[worker * _CELLS : (worker + 1) * _CELLS].tolist()
        return (
            None if number == _NOTHING else number,
            None if index == _NOTHING else index,
        )
