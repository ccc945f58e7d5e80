"""Handles each event of a run: gathers facts, asks the rules (``kernel/rules``), performs the answer.

Everything is level-triggered: an event only records a fact, and :meth:`Supervisor.advance` then does
everything that the facts allow (plan, kill, fork, form, end). So the order of events matters little.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ddp_runner.kernel.parent.node_keeper import NodeKeeper
from ddp_runner.kernel.parent.ports import (
    HelperPolicy,
    Observer,
    Opening,
    RunRecord,
    ShownStart,
    Stages,
    Turn,
)
from ddp_runner.kernel.parent.rank_handle import RankHandle
from ddp_runner.kernel.parent.run_context import RunContext
from ddp_runner.kernel.parent.run_end import RunEnd
from ddp_runner.kernel.parent.run_facts import Ending, RunFacts
from ddp_runner.kernel.parent.world import World
from ddp_runner.kernel.processes.children import Ended
from ddp_runner.kernel.processes.helper_process import RankEnded, ZygoteEnded
from ddp_runner.kernel.processes.node import Node
from ddp_runner.kernel.processes.rank_process import WhatItWrote, exit_of
from ddp_runner.kernel.recovery.communicator_cut import Cutting
from ddp_runner.kernel.recovery.repair import Repair
from ddp_runner.kernel.recovery.zygote_keeper import NoZygote
from ddp_runner.kernel.rules.classify import VICTIM_KINDS, classify_exit
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.exits import STATUS_OF_REASON, RunStatus, StopReason
from ddp_runner.kernel.rules.faults import Fault
from ddp_runner.kernel.rules.lifecycle import (
    IN_WORLD,
    Membership,
    RankEvent,
    RankState,
    RunEvent,
    RunState,
)
from ddp_runner.kernel.rules.stopping import StopSignal, StopSignals
from ddp_runner.kernel.wire import events
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.kernel.wire.messages import (
    AbortHeard,
    Built,
    Checkpoint,
    CollectivesBegun,
    Finished,
    LoaderWorkers,
    Message,
    Metrics,
    NotSaved,
    Ready,
    Stop,
    decode,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of one :class:`Supervisor`, which ``supervisor/assembly.py`` builds.

    ``start`` shows the start to people. ``cutting`` is the second phase of an abort. ``repair`` handles faults.
    ``run_end`` makes the last save and the ending. ``opening`` takes the folders once every rank is ready. ``stages``
    begins the next stage. ``policies`` decide when each role of this machine has a process. ``observers`` work
    next to the run, in the order of their turns. ``goes_on_behind``: the ranks run a user's program, which may
    continue after its loop without a time limit.
    """

    node: Node
    start: ShownStart
    cutting: Cutting
    repair: Repair
    run_end: RunEnd
    opening: Opening
    stages: Stages
    policies: Sequence[HelperPolicy]
    observers: Sequence[Observer]
    goes_on_behind: bool = False


EXIT_TIMEOUT_S = 15.0  # for a rank that has finished to exit


