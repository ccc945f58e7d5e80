"""Marks a rank on the board as waiting for its peers. Waits for nothing itself."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.kernel.wire.board import Cell, Slot


@contextlib.contextmanager
def waiting_for_peers(slot: Slot) -> Iterator[None]:
    """Wait in the block as one waits in a reduction: whoever lets the others wait is late alone.

    Not for all ranks of a transfer at once: it may take longer than a step. A rank whose wait fails
    stays where it is on the board, as one whose reduction fails does.
    """
    before = Phase(slot.get(Cell.PHASE))
    slot.stamp(Phase.REDUCE, time.monotonic_ns())
    yield
    slot.stamp(before, time.monotonic_ns())
