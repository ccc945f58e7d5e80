"""DDPTrainer: builds, joins one generation after the other, and ends with a report.

Decides nothing about repair: what broke goes to the runtime as a Fault, and the next generation
comes from there.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddp_runner import config as configuration
from ddp_runner.checkpoint.store import CheckpointStore, Loaded
from ddp_runner.collective.abort import AbortSwitch
from ddp_runner.collective.communicators import ends_in_silence
from ddp_runner.collective.device import prove_device
from ddp_runner.collective.device_progress import NoDeviceProgress, device_progress
from ddp_runner.collective.group import Group, joined
from ddp_runner.collective.transfer import receive_state, send_state
from ddp_runner.collective.waiting import waiting_for_peers
from ddp_runner.config.identity import TASK_FILE
from ddp_runner.core.board import Cell
from ddp_runner.core.classify import VICTIM_KINDS
from ddp_runner.core.election import EMPTY_STEP, ReplicaProgress, elect_source
from ddp_runner.core.exits import StopReason
from ddp_runner.core.faults import (
    REPAIRED_BY_RANK,
    Fault,
    FaultError,
    FaultKind,
    ReportedFaultError,
)
from ddp_runner.core.messages import Faulted, Formed, Ready, TuningChanged
from ddp_runner.core.phases import Phase, Stage
from ddp_runner.core.recovery import is_short_for_steps
from ddp_runner.core.secrets import secret_texts
from ddp_runner.core.settings import Settings
from ddp_runner.data.order import ORDER_VERSION
from ddp_runner.memory.manager import MemoryManager
from ddp_runner.training.agreeing import agree_on_tuning, recalled
from ddp_runner.training.audit import GenerationMembers, complete_audits
from ddp_runner.training.changes import tell_changes
from ddp_runner.training.components.tuning import Tuning, free_memory, mend
from ddp_runner.training.exactness.drill_notes import Drills
from ddp_runner.training.exactness.first_step import tell_lost
from ddp_runner.training.exactness.same_data import SameData
from ddp_runner.training.failure import fault_of
from ddp_runner.training.fitting import warn_of_values
from ddp_runner.training.fork_safety import rehearse_threads
from ddp_runner.training.given import give_average, with_task_named
from ddp_runner.training.guard import NumericsGuard
from ddp_runner.training.helpers import Helpers
from ddp_runner.training.last_save import warn_of_room
from ddp_runner.training.loaders import (
    collective_timeout_s,
    make_loader,
    open_quarantine,
    waiting,
)
from ddp_runner.training.progress import Progress
from ddp_runner.training.rank_context import RankParts
from ddp_runner.training.runtime import Generation, RankInfo, Runtime, local_runtime
from ddp_runner.training.saving import ROOM_SHARE_MAX, Saving
from ddp_runner.training.session import Session
from ddp_runner.training.stages import StageClock
from ddp_runner.training.state import TrainState
from ddp_runner.training.task_steps import TaskSteps
from ddp_runner.training.train_report import TrainReport, finished_message, report_of, start_notes
from ddp_runner.training.workload import (
    Workload,
    build_workload,
    is_complete,
    leave_other_course,
    load_start,
    restore_newest,
)


class DDPTrainer:
    """Trains one rank.

    In a plain script or notebook: ``DDPTrainer(MyTask, config={"epochs": 3}).train().model``. The
    first argument is a task class, or this process's rank; a class may also be the ``task`` of
    ``config``, which is a ``Settings``, or a mapping with flat or nested keys. With ``world_size`` above
    1 and no runtime, every process makes its own trainer, and MASTER_ADDR and MASTER_PORT name a
    store that runs already (as under torchrun).
    """

    def __init__(
        self,
        rank: int | Callable[..., Any] = 0,
        world_size: int = 1,
        config: Settings | Mapping[str, Any] | None = None,
        *,
        runtime: Runtime | None = None,
    ) -> None:
        if not isinstance(rank, int):
            if isinstance(config, Settings):
                raise TypeError("with a task class, config must be a mapping")
            rank, config = 0, {**(config or {}), "task": rank}
        if not isinstance(config, Settings):
            config = configuration.from_flat(with_task_named(config or {}))
        self.settings = config
        self._runtime = runtime or local_runtime(self.settings, rank, world_size)
        self._runtime.logger.hidden = tuple(secret_texts(self.settings.task))
        self._place = self._runtime.place
        self._began = False
        self._short_of_memory_in = self._place.short_of_memory_in
        self._tuning_mended: Tuning | None = None  # until the ranks have agreed on it
        self._members: GenerationMembers | None = (
            None  # of the newest generation that this process trained in
        )
        self._switch = AbortSwitch()  # of the generation that this rank is in

    def train(self) -> TrainReport:
        """Train until the end of the run or an agreed stop.

        Raises BadInputError for settings, data or a checkpoint that do not fit, and FaultError for
        a fault that this process does not survive, or where the run ends without it.
        """
        with contextlib.ExitStack() as ending:
            parts, run_id = self._prepare(ending)
            while True:
                generation = self._runtime.next_generation(_ready(parts, self._place, run_id))
                if generation is None:
                    raise ReportedFaultError(parts.saving.save_alone())
                outcome = self._train_generation(generation, parts)
                if isinstance(outcome, TrainReport):
                    parts.device.close()
                    return outcome
                # Out here no frame of the failed step is alive: its tensors are free.
                parts.state.drop_unfinished_step()
                parts.saving.report_ended()
                outcome = self._mended(outcome, parts)
                self._log_fault(outcome)
                self._runtime.report(
                    Faulted(generation=generation.membership.generation, fault=outcome)
                )
                if not self._runtime.survives(outcome):
                    raise ReportedFaultError(outcome)
                prove_device(
                    parts.workload.device, rank=self._place.rank, step=parts.state.committed_step
                )
                # Which reads from the device: not before that has let go of the generation.
                parts.state.precision.drop_unfinished_step()

    def _mended(self, fault: Fault, parts: RankParts) -> Fault:
        """Change what keeps this rank from doing the step, if that is in its hands."""
        state = parts.state
        if fault.kind is FaultKind.REPLICA_DIVERGED and fault.may_retry:
            state.committed_step = EMPTY_STEP  # to receive what the majority has
            return fault
        if fault.kind not in REPAIRED_BY_RANK or not fault.may_retry:
            return fault
        is_memory = fault.kind is FaultKind.OUT_OF_MEMORY
        if self._runtime.slot.get(Cell.DIRTY) or (is_memory and not is_short_for_steps(fault)):
            return fault  # inside the optimizer: this process ends, and the next one asks for less
        free_memory()
        mended = mend(fault, state.tuning, samples=parts.loader.share_samples)
        if mended is None:
            return replace(fault, may_retry=False)
        state.tuning = self._tuning_mended = mended.tuning
        self._runtime.logger.progress(f"{fault.cause}: {mended.remedy}", step=fault.step)
        self._runtime.report(
            TuningChanged(
                rank=self._place.rank,
                step=fault.step,
                action=mended.remedy,
                inexact_reason=mended.inexact_reason,
                tuning=dict(mended.tuning.to_record()),
                plain_retry=mended.plain_retry,
            )
        )
        return fault

    def _log_fault(self, fault: Fault) -> None:
        """A cause once, with its traceback, where the console sees it; a consequence in the file only."""
        logger = self._runtime.logger
        # Where a disk refused us, or a value was of no use, is in our own code: the plan tells it.
        of_no_use = {FaultKind.STORAGE_FAILED, FaultKind.STORE_TAMPERED, FaultKind.BAD_INPUT}
        for_file = fault.kind in VICTIM_KINDS | of_no_use
        for_file |= fault.kind is FaultKind.RANK_RAISED and not fault.may_retry
        if for_file or (fault.kind in REPAIRED_BY_RANK and fault.may_retry):
            logger.progress(f"left the generation: {fault.cause}\n{fault.detail}", step=fault.step)
        else:
            logger.error(f"{fault.cause}\n{fault.detail}", step=fault.step)

    def _prepare(self, ending: contextlib.ExitStack) -> tuple[RankParts, str]:
        """What this rank trains with, and its run; what has to be closed is left to ``ending``."""
        slot = self._runtime.slot
        slot.stamp(Phase.STARTUP, time.monotonic_ns())
        slot.set(Cell.DIRTY, 0)  # of a predecessor that died inside its optimizer
        rehearse_threads()
        settings = self.settings
        stages = StageClock(self._runtime)
        workload, state = build_workload(settings, self._place, entering=stages.enter)
        on_wait = waiting(self._runtime, is_leaving=lambda: self._switch.tripped)
        same_data = SameData(settings, workload, self._runtime, on_wait=on_wait)
        ending.callback(same_data.close)
        store = CheckpointStore(
            Path(settings.run.checkpoint_dir),
            keep_last=settings.checkpoint.keep_last,
            disk=self._runtime.disk,
        )
        progress, run_id, loaded = Progress(), "", None
        if self._place.loads:
            stages.enter(Stage.CHECKPOINT)
            loaded = load_start(settings, workload, state, store)
            if loaded is not None or settings.run.init_from:
                warn_of_values(state, self._runtime.logger.warning)
            if loaded is not None:
                run_id = loaded.manifest.run_id
                progress.checkpoint = str(loaded.path)
                if loaded.path.parent.resolve() == store.directory.resolve():
                    progress.checkpoint_step = state.committed_step  # else it is to be saved here
                self._tell_of_old_order(state)
                same_data.compare_with(loaded, workload, state)
                self._look_back(loaded, workload, state, progress)
        stages.enter(Stage.NONE)
        slot.set(Cell.TOTAL_STEPS, workload.length.total_steps)
        loader = make_loader(settings, workload, state, self._runtime, on_wait=on_wait)
        ending.callback(loader.close)
        memory = MemoryManager(
            settings.memory,
            rank=self._place.rank,
            loader_pids=lambda: loader.worker_pids,
            shrink_prefetch=loader.shrink_prefetch,
            log=lambda level, message: getattr(self._runtime.logger, level)(message),
            device=workload.device if workload.device.type == "cuda" else None,
        )
        saving = Saving(
            settings=settings,
            workload=workload,
            state=state,
            store=store,
            memory=memory,
            runtime=self._runtime,
            progress=progress,
            data=lambda: same_data.record,
        )
        parts = RankParts(
            settings=settings,
            workload=workload,
            state=state,
            loader=loader,
            memory=memory,
            store=store,
            runtime=self._runtime,
            progress=progress,
            saving=saving,
            drills=Drills(
                settings, workload, state, saving=saving, memory=memory, runtime=self._runtime
            ),
            on_wait=on_wait,
            same_data=same_data,
            device=device_progress(slot, workload.device, warn=self._runtime.logger.warning)
            if self._runtime.is_watched
            else NoDeviceProgress(),
        )
        if loaded is not None:
            parts.saving.resumed(loaded)
            tell_changes(self._runtime, state, known=loaded.manifest.changes)
        return parts, run_id

    def _tell_of_old_order(self, state: TrainState) -> None:
        if state.order_version != ORDER_VERSION and state.stream is None:
            self._runtime.logger.info(
                "the samples come in the order that this run began with; a new run has one that"
                " needs no table of them in memory"
            )

    def _look_back(
        self, loaded: Loaded, workload: Workload, state: TrainState, progress: Progress
    ) -> None:
        """Note what is to be known of the run whose checkpoint was loaded."""
        before, now = (of.get(TASK_FILE) for of in (loaded.manifest.recipe, workload.recipe))
        if before and now and before != now:
            progress.changed_task = self.settings.run.task
        if is_complete(workload, state):
            where = f"{state.committed_step:,} of {workload.length.total_steps:,} steps"
            self._runtime.logger.progress(f"already complete: {where}, nothing to train")

    def _train_generation(self, generation: Generation, parts: RankParts) -> TrainReport | Fault:
        """One generation from forming to its end, as a report or as the fault that broke it."""
        try:
            return self._join_and_train(generation, parts)
        except Exception as error:  # noqa: BLE001 - the step boundary: becomes a Fault
            slot, step = self._runtime.slot, parts.state.committed_step
            return fault_of(
                error,
                rank=self._place.rank,
                step=slot.get(Cell.COMMITTED_STEP) if step == EMPTY_STEP else step,
                phase=slot.read().phase.label,
                aborted=generation.switch.aborted,
            )

    def _join_and_train(self, generation: Generation, parts: RankParts) -> TrainReport:
        settings, slot, state = self.settings, self._runtime.slot, parts.state
        self._switch = generation.switch
        began_s = time.monotonic()
        slot.set(Cell.GENERATION, generation.membership.generation)
        slot.stamp(Phase.FORMING, time.monotonic_ns())
        with joined(
            generation.membership,
            link=generation.link,
            backend=parts.workload.backend,
            device=parts.workload.device,
            timeout_s=collective_timeout_s(settings, is_watched=self._runtime.is_watched),
            switch=generation.switch,
        ) as group:
            joined_s = time.monotonic()
            source = self._agree_on_state(group, parts)
            if state.buffers.frozen_bytes():
                room_bytes = ROOM_SHARE_MAX * parts.memory.room_bytes()
                state.hold_frozen(room_bytes=room_bytes / self._place.local_world_size)
            transferred_s = time.monotonic()
            agree_on_tuning(
                group,
                parts,
                mended=self._tuning_mended or (None if self._began else recalled(parts)),
                short_of_memory_in=self._short_of_memory_in,
            )
            self._tuning_mended, self._short_of_memory_in = None, ""
            open_quarantine(parts, is_first=not self._began)
            if group.rank == 0 and generation.membership.generation == 1:
                warn_of_room(parts.state, parts.store, self._runtime)
            guard = NumericsGuard(parts, group)
            steps = TaskSteps(parts, group=group, guard=guard)
            session = Session(parts, group=group, guard=guard, maker=steps)
            self._began = True
            with contextlib.closing(session):
                steps.settle()
                tell_lost(parts)
                slot.stamp(Phase.FORMING, time.monotonic_ns())
                self._runtime.report(
                    Formed(
                        rank=self._place.rank,
                        generation=generation.membership.generation,
                        committed_step=state.committed_step,
                        source=source,
                        group_s=joined_s - began_s,
                        transfer_s=transferred_s - joined_s,
                        rebuild_s=time.monotonic() - transferred_s,
                    )
                )
                # Forming has a deadline of its own, which ends with the world being formed.
                slot.stamp(Phase.COMPARE, time.monotonic_ns())
                while step := session.begin():
                    with session.step(step):
                        step.result = steps.make(step.micro_batches, votes=step.votes)
            return self._conclude(group, parts, session.reason)

    def _agree_on_state(self, group: Group, parts: RankParts) -> int:
        """Bring every rank to the newest committed step; returns the rank it came from."""
        state, slot = parts.state, self._runtime.slot
        parts.same_data.compare(group, parts.loader)
        answers = self._standings(group, state, "committed_step")
        if all(step == EMPTY_STEP for step, _ in answers):  # a roll-back was cut short
            slot.stamp(Phase.CHECKPOINT, time.monotonic_ns())  # under the deadline of a save
            if group.rank == 0:
                loaded = restore_newest(self.settings, parts.workload, state, parts.store)
                parts.saving.rolled_back(loaded)
            answers = self._standings(group, state, "restored_step")
            slot.stamp(Phase.FORMING, time.monotonic_ns())
        election = elect_source(
            [
                ReplicaProgress(rank=rank, committed_step=step)
                for rank, (step, _) in enumerate(answers)
            ]
        )
        if group.rank == election.source:
            # Before anybody gets the newest step.
            complete_audits(
                self.settings,
                self._members,
                step=state.committed_step,
                order=replace(parts.workload.order, version=state.order_version),
                quarantine=parts.state.quarantine,
                loss=parts.progress.loss,
                warn=self._runtime.logger.warning,
            )
        if self._place.loads and group.rank == election.source and not self._began:
            # INVARIANT left-before-shared: whoever has the state of this run finds no other course.
            # Broken if: it is sent first; should this rank die then, nobody loads it, and leaves that.
            # Guarded by: test_a_rank_that_dies_leaving_the_other_branch_has_a_successor.
            leave_other_course(
                self.settings,
                parts.store,
                begun_from=parts.progress.checkpoint,
                say=self._runtime.logger.info,
            )
        if election.receivers and group.rank == election.source:
            send_state(
                group, state.capture(), to=election.receivers, on_progress=self._show_progress
            )
        elif group.rank in election.receivers:
            was_left = self._began and state.committed_step == EMPTY_STEP
            learnt = state.tuning
            state.restore(
                receive_state(group, source=election.source, on_progress=self._show_progress)
            )
            if was_left:
                # Of the source's and this all agree on one next; who has read the state may be new.
                state.tuning = learnt
        if math.isnan(parts.progress.loss) and state.monitor.last is not None:
            parts.progress.loss = state.monitor.last  # until this process has trained a step
        slot.set(Cell.COMMITTED_STEP, state.committed_step)
        slot.set(Cell.SAMPLES, state.samples)
        slot.set(Cell.DIRTY, 0)
        self._members = GenerationMembers(
            generation=group.membership.generation,
            slots=tuple(place for _, place in answers),
            first_step=state.committed_step,
        )
        return election.source

    def _standings(self, group: Group, state: TrainState, name: str) -> list[tuple[int, int]]:
        """Committed step and slot of every rank of the group; all take over the first one's run id."""
        mine = json.dumps([state.committed_step, self._place.rank, self._runtime.run_id])
        answers = [json.loads(answer) for answer in group.exchange(name, mine)]
        self._runtime.run_id = answers[0][2]  # without a supervisor each rank has made one
        return [(step, slot) for step, slot, _ in answers]

    def _show_progress(self) -> None:
        """A transfer may take longer than forming may; it shows that it goes on."""
        self._runtime.slot.set(Cell.PHASE_SINCE_NS, time.monotonic_ns())

    def _conclude(self, group: Group, parts: RankParts, reason: StopReason) -> TrainReport:
        report = report_of(parts, reason)
        if reason is StopReason.COMPLETED and group.rank == 0:
            parts.state.model.eval()
            helpers = Helpers(parts.workload.task, warn=self._runtime.logger.warning)
            # The report is of the weights before it: a sample may change them.
            report = replace(report, sample=helpers.sample(parts.state.model))
        with waiting_for_peers(self._runtime.slot):
            digests = group.exchange("weights_sha256", report.weights_sha256)
        if len(set(digests)) > 1:
            parts.state.is_in_doubt = True
            raise FaultError(
                Fault(
                    kind=FaultKind.REPLICA_DIVERGED,
                    rank=-1,
                    step=report.steps,
                    cause=f"the replicas ended with different weights: {digests}",
                    at_ns=time.monotonic_ns(),
                    may_retry=False,  # they were equal before the save: there is nobody to believe
                )
            )
        self._runtime.slot.stamp(Phase.FINISHED, time.monotonic_ns())
        self._runtime.report(finished_message(report, self._place.rank))
        if self._runtime.is_watched:
            return report
        return replace(report, model=give_average(parts.state.model, parts.state.ema))


def _ready(parts: RankParts, place: RankInfo, run_id: str) -> Ready:
    workload = parts.workload
    return Ready(
        rank=place.rank,
        committed_step=parts.state.committed_step,
        run_id=run_id,
        total_steps=workload.length.total_steps,
        steps_per_epoch=workload.length.steps_per_epoch,
        train_samples=workload.order.dataset_size,
        parameters=workload.parameters,
        device=str(workload.device),
        precision=parts.state.precision.name,
        notes=start_notes(parts),
        is_complete=is_complete(workload, parts.state),
        changed_task=parts.progress.changed_task,
        ends_in_silence=ends_in_silence(workload.backend),
        device_free_bytes=workload.device_free_bytes,
    )
