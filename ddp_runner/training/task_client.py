"""A Task as the engine's client: agrees on its tuning, asks for less where that repairs, and reports.

Its steps in one generation are made by ``task_steps.py``.
"""

from __future__ import annotations

import time
from dataclasses import replace

from ddp_runner.collective.group import Group
from ddp_runner.core.exits import StopReason
from ddp_runner.core.faults import Fault, FaultKind
from ddp_runner.core.phases import Phase
from ddp_runner.core.recovery import is_short_for_steps
from ddp_runner.data.loader import MicroBatch
from ddp_runner.training.agreeing import (
    agree_on_tuning,
    agree_on_weights,
    change_tuning,
    recalled,
)
from ddp_runner.training.components.tuning import Tuning, beyond_repair, free_memory
from ddp_runner.training.final_weights import (
    BestWeights,
    best_weights,
    give_best,
    publish_final,
    swapped_in,
)
from ddp_runner.training.given import give_average
from ddp_runner.training.guard import NumericsGuard
from ddp_runner.training.helpers import Helpers
from ddp_runner.training.loaders import open_quarantine
from ddp_runner.training.rank_context import TaskParts
from ddp_runner.training.step import StepResult, Votes
from ddp_runner.training.task_steps import TaskSteps
from ddp_runner.training.train_report import TrainReport, finished_message, report_of


class TaskClient:
    """Implements :class:`~ddp_runner.training.engine.Client` for a Task, from the rank's start to its end."""

    def __init__(self, parts: TaskParts) -> None:
        self._parts = parts
        self._runtime = parts.runtime
        self._rank_info = parts.runtime.rank_info
        self._steps: TaskSteps | None = None  # of the newest generation
        self._short_of_memory_in = self._rank_info.short_of_memory_in
        self._changed_tuning: Tuning | None = None  # until the ranks have agreed on it
        self.report: TrainReport | None = None  # once training has ended

    def train_step(self, micro_batches: list[MicroBatch], *, votes: Votes) -> StepResult | None:
        """Make one step; None where the state is now an older one, or raises what broke in it."""
        assert self._steps is not None, "a step is made in a generation"
        return self._steps.make(micro_batches, votes=votes)

    def compare(self, group: Group) -> None:
        """Compare samples: a step is of the same ones whoever loads them."""
        self._parts.same_data.compare(group, self._parts.loader)

    def agree(self, group: Group, *, is_first: bool) -> None:
        """Agree on the tuning, and take over what is known of bad samples."""
        agree_on_tuning(
            group,
            self._parts,
            changed=self._changed_tuning
            or (recalled(self._parts.state, self._runtime) if is_first else None),
            short_of_memory_in=self._short_of_memory_in,
        )
        self._changed_tuning, self._short_of_memory_in = None, ""
        open_quarantine(self._parts, is_first=is_first)

    def enter(self, group: Group, guard: NumericsGuard) -> TaskSteps:
        """Wrap the model for the steps of a generation."""
        self._steps = TaskSteps(self._parts, group=group, guard=guard)
        return self._steps

    def repaired(self, fault: Fault) -> Fault:
        """Ask for less memory, or have DDP search for unused parameters; the fault says if it was in vain."""
        if fault.kind is FaultKind.OUT_OF_MEMORY and not is_short_for_steps(fault):
            return fault  # this process ends, and the next one asks for less
        self._steps = None  # of the generation that was left
        free_memory()
        changed = change_tuning(
            self._parts.state, self._runtime, fault, samples=self._parts.loader.share_samples
        )
        if changed is None:
            return beyond_repair(fault, self._parts.settings.ddp)
        self._changed_tuning = changed
        return fault

    def conclude(self, group: Group, reason: StopReason) -> None:
        """Make the report. Raises FaultError where the replicas ended with different weights."""
        parts = self._parts
        parts.profile.conclude()
        report = report_of(parts, reason)
        best: BestWeights | None = None
        stage = parts.settings.stage
        is_over = reason is StopReason.COMPLETED and (stage is None or stage.is_last)
        if is_over and group.rank == 0:
            best = best_weights(parts)
            publish_final(parts, best)
            parts.state.model.eval()
            helpers = Helpers(parts.workload.task, warn=self._runtime.logger.warning)
            # The report is of the weights before it: a sample may change them.
            with swapped_in(parts.state.model, best):
                report = replace(report, sample=helpers.sample(parts.state.model))
        agree_on_weights(group, parts.state, self._runtime, report.weights_sha256)
        if reason is StopReason.COMPLETED:
            parts.drills.conclude(group)
        self._runtime.slot.stamp(Phase.FINISHED, time.monotonic_ns())
        self._runtime.report(finished_message(report, self._rank_info.rank))
        if not self._runtime.is_watched:
            is_best = reason is StopReason.COMPLETED and parts.settings.run.load_best_at_end
            model = give_best(parts, group, best) if is_best else None
            model = model or give_average(parts.state.model, parts.state.ema)
            report = replace(report, model=model)
        self.report = report
