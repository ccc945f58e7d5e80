"""What a rank does about a broken loader worker: the same again, fewer workers, or none. Decides only."""

from __future__ import annotations

from dataclasses import dataclass

PROGRESS_STEPS = 8  # taken since the last fault: the next one counts as a first one again


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderHistory:
    """How many faults came in a row, without :data:`PROGRESS_STEPS` between one and the next."""

    in_a_row: int = 0
    last_step: int = 0

    def after_fault(self, step: int) -> LoaderHistory:
        """The history once a fault has come while ``step`` was being loaded."""
        went_well = abs(step - self.last_step) >= PROGRESS_STEPS
        return LoaderHistory(in_a_row=1 if went_well else self.in_a_row + 1, last_step=step)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderRepair:
    """Load on with ``workers`` new ones; with 0, in the rank itself. ``remedy`` is for people."""

    workers: int
    remedy: str


def plan_loader_repair(history: LoaderHistory, *, workers: int) -> LoaderRepair:
    """The first fault is taken for bad luck; each that follows in a row halves the workers.

    So a row ends: no worker is left that could break.
    """
    if history.in_a_row < 2:
        return LoaderRepair(workers=workers, remedy=f"{_counted(workers)} started anew")
    fewer = workers // 2
    after = f"after {history.in_a_row} faults in a row"
    if fewer == 0:
        return LoaderRepair(workers=0, remedy=f"loading in the rank itself {after}")
    return LoaderRepair(workers=fewer, remedy=f"{_counted(fewer)} instead of {workers} {after}")


def _counted(workers: int) -> str:
    return f"{workers} loader worker{'' if workers == 1 else 's'}"
