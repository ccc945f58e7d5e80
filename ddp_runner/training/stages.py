"""Says how far a rank is in its start: on the board while it lasts, in a message when it is over."""

from __future__ import annotations

import time

from ddp_runner.core.board import Cell
from ddp_runner.core.messages import Built
from ddp_runner.core.phases import Stage
from ddp_runner.training.runtime import Runtime


class StageClock:
    """The stages of one start, one after the other; the last one entered is ``Stage.NONE``."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._stage = Stage.NONE
        self._since_s = 0.0

    def enter(self, stage: Stage) -> None:
        """The stage before this one is over, and its seconds are reported."""
        now_s = time.monotonic()
        self._runtime.slot.set(Cell.STAGE, stage)
        if self._stage is not Stage.NONE:
            took_s = round(now_s - self._since_s, 4)
            if self._stage in (Stage.DATA, Stage.MODEL):
                self._runtime.slot.add(Cell.BUILD_NS, int(took_s * 1e9))
            rank = self._runtime.rank_info.rank
            self._runtime.report(Built(rank=rank, stage=int(self._stage), seconds=took_s))
        self._stage, self._since_s = stage, now_s
