"""Follows the loss: smoothed value, best, target reached, too many skipped steps. Values only."""

from __future__ import annotations

import math
from collections import deque
from enum import Enum
from typing import Any

CALM_STEPS = 10


class Verdict(Enum):
    """The action that the trainer takes after a step."""

    CONTINUE = "continue"
    TARGET_REACHED = "target_reached"
    TOO_MANY_ERRORS = "too_many_errors"


class LossMonitor:
    """Watches the losses of one run; all ranks that observe the same values agree.

    ``target_loss`` is compared with the mean of the last ``window`` applied steps, once there are
    that many. More than ``max_errors_per_epoch`` steps that were not applied in one epoch are too
    many; the count starts again with the next epoch. One that only lowered the loss scale of fp16
    does not count.
    """

    def __init__(
        self, *, target_loss: float | None, window: int = 20, max_errors_per_epoch: int
    ) -> None:
        if window < 1:
            raise ValueError(f"window={window}: must be at least 1")
        self._target_loss = target_loss
        self._max_errors = max_errors_per_epoch
        self._losses: deque[float] = deque(maxlen=window)
        self._epoch = 0
        self._errors = 0
        self._last_step = -1
        self._last_error: int | None = None
        self._best: float | None = None

    @property
    def smoothed(self) -> float | None:
        """The mean of the window so far; None before the first applied step."""
        return math.fsum(self._losses) / len(self._losses) if self._losses else None

    @property
    def best(self) -> float | None:
        """The lowest smoothed loss of a full window."""
        return self._best

    @property
    def last(self) -> float | None:
        """The loss of the newest applied step."""
        return self._losses[-1] if self._losses else None

    @property
    def errors_in_epoch(self) -> int:
        """Steps of the current epoch that were not applied."""
        return self._errors

    def observe(
        self, step: int, epoch: int, loss: float, applied: bool, *, overflowed: bool = False
    ) -> Verdict:
        """Take in one finished step. ``applied`` is False when the optimizer was skipped.

        ``overflowed``: it was skipped in the search for a loss scale that fits.

        Raises ValueError for a non-finite loss that was applied (the step's check has failed) and
        for a step that is not newer than the last: after a rollback, load the state first.
        """
        if step <= self._last_step:
            raise ValueError(f"step {step} was observed after step {self._last_step}")
        if applied and not math.isfinite(loss):
            raise ValueError(f"step {step} was applied with loss {loss}")
        self._last_step = step
        if epoch != self._epoch:
            self._epoch, self._errors = epoch, 0
        if overflowed:
            return Verdict.CONTINUE
        if not applied:
            self._errors += 1
            self._last_error = step
            too_many = self._errors > self._max_errors
            return Verdict.TOO_MANY_ERRORS if too_many else Verdict.CONTINUE
        self._losses.append(loss)
        return self._judge_window()

    def _judge_window(self) -> Verdict:
        """Compare a full window with the best and the target."""
        smoothed = self.smoothed if self._is_full else None
        if smoothed is None:
            return Verdict.CONTINUE
        if self._best is None or smoothed < self._best:
            self._best = smoothed
        return Verdict.TARGET_REACHED if self.target_reached else Verdict.CONTINUE

    def restart_count(self) -> None:
        """Count skipped steps from zero, after a repair that may have helped."""
        self._errors = 0

    @property
    def is_calm(self) -> bool:
        """True if enough steps have been applied since the last one that was not.

        An earlier state may be the cause of the errors, so a roll-back must not use it.
        """
        return self._last_error is None or self._last_step - self._last_error >= CALM_STEPS

    @property
    def _is_full(self) -> bool:
        return len(self._losses) >= (self._losses.maxlen or 0)

    @property
    def target_reached(self) -> bool:
        """True if the mean of a full window is at the target, also right after loading a state."""
        if self._target_loss is None or not self._is_full:
            return False
        smoothed = self.smoothed
        return smoothed is not None and smoothed <= self._target_loss

    def state_dict(self) -> dict[str, Any]:
        """Plain values. The target and the limits belong to the settings and are not included."""
        return {
            "losses": list(self._losses),
            "epoch": self._epoch,
            "errors": self._errors,
            "last_step": self._last_step,
            "last_error": self._last_error,
            "best": self._best,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``; a longer window than ours keeps its newest values."""
        self._losses.clear()
        self._losses.extend(float(loss) for loss in state["losses"])
        self._epoch = int(state["epoch"])
        self._errors = int(state["errors"])
        self._last_step = int(state["last_step"])
        last_error = state.get("last_error")  # checkpoints of earlier versions have none
        self._last_error = None if last_error is None else int(last_error)
        self._best = None if state["best"] is None else float(state["best"])
