"""Decides whether an evaluated loss still improves, and what a plateau leads to."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ddp_runner.core.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class ImprovementRules:
    """The number of evaluations without improvement that lead to an action; 0 turns the action off.

    An improvement is a loss below the best one by more than ``min_delta``. ``plateau``: the learning rate
    is multiplied by its factor, and the next ``plateau_cooldown`` evaluations do not count. ``stop``: the
    run ends.
    """

    plateau_patience: int = 0
    plateau_min_delta: float = 0.0
    plateau_factor: float = 0.5
    plateau_cooldown: int = 0
    stop_patience: int = 0
    stop_min_delta: float = 0.0

    @classmethod
    def of(cls, settings: Settings) -> ImprovementRules:
        """Return the rules that the settings ask for."""
        optim, run = settings.optim, settings.run
        return cls(
            plateau_patience=optim.plateau_patience,
            plateau_min_delta=optim.plateau_min_delta,
            plateau_factor=optim.plateau_factor,
            plateau_cooldown=optim.plateau_cooldown,
            stop_patience=run.early_stopping_patience,
            stop_min_delta=run.early_stopping_min_delta,
        )

    @property
    def are_on(self) -> bool:
        """True if a plateau or a stop is asked for."""
        return bool(self.plateau_patience or self.stop_patience)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The best loss, the evaluations in a row without a better one, and those that do not count yet."""

    best: float = math.inf
    count: int = 0
    cooldown: int = 0

    def after(self, loss: float, *, min_delta: float) -> Wait:
        """Return the wait after one more evaluation. A loss that is not a number is no improvement."""
        if loss < self.best - min_delta:
            seen = Wait(best=loss, cooldown=self.cooldown)
        else:
            seen = replace(self, count=self.count + 1)
        if seen.cooldown:
            seen = replace(seen, count=0, cooldown=seen.cooldown - 1)
        return seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """The state that a run's evaluations lead to. ``rate_factor`` multiplies the learning rate."""

    plateau: Wait = Wait()
    stop: Wait = Wait()
    rate_factor: float = 1.0

    def after(self, loss: float, rules: ImprovementRules) -> Improvement:
        """Return the state after one more evaluation, counted as torch's ReduceLROnPlateau does."""
        plateau = self.plateau.after(loss, min_delta=rules.plateau_min_delta)
        factor = self.rate_factor
        if 0 < rules.plateau_patience <= plateau.count:
            factor *= rules.plateau_factor
            plateau = replace(plateau, count=0, cooldown=rules.plateau_cooldown)
        stop = self.stop.after(loss, min_delta=rules.stop_min_delta)
        return Improvement(plateau=plateau, stop=stop, rate_factor=factor)

    def is_over(self, rules: ImprovementRules) -> bool:
        """Return whether the run stops."""
        return 0 < rules.stop_patience <= self.stop.count
