"""A Task as the engine's client: is built, agrees on its tuning, asks for less where that repairs, and reports.

Its steps in one generation are made by ``task_steps.py``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ddp_runner.checkpoint.store import Loaded
from ddp_runner.config.identity import task_has_changed
from ddp_runner.core.settings import JsonValue, Settings
from ddp_runner.data.loader import Loader, MicroBatch
from ddp_runner.data.order import ORDER_VERSION
from ddp_runner.kernel.group.group import Group
from ddp_runner.kernel.rules.election import EMPTY_STEP
from ddp_runner.kernel.rules.exits import StopReason
from ddp_runner.kernel.rules.faults import Fault, FaultError, FaultKind
from ddp_runner.kernel.rules.phases import Phase, Stage
from ddp_runner.kernel.rules.recovery import is_short_for_steps
from ddp_runner.kernel.step.agreeing import agree_on_weights
from ddp_runner.kernel.step.runtime import Runtime
from ddp_runner.kernel.step.session import Makers, StepResult, Votes
from ddp_runner.kernel.wire.events import TuningChanged
from ddp_runner.training.beside_steps import beside_steps
from ddp_runner.training.components.tuning import Tuning, beyond_repair, free_memory, repair_tuning
from ddp_runner.training.exactness.first_step import note_carried, report_lost_carried
from ddp_runner.training.exactness.held_values import DataWatch
from ddp_runner.training.exactness.same_data import SameData
from ddp_runner.training.figures.profiling import step_profile
from ddp_runner.training.figures.train_report import TrainReport, finished_message, report_of
from ddp_runner.training.helpers import Helpers
from ddp_runner.training.loading.given import give_average
from ddp_runner.training.loading.loaders import make_loader, open_quarantine
from ddp_runner.training.loading.preloaded_data import with_preloaded_data
from ddp_runner.training.prepare import Kept, StageClock
from ddp_runner.training.rank_client import RankClient, change_tuning, exchange_tuning
from ddp_runner.training.rank_context import TaskParts
from ddp_runner.training.saves.final_weights import (
    BestWeights,
    best_weights,
    give_best,
    publish_final,
    swapped_in,
)
from ddp_runner.training.starting.built_ahead import BuiltAhead
from ddp_runner.training.starting.compiling import Compiler
from ddp_runner.training.starting.resume import TakenUp, is_complete
from ddp_runner.training.state import Progress, TrainState
from ddp_runner.training.task_steps import TaskSteps
from ddp_runner.training.workload import build_workload

_DRAWS = "a cache of random draws in the dataset"
_CURE_OF_DRAWS = "cache a sample before its random changes"
_CURE_OF_DATA = "compute what depends on the step or epoch in loss(model, batch, context)"


def _may_change_samples(state: TrainState) -> bool:
    """Return True if samples may use what steps change: loader workers had it as it was when they began."""
    of_task = [name for name in state.side.followed_names() if not name.startswith("model.")]
    return bool(state.carried_of_data or of_task)


class TaskSetup:
    """Implements :class:`~ddp_runner.training.prepare.Setup` for a Task: builds task, data, model and state."""

    def __init__(
        self,
        settings: Settings,
        runtime: Runtime,
        *,
        built: BuiltAhead | None,
        on_wait: Callable[[], None],
        stages: StageClock,
        ending: contextlib.ExitStack,
    ) -> None:
        """Build the workload, or take what was ``built`` ahead of need, and begin to look at its data.

        What is to be closed is left to ``ending``. Raises BadInputError for what a user can correct.
        """
        self.settings = settings
        self._runtime = runtime
        self._on_wait = on_wait
        if built is None:
            workload, state = build_workload(settings, runtime.rank_info, entering=stages.enter)
        else:
            workload, state = built.taken(settings, runtime.rank_info)
            state.local.belongs_to(runtime.rank_info)
        if settings.data.preload:
            stages.enter(Stage.PRELOAD)
            workload = with_preloaded_data(settings, workload, state, runtime, ending=ending)
        self.workload, self.state = workload, state
        self._same_data = SameData(
            settings,
            workload,
            runtime,
            on_wait=on_wait,
            may_differ=lambda: _may_change_samples(state),
        )
        ending.callback(self._same_data.close)

    def take_in(self, start: TakenUp) -> None:
        """Look back at the run whose checkpoint was loaded, and begin what is profiled from the start on.

        Raises BadInputError for other data than that run's, and where a profile is wanted beyond the end.
        """
        if self.state.committed_step != EMPTY_STEP:
            self.state.room = {}  # for what it was to receive
        if start.loaded is not None:
            self._look_back(start.loaded, start.progress)
        self._profile = step_profile(
            self.settings,
            self._runtime,
            device=self.workload.device,
            total_steps=self.workload.length.total_steps,
        )

    def _look_back(self, loaded: Loaded, progress: Progress) -> None:
        workload, state, logger = self.workload, self.state, self._runtime.logger
        if state.order_version != ORDER_VERSION and state.stream is None:
            logger.info(
                "the samples come in the order that this run began with; a new run has one that"
                " needs no table of them in memory"
            )
        self._same_data.compare_with(loaded, workload, state)
        if task_has_changed(loaded.manifest.recipe, workload.recipe):
            progress.changed_task = self.settings.run.task
        if is_complete(workload, state):
            where = f"{state.committed_step:,} of {workload.length.total_steps:,} steps"
            logger.progress(f"already complete: {where}, nothing to train")

    def open_loader(self) -> Loader:
        """Open the loader of the task's training data."""
        self._loader = make_loader(
            self.settings,
            self.workload,
            self.workload.datasets,
            self.state,
            self._runtime,
            on_wait=self._on_wait,
        )
        return self._loader

    def seen_data(self) -> Mapping[str, JsonValue]:
        """Return what the ranks have agreed on of their data."""
        return self._same_data.record

    def parts(self, kept: Kept) -> TaskParts:
        """Return all that the rank trains with."""
        settings, workload, state, runtime = self.settings, self.workload, self.state, self._runtime
        return TaskParts(
            settings=settings,
            workload=workload,
            state=state,
            loader=self._loader,
            memory=kept.memory,
            store=kept.store,
            runtime=runtime,
            progress=kept.progress,
            saving=kept.saving,
            device=kept.device,
            on_wait=self._on_wait,
            same_data=self._same_data,
            compiler=Compiler(settings.run, state.model, slot=runtime.slot),
            profile=self._profile,
        )


