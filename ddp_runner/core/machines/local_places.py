"""The places in shared memory for what each rank has of its own, and where each lies. Opens none.

One file without a name for a machine: it has no size but that of what is written, however far apart its parts lie.
"""

from __future__ import annotations

FIELD = "local_slots"  # of Surroundings
NAMES = ("local_state",)
STEPS = 3  # places of a rank for its newest steps: of the state, of the step in hand, and of what follows its update
BETWEEN = STEPS  # the place for what functions that are called between steps have changed
PLACES = STEPS + 1
PLACE_BYTES = 1 << 36  # at most, in one place
CELL_BYTES = 8  # of a rank on the board, which comes first


def begin_of(local_rank: int, place: int) -> int:
    """Return where a rank's place begins in the file."""
    return (1 + local_rank * PLACES + place) * PLACE_BYTES
