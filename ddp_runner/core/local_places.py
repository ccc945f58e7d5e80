"""The places in shared memory for what each rank has of its own: how many, and in which order. Opens none."""

from __future__ import annotations

STEPS = 3  # places of a rank for its newest steps: of the state, of the step in hand, and of what follows its update
BETWEEN = STEPS  # the place for what functions that are called between steps have changed
PLACES = STEPS + 1


def names_of_places(ranks: int) -> tuple[str, ...]:
    """Return the names of the memory that a machine with so many ranks needs: a board, then each rank's places."""
    return (
        "local_board",
        *(f"local_{rank}_{place}" for rank in range(ranks) for place in range(PLACES)),
    )


def number_of_place(local_rank: int, place: int) -> int:
    """Return where a rank's place stands among these names."""
    return 1 + local_rank * PLACES + place


def ranks_of(names: int) -> int:
    """Return for how many ranks so many names are."""
    return max(1, (names - 1) // PLACES)