class TaskClient(RankClient):
    """Implements :class:`~ddp_runner.kernel.step.engine.Client` for a Task, from the rank's start to its end."""

    _parts: TaskParts

    def __init__(self, parts: TaskParts, run_id: str) -> None:
        super().__init__(parts, run_id)
        self._beside = beside_steps(parts)
        self._data = DataWatch(
            self._watched(),
            is_kept=self._is_kept,
            loads_here=lambda: parts.loader.loads_here,
            sampled=parts.workload.samplings,
            note=self._note_data,
        )
        self._rank_info = parts.runtime.rank_info
        self._steps: TaskSteps | None = None  # of the newest generation
        self._short_of_memory_in = self._rank_info.short_of_memory_in
        self.report: TrainReport | None = None  # once training has ended

    def _watched(self) -> dict[str, Any]:
        datasets = self._parts.workload.datasets
        owners = {"data": datasets.train, "collate": datasets.collate, "sampler": datasets.sampler}
        for name, one in datasets.validation_sets.items():
            owners[f"validation {name}".rstrip()] = one
        return {name: one for name, one in owners.items() if one is not None}

    def _is_kept(self, value: Any) -> bool:
        """Return True for objects of the state, which are the same ones here; loader workers have copies of them."""
        parts = self._parts
        if value is parts.workload.datasets.sampler:
            return False  # a replaced rank draws the epoch from it as it is by then
        may_be_read = value is parts.workload.task or not parts.loader.workers
        return may_be_read and parts.state.side.owns(value)

    def train_step(self, micro_batches: list[MicroBatch], *, votes: Votes) -> StepResult | None:
        """Make one step; None where the state is now an older one, or raises what broke in it."""
        assert self._steps is not None, "a step is made in a generation"
        return self._steps.make(micro_batches, votes=votes)

    def _note_data(self, names: list[str], cure: str = _CURE_OF_DATA) -> None:
        line = note_carried(
            self._parts.state, names, cure=cure, when="during training", of_data=True
        )
        if line and self._rank_info.rank == 0:
            self._runtime.logger.warning(line, step=self._parts.state.committed_step)
        report_lost_carried(self._parts)

    def compare(self, group: Group) -> None:
        """Compare samples: a step is of the same ones whoever loads them."""
        self._parts.same_data.compare(group, self._parts.loader)
        if self._parts.same_data.keeps_draws:
            self._note_data([_DRAWS], _CURE_OF_DRAWS)

    def agree(self, group: Group, *, is_first: bool) -> None:
        """Agree on the tuning, and take over what is known of bad samples."""
        super().agree(group, is_first=is_first)
        agree_on_tuning(
            group,
            self._parts,
            changed=self._learnt(is_first=is_first),
            short_of_memory_in=self._short_of_memory_in,
        )
        self._changed, self._short_of_memory_in = None, ""
        open_quarantine(self._parts, is_first=is_first)

    def enter(self, group: Group) -> Makers:
        """Wrap the model for the steps of a generation."""
        guard = self._guard(group)
        self._steps = steps = TaskSteps(
            self._parts, group=group, guard=guard, beside=self._beside, data=self._data
        )
        return Makers(maker=steps, guard=guard, side=self._side(group))

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
        self._changed = changed
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
            with swapped_in(parts.state, best):
                report = replace(report, sample=helpers.sample(parts.state.model))
        agree_on_weights(group, parts.state, self._runtime, report.weights_sha256)
        if reason is StopReason.COMPLETED:
            for one in self._beside:
                one.conclude(group)
        self._runtime.slot.stamp(Phase.FINISHED, time.monotonic_ns())
        self._runtime.report(finished_message(report, self._rank_info.rank))
        if not self._runtime.is_watched:
            is_best = reason is StopReason.COMPLETED and parts.settings.run.load_best_at_end
            model = give_best(parts, group, best) if is_best else None
            model = model or give_average(parts.state.model, parts.state.ema)
            report = replace(report, model=model)
        self.report = report


