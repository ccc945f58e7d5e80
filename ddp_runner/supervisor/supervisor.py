"""Handles each event of a run: gathers facts, asks core, performs the answer.

Everything is level-triggered: an event only records a fact, and :meth:`Supervisor.advance` then does
whatever the facts allow (plan, kill, fork, form, end). So the order of events matters little.
"""

from __future__ import annotations

import math
import signal
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ddp_runner.checkpoint.unreported import Published
from ddp_runner.core import events
from ddp_runner.core.board import Cell
from ddp_runner.core.classify import VICTIM_KINDS, classify_exit
from ddp_runner.core.drill import END_WAIT_S, wait_line
from ddp_runner.core.errors import BadInputError
from ddp_runner.core.exits import STATUS_OF_REASON, RunStatus, StopReason
from ddp_runner.core.faults import Fault
from ddp_runner.core.launch_plan import LaunchPlan
from ddp_runner.core.lifecycle import (
    IN_WORLD,
    RUN_TABLE,
    Machine,
    Membership,
    RankEvent,
    RankState,
    RunEvent,
    RunState,
)
from ddp_runner.core.messages import (
    AbortHeard,
    Built,
    Checkpoint,
    CollectivesBegun,
    DrillPart,
    Finished,
    LoaderWorkers,
    Message,
    Metrics,
    NotSaved,
    OtherStage,
    Ready,
    Stop,
    WriteCopy,
    decode,
)
from ddp_runner.core.stopping import StopSignal, StopSignals
from ddp_runner.observe.summary import EndOfRun, RunSummary
from ddp_runner.supervisor.features.fault_injector import FaultInjector
from ddp_runner.supervisor.features.stage_change import StageChange
from ddp_runner.supervisor.node_keeper import NodeKeeper
from ddp_runner.supervisor.ports import RankHost
from ddp_runner.supervisor.processes.children import Ended
from ddp_runner.supervisor.processes.endings import exit_of
from ddp_runner.supervisor.processes.helper_process import RankEnded, ZygoteEnded
from ddp_runner.supervisor.processes.node import Node
from ddp_runner.supervisor.processes.rank_process import WhatItWrote
from ddp_runner.supervisor.processes.resources import remove_temporary_files
from ddp_runner.supervisor.rank_handle import RankHandle
from ddp_runner.supervisor.recovery.communicator_cut import Cutting
from ddp_runner.supervisor.recovery.repair import Repair
from ddp_runner.supervisor.recovery.zygote_keeper import NoZygote
from ddp_runner.supervisor.reporting.completed_run import kept_summary
from ddp_runner.supervisor.reporting.event_log import with_newest
from ddp_runner.supervisor.reporting.outputs import Outputs
from ddp_runner.supervisor.reporting.recorder import Recorder
from ddp_runner.supervisor.reporting.start_progress import Start
from ddp_runner.supervisor.run_end import RunEnd
from ddp_runner.supervisor.run_facts import Ending, RunFacts
from ddp_runner.supervisor.world import World
from ddp_runner.system.clock import Clock
from ddp_runner.system.run_directories import RunDirectories

EXIT_TIMEOUT_S = 15.0  # for a rank that has finished to exit


