"""Memory layout of the progress board: one slot of 8-byte cells per rank. Never allocates memory.

A rank stamps its slot with plain stores; the supervisor reads it at any time without asking. Each
cell is aligned and written whole, so a reader sees old or new values, never half of one; cells of
one slot may be of two neighbouring moments, which every reader here tolerates.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from ddp_runner.kernel.rules.phases import Moment, Phase

CELLS_PER_SLOT = 40
SLOT_BYTES = CELLS_PER_SLOT * 8
_COUNT_BITS = 32  # of DONE_BETWEEN


class Cell(IntEnum):
    """Index of a cell inside a slot. Wire format: add at the end, never renumber."""

    GENERATION = 0
    STEP = 1
    PHASE = 2
    PHASE_SINCE_NS = 3
    COMMITTED_STEP = 4
    DIRTY = 5
    SAMPLES = 6
    LOSS = 7  # float64
    PRODUCTIVE_NS = 8
    DATA_WAIT_NS = 9
    CHECKPOINT_NS = 10
    EVALUATION_NS = 11
    TOTAL_STEPS = 12
    STEP_NS = 13  # duration of the newest committed step
    EPOCH = 14
    FIRST_STEP_NS = 15  # monotonic time at which this run's first step began
    LAST_COMMIT_NS = 16  # monotonic time of the newest commit
    OWN_NS = 17  # cumulative time inside steps, waiting in collectives left out
    OWN_STEPS = 18  # how many steps OWN_NS sums up
    BUSY_NS = 19  # of STEP_NS, what was spent neither on data nor in the reduction
    REDUCE_NS = 20  # of STEP_NS, in the reduction, the wait for later ranks included
    COLLECTIVES = 21  # begun in the generation when the newest step was committed
    FENCED = 22  # written by the supervisor: this process may write no files any more, it is about to be killed
    SAMPLE = 23  # loaded in the rank itself: its index + 1, negative of validation; 0: none
    DONE_BETWEEN = 24  # the committed step, shifted, and what this generation has done since
    COMPARISON_NS = 25  # cumulative, of training that waited for comparisons of the replicas
    STAGE = 26  # of the start, what is being built
    DEVICE_SUMS = 27  # written by the rank's device: generation, shifted, and the sum it has come to; 0: unknown
    SCRIPT_SAVES = 28  # of a script: how often it has saved with torch
    SCRIPT_LOADS = 29  # and how often it has read with torch
    SCRIPT_HEARTBEATS = 30  # and how often it has said that it is at work
    LEASE_NS = 31  # written by its supervisor: until when it may publish, by LeaseClock; 0: as long as it lives
    BUILD_NS = (
        32  # how long it took this process to build its data and its model; 0: not built here
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotReading:
    """One look at a rank's slot. Times are CLOCK_MONOTONIC nanoseconds."""

    generation: int
    step: int
    phase: Phase
    phase_since_ns: int
    committed_step: int
    dirty: bool
    samples: int
    loss: float
    productive_ns: int
    data_wait_ns: int
    checkpoint_ns: int
    evaluation_ns: int
    comparison_ns: int
    total_steps: int
    step_ns: int
    epoch: int
    first_step_ns: int
    last_commit_ns: int


