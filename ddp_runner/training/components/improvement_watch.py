"""Remembers what evaluations came to, for the learning rate and the end of a run. Evaluates nothing."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ddp_runner.core.improvement import Improvement, ImprovementRules, Wait
from ddp_runner.core.monitor import Monitor


class ImprovementWatch:
    """All ranks that observe the same figures at the same steps agree; part of the saved state."""

    def __init__(
        self, rules: ImprovementRules | None = None, *, monitor: Monitor | None = None
    ) -> None:
        """Watch nothing without rules. ``monitor``: the figure, and whether lower or higher is better."""
        self._rules = rules or ImprovementRules()
        self._monitor = monitor or Monitor()
        self._step = -1  # of the newest evaluation
        self._before = self._now = Improvement()  # without that one, and with it

    @property
    def rate_factor(self) -> float:
        """The factor of the learning rate."""
        return self._now.rate_factor

    @property
    def is_over(self) -> bool:
        """True if the run has gone without an improvement for too long."""
        return self._now.is_over(self._rules)

    def observe(self, *, step: int, value: float) -> str:
        """Take in the figure that was evaluated after ``step`` steps; what follows from it, in words."""
        if not self._rules.are_on:
            return ""
        # INVARIANT counted-once: an evaluation that is made again, since a fault cut short what follows it
        # on some ranks, takes the place of the first: it was of the same step, and all have the last one.
        # Broken if: ranks that had come to its end count it twice, and others once.
        # Guarded by: test_an_evaluation_that_is_made_again_counts_once.
        base = self._before if step == self._step else self._now
        self._step, self._before, self._now = (
            step,
            base,
            base.after(self._monitor.signed(value), self._rules),
        )
        if self.is_over:
            count, best = self._now.stop.count, self._monitor.signed(self._now.stop.best)
            return f"no improvement on {best:.6g} in {count} evaluations: the run ends early"
        if self.rate_factor != base.rate_factor:
            count = self._rules.plateau_patience
            return (
                f"no improvement on {self._monitor.signed(base.plateau.best):.6g} in {count} evaluations: "
                f"learning rate x {self.rate_factor:g}"
            )
        return ""

    def forget(self, *, step: int) -> None:
        """Be as without the evaluation after ``step``, where that was the newest."""
        if step == self._step:
            self._step, self._now = -1, self._before

    def state_dict(self) -> dict[str, Any]:
        """Plain values; empty where nothing is watched."""
        if not self._rules.are_on:
            return {}
        record = {"step": self._step, "before": asdict(self._before), "now": asdict(self._now)}
        return record | {"of": self._monitor.words}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``; from nothing where it is empty, or of another figure.

        What follows is this run's rules' to say.
        """
        if state.get("of", self._monitor.words) != self._monitor.words:
            state = {}
        self._step = int(state.get("step", -1))
        self._before = _improvement(state.get("before"))
        self._now = _improvement(state.get("now"))


def _improvement(record: dict[str, Any] | None) -> Improvement:
    if record is None:
        return Improvement()
    plateau, stop = (_wait(record[name]) for name in ("plateau", "stop"))
    return Improvement(plateau=plateau, stop=stop, rate_factor=float(record["rate_factor"]))


def _wait(record: dict[str, Any]) -> Wait:
    best, count, cooldown = record["best"], record["count"], record["cooldown"]
    return Wait(best=float(best), count=int(count), cooldown=int(cooldown))
