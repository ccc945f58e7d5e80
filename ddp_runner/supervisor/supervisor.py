"""What the supervisor does about each event. It gathers facts, asks core, performs the answer.

Everything is level-triggered: an event only records a fact, and :meth:`Supervisor.advance` then does
whatever the facts allow (plan, kill, fork, form, end). So the order of events matters little.
"""

from __future__ import annotations

import signal
import time
import uuid
from dataclasses import dataclass

from ddp_runner.core.board import Cell
from ddp_runner.core.classify import VICTIM_KINDS, RankExit, classify_exit
from ddp_runner.core.exits import (
    EXIT_CODE_OF_STATUS,
    STATUS_OF_REASON,
    ExitCode,
    RunStatus,
    StopReason,
)
from ddp_runner.core.faults import BadInputError, Fault, FaultKind
from ddp_runner.core.launch import LaunchPlan
from ddp_runner.core.lifecycle import RUN_TABLE, Machine, RankEvent, RankState, RunEvent, RunState
from ddp_runner.core.messages import (
    Adjusted,
    CollectivesBegun,
    Faulted,
    Finished,
    Forked,
    Formed,
    Injected,
    LoaderWorkers,
    MendedInPlace,
    Message,
    Metrics,
    Ready,
    Saved,
    Stop,
    StopAsked,
    StoreReady,
    ZygoteReady,
)
from ddp_runner.core.recovery import GiveUp
from ddp_runner.memory.kernel_kills import KernelKills
from ddp_runner.supervisor.children import Ended
from ddp_runner.supervisor.chronicle import Chronicle
from ddp_runner.supervisor.claim import DirectoryLock, claim_directories
from ddp_runner.supervisor.facts import RunFacts, told
from ddp_runner.supervisor.ledger import Ledger
from ddp_runner.supervisor.ranks import RankHandle
from ddp_runner.supervisor.records import Records
from ddp_runner.supervisor.repair import Repair
from ddp_runner.supervisor.striker import Striker
from ddp_runner.supervisor.world import RankEnded, StoreEnded, World, ZygoteEnded
from ddp_runner.supervisor.zygotes import ZygoteKeeper