class Slot:
    """One rank's cells. Written by that rank's main thread, but for ``FENCED``, ``LEASE_NS`` and ``DEVICE_SUMS``."""

    __slots__ = ("_base", "_floats", "_ints")

    def __init__(self, ints: memoryview[int], floats: memoryview[float], rank: int) -> None:
        self._ints = ints
        self._floats = floats
        self._base = rank * CELLS_PER_SLOT

    def set(self, cell: Cell, value: int) -> None:
        """Store an integer cell."""
        self._ints[self._base + cell] = value

    def get(self, cell: Cell) -> int:
        """Load an integer cell."""
        return int(self._ints[self._base + cell])

    def add(self, cell: Cell, value: int) -> None:
        """Add to an integer cell (one writer, so no lock)."""
        self._ints[self._base + cell] += value

    def account(
        self,
        now_ns: int,
        took_ns: int,
        *,
        aside_ns: int,
        for_data_ns: int,
        for_peers_ns: int,
        samples: int,
    ) -> None:
        """Store all that is known of the time of a step that is committed; in one call, as it is in every step."""
        cells, base = self._ints, self._base
        cells[base + Cell.OWN_NS] += took_ns - for_peers_ns - aside_ns
        cells[base + Cell.OWN_STEPS] += 1
        cells[base + Cell.PRODUCTIVE_NS] += took_ns - for_data_ns - aside_ns
        cells[base + Cell.DATA_WAIT_NS] += for_data_ns
        cells[base + Cell.STEP_NS] = took_ns
        cells[base + Cell.BUSY_NS] = took_ns - for_data_ns - for_peers_ns
        cells[base + Cell.REDUCE_NS] = for_peers_ns
        cells[base + Cell.LAST_COMMIT_NS] = now_ns
        cells[base + Cell.SAMPLES] = samples

    def set_loss(self, value: float) -> None:
        """Store the newest loss."""
        self._floats[self._base + Cell.LOSS] = value

    def memory(self, cell: Cell) -> memoryview[int]:
        """Return the memory of an integer cell, for a writer that is not a thread, such as a GPU."""
        at = self._base + cell
        return self._ints[at : at + 1]

    def stamp(self, phase: Phase, now_ns: int) -> None:
        """Enter ``phase`` at ``now_ns``."""
        # The time goes first: a reader between the two stores then sees a young old phase, which
        # can only delay a hang verdict, never hasten one.
        self._ints[self._base + Cell.PHASE_SINCE_NS] = now_ns
        self._ints[self._base + Cell.PHASE] = phase

    def reach(self, moment: Moment) -> None:
        """Mark the moment ``moment``, which only fault injection uses."""

    def release(self) -> None:
        """Let go of the board's memory; the slot is of no use afterwards."""
        empty = memoryview(b"")
        self._ints = empty
        self._floats = empty.cast("d")

    def begin_between(self, step: int) -> None:
        """Nothing but ``step`` steps is done yet: no evaluation, comparison or save."""
        self.set(Cell.DONE_BETWEEN, step << _COUNT_BITS)

    def count_done(self, step: int) -> None:
        """One more thing is done since ``step`` was committed, which who begins again does again."""
        if self.get(Cell.DONE_BETWEEN) >> _COUNT_BITS != step:
            self.begin_between(step)
        self.add(Cell.DONE_BETWEEN, 1)

    def done_between(self, step: int) -> int:
        """Return how much was done since ``step`` was committed."""
        at, count = divmod(self.get(Cell.DONE_BETWEEN), 1 << _COUNT_BITS)
        return count if at == step else 0

    def clear(self) -> None:
        """Zero every cell, for a rank that starts from nothing."""
        for cell in range(CELLS_PER_SLOT):
            self._ints[self._base + cell] = 0

    def cells(self) -> list[int]:
        """All cells as whole numbers, the loss by its bits."""
        return self._ints[self._base : self._base + CELLS_PER_SLOT].tolist()

    def put(self, values: Sequence[int]) -> None:
        """Store all cells at once, as :meth:`cells` gives them."""
        whole = memoryview(array("q", values[:CELLS_PER_SLOT]))
        self._ints[self._base : self._base + CELLS_PER_SLOT] = whole

    def of_all(self, cell: Cell) -> list[int]:
        """One cell of every slot of the board, by rank."""
        return self._ints[cell::CELLS_PER_SLOT].tolist()

    def read(self) -> SlotReading:
        """Read the slot."""
        cells = self.cells()
        return SlotReading(
            generation=cells[Cell.GENERATION],
            step=cells[Cell.STEP],
            phase=Phase(cells[Cell.PHASE]),
            phase_since_ns=cells[Cell.PHASE_SINCE_NS],
            committed_step=cells[Cell.COMMITTED_STEP],
            dirty=bool(cells[Cell.DIRTY]),
            samples=cells[Cell.SAMPLES],
            loss=float(self._floats[self._base + Cell.LOSS]),
            productive_ns=cells[Cell.PRODUCTIVE_NS],
            data_wait_ns=cells[Cell.DATA_WAIT_NS],
            checkpoint_ns=cells[Cell.CHECKPOINT_NS],
            evaluation_ns=cells[Cell.EVALUATION_NS],
            comparison_ns=cells[Cell.COMPARISON_NS],
            total_steps=cells[Cell.TOTAL_STEPS],
            step_ns=cells[Cell.STEP_NS],
            epoch=cells[Cell.EPOCH],
            first_step_ns=cells[Cell.FIRST_STEP_NS],
            last_commit_ns=cells[Cell.LAST_COMMIT_NS],
        )


class Board:
    """All slots over one writable buffer of at least ``slots * SLOT_BYTES`` bytes."""

    def __init__(self, buffer: memoryview, slots: int) -> None:
        if len(buffer) < slots * SLOT_BYTES:
            raise ValueError(f"a board of {slots} slots needs {slots * SLOT_BYTES} bytes")
        self._ints = buffer[: slots * SLOT_BYTES].cast("q")
        self._floats = buffer[: slots * SLOT_BYTES].cast("d")
        self.slots = slots

    def slot(self, rank: int) -> Slot:
        """The slot of ``rank``."""
        if not 0 <= rank < self.slots:
            raise IndexError(f"no slot {rank} on a board of {self.slots}")
        return Slot(self._ints, self._floats, rank)

    def close(self) -> None:
        """Let go of the buffer, so that its mapping can be closed."""
        self._ints.release()
        self._floats.release()