def agree_on_tuning(
    group: Group, parts: TaskParts, *, changed: Tuning | None, short_of_memory_in: str
) -> None:
    """Take what suits every rank, and cut this rank's share accordingly. Every rank must call it.

    ``changed``: what this rank has just changed for a fault of its own; the state that it received
    since then, where the others had gone on without it, knows nothing of that.
    ``short_of_memory_in``: the phase in which this rank's predecessor ended for lack of memory, if it
    did, so that it asks for half.
    Raises FaultError (OUT_OF_MEMORY) where that cannot be halved.
    """
    state = parts.state
    mine = _halved(parts, short_of_memory_in) if short_of_memory_in else state.tuning
    state.tuning = exchange_tuning(group, mine, changed=changed)
    shares = parts.settings.data.shares
    if shares and shares != "auto":
        # By the ranks of the launch: of those that are left each keeps its own.
        places = group.exchange("place", str(parts.runtime.rank_info.rank))
        parts.loader.use_shares(tuple(shares[int(place)] for place in places))
    parts.loader.assign(
        rank=group.rank,
        world_size=group.world_size,
        micro_batch_size=state.tuning.micro_batch_size,
    )


def _halved(parts: TaskParts, phase: str) -> Tuning:
    """Return the tuning with which this rank avoids the lack of memory that ended its predecessor."""
    state, runtime = parts.state, parts.runtime
    fault = Fault(
        kind=FaultKind.OUT_OF_MEMORY,
        rank=runtime.rank_info.rank,
        step=state.committed_step,
        cause="this rank ended for lack of memory, with single samples",
        phase=phase,
        at_ns=time.monotonic_ns(),
        may_retry=False,
    )
    change = repair_tuning(fault, state.tuning, samples=parts.loader.share_samples)
    if change is None:
        raise FaultError(fault)
    runtime.logger.warning(f"the process before this one ran out of memory: {change.action}")
    runtime.report(
        TuningChanged(
            rank=fault.rank,
            step=fault.step,
            action=change.action,
            inexact_reason=change.inexact_reason,
            fault_free=True,
            plain_retry=change.plain_retry,
        )
    )
    return change.tuning
