"""Decides when a spare process is forked ahead, and whether it may become a rank. Never forks."""

from __future__ import annotations

from dataclasses import dataclass

LOST_MAX = 5  # spares in a row that ended unused and young; then there are no more
YOUNG_S = 60.0
LOST_WAIT_S = 1.0  # after the first of them; each further one waits once longer
# For a spare that was made a rank to begin, which takes a millisecond: one that is stopped, and any.
BEGIN_TIMEOUT_S = 1.0
SLOW_BEGIN_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareFacts:
    """What is known when it is asked whether to fork one."""

    in_peace: bool  # every rank trains, and nobody is asked to stop
    stepped: bool  # in this generation: its first step is not to share the processor with a fork
    exists: bool  # forked, or asked for
    lost_in_a_row: int
    since_lost_s: float


def wants_spare(facts: SpareFacts) -> bool:
    """Whether a spare is to be forked now."""
    # INVARIANT spare-in-peace: no spare is forked while something is being repaired, started or
    # stopped: it would take time and processes from what matters. Spares that keep dying end, too.
    # Broken if: a fork is asked for while a rank is missing.
    # Guarded by: test_a_spare_is_forked_in_peace_only.
    if facts.exists or not facts.in_peace or not facts.stepped:
        return False
    if facts.lost_in_a_row >= LOST_MAX:
        return False
    return facts.since_lost_s >= facts.lost_in_a_row * LOST_WAIT_S


def lost_after(lost_in_a_row: int, *, lived_s: float) -> int:
    """The spares lost in a row, with one more that ended unused after ``lived_s``."""
    return lost_in_a_row + 1 if lived_s < YOUNG_S else 1


def must_give_back(*, has_begun: bool, is_stopped: bool, since_s: float) -> bool:
    """Whether a spare that was made a rank ``since_s`` ago is replaced by an ordinary fork.

    A busy machine may take its time to run it, and would take longer for a fork.
    """
    return not has_begun and since_s > (BEGIN_TIMEOUT_S if is_stopped else SLOW_BEGIN_TIMEOUT_S)