class Supervisor:
    """One run, from the first fork to its ending. Driven by ``run``; never waits for anything."""

    def __init__(
        self,
        plan: LaunchPlan,
        node: Node,
        *,
        outputs: Outputs,
        directories: RunDirectories,
        published: Published,
        clock: Clock,
        others: Sequence[RankHost] = (),
    ) -> None:
        self.plan = plan
        self.node = node
        self.world = world = World(node, others)
        self.outputs = outputs
        self.facts = facts = RunFacts(name=plan.settings.run.name)
        self.machine: Machine[RunState, RunEvent] = Machine(RUN_TABLE, RunState.STARTING)
        self._clock = clock
        self.recorder = recorder = Recorder(
            outputs, facts=facts, published=published, clock=clock, host_of=world.host_of
        )
        self._fault_injector = FaultInjector(plan, world, recorder)
        self._cutting = Cutting(world=world, recorder=recorder)
        self._repair = Repair(
            plan.settings,
            facts,
            machine=self.machine,
            world=world,
            recorder=recorder,
            fault_injector=self._fault_injector,
            published=published,
            cutting=self._cutting,
            clock=clock,
        )
        self._stages = StageChange(node, repair=self._repair, recorder=recorder, clock=clock)
        self.start = Start(
            facts,
            node=node,
            world=world,
            recorder=recorder,
            debug=plan.settings.run.debug,
            waits_for=self._waits_for,
        )
        self.keeper = NodeKeeper(
            plan,
            facts,
            node=node,
            world=world,
            recorder=recorder,
            repair=self._repair,
            start=self.start,
            clock=clock,
        )
        self.run_end = RunEnd(
            plan.settings,
            facts,
            machine=self.machine,
            world=world,
            recorder=recorder,
            published=published,
            start=self.start,
            cutting=self._cutting,
            owed=self.keeper.savers.owed,
            clock=clock,
        )
        self.directories = directories
        self._save_request = SaveRequest(facts, world=world, recorder=recorder)
        self._stop: StopReason | None = None
        self._signals = StopSignals()  # to this process, by a person or a scheduler
        self._stop_by_s = 0.0
        self._finished_at_s: float | None = None
        # A program of the user's goes on behind its loop for as long as it likes.
        self._exit_timeout_s = EXIT_TIMEOUT_S if plan.loop is None else math.inf
        self._waits_since_s: float | None = None  # for a drill, once all have finished

    @property
    def ending(self) -> Ending | None:
        """The ending of the run; None while it has not ended."""
        return self.run_end.ending

    def on_packet(self, packet: bytes, rank: int | None) -> None:
        """Handle an encoded message like :meth:`on_message`, of a process of this machine."""
        self.on_message(decode(packet), rank)

    def on_message(self, message: Message, rank: int | None) -> None:
        """A message came in; ``rank`` is who sent it, None for a process that is no rank."""
        if self.ending is not None:
            return
        if rank is None:
            ended = self.keeper.on_message(message)
            if ended is not None:
                self.on_ended(ended)
        else:
            self._on_rank_message(message, self.world.ranks[rank])

    def _on_rank_message(  # noqa: C901, PLR0912, PLR0915 - one row a message
        self, message: Message, handle: RankHandle
    ) -> None:
        match message:
            case events.Faulted() | events.RankFormed() | OtherStage() if self.run_end.is_open:
                pass  # nobody is repaired any more, and a rank that leaves says that it is ready
            case events.StopSignalAtRank():
                self.recorder.record(message)
                self._begin_stop(message.reason)
            case Built():
                self.start.built(message)
            case Ready():
                handle.ready = message
                handle.device_free_bytes = handle.device_free_bytes or message.device_free_bytes
                self.facts.steps_per_epoch = message.steps_per_epoch
                if message.is_from_memory:
                    taken = events.CopyTaken(rank=message.rank, step=message.committed_step)
                    self.recorder.record(taken)
                handle.machine.advance(RankEvent.GOT_READY)
                if handle.membership is Membership.REJOINING:
                    self._repair.returning.got_ready(handle)
            case AbortHeard(generation=generation):
                if generation == self.facts.generation:
                    handle.machine.advance(RankEvent.ABORT_HEARD)
            case events.RankFormed():
                handle.machine.advance(RankEvent.GOT_FORMED)
                handle.has_formed = True
                self._save_request.accept_from(message.committed_step)
                self._on_formed(message)
            case events.Faulted() if handle.membership not in IN_WORLD:
                self.recorder.record(
                    events.FaultOfGivenUpRank(rank=handle.rank, text=message.fault.cause)
                )
            case events.Faulted():
                self._report(message.fault)
            case Metrics():
                handle.metrics = {**handle.metrics, **message.values, "step": message.step}
                self.recorder.metrics(message.step, message.rank, message.values)
            case events.CheckpointSaved():
                productive_ns = handle.slot.get(Cell.PRODUCTIVE_NS)
                self.recorder.saved(replace(message, productive_ns=productive_ns))
                self._save_request.saved(message.step)
                self.run_end.last_save.saved(message)
            case WriteCopy():
                is_fenced = bool(handle.slot.get(Cell.FENCED))
                now_s = self._clock.monotonic()
                self.keeper.savers.ordered(message, now_s, is_fenced=is_fenced)
            case NotSaved():
                self.run_end.last_save.not_saved(message)
            case events.TuningChanged():
                self.recorder.reported(message)
                self._repair.note_action(message)
            case events.RepairedInPlace():
                for _ in range(message.kernel_kills):
                    # A loader worker's, not a rank's.
                    self.world.was_killed_for_memory(handle, self._clock.monotonic())
                self.recorder.reported(message)
                if message.steps_lost:
                    self._save_request.accept_from(message.fault.step - message.steps_lost)
            case DrillPart():
                self.keeper.drills.part(message)
            case CollectivesBegun():
                self._repair.note_collectives(message)
            case events.Injected():
                self._fault_injector.happened(message)
            case LoaderWorkers():
                handle.loader_pids = message.pids
            case OtherStage():
                self.keeper.drills.forget()
                self.plan = self._stages.other(self.plan, message)
            case Finished():
                handle.finished = message
                handle.machine.advance(RankEvent.GOT_FINISHED)
            case events.Report():  # nothing follows from it
                self.recorder.reported(message)
            case _:
                raise TypeError(f"a rank does not send {type(message).__name__}")

    def on_ended(self, ended: Ended) -> None:
        """A child process was reaped. What it still had to say is heard first."""
        self.start.show_output()
        for packet, rank in self.node.last_packets(ended.pid):
            self.on_packet(packet, rank)
        departure = self.node.departed(ended)
        if isinstance(departure, RankEnded):
            self._on_rank_ended(self.world.ranks[departure.rank], ended, departure.wrote)
        elif departure is not None and not (
            isinstance(departure, ZygoteEnded) and self.run_end.is_known
        ):
            match self.keeper.ended(departure):
                case NoZygote(reason=reason, detail=said):
                    detail = self.start.without_shown(said)
                    self.run_end.begin(Ending.of(RunStatus.FAILED, reason, detail=detail))
                case Fault() as fault:
                    self._report(fault)

    @property
    def _is_ending(self) -> bool:
        """True if ranks finish, or are asked to: no rank is taken back into such a world."""
        return self._stop is not None or self._has_any_finished

    @property
    def _has_any_finished(self) -> bool:
        return self.world.counts.present_in(RankState.FINISHED, RankState.ENDED) > 0

    @property
    def _is_fault_free(self) -> bool:
        trains = self.world.counts.are_all_present(RankState.TRAINING)
        return trains and self.machine.state is RunState.RUNNING and not self._repair.is_open

    @property
    def _ends_unproved(self) -> bool:
        """True if ranks finish a run in which a rank was replaced and no drill has passed: one still may."""
        if self._stop is not None or not (self._has_any_finished and self.facts.lacks_proof):
            return False
        if self._finished_at_s is not None:
            return True
        there = (RankState.TRAINING, RankState.FINISHED, RankState.ENDED)
        are_all_there = self.world.counts.present_in(*there) == len(self.world.present)
        return are_all_there and self.machine.state is RunState.RUNNING and not self._repair.is_open

    def _on_rank_ended(self, handle: RankHandle, ended: Ended, wrote: WhatItWrote) -> None:
        had_finished = handle.state is RankState.FINISHED
        handle.machine.advance(RankEvent.EXITED)
        if self.run_end.is_known:
            self.run_end.last_save.ended(handle)
        elif handle.membership is Membership.REJOINING:
            self._repair.returning.ended(handle)
        elif handle.was_spare and not handle.has_begun:
            self._repair.schedule_respawn(handle)  # it was ended as a spare
        elif not self._repair.expects_end_of(handle) and not handle.has_finished:
            now_s = self._clock.monotonic()
            end = exit_of(
                ended,
                wrote.without(self.outputs.hidden),
                rank=handle.rank,
                reading=handle.slot.read(),
                killed_for_memory=ended.signal_number == signal.SIGKILL
                and self.world.was_killed_for_memory(
                    handle, now_s, before_it=self._repair.larger_ones_killed(handle)
                ),
                was_asked=self._repair.was_asked(handle),
                keeps_all=not self.recorder.may_write,
            )
            fault = classify_exit(end)
            self._report(fault)
            self._repair.note_end(handle, fault)
        if not handle.has_log:
            self.outputs.keep_words(handle.rank, wrote.before_log)
        handle.released()
        if had_finished and self.plan.loop is not None and self._stop is None:
            self.run_end.program_ended(handle.rank, ended, wrote)

    def ask_stop(self, reason: StopReason, *, by: StopSignal = StopSignal.OTHER) -> None:
        """Finish the step, save, end; :class:`StopSignals` knows who may ask for an end at once."""
        if self.ending is not None:
            return
        if not self.facts.ever_formed:  # there is nothing to save
            line = f"{reason.value} before training began"
            self.run_end.at_once(Ending.of(STATUS_OF_REASON[reason], line))
            return
        self._signals.heard(by, self._clock.monotonic())
        self._begin_stop(reason)

    def ask_save(self) -> None:
        """Save after the step, and go on. Kept over repairs until such a checkpoint is reported."""
        if self._stop is not None or self.run_end.is_known:
            return  # which saves, or can no more
        self._save_request.ask()

    def _begin_stop(self, reason: StopReason) -> None:
        """Stop after the step, whoever asks.

        Ranks may all be signalled at once, and the supervisor with them: that is one request.
        """
        if self._stop is not None or self.run_end.is_known:
            return
        self._stop = reason
        now_s = self._clock.monotonic()
        self._stop_by_s = now_s + self.plan.settings.recovery.stop_timeout_s
        self.machine.advance(RunEvent.STOP_ASKED)
        self.recorder.record(events.StopAsked(reason=reason.value))
        self.world.stop(Stop(reason=reason))

    def _report(self, fault: Fault) -> None:
        if self._repair.returning.is_regrouping and fault.kind in VICTIM_KINDS:
            return  # it was told to leave
        if not self.run_end.is_known and self._finished_at_s is None:
            self._repair.report(fault)

    def advance(self) -> None:
        """Do whatever the facts allow now. Called after every event and every tick."""
        now_s = self._clock.monotonic()
        if self.ending is not None:
            return
        self.node.kernel_kills.look_sometimes(now_s)
        self.facts.committed_step = max(self.world.present_cells(Cell.COMMITTED_STEP))
        self._cutting.look(now_s)
        if self._finished_at_s is None:  # else the end says so
            self.run_end.refuse_inexact()
        self.keeper.look_beside(
            now_s,
            may_drill=self._is_fault_free or self._ends_unproved,
            at_end=self._finished_at_s is not None,
        )
        if self._is_at_its_end(now_s):
            return
        self.keeper.look(now_s)
        given_up = self._repair.advance(now_s)
        if given_up is not None:
            self.run_end.give_up(given_up, stage=self.plan.settings.stage)
            return
        if self.machine.state is RunState.RUNNING:
            self._fault_injector.inject_if_due(now_s)
            self._repair.returning.try_again(now_s)
            if not self._repair.is_open and not self._is_ending:
                self._repair.returning.take_back(now_s)
            self._repair.name_stragglers()
        self._form(now_s)
        self.keeper.spares.look(now_s, fault_free=self._is_fault_free)
        self._end_if_stopping_takes_too_long(now_s)

    def _is_at_its_end(self, now_s: float) -> bool:
        """Return True if the run ends: all have finished, the last save is made, or it must end at once."""
        is_asked_again = self._signals.ends_at_once(now_s)
        if self.run_end.is_open:
            if is_asked_again:
                self.run_end.cut_short()
            else:
                self.run_end.look(now_s, stop=self._stop)
            return True
        self._end_if_finished(now_s)
        if self._finished_at_s is not None:
            return True
        if is_asked_again and self._stop is not None:
            line = f"{self._stop.value} again: ended at once"
            self.run_end.at_once(Ending.of(STATUS_OF_REASON[self._stop], line))
            return True
        return False

    def _form(self, now_s: float) -> None:
        # A rank may be ready before its zygote has reported who it is. Until then nobody could end it.
        ready = self.world.counts.are_all_present(RankState.READY) and all(
            handle.pid is not None for handle in self.world.present
        )
        if not ready or self._repair.is_open or not self.world.has_ready_store:
            return
        if not self.recorder.may_write and not self._begin():
            return
        self._stages.formed(self.plan, self.world.present[0].ready)
        self.facts.generation += 1
        self.facts.formed_at_s = now_s
        self._repair.returning.is_regrouping = False
        self.recorder.record(events.Forming(generation=self.facts.generation))
        self.keeper.savers.saves_now(self.world.present[0].rank)
        owes_drill = self.keeper.drills.is_owed
        self.world.form(self.facts.generation, run_id=self.facts.run_id, owes_drill=owes_drill)
        self._save_request.pass_on()
        if self._stop is not None:
            self.world.stop(Stop(reason=self._stop))

    def _waits_for(self) -> str:
        """Return what the run needs before it can begin, in words; empty: nothing."""
        return ""

    def _begin(self) -> bool:
        """Every rank has built what it trains: the disk may be touched from here on."""
        ready = with_newest([one.ready for one in self.world.present if one.ready is not None])
        first = ready[0]
        self.facts.take_up(first.run_id or uuid.uuid4().hex[:12], self.plan.settings.run.log_dir)
        try:
            self.directories.claim()
        except BadInputError as error:
            self.run_end.bad_input(str(error))
            return False
        self.keeper.drills.clear()  # what a supervisor that was killed has left
        if self.plan.is_last_stage:
            self.facts.kept = kept_summary(Path(self.plan.settings.run.log_dir), first)
        if self.facts.kept is not None:
            self.outputs.keep_result()
        self.outputs.open(shown_bytes=self.start.shown_bytes())
        if self.facts.kept is not None:
            self.recorder.already_complete(self.plan, first)
            self.run_end.completed(StopReason.COMPLETED)
            return False
        self.recorder.begun(self.plan, ready)
        return True

    def _on_formed(self, formed: events.RankFormed) -> None:
        if formed.generation != self.facts.generation:
            return
        self.recorder.record(replace(formed, pid=self.world.ranks[formed.rank].pid))
        if not self.world.counts.are_all_present(RankState.TRAINING):
            return
        self.facts.ever_formed = True
        now_s = self._clock.monotonic()
        self.start.formed(now_s)
        self.machine.advance(RunEvent.WORLD_FORMED)
        self.recorder.world_formed(
            now_s,
            committed_step=formed.committed_step,
            productive_ns=self.world.present[0].slot.read().productive_ns,
        )

    def _end_if_finished(self, now_s: float) -> None:
        ranks = self.world.present
        if self.ending or self._stages.is_changing or not all(one.has_finished for one in ranks):
            return
        if self._finished_at_s is None:
            self._finished_at_s = now_s
            self._repair.drop()
        late = now_s > self._finished_at_s + self._exit_timeout_s or self._signals.ends_at_once(
            now_s
        )
        if any(handle.is_alive for handle in ranks) and not late:
            return
        finished = ranks[0].finished
        assert finished is not None
        reason = self._stages.why_the_run_ends(self.plan, finished, stop=self._stop)
        if reason is not None:
            if reason is StopReason.COMPLETED and self._waits_for_proof(now_s):
                return
            self.run_end.completed(
                reason, never_caused=self._fault_injector.never_caused(finished.step)
            )
            return
        self.keeper.drills.forget()
        self._finished_at_s, self.plan = None, self._stages.ended(self.plan, finished)

    def _waits_for_proof(self, now_s: float) -> bool:
        """Return True while a drill is waited for; if none passes that should, the run is not exact."""
        # INVARIANT proved-or-said: a run in which a rank was replaced is not said to be exact while a drill of it is open.
        # Broken if: it ends as exact, or without a wait, while one runs or has all that it needs.
        # Guarded by: test_the_end_waits_for_a_drill_where_a_rank_was_replaced.
        if not self.facts.lacks_proof:
            return False
        drills, why = self.keeper.drills, ""
        if drills.pending is not None:
            if self._waits_since_s is None:
                self._waits_since_s = now_s
                self.recorder.say(wait_line(drills.pending))
            if self._stop is not None or self._signals.ends_at_once(now_s):
                why = "the run was asked to stop before it had ended"
            elif now_s > self._waits_since_s + END_WAIT_S:
                why = f"it had not ended {END_WAIT_S:g} s after training"
            else:
                return True
        drills.unproved(why)
        return False

    def _end_if_stopping_takes_too_long(self, now_s: float) -> None:
        if self._stop is not None and now_s > self._stop_by_s:
            limit_s = self.plan.settings.recovery.stop_timeout_s
            line = f"the ranks did not stop within {limit_s:g} s"
            self.run_end.begin(Ending.of(RunStatus.FAILED, line, is_late_stop=True))

    def end_at_once(self, line: str) -> None:
        """End a run that has no ending as it is, as a failed one."""
        if self.ending is None:
            self.run_end.at_once(Ending.of(RunStatus.FAILED, line))

    def tidy_up(self) -> None:
        """Remove what the run has left on disk, and take up what it has saved; every process has ended."""
        self.keeper.drills.clear()
        for path in remove_temporary_files(Path(self.plan.settings.run.checkpoint_dir)):
            self.recorder.say(f"removed {path}, which a save that was cut off had left")
        self.recorder.saved_unreported()
        self.recorder.know_newest()

    def closing_words(self) -> str:
        """Return the words after the run's ending; empty if there are none."""
        return self.run_end.closing_words()

    def summary(self, ending: Ending) -> RunSummary | None:
        """Return the content of summary.json; every process has ended."""
        if self.facts.kept is not None:
            return self.facts.kept
        ranks = self.world.present
        finished = [handle.finished for handle in ranks if handle.finished is not None]
        end = EndOfRun(
            status=ending.status,
            exit_code=ending.exit_code,
            reading=ranks[0].slot.read(),
            finished=finished if len(finished) == len(ranks) else [],
            now_s=self._clock.monotonic(),
        )
        return self.recorder.accounting.summary(
            end,
            facts=self.facts,
            world_size=len(ranks),
            steps_per_epoch=self.facts.steps_per_epoch,
            own_step_s={handle.rank: handle.own_step_s for handle in self.world.ranks},
        )

    def fail(self, detail: str) -> None:
        """End the run because this supervisor is at fault itself; one that has ended stays so."""
        if self.run_end.is_known:
            self.recorder.say(detail.strip(), level="ERROR")
            if self.run_end.is_open:
                self.run_end.cut_short()
            return
        last = detail.strip().splitlines()[-1]
        self.run_end.begin(
            Ending.of(RunStatus.FAILED, f"a bug in the supervisor: {last}", detail=detail)
        )


# A checkpoint that a person waits for: kept over repairs until one is reported. Decides nothing
# else.


class SaveRequest:
    """A request for a save, of the step at which it was made, or a later one."""

    def __init__(self, facts: RunFacts, *, world: World, recorder: Recorder) -> None:
        self._facts = facts
        self._world = world
        self._recorder = recorder
        self._from_step: int | None = None  # None: nobody waits

    def ask(self) -> None:
        """Have one made after the step in hand."""
        self._from_step = self._facts.committed_step
        self._recorder.record(events.SaveAsked())
        self.pass_on()

    def accept_from(self, step: int) -> None:
        """A roll-back may have led behind the step at which one was asked for."""
        if self._from_step is not None:
            self._from_step = min(self._from_step, step)

    def saved(self, step: int) -> None:
        """There is one of this step."""
        if self._from_step is not None and step >= self._from_step:
            self._from_step = None

    def pass_on(self) -> None:
        """Ask the rank that saves, which may be another one than before."""
        if self._from_step is not None:
            self._world.send(self._world.present[0], Checkpoint())
