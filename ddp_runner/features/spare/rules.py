"""Decides when a spare process is forked ahead, what for, and whether it may become a rank. Never forks."""

from __future__ import annotations

from ddp_runner.core.fork_specs import ForkKind, SpareKind
from ddp_runner.core.helper_roles import Role

SPARE = Role(
    name="spare",
    module=f"{__package__}.child",
    fork=ForkKind.SPARE,
    runs_user_code=True,
    ready_s=20.0,  # it takes a tenth of a second
    pauses_s=(1.0, 2.0, 3.0, 4.0),
    lived_s=60.0,
    tries=5,
)

BUILDS_MIN_S = 0.1  # of a task that is worth building ahead
FREE_SHARE_MAX = 0.25  # of the memory that is free, for what is built ahead
# Spares that ended while they built, with none in between that had built; then no more build.
LOST_BUILDING_MAX = 2
# For a spare that was made a rank to begin, which takes a millisecond: one that is stopped, and any.
BEGIN_TIMEOUT_S = 1.0
SLOW_BEGIN_TIMEOUT_S = 20.0


def builds_ahead(
    setting: bool | str, *, build_s: float, rank_bytes: int, free_bytes: int, lost_in_a_row: int
) -> bool:
    """Return whether a spare on the CPU builds in advance what a replacement needs to train.

    ``build_s``: how long that took a rank; ``rank_bytes``: all memory that a rank holds; ``free_bytes``: of the machine
    or the container, without a spare. A kind that the user asked for by name is not weighed.
    """
    if lost_in_a_row >= LOST_BUILDING_MAX:
        return False
    if setting == SpareKind.MODEL.value:
        return True
    is_worth_it = build_s > BUILDS_MIN_S and 0 < rank_bytes <= FREE_SHARE_MAX * free_bytes
    return setting is True and is_worth_it


def wants_spare(*, fault_free: bool, stepped: bool) -> bool:
    """Return whether a spare is wanted now.

    ``fault_free``: every rank trains, and no stop is requested. ``stepped``: a step was made in this generation; a fork
    would slow its first step down.
    """
    # INVARIANT spare-without-faults: no spare is forked while something is being repaired, started or
    # stopped: it would take time and processes from what matters.
    # Broken if: a fork is asked for while a rank is missing.
    # Guarded by: test_a_spare_is_forked_without_faults_only.
    return fault_free and stepped


def must_give_back(*, has_begun: bool, is_stopped: bool, since_s: float) -> bool:
    """Return whether an ordinary fork replaces a spare that was made a rank ``since_s`` ago.

    A busy machine may be slow to run the spare, and would need longer for a fork.
    """
    return not has_begun and since_s > (BEGIN_TIMEOUT_S if is_stopped else SLOW_BEGIN_TIMEOUT_S)
