"""Decides how a rank repairs a broken loader worker: same number of workers, fewer, or none."""

from __future__ import annotations

from dataclasses import dataclass, replace

CALM_STEPS = 200  # without a fault, before the workers that were given up are tried again
CALM_FACTOR = 4  # times that, each time that it did not help
PROGRESS_STEPS = 8  # taken since the last fault: the next one counts as a first one again
BREAKS_TO_SUSPECT = 2  # workers that one batch broke, before it is searched for a bad sample
OTHERS_TRIED = 2  # samples of which one must load, before another one is called bad
# Waits of a rank that each last the loader's timeout, for one sample that hangs: with its batch,
# then to see which it is, alone, with its batch again, and for the others if they hang as well.
VAIN_WAITS_MAX = BREAKS_TO_SUSPECT + 3 + OTHERS_TRIED


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderHistory:
    """Counts the faults in a row, that is without :data:`PROGRESS_STEPS` between one and the next.

    ``rows``: how often a second fault followed the first; each such row costs workers.
    """

    in_a_row: int = 0
    last_step: int = 0
    rows: int = 0

    def after_fault(self, step: int) -> LoaderHistory:
        """The history once a fault has come while ``step`` was being loaded."""
        went_well = abs(step - self.last_step) >= PROGRESS_STEPS
        in_a_row = 1 if went_well else self.in_a_row + 1
        return LoaderHistory(
            in_a_row=in_a_row, last_step=step, rows=self.rows + (1 if in_a_row == 2 else 0)
        )

    def without_cause(self) -> LoaderHistory:
        """The history once the cause of the last faults was found and is gone: the row is over."""
        return replace(self, in_a_row=0, rows=self.rows - (1 if self.in_a_row >= 2 else 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderRepair:
    """Load on with ``workers`` new ones; with 0, in the rank itself. ``action`` is for people."""

    workers: int
    action: str


def plan_loader_repair(history: LoaderHistory, *, workers: int) -> LoaderRepair:
    """The first fault is taken for bad luck; each that follows in a row halves the workers.

    So a row ends: no worker is left that could break.
    """
    if history.in_a_row < 2:
        return LoaderRepair(workers=workers, action=f"{_counted(workers)} restarted")
    fewer = workers // 2
    after = f"after {history.in_a_row} faults in a row"
    if fewer == 0:
        return LoaderRepair(workers=0, action=f"loading in the rank itself {after}")
    return LoaderRepair(workers=fewer, action=f"{_counted(fewer)} instead of {workers} {after}")


def is_batch_suspect(*, broke: int, repair: LoaderRepair) -> bool:
    """Return whether to search a batch that broke ``broke`` workers for a bad sample before ``repair``."""
    # INVARIANT workers-first: what broke a worker is loaded in the rank itself only once a worker
    # has loaded each part of it, or where no worker can load anything.
    # Broken if: a row of faults by different batches ends without workers, unsearched.
    # Guarded by: test_several_samples_that_kill_every_worker_are_all_replaced.
    return broke >= BREAKS_TO_SUSPECT or repair.workers == 0


def workers_to_use(history: LoaderHistory, *, step: int, workers: int, asked: int) -> int:
    """``asked`` again after a calm stretch, longer each time; else the ``workers`` that are left."""
    calm_steps = CALM_STEPS * CALM_FACTOR ** max(0, history.rows - 1)
    return asked if workers < asked and step - history.last_step >= calm_steps else workers


def _counted(workers: int) -> str:
    return f"{workers} loader worker{'' if workers == 1 else 's'}"
