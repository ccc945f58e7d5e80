"""Remembers the losses and gradient norms of recent steps, and what would be an explosion now."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

from ddp_runner.core.loss_spikes import explosion_limit
from ddp_runner.core.settings import Settings
from ddp_runner.core.step_schedule import steps_of
from ddp_runner.training.components.lr_schedule import schedule_end


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of the next step; infinite where nothing can be said yet."""

    loss: float = math.inf
    grad_norm: float = math.inf

    def exceeded_by(self, *, loss: float, grad_norm: float) -> str:
        """What exploded, in words; empty if nothing did, or if the step is not finite anyway."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return ""
        if loss > self.loss:
            return f"loss {loss:.4g} has exploded: far above the last steps', limit {self.loss:.4g}"
        if grad_norm > self.grad_norm:
            return (
                f"gradient norm {grad_norm:.4g} has exploded: "
                f"far above the last steps', limit {self.grad_norm:.4g}"
            )
        return ""


class LossSpikes:
    """All ranks that observe the same values set the same limits; part of the saved state.

    There are none before ``window`` steps were applied, the warm-up of the learning rate not
    counted: losses are high and jump while a run begins. What is no higher than at the first step
    is never one either: late in a run, losses near zero may jump by orders of magnitude and recover.
    """

    def __init__(
        self, *, window: int, loss_factor: float, grad_factor: float, warmup_steps: int
    ) -> None:
        self._window = window
        self._loss_factor = loss_factor
        self._grad_factor = grad_factor
        self._warmup_steps = warmup_steps
        self._losses: deque[float] = deque(maxlen=window)
        self._grad_norms: deque[float] = deque(maxlen=window)
        self._first = Limits(loss=-math.inf, grad_norm=-math.inf)

    @classmethod
    def watched_as(cls, settings: Settings, *, total_steps: int) -> LossSpikes:
        """As the settings have it for a run of so many steps."""
        recovery, optim = settings.recovery, settings.optim
        end = schedule_end(optim, total_steps=total_steps)
        return cls(
            window=recovery.explosion_window,
            loss_factor=recovery.explosion_loss_factor,
            grad_factor=recovery.explosion_grad_factor,
            warmup_steps=steps_of(optim.warmup_steps, of=end),
        )

    def limits(self) -> Limits:
        """What the next step's loss and gradient norm must not exceed."""
        if self._window == 0 or len(self._losses) < self._window:
            return Limits()
        return Limits(
            loss=max(self._first.loss, explosion_limit(self._losses, factor=self._loss_factor)),
            grad_norm=max(
                self._first.grad_norm,
                explosion_limit(self._grad_norms, factor=self._grad_factor),
            ),
        )

    def observe(self, *, step: int, loss: float, grad_norm: float) -> None:
        """Take in a step that was applied. ``step`` counts those before it."""
        if step == 0:
            self._first = Limits(loss=loss, grad_norm=grad_norm)
        if step >= self._warmup_steps:
            self._losses.append(loss)
            self._grad_norms.append(grad_norm)

    def state_dict(self) -> dict[str, Any]:
        """Plain values, without the settings."""
        return {
            "losses": list(self._losses),
            "grad_norms": list(self._grad_norms),
            "first": [self._first.loss, self._first.grad_norm],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``; of a longer past the newest values are kept."""
        loss, grad_norm = map(float, state["first"])
        self._first = Limits(loss=loss, grad_norm=grad_norm)
        self._losses = deque(map(float, state["losses"]), maxlen=self._window)
        self._grad_norms = deque(map(float, state["grad_norms"]), maxlen=self._window)