class Supervisor:
    """Supervises a training, from the first fork to its ending. Its loop calls it; it never waits."""

    def __init__(self, run: RunContext, parts: Parts) -> None:
        self.run = run
        self.node = parts.node
        self.world: World = run.world
        self.facts: RunFacts = run.facts
        self.machine = run.machine
        self.recorder: RunRecord = run.record
        self._clock = run.clock
        self.start = parts.start
        self.run_end = parts.run_end
        self._cutting = parts.cutting
        self._repair = parts.repair
        self._keeper = NodeKeeper(
            run.settings,
            parts.policies,
            node=self.node,
            world=self.world,
            recorder=self.recorder,
            repair=self._repair,
            clock=self._clock,
        )
        self._opening = parts.opening
        self._stages = parts.stages
        self._observers = tuple(parts.observers)
        self._save_request = SaveRequest(self.facts, world=self.world, recorder=self.recorder)
        self._heard = self._messages()
        # Nothing follows from these once the last save has begun: no rank is repaired then, and one that leaves
        # its generation sends Ready.
        self._not_while_ending = {
            events.Faulted,
            events.RankFormed,
            *(
                kind
                for one in self._observers
                if not one.hears_while_ending
                for kind in one.hears()
            ),
        }
        self._stop: StopReason | None = None
        self._signals = StopSignals()  # to this process, by a person or a scheduler
        self._stop_by_s = 0.0
        self._finished_at_s: float | None = None
        self._goes_on_behind = parts.goes_on_behind
        self._exit_timeout_s = math.inf if parts.goes_on_behind else EXIT_TIMEOUT_S

    @property
    def ending(self) -> Ending | None:
        """The ending of the run; None while it has not ended."""
        return self.run_end.ending

    def on_packet(self, packet: bytes, rank: int | None) -> None:
        """Handle an encoded message like :meth:`on_message`, of a process of this machine."""
        self.on_message(decode(packet), rank)

    def on_message(self, message: Message, rank: int | None) -> None:
        """Hear a message; ``rank`` is who sent it, None for a process that is no rank."""
        if self.ending is not None:
            return
        if rank is None:
            ended = self._keeper.on_message(message, self.start)
            if ended is not None:
                self.on_ended(ended)
        else:
            self._on_rank_message(message, self.world.ranks[rank])

    def _messages(self) -> dict[type[object], Callable[..., None]]:
        """Return the handler of each message of a rank: those here, and those of observers."""
        heard: dict[type[object], Callable[..., None]] = {
            events.StopSignalAtRank: self._stop_signal_at_rank,
            events.RankFormed: self._rank_formed,
            events.Faulted: self._faulted,
            events.CheckpointSaved: self._checkpoint_saved,
            events.TuningChanged: self._tuning_changed,
            events.RepairedInPlace: self._repaired_in_place,
            Built: lambda message, _: self.start.built(message),
            Ready: self._ready,
            AbortHeard: self._abort_heard,
            Metrics: self._metrics,
            NotSaved: lambda message, _: self.run_end.last_save.not_saved(message),
            CollectivesBegun: lambda message, _: self._repair.note_collectives(message),
            LoaderWorkers: self._loader_workers,
            Finished: self._finished,
        }
        for observer in self._observers:
            heard.update(observer.hears())
        return heard

    def _on_rank_message(self, message: Message, handle: RankHandle) -> None:
        kind = type(message)
        if self.run_end.is_open and kind in self._not_while_ending:
            return
        heard = self._heard.get(kind)
        if heard is not None:
            heard(message, handle)
        elif isinstance(message, events.Report):  # it is only recorded
            self.recorder.reported(message)
        else:
            raise TypeError(f"a rank does not send {kind.__name__}")

    def _stop_signal_at_rank(self, message: events.StopSignalAtRank, handle: RankHandle) -> None:
        del handle
        self.recorder.record(message)
        self._begin_stop(message.reason)

    def _ready(self, message: Ready, handle: RankHandle) -> None:
        handle.ready = message
        handle.device_free_bytes = handle.device_free_bytes or message.device_free_bytes
        self.facts.steps_per_epoch = message.steps_per_epoch
        if message.is_from_memory:
            taken = events.CopyTaken(rank=message.rank, step=message.committed_step)
            self.recorder.record(taken)
        handle.machine.advance(RankEvent.GOT_READY)
        if handle.membership is Membership.REJOINING:
            self._repair.returning.got_ready(handle)

    def _abort_heard(self, message: AbortHeard, handle: RankHandle) -> None:
        if message.generation == self.facts.generation:
            handle.machine.advance(RankEvent.ABORT_HEARD)

    def _rank_formed(self, message: events.RankFormed, handle: RankHandle) -> None:
        handle.machine.advance(RankEvent.GOT_FORMED)
        handle.has_formed = True
        self._save_request.accept_from(message.committed_step)
        self._on_formed(message)

    def _faulted(self, message: events.Faulted, handle: RankHandle) -> None:
        if handle.membership in IN_WORLD:
            self._report(message.fault)
        else:
            text = message.fault.cause
            self.recorder.record(events.FaultOfGivenUpRank(rank=handle.rank, text=text))

    def _metrics(self, message: Metrics, handle: RankHandle) -> None:
        # The report of a step has an epoch, that of an evaluation has none and leaves the step as it is.
        of_step = {"step": message.step, "loss": math.nan} if "epoch" in message.values else {}
        handle.metrics = {**handle.metrics, **of_step, **message.values}
        self.recorder.metrics(message.step, message.rank, message.values)

    def _checkpoint_saved(self, message: events.CheckpointSaved, handle: RankHandle) -> None:
        productive_ns = handle.slot.get(Cell.PRODUCTIVE_NS)
        self.recorder.saved(replace(message, productive_ns=productive_ns))
        self._save_request.saved(message.step)
        self.run_end.last_save.saved(message)

    def _tuning_changed(self, message: events.TuningChanged, handle: RankHandle) -> None:
        del handle
        self.recorder.reported(message)
        self._repair.note_action(message)

    def _repaired_in_place(self, message: events.RepairedInPlace, handle: RankHandle) -> None:
        for _ in range(message.kernel_kills):
            # A loader worker's, not a rank's.
            self.world.was_killed_for_memory(handle, self._clock.monotonic())
        self.recorder.reported(message)
        if message.steps_lost:
            back_at = message.fault.step - message.steps_lost
            self._save_request.accept_from(back_at)
            for observer in self._observers:
                observer.went_back(back_at)

    @staticmethod
    def _loader_workers(message: LoaderWorkers, handle: RankHandle) -> None:
        handle.loader_pids = message.pids

    @staticmethod
    def _finished(message: Finished, handle: RankHandle) -> None:
        handle.finished = message
        handle.machine.advance(RankEvent.GOT_FINISHED)

    def on_ended(self, ended: Ended) -> None:
        """Handle the end of a child process, which was reaped; its last messages come first."""
        self.start.show_output()
        for packet, rank in self.node.last_packets(ended.pid):
            self.on_packet(packet, rank)
        departure = self.node.departed(ended)
        if isinstance(departure, RankEnded):
            self.rank_ended(self.world.ranks[departure.rank], ended, departure.wrote)
        elif departure is not None and not (
            isinstance(departure, ZygoteEnded) and self.run_end.is_known
        ):
            match self._keeper.ended(departure):
                case NoZygote(reason=reason, detail=said):
                    detail = self.start.without_shown(said)
                    self.run_end.begin(Ending.of(RunStatus.FAILED, reason, detail=detail))
                case Fault() as fault:
                    self._report(fault)

    @property
    def _is_ending(self) -> bool:
        """True if ranks finish, or are asked to: no rank that was given up returns then."""
        return self._stop is not None or self._has_any_finished

    @property
    def _has_any_finished(self) -> bool:
        return self.world.counts.present_in(RankState.FINISHED, RankState.ENDED) > 0

    @property
    def _is_fault_free(self) -> bool:
        trains = self.world.counts.are_all_present(RankState.TRAINING)
        return trains and self.machine.state is RunState.RUNNING and not self._repair.is_open

    def _turn(self, now_s: float) -> Turn:
        """Return the facts of this turn for observers."""
        return Turn(
            now_s=now_s,
            is_fault_free=self._is_fault_free,
            ends_undisturbed=self._ends_undisturbed,
            at_end=self._finished_at_s is not None,
        )

    @property
    def _ends_undisturbed(self) -> bool:
        """Whether ranks finish, or all have, with nobody missing and no stop asked for."""
        if self._stop is not None or not self._has_any_finished:
            return False
        if self._finished_at_s is not None:
            return True
        there = (RankState.TRAINING, RankState.FINISHED, RankState.ENDED)
        are_all_there = self.world.counts.present_in(*there) == len(self.world.present)
        return are_all_there and self.machine.state is RunState.RUNNING and not self._repair.is_open

    def rank_ended(self, handle: RankHandle, ended: Ended, wrote: WhatItWrote) -> None:
        """Take note of how a rank has ended, on whichever machine; nothing is left to hear of it."""
        # The repair may replace one that had finished along with a lost rank that had not.
        had_finished = handle.state is RankState.FINISHED and not self._repair.expects_end_of(
            handle
        )
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
                wrote.without(self.recorder.hidden),
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
            self.recorder.keep_words(handle.rank, wrote.before_log)
        handle.released()
        if had_finished and self._goes_on_behind and self._stop is None:
            is_known = self.run_end.is_known
            self.run_end.program_ended(handle, ended, wrote)
            if self.run_end.is_known and not is_known:
                self._waits_no_longer()

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
            return  # the end of the run saves anyway, or a save is no longer possible
        self._save_request.ask()

    def _begin_stop(self, reason: StopReason) -> None:
        """Stop after the step, whoever asks.

        Ranks may all be signalled at once, and the supervisor with them: that is one request.
        """
        if self._stop is not None or self.run_end.is_known:
            return
        self._stop = reason
        now_s = self._clock.monotonic()
        self._stop_by_s = now_s + self.run.settings.stop_timeout_s
        self.machine.advance(RunEvent.STOP_ASKED)
        self.recorder.record(events.StopAsked(reason=reason.value))
        self.world.stop(Stop(reason=reason))

    def _report(self, fault: Fault) -> None:
        if self._repair.returning.is_regrouping and fault.kind in VICTIM_KINDS:
            return  # all ranks were told to leave, to take back one that had been given up
        if not self.run_end.is_known and self._finished_at_s is None:
            self._repair.report(fault)

    def advance(self) -> None:
        """Do whatever the facts allow now: repair, form, end. Called after every event and every tick."""
        now_s = self._clock.monotonic()
        if self.ending is not None:
            return
        self.node.kernel_kills.look_sometimes(now_s)
        self.facts.committed_step = max(self.world.present_cells(Cell.COMMITTED_STEP))
        self._cutting.look(now_s)
        if self._finished_at_s is None:  # else the end says so
            open_reasons = {reason for one in self._observers for reason in one.open_reasons()}
            self.run_end.refuse_inexact(open_reasons)
        turn = self._turn(now_s)
        for observer in self._observers:
            observer.look(turn)
            found = observer.found()
            if found is not None and not self.run_end.is_known and self._finished_at_s is None:
                self._repair.distrust(found)
        if self._is_at_its_end(now_s):
            return
        self._keeper.look(now_s)
        given_up = self._repair.advance(now_s)
        if given_up is not None:
            self.run_end.give_up(given_up, refusal=self._stages.refusal)
            return
        if self.machine.state is RunState.RUNNING:
            self._repair.look_while_running(now_s, may_take_back=not self._is_ending)
        self._form(now_s)
        turn = self._turn(now_s)
        for observer in self._observers:
            observer.look_after_repair(turn)
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
        if not self._may_form(self.facts.generation + 1):
            return
        first = self.world.present[0]
        self._stages.formed(first.ready)
        self.facts.generation += 1
        self.facts.formed_at_s = now_s
        self._repair.returning.is_regrouping = False
        self.recorder.record(events.Forming(generation=self.facts.generation))
        for observer in self._observers:
            observer.forms(first)
        drilled = next(filter(None, (observer.owes() for observer in self._observers)), None)
        self.world.form(self.facts.generation, run_id=self.facts.run_id, drilled=drilled)
        self._save_request.pass_on()
        if self._stop is not None:
            self.world.stop(Stop(reason=self._stop))

    def _may_form(self, generation: int) -> bool:
        """Return whether the world may form now, which it does next."""
        del generation
        return True

    def _begin(self) -> bool:
        """Every rank has built what it trains: the disk may be touched from here on."""
        ready = [one.ready for one in self.world.present if one.ready is not None]
        try:
            self._opening.claim(ready)
        except BadInputError as error:
            self.run_end.bad_input(str(error))
            return False
        for observer in self._observers:
            observer.begins()
        if self._opening.record(ready):
            self.run_end.completed(StopReason.COMPLETED)
            return False
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
        reason = self._stages.why_the_run_ends(finished, stop=self._stop)
        if reason is None:
            self._finished_at_s = None
            self._stages.begin_next(finished)
            return
        if reason is StopReason.COMPLETED and self._is_held(now_s):
            return
        objections = [line for one in self._observers for line in one.objections(finished.step)]
        self.run_end.completed(reason, objections=objections)

    # INVARIANT failed-behind-is-said: a run whose program fails behind its training is not called exact while a repair is open.
    # Broken if: it ends as exact although no drill has proved its last repair, and no step is left for one.
    # Guarded by: test_a_loop_that_fails_behind_its_training_says_what_is_not_proved.
    def _waits_no_longer(self) -> None:
        """Have those that would have the end wait say what is missing: the run ends all the same."""
        for one in self._observers:
            one.holds_the_end(self._clock.monotonic(), is_stopped=True)

    def _is_held(self, now_s: float) -> bool:
        """Whether something that observes the run has the end wait for it."""
        is_stopped = self._stop is not None or self._signals.ends_at_once(now_s)
        return any(one.holds_the_end(now_s, is_stopped=is_stopped) for one in self._observers)

    def _end_if_stopping_takes_too_long(self, now_s: float) -> None:
        if self._stop is not None and now_s > self._stop_by_s:
            limit_s = self.run.settings.stop_timeout_s
            line = f"the ranks did not stop within {limit_s:g} s"
            self.run_end.begin(Ending.of(RunStatus.FAILED, line, is_late_stop=True))

    def end_at_once(self, line: str) -> None:
        """End a run that has no ending as it is, as a failed one."""
        if self.ending is None:
            self.run_end.at_once(Ending.of(RunStatus.FAILED, line))

    def closing_words(self) -> str:
        """Return what there is to say after how the run has ended; empty where that is all."""
        words = [self.run_end.closing_words(), *(one.last_words() for one in self._observers)]
        return "; ".join(filter(None, words))

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


class SaveRequest:
    """Keeps a person's request for a checkpoint over repairs, until one of that step or a later one is reported."""

    def __init__(self, facts: RunFacts, *, world: World, recorder: RunRecord) -> None:
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