EXIT_TIMEOUT_S = 15.0  # for a finished rank to exit


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the run ends. ``error_line`` goes to stderr; ``detail`` may hold a traceback."""

    status: RunStatus
    exit_code: ExitCode
    reason: str
    error_line: str = ""
    detail: str = ""


class Supervisor:
    """One run, from the first fork to its ending. Driven by ``run``; never waits for anything."""

    def __init__(
        self, plan: LaunchPlan, world: World, records: Records, lock: DirectoryLock
    ) -> None:
        self.plan = plan
        self.world = world
        self.records = records
        self.ledger = Ledger(began_s=time.monotonic())
        self.facts = RunFacts()
        self.ending: Ending | None = None
        self.machine: Machine[RunState, RunEvent] = Machine(RUN_TABLE, RunState.STARTING)
        self._chronicle = Chronicle(facts=self.facts, ledger=self.ledger, records=records)
        self._striker = Striker(plan, world, records)
        self._repair = Repair(
            plan.settings,
            self.facts,
            world=world,
            records=records,
            ledger=self.ledger,
            striker=self._striker,
        )
        self._zygotes = ZygoteKeeper(
            plan.settings.recovery, self.facts, world=world, records=records, repair=self._repair
        )
        self._lock = lock
        self._kernel_kills = KernelKills()
        self._stop: StopReason | None = None
        self._was_signalled = False  # this process, by a person or a scheduler
        self._stop_by_s = 0.0
        self._finished_at_s: float | None = None

    def on_message(self, message: Message, handle: RankHandle | None) -> None:
        """A message came in; ``handle`` is its rank, None for the zygote or the store host."""
        match message:
            case ZygoteReady():
                self.world.zygote_is_ready()
                self.records.event(
                    "zygote_ready", torch=message.torch_version, import_s=message.import_s
                )
                if message.warning:
                    self.records.say(message.warning, level="WARNING")
            case Forked():
                ended = self.world.claim(message)
                if ended is not None:
                    self.on_ended(ended)
            case StoreReady():
                self.world.store_ready = True
            case StopAsked():
                self.records.event("stop_signal_at_rank", rank=message.rank)
                self._begin_stop(message.reason)
            case _ if handle is not None:
                self._on_rank_message(message, handle)
            case _:
                raise TypeError(f"unexpected {type(message).__name__}")

    def _on_rank_message(  # noqa: C901, PLR0912 - one row a message
        self, message: Message, handle: RankHandle
    ) -> None:
        match message:
            case Ready():
                handle.ready = message
                handle.machine.advance(RankEvent.GOT_READY)
                if handle.is_returning and not self._is_ending:
                    self._repair.take_back(handle)
            case Formed():
                handle.machine.advance(RankEvent.GOT_FORMED)
                self._on_formed(message)
            case Faulted() if handle.given_up_at_s is not None:
                self.records.event(
                    "fault_of_given_up_rank", rank=handle.rank, text=message.fault.cause
                )
            case Faulted():
                self._report(message.fault)
            case Metrics():
                self._chronicle.metrics(handle, message)
            case Saved():
                self._chronicle.saved(message, productive_ns=handle.slot.get(Cell.PRODUCTIVE_NS))
            case Adjusted():
                self._chronicle.adjusted(message)
                if message.remedy and not message.in_peace:
                    self._repair.note_remedy(message.remedy)
            case MendedInPlace():
                for _ in range(message.kernel_kills):
                    self._kernel_kills.claim(time.monotonic())  # a loader worker's, not a rank's
                self._chronicle.mended(message)
            case CollectivesBegun():
                self._repair.note_collectives(message)
            case Injected():
                self._striker.happened(message)
            case LoaderWorkers():
                handle.loader_pids = message.pids
            case Finished():
                handle.finished = message
                handle.machine.advance(RankEvent.GOT_FINISHED)
            case _:
                raise TypeError(f"a rank does not send {type(message).__name__}")

    def on_ended(self, ended: Ended) -> None:
        """A child process was reaped. What it still had to say is heard first."""
        for message, handle in self.world.last_messages(ended.pid):
            self.on_message(message, handle)
        match self.world.departed(ended):
            case RankEnded(handle=rank):
                self._on_rank_ended(rank, ended)
            case ZygoteEnded(output=output) if self.ending is None:
                none = self._zygotes.ended(ended, output)
                if none is not None:
                    self._end(RunStatus.FAILED, none.reason, detail=none.detail)
            case StoreEnded():
                self._report(
                    Fault(
                        kind=FaultKind.STORE_DIED,
                        rank=-1,
                        step=self.facts.committed_step,
                        cause="the store process died",
                        at_ns=ended.at_ns,
                    )
                )
            case ZygoteEnded() | None:
                pass

    @property
    def _is_ending(self) -> bool:
        """Whether ranks finish, or are asked to: nobody is taken back into such a world."""
        return self._stop is not None or any(handle.finished for handle in self.world.present)

    def _on_rank_ended(self, handle: RankHandle, ended: Ended) -> None:
        if handle.is_returning:
            self._repair.returning_rank_ended(handle)
        elif not self._repair.expects_end_of(handle) and handle.finished is None:
            reading = handle.slot.read()
            exit_facts = RankExit(
                rank=handle.rank,
                step=reading.step,
                phase=reading.phase.label,
                at_ns=ended.at_ns,
                exit_code=ended.exit_code,
                signal_number=ended.signal_number,
                killed_for_memory=ended.signal_number == signal.SIGKILL
                and self._kernel_kills.claim(time.monotonic()),
                last_words=handle.last_words() if not self.records.may_write else "",
            )
            self._report(classify_exit(exit_facts))
        if not handle.has_log:
            self.records.keep_words(handle.rank, handle.last_words())
        self.world.bury(handle)

    def ask_stop(self, reason: StopReason) -> None:
        """Finish the step, save, end; a second request ends at once."""
        if self.ending is not None:
            return
        if self._was_signalled or not self.facts.ever_formed:
            word = "again: ended at once" if self._was_signalled else "before training began"
            self._end(STATUS_OF_REASON[reason], f"{reason.value} {word}")
            return
        self._was_signalled = True
        self._begin_stop(reason)

    def _begin_stop(self, reason: StopReason) -> None:
        """Stop after the step, whoever asks.

        Ranks may all be signalled at once, and the supervisor with them: that is one request.
        """
        if self._stop is not None or self.ending is not None:
            return
        self._stop = reason
        self._stop_by_s = time.monotonic() + self.plan.settings.recovery.stop_timeout_s
        self.machine.advance(RunEvent.STOP_ASKED)
        self.records.event("stop_asked", reason=reason.value)
        self.records.say(f"{reason.value}: finishing the step and saving; once more ends at once")
        self.world.stop(Stop(reason=reason))

    def _report(self, fault: Fault) -> None:
        if self._repair.is_regrouping and fault.kind in VICTIM_KINDS:
            return  # it was told to leave
        if self.ending is None and self._finished_at_s is None and self._repair.report(fault):
            self.machine.advance(RunEvent.INCIDENT_BEGAN)

    def advance(self) -> None:
        """Do whatever the facts allow now. Called after every event and every tick."""
        now_s = time.monotonic()
        if self.ending is not None:
            return
        self._kernel_kills.look_sometimes(now_s)
        self.facts.committed_step = max(
            handle.slot.get(Cell.COMMITTED_STEP) for handle in self.world.present
        )
        self._end_if_finished(now_s)
        if self._finished_at_s is not None:
            return
        self._zygotes.look(now_s)
        hung = self._repair.look(now_s)
        for fault in hung:
            self._report(fault)
        if hung:
            self._repair.condemn(hung)
        given_up = self._repair.settle(now_s)
        if given_up is not None:
            self._give_up(given_up)
            return
        self._repair.respawn(now_s)
        if self.machine.state is RunState.RUNNING:
            self._striker.strike_if_due(now_s)
            self._repair.try_given_up_ranks(now_s)
            self._repair.name_stragglers()
        self._form(now_s)
        self._end_if_stopping_takes_too_long(now_s)

    def _give_up(self, plan: GiveUp) -> None:
        fault = plan.fault
        if fault.kind is FaultKind.BAD_INPUT:
            self._end_as_bad_input(fault.cause)
            return
        log = (
            f"; see {self.plan.settings.run.log_dir}/rank_{fault.rank}.log"
            if fault.rank >= 0 and self.records.may_write
            else ""
        )
        detail = "" if self.records.may_write else fault.detail
        self._end(plan.status, f"{told(fault)} ({plan.reason}){log}", detail=detail)

    def _form(self, now_s: float) -> None:
        ready = all(handle.state is RankState.READY for handle in self.world.present)
        if not ready or self._repair.is_open or not self.world.store_ready:
            return
        if not self.records.may_write and not self._begin():
            return
        self.facts.generation += 1
        self.facts.formed_at_s = now_s
        self._repair.is_regrouping = False
        self._chronicle.forming(now_s)
        self.world.form(self.facts.generation, run_id=self.facts.run_id)
        if self._stop is not None:
            self.world.stop(Stop(reason=self._stop))

    def _begin(self) -> bool:
        """Every rank has built what it trains: the disk may be touched from here on."""
        first = self.world.present[0].ready
        assert first is not None
        self.facts.take_up(first.run_id or uuid.uuid4().hex[:12], self.plan.settings.run.log_dir)
        try:
            claim_directories(self.plan.settings, self._lock)
        except BadInputError as error:
            self._end_as_bad_input(str(error))
            return False
        self.records.open()
        self.records.event(
            "run_begins",
            run_id=self.facts.run_id,
            command=list(self.plan.command),
            world_size=self.plan.world_size,
            resumed_step=first.committed_step,
            total_steps=first.total_steps,
        )
        for note in self.plan.notes:
            self.records.say(note)
        resumed = f", resumed at step {first.committed_step:,}" if first.committed_step else ""
        self.records.say(
            f"{first.parameters:,} parameters, {first.train_samples:,} samples, "
            f"{first.total_steps:,} steps{resumed}"
        )
        return True

    def _on_formed(self, formed: Formed) -> None:
        if formed.generation != self.facts.generation:
            return
        self._chronicle.rank_formed(formed, pid=self.world.ranks[formed.rank].pid)
        if any(handle.state is not RankState.TRAINING for handle in self.world.present):
            return
        self.facts.ever_formed = True
        self.machine.advance(RunEvent.WORLD_FORMED)
        self._chronicle.world_formed(
            time.monotonic(),
            committed_step=formed.committed_step,
            productive_ns=self.world.present[0].slot.read().productive_ns,
        )

    def _end_if_finished(self, now_s: float) -> None:
        ranks = self.world.present
        if self.ending is not None or not all(handle.finished for handle in ranks):
            return
        if self._finished_at_s is None:
            self._finished_at_s = now_s
            self._repair.drop()
        late = now_s > self._finished_at_s + EXIT_TIMEOUT_S
        if any(handle.is_alive for handle in ranks) and not late:
            return
        finished = ranks[0].finished
        assert finished is not None
        self.machine.advance(RunEvent.ALL_FINISHED)
        status = STATUS_OF_REASON[finished.reason]
        self.ending = Ending(
            status=status, exit_code=EXIT_CODE_OF_STATUS[status], reason=status.value
        )

    def _end_if_stopping_takes_too_long(self, now_s: float) -> None:
        if self._stop is not None and now_s > self._stop_by_s:
            limit_s = self.plan.settings.recovery.stop_timeout_s
            self._end(RunStatus.FAILED, f"the ranks did not stop within {limit_s:g} s")

    def fail(self, detail: str) -> None:
        """End the run because this supervisor is at fault itself."""
        last = detail.strip().splitlines()[-1]
        self._end(RunStatus.FAILED, f"a bug in the supervisor: {last}", detail=detail)

    def _end_as_bad_input(self, line: str) -> None:
        self._end(RunStatus.FAILED, line, exit_code=ExitCode.BAD_USAGE, error_line=line)

    def _end(
        self,
        status: RunStatus,
        reason: str,
        *,
        exit_code: ExitCode | None = None,
        error_line: str = "",
        detail: str = "",
    ) -> None:
        self.machine.advance(RunEvent.GAVE_UP)
        self.ending = Ending(
            status=status,
            exit_code=EXIT_CODE_OF_STATUS[status] if exit_code is None else exit_code,
            reason=reason,
            error_line=error_line,
            detail=detail,
        )
