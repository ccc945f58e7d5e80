"""Decides when a spare process is forked ahead, what for, and whether it may become a rank. Never forks."""

from __future__ import annotations

from enum import Enum

BUILDS_MIN_S = 0.1  # of a task that is worth building ahead
FREE_SHARE_MAX = 0.25  # of the memory that is free, for what is built ahead
# Spares that ended while they built, with none in between that had built; then no more build.
LOST_BUILDING_MAX = 2
# For a spare that was made a rank to begin, which takes a millisecond: one that is stopped, and any.
BEGIN_TIMEOUT_S = 1.0
SLOW_BEGIN_TIMEOUT_S = 20.0


class SpareKind(Enum):
    """What a spare has done ahead of what a replacement has to do."""

    CPU = "cpu"  # a first step, on the CPU
    MODEL = (
        "model"  # also the task's data and model, with room for the optimizer's state, on the CPU
    )
    LIBRARIES = "libraries"  # CUDA's driver and libraries are there; nothing is held on any GPU


def builds_ahead(
    setting: bool | str, *, build_s: float, rank_bytes: int, free_bytes: int, lost_in_a_row: int
) -> bool:
    """Whether a spare on the CPU builds what it may have to train.

    ``build_s``: how long that took a rank; ``rank_bytes``: all that one holds; ``free_bytes``: of the machine or the
    container, without a spare. Where it is asked for by name it is not weighed.
    """
    if lost_in_a_row >= LOST_BUILDING_MAX:
        return False
    if setting == SpareKind.MODEL.value:
        return True
    is_worth_it = build_s > BUILDS_MIN_S and 0 < rank_bytes <= FREE_SHARE_MAX * free_bytes
    return setting is True and is_worth_it


def wants_spare(*, fault_free: bool, stepped: bool) -> bool:
    """Whether a spare is wanted now.

    ``fault_free``: every rank trains, and nobody is asked to stop. ``stepped``: in this generation; its first step is
    not to share the processor with a fork.
    """
    # INVARIANT spare-without-faults: no spare is forked while something is being repaired, started or
    # stopped: it would take time and processes from what matters.
    # Broken if: a fork is asked for while a rank is missing.
    # Guarded by: test_a_spare_is_forked_without_faults_only.
    return fault_free and stepped


def must_give_back(*, has_begun: bool, is_stopped: bool, since_s: float) -> bool:
    """Whether a spare that was made a rank ``since_s`` ago is replaced by an ordinary fork.

    A busy machine may take its time to run it, and would take longer for a fork.
    """
    return not has_begun and since_s > (BEGIN_TIMEOUT_S if is_stopped else SLOW_BEGIN_TIMEOUT_S)
