"""The layout of the shared memory that holds per-rank state. Opens no file.

Each machine has one anonymous, sparse file: only the parts that are written take memory, however far apart they lie.
"""

from __future__ import annotations

FIELD = "local_slots"  # of Surroundings
NAMES = ("local_state",)
STEPS = 3  # places of a rank for its newest steps: the committed one, the one in progress, and the changes after its update
BETWEEN = STEPS  # the place for changes by functions that are called between steps
PLACES = STEPS + 1
PLACE_BYTES = 1 << 36  # at most, in one place
CELL_BYTES = 8  # of a rank, on the board at the beginning of the file


def begin_of(local_rank: int, place: int) -> int:
    """Return where a rank's place begins in the file."""
    return (1 + local_rank * PLACES + place) * PLACE_BYTES
