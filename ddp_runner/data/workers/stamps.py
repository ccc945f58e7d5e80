"""Records what each loader worker is loading right now, in memory that outlives the worker.

A worker stamps before every sample, with plain stores; the rank reads after the worker's death.
Otherwise only the oldest undelivered batch would be known, and a dead worker may also have held
finished batches that were not sent yet.
"""

from __future__ import annotations

import mmap
import resource

_BATCH, _SAMPLE, _PEAK_KB = range(3)
_CELLS = 3  # of 8 bytes
_NOTHING = -1


class LoadStamps:
    """The cells of all workers of a pool, in an anonymous shared map: made before the fork."""

    def __init__(self, workers: int) -> None:
        self._cells = memoryview(mmap.mmap(-1, workers * _CELLS * 8)).cast("q")
        for worker in range(workers):
            self._cells[worker * _CELLS + _BATCH] = _NOTHING
            self._cells[worker * _CELLS + _SAMPLE] = _NOTHING

    def begin(self, worker: int, number: int) -> None:
        """Worker: batch ``number`` is begun; no sample of it yet."""
        peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self._cells[worker * _CELLS + _PEAK_KB] = peak_kb
        self._cells[worker * _CELLS + _SAMPLE] = _NOTHING
        self._cells[worker * _CELLS + _BATCH] = number

    def sample(self, worker: int, index: int) -> None:
        """Worker: the sample at ``index`` is loaded next."""
        self._cells[worker * _CELLS + _SAMPLE] = index

    def end(self, worker: int) -> None:
        """Worker: nothing is being loaded; the last sample stays readable."""
        self._cells[worker * _CELLS + _BATCH] = _NOTHING

    def read(self, worker: int) -> tuple[int | None, int | None]:
        """Rank: ``(batch number, last sample)``, None for what is unknown or not there."""
        number = self._cells[worker * _CELLS + _BATCH]
        index = self._cells[worker * _CELLS + _SAMPLE]
        return (
            None if number == _NOTHING else number,
            None if index == _NOTHING else index,
        )

    def peak_bytes(self, worker: int) -> int:
        """Rank: the most memory the worker had resident when it last began a batch; 0 before."""
        return self._cells[worker * _CELLS + _PEAK_KB] * 1024
