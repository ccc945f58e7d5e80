"""What is asked of a run that has ended, gathered from its files as they were read. Reads none itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ddp_runner.observe.history.metrics_history import Curves
from ddp_runner.observe.history.run_history import RunHistory
from ddp_runner.observe.summary import RunSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRun:
    """``settings`` by ``section.name``; ``resumed_step``: where its newest launch, which the summary is of, began."""

    name: str
    summary: RunSummary
    settings: Mapping[str, object]
    curves: Curves
    resumed_step: int = 0

    @classmethod
    def of(cls, history: RunHistory, summary: RunSummary) -> EndedRun:
        """From a folder that has been read."""
        return cls(
            name=summary.name or history.name,
            summary=summary,
            settings={row.key: row.value for row in history.settings()},
            curves=history.metrics.curves,
            resumed_step=history.faults.resumed_step,
        )

    @property
    def trained_s(self) -> float:
        """The time since the start-up."""
        return max(0.0, self.summary.wall_s - self.summary.time_s.startup)

    @property
    def steps(self) -> int:
        """That this launch has done."""
        return max(0, self.summary.steps - self.resumed_step)

    @property
    def steps_per_s(self) -> float | None:
        """Over all of the time since the start-up, repairs and saves included."""
        return self.steps / self.trained_s if self.trained_s > 0 else None

    @property
    def faults_total(self) -> int:
        """Also those that the summary does not list."""
        return len(self.summary.faults) + self.summary.faults_left_out
