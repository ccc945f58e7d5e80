"""Remembers the losses and gradient norms of recent steps, and what would be an explosion now."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ddp_runner.core.loss_spikes import RecentValues
from ddp_runner.core.settings import Settings
from ddp_runner.core.step_schedule import warmup_of
from ddp_runner.training.components.lr_schedule import schedule_end


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits for the next step; infinite if there is no basis for them yet."""

    loss: float = math.inf
    grad_norm: float = math.inf
    is_threshold: bool = False  # the loss's is that of the settings

    def exceeded_by(self, *, loss: float, grad_norm: float) -> str:
        """Return which value exploded, in words; empty if none did, or if the step is not finite anyway."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return ""
        if loss > self.loss and self.is_threshold:
            return f"loss {loss:.4g} is above explosion_loss_max={self.loss:g}"
        if loss > self.loss:
            return f"loss {loss:.4g} has exploded: far above the last steps (limit {self.loss:.4g})"
        if grad_norm > self.grad_norm:
            return (
                f"gradient norm {grad_norm:.4g} has exploded: "
                f"far above the last steps (limit {self.grad_norm:.4g})"
            )
        return ""


class LossSpikes:
    """All ranks that observe the same values set the same limits; part of the saved state.

    There are none before ``window`` steps were applied, the warm-up of the learning rate not
    counted: losses are high and jump while a run begins. What is no higher than at the first step
    is never one either: late in a run, losses near zero may jump by orders of magnitude and recover.
    """

    def __init__(
        self,
        *,
        window: int,
        loss_factor: float,
        grad_factor: float,
        warmup_steps: int,
        loss_max: float | None = None,
        rate_factor: float = 1.0,
        recover_steps: int = 1,
    ) -> None:
        """``loss_max``: a threshold of its own, from the first step on.

        ``rate_factor``: below 1, each explosion lowers the learning rate by it, which comes back over
        ``recover_steps``.
        """
        self._window = window
        self._loss_factor = loss_factor
        self._grad_factor = grad_factor
        self._warmup_steps = warmup_steps
        self._losses = RecentValues(window)
        self._grad_norms = RecentValues(window)
        self._first = Limits(loss=-math.inf, grad_norm=-math.inf)
        self._loss_max = math.inf if loss_max is None else loss_max
        self._rate_factor = rate_factor
        self._recover_steps = recover_steps
        self._lowered = 1.0  # the factor after the newest explosion, which was at this step
        self._lowered_at = 0

    @classmethod
    def watched_as(cls, settings: Settings, *, total_steps: int) -> LossSpikes:
        """Return a detector for a run of ``total_steps``, by its settings."""
        recovery, optim = settings.recovery, settings.optim
        end = schedule_end(optim, total_steps=total_steps)
        return cls(
            window=recovery.explosion_window,
            loss_factor=recovery.explosion_loss_factor,
            grad_factor=recovery.explosion_grad_factor,
            warmup_steps=warmup_of(optim.warmup_steps, schedule_steps=end),
            loss_max=recovery.explosion_loss_max,
            rate_factor=recovery.explosion_rate_factor,
            recover_steps=recovery.explosion_recover_steps,
        )

    def exploded(self, *, step: int) -> None:
        """The step after ``step`` others has exploded."""
        if self._rate_factor < 1.0:
            self._lowered = self.rate_factor(step) * self._rate_factor
            self._lowered_at = step

    def rate_factor(self, step: int) -> float:
        """Return the factor of the learning rate for the step after ``step`` others."""
        if self._lowered == 1.0:
            return 1.0
        passed = min(1.0, (step - self._lowered_at) / self._recover_steps)
        return self._lowered + (1.0 - self._lowered) * passed

    def says_of_rate(self) -> str:
        """Return the last explosion's effect on the learning rate, in words; empty if none."""
        if self._rate_factor == 1.0:
            return ""
        end = self._lowered_at + self._recover_steps
        return f", learning rate x {self._lowered:g}, back in full at step {end:,}"

    def limits(self) -> Limits:
        """Return the limits that the next step's loss and gradient norm must not exceed."""
        if self._window == 0 or len(self._losses) < self._window:
            is_threshold = math.isfinite(self._loss_max)
            return Limits(loss=self._loss_max, is_threshold=is_threshold)
        usual = max(self._first.loss, self._losses.explosion_limit(factor=self._loss_factor))
        return Limits(
            loss=min(usual, self._loss_max),
            is_threshold=self._loss_max <= usual,
            grad_norm=max(
                self._first.grad_norm,
                self._grad_norms.explosion_limit(factor=self._grad_factor),
            ),
        )

    def observe(self, *, step: int, loss: float, grad_norm: float) -> None:
        """Take in a step that was applied. ``step`` counts those before it."""
        if step == 0:
            self._first = Limits(loss=loss, grad_norm=grad_norm)
        if step >= self._warmup_steps:
            self._losses.add(loss)
            self._grad_norms.add(grad_norm)

    def state_dict(self) -> dict[str, Any]:
        """Plain values, without the settings."""
        state = {
            "losses": self._losses.oldest_first(),
            "grad_norms": self._grad_norms.oldest_first(),
            "first": [self._first.loss, self._first.grad_norm],
        }
        return (
            state
            if self._lowered == 1.0
            else {**state, "lowered": [self._lowered, self._lowered_at]}
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``; of a longer past the newest values are kept."""
        loss, grad_norm = map(float, state["first"])
        self._first = Limits(loss=loss, grad_norm=grad_norm)
        self._losses = RecentValues(self._window, map(float, state["losses"]))
        self._grad_norms = RecentValues(self._window, map(float, state["grad_norms"]))
        lowered, step = state.get("lowered", (1.0, 0))
        self._lowered, self._lowered_at = float(lowered), int(step)
