"""Decides what is due at a step boundary: evaluation, checkpoint, a metrics line. A pure function of the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ddp_runner.core.settings import CheckpointSettings, LogSettings, Settings
from ddp_runner.kernel.rules.phases import DueActions

SAVE_BACKOFF_MAX = 16  # intervals
_WARMUP_STEPS, _WARMUP_PART = 100, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLength:
    """The length of a run. ``total_steps`` counts optimizer steps from the run's very first.

    For a run in stages it is the length of one stage, which begins at ``first_step`` and has its own epochs.
    """

    steps_per_epoch: int
    total_steps: int
    first_step: int = 0

    @property
    def own_steps(self) -> int:
        """The number of steps from ``first_step`` on."""
        return self.total_steps - self.first_step

    def since_begin(self, step: int) -> int:
        """Return the number of steps from ``first_step`` to ``step``, which schedules and epochs count."""
        return step - self.first_step

    def epoch_of(self, step: int) -> int:
        """The epoch (from 0) in which step index ``step`` lies."""
        return self.since_begin(step) // self.steps_per_epoch

    def ends_epoch(self, step: int) -> bool:
        """Return True if an epoch is complete once ``step`` steps are committed."""
        own_step = self.since_begin(step)
        return own_step > 0 and own_step % self.steps_per_epoch == 0

    @property
    def epochs(self) -> int:
        """Epochs begun in the whole run."""
        return -(-self.own_steps // self.steps_per_epoch)


def run_length(
    *, steps_per_epoch: int, epochs: int, max_steps: int, first_step: int = 0
) -> RunLength:
    """``max_steps`` wins over ``epochs`` where it is not 0. Raises ValueError for an empty epoch."""
    if steps_per_epoch < 1:
        raise ValueError("an epoch without a step")
    own_steps = max_steps or epochs * steps_per_epoch
    return RunLength(
        steps_per_epoch=steps_per_epoch,
        total_steps=first_step + own_steps,
        first_step=first_step,
    )


def steps_of(steps: float, *, of: int) -> int:
    """Return ``steps`` as a number: a value below 1 is a share of all steps."""
    return round(steps * of) if 0 < steps < 1 else int(steps)


def warmup_of(steps: float | Literal["auto"], *, schedule_steps: int) -> int:
    """The steps of a warm-up. ``auto``: a hundred, or a share of a schedule that is short."""
    if steps == "auto":
        return min(_WARMUP_STEPS, schedule_steps // _WARMUP_PART)
    return steps_of(steps, of=schedule_steps)


def due_after(
    committed_step: int,
    length: RunLength,
    *,
    log: LogSettings,
    checkpoint: CheckpointSettings,
    replica_check_steps: int = 0,
) -> DueActions:
    """Return the actions that are due once ``committed_step`` steps are committed.

    With ``save_every_steps=auto`` the saving rank asks for a save, by time: see ``core.checkpoint_interval``.
    Replicas are compared before each save too, because a checkpoint holds the state that all of them share.
    The last step's evaluation and save belong to the end of the run, not here.
    """
    own_step = length.since_begin(committed_step)
    if own_step <= 0:
        return DueActions(compare=False, log=False, evaluate=log.evaluate_at_start, save=False)
    at_end = committed_step >= length.total_steps
    epoch, rest = divmod(own_step, length.steps_per_epoch)
    epoch_ended = rest == 0
    evaluate = (epoch_ended and _divides(log.evaluate_interval, epoch)) or _divides(
        log.evaluate_every_steps, own_step
    )
    by_steps = checkpoint.save_every_steps
    save = (epoch_ended and _divides(checkpoint.save_interval, epoch)) or (
        by_steps != "auto" and _divides(by_steps, own_step)
    )
    save |= _divides(checkpoint.keep_every, committed_step)
    return DueActions(
        compare=_divides(replica_check_steps, own_step) or (save and replica_check_steps > 0),
        log=at_end or own_step == 1 or _divides(log.log_interval, own_step),
        evaluate=evaluate and not at_end,
        save=save and not at_end,
    )


def due_by_settings(settings: Settings, length: RunLength, step: int) -> DueActions:
    """Return what the settings have due once ``step`` steps of a run of this length are committed."""
    return due_after(
        step,
        length,
        log=settings.log,
        checkpoint=settings.checkpoint,
        replica_check_steps=settings.recovery.replica_check_steps,
    )


def saves_to_skip(failures: int) -> int:
    """Return the number of due saves to skip after ``failures`` failed saves in a row.

    The interval doubles with each failure, up to 16 times: a disk that is full or broken seldom recovers
    within one interval, and each try costs a copy of the state and a warning.
    """
    return int(min(2**failures, SAVE_BACKOFF_MAX)) - 1


def last_save_due(committed_step: int, length: RunLength, checkpoint: CheckpointSettings) -> int:
    """The newest step up to ``committed_step`` after which a save was due; 0 for none.

    Saves that come by time (``auto``) are due at no step.
    """
    epochs_apart = checkpoint.save_interval * length.steps_per_epoch
    by_steps = checkpoint.save_every_steps
    own_step, first = length.since_begin(committed_step), length.first_step
    apart = [steps for steps in (epochs_apart, by_steps) if steps and steps != "auto"]
    newest = [first + own_step // steps * steps for steps in apart]
    if checkpoint.keep_every:
        newest.append(committed_step // checkpoint.keep_every * checkpoint.keep_every)
    return max(newest, default=0)


def _divides(interval: int, count: int) -> bool:
    return interval > 0 and count % interval == 0
