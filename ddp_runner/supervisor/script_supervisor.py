"""What the supervisor does about a program of the user's own: watches its ranks, and starts all of them again.

A rank of such a program has a state that nobody else can have: where its loops stand, and its data. So
one that is lost takes all with it, and they begin again from the script's own checkpoint.
"""

from __future__ import annotations

import signal
import uuid
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from ddp_runner.core import events
from ddp_runner.core.board import Cell
from ddp_runner.core.classify import RankExit, classify_exit
from ddp_runner.core.errors import BadInputError
from ddp_runner.core.exits import STATUS_OF_REASON, RunStatus, StopReason
from ddp_runner.core.faults import Fault, FaultKind, Origin, rank_list
from ddp_runner.core.fork_specs import ScriptCall
from ddp_runner.core.helper_roles import STORE
from ddp_runner.core.launch_plan import LaunchPlan
from ddp_runner.core.lifecycle import (
    NO_PROCESS_LEFT,
    MembershipEvent,
    RankEvent,
    RankState,
    RunEvent,
)
from ddp_runner.core.messages import CollectivesBegun, Finished, Leaving, Message, Ready
from ddp_runner.core.script import (
    GRACE_AFTER_FAULT_S,
    STOPPED_MAX_S,
    Attempt,
    EndRun,
    ScriptPlan,
    does_not_resume,
    exit_code_of,
    first_cause,
    plan_restart,
)
from ddp_runner.observe.script_summary import AttemptRecord, ScriptSummary
from ddp_runner.supervisor.processes.children import Ended
from ddp_runner.supervisor.processes.endings import exit_of
from ddp_runner.supervisor.processes.rank_process import WhatItWrote
from ddp_runner.supervisor.processes.rank_start import RankStart
from ddp_runner.supervisor.rank_handle import RankHandle
from ddp_runner.supervisor.reporting.recorder import Recorder
from ddp_runner.supervisor.reporting.start_progress import Start
from ddp_runner.supervisor.run_context import RunContext
from ddp_runner.supervisor.run_facts import Ending
from ddp_runner.supervisor.script_errors import error_file, explained, recorded_fault
from ddp_runner.supervisor.script_hangs import ScriptHangs
from ddp_runner.supervisor.script_resume import words_to_resume
from ddp_runner.supervisor.supervisor import Parts, Supervisor
from ddp_runner.system.run_directories import RunDirectories

LATE_S = 10.0  # for ranks to end after the first has
_EXIT_CODE_OF_STOP = {StopReason.INTERRUPTED: 130, StopReason.PREEMPTED: 143}


class ScriptSupervisor(Supervisor):
    """One run of a script, from the first attempt to its ending. Driven as :class:`Supervisor` is."""

    def __init__(
        self,
        run: RunContext,
        parts: Parts,
        *,
        plan: LaunchPlan,
        script: ScriptPlan,
        recorder: Recorder,
        start: Start,
        directories: RunDirectories,
    ) -> None:
        super().__init__(run, parts)
        self.plan, self._record, self._start = plan, recorder, start
        self.outputs, self.directories = recorder.outputs, directories
        self._script = script
        self._attempts: list[Attempt] = []  # those that have failed
        self._records: list[AttemptRecord] = []
        self._began_s = 0.0  # when this attempt was asked for
        self._faults: list[Fault] = []  # of this attempt
        self._codes: dict[int, int] = {}  # rank -> with which it would have ended a shell's command
        # Ranks of this attempt whose program had ended before anybody was asked to end.
        self._left: dict[int, Leaving] = {}
        self._left_when_asked: set[int] = set()
        self._kill_at_s: float | None = None  # what is left of this attempt gets SIGKILL then
        self._again_at_s = 0.0
        self._renews_store = False
        self._has_saved = False  # in an attempt that has failed
        self._others_ended_s: float | None = None  # when the first ranks of this attempt had ended
        self._hangs = ScriptHangs(script.hang_timeout_s, world=self.world)  # of this attempt
        self._run_id = uuid.uuid4().hex[:12]

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 0; torchrun calls it the restart count."""
        return len(self._attempts)

    def _on_rank_message(self, message: Message, handle: RankHandle) -> None:
        match message:
            case Ready():
                handle.ready = message
                handle.machine.advance(RankEvent.GOT_READY)
            case events.RankFormed():
                handle.machine.advance(RankEvent.GOT_FORMED)
                handle.has_formed = True
                self._on_formed(message)
            case CollectivesBegun():
                self._hangs.note(message)
            case events.Faulted(fault=fault):
                self._codes.setdefault(handle.rank, 1)
                self._report(fault)
            case Leaving():
                if self._is_ending_rest:
                    self._left_when_asked.add(handle.rank)
                else:
                    self._left[handle.rank] = message
            case _:
                raise TypeError(f"a script's rank does not send {type(message).__name__}")

    def _on_formed(self, formed: events.RankFormed) -> None:
        self.recorder.record(replace(formed, pid=self.world.ranks[formed.rank].pid))
        if any(handle.state is not RankState.TRAINING for handle in self.world.ranks):
            return
        self.facts.ever_formed = True
        self.start.formed(self._clock.monotonic())
        self.machine.advance(RunEvent.WORLD_FORMED)

    def _on_rank_ended(self, handle: RankHandle, ended: Ended, wrote: WhatItWrote) -> None:
        is_done = ended.exit_code == 0 and handle.state is RankState.TRAINING
        if is_done and self._is_ending_rest and self._had_gone_before(handle):
            self._left[handle.rank] = Leaving(rank=handle.rank, exit_code=0, at_ns=ended.at_ns)
        elif is_done and not self._is_ending_rest:
            step = handle.slot.get(Cell.COMMITTED_STEP)
            handle.finished = Finished(rank=handle.rank, reason=StopReason.COMPLETED, step=step)
            handle.machine.advance(RankEvent.GOT_FINISHED)
            left = Leaving(rank=handle.rank, exit_code=0, at_ns=ended.at_ns)
            self._left.setdefault(handle.rank, left)
        was_killed = handle.state is RankState.KILLING
        handle.machine.advance(RankEvent.EXITED)
        left_with = self._left.get(handle.rank)
        if left_with is not None and left_with.exit_code:
            self._codes[handle.rank] = left_with.exit_code
            self._report_once(self._fault_of_leaving(left_with))
        elif not is_done and not self._is_our_doing(ended, was_killed=was_killed):
            code = exit_code_of(exit_code=ended.exit_code, signal_number=ended.signal_number)
            self._codes[handle.rank] = code
            self._report_once(self._fault_of(handle, ended, wrote))
        if not handle.has_log:
            self.outputs.keep_words(handle.rank, wrote.before_log)
        handle.released()

    def _had_gone_before(self, handle: RankHandle) -> bool:
        """Whether a rank that ended with 0 most likely did so before it was asked: its peers lose it before we can reap it.

        One that ends because of SIGTERM says with which code.
        """
        is_silent = handle.rank not in self._left_when_asked and not self._script.is_program
        return is_silent and self._stop is None and handle.state is not RankState.KILLING

    def _fault_of(self, handle: RankHandle, ended: Ended, wrote: WhatItWrote) -> Fault:
        by_memory = ended.signal_number == signal.SIGKILL and self.world.was_killed_for_memory(
            handle, self._clock.monotonic()
        )
        end = exit_of(
            ended,
            wrote.without(self.outputs.hidden),
            rank=handle.rank,
            reading=handle.slot.read(),
            killed_for_memory=by_memory,
            was_asked=False,
            keeps_all=not self.recorder.may_write,
        )
        return classify_exit(end)

    def _fault_of_leaving(self, left: Leaving) -> Fault:
        reading = self.world.ranks[left.rank].slot.read()
        return classify_exit(
            RankExit(
                rank=left.rank,
                step=reading.step,
                phase=reading.phase.label,
                at_ns=left.at_ns,
                exit_code=left.exit_code,
                signal_number=None,
                words=left.words,
            )
        )

    def _report_once(self, fault: Fault) -> None:
        """Report how a rank ended, unless it has said why itself."""
        if not any(known.rank == fault.rank for known in self._faults):
            self._report(fault)

    def _is_our_doing(self, ended: Ended, *, was_killed: bool) -> bool:
        """Whether a rank ended because it was asked to. One that had failed before may be reaped later."""
        if not self._is_ending_rest:
            return False
        asked = signal.SIGTERM
        by_signal = ended.signal_number == asked or was_killed
        return by_signal or ended.exit_code in (0, 128 + asked) or self._stop is not None

    @property
    def _is_ending_rest(self) -> bool:
        """Whether what is left of this attempt was asked to end."""
        return self._kill_at_s is not None

    def _report(self, fault: Fault) -> None:
        if fault.kind is FaultKind.STORE_DIED and self._renews_store:
            self._renews_store = False
            return
        if self.run_end.is_known:
            return
        fault = self.recorder.shown(fault)
        self.recorder.record(events.Faulted(fault=fault))
        self._faults.append(fault)

    def _end_after_fault(self) -> None:
        """End the other ranks, once every end of this turn is known: a rank may have ended before it was asked."""
        if self._faults and not self._is_ending_rest and self._stop is None:
            self.machine.advance(RunEvent.INCIDENT_BEGAN)
            self._end_rest(GRACE_AFTER_FAULT_S, but=self._ending_themselves())

    def _ending_themselves(self) -> set[int]:
        """Ranks whose program has ended or raised: what they still write, as a traceback, is not to be cut off."""
        said = {fault.rank for fault in self._faults if fault.kind is not FaultKind.RANK_HUNG}
        return said | self._left.keys()

    def _end_rest(self, grace_s: float, *, but: Collection[int] = ()) -> None:
        """SIGTERM to whoever is left, ``but`` these ranks, and SIGKILL to all after ``grace_s``."""
        self._kill_at_s = self._clock.monotonic() + grace_s
        for handle in self.world.ranks:
            if handle.is_alive and handle.rank not in but:
                self.world.signal_rank(handle, signal.SIGTERM)
                if self.world.is_stopped(handle):
                    self.world.wake([handle])

    def _begin_stop(self, reason: StopReason) -> None:
        if self._stop is not None or self.run_end.is_known:
            return
        self._stop = reason
        self.machine.advance(RunEvent.STOP_ASKED)
        grace_s = self._script.grace_period_s
        self.recorder.say(
            f"{reason.value}: the ranks get SIGTERM, and have {grace_s:g} s to end; again ends at once"
        )
        self._end_rest(grace_s)

    def ask_save(self) -> None:
        """A script saves when it does."""

    def advance(self) -> None:
        """Do whatever the facts allow now. Called after every event and every tick."""
        now_s = self._clock.monotonic()
        if self.ending is not None:
            return
        self.node.kernel_kills.look_sometimes(now_s)
        ranks = self.world.ranks
        self.facts.committed_step = max(handle.slot.get(Cell.COMMITTED_STEP) for handle in ranks)
        self._keeper.look(now_s)
        self._look_for_stopped(now_s)
        self._end_after_fault()
        if self._kill_at_s is not None:
            self._wait_for_rest(now_s, self._kill_at_s)
        elif all(handle.has_finished for handle in ranks):
            self._note_attempt(None)
            self._say_if_nothing_was_trained()
            self.run_end.completed(StopReason.COMPLETED)
        else:
            self._spawn(now_s)
            self._form(now_s)
            self._name_late_ones(now_s)
            self._end_if_it_does_not_resume()
            self._look_for_hung(now_s)

    def _say_if_nothing_was_trained(self) -> None:
        """Some scripts end with 0 where they miss a GPU."""
        if not self.facts.committed_step and not self._script.is_program:
            self.recorder.say("no rank has made an optimizer step", level="WARNING")

    def _look_for_hung(self, now_s: float) -> None:
        fault = self._hangs.look(now_s) if self._script.hang_timeout_s else None
        if fault is not None:
            self._codes[fault.rank] = 128 + signal.SIGKILL
            self._report(fault)

    def _look_for_stopped(self, now_s: float) -> None:
        """A rank that the system holds stopped has all others wait, and nobody may wake it."""
        for handle in self.world.ranks:
            if self._is_ending_rest or self._faults:
                return
            if handle.is_alive and self.world.stopped_s(handle, now_s) > STOPPED_MAX_S:
                self._codes[handle.rank] = 128 + signal.SIGKILL
                self._report(
                    Fault(
                        kind=FaultKind.RANK_HUNG,
                        rank=handle.rank,
                        step=handle.slot.get(Cell.COMMITTED_STEP),
                        cause=f"rank {handle.rank} hung: stopped by a signal for {STOPPED_MAX_S:g} s",
                        at_ns=self._clock.monotonic_ns(),
                        origin=Origin.OUTSIDE,
                    )
                )

    def _name_late_ones(self, now_s: float) -> None:
        """Ranks that still run when others have ended for a while: perhaps for ever, at their own end."""
        left = [handle.rank for handle in self.world.ranks if not handle.has_finished]
        if len(left) == len(self.world.ranks):
            self._others_ended_s = None
        elif self._others_ended_s is None:
            self._others_ended_s = now_s
        elif self._others_ended_s + LATE_S < now_s:
            self._others_ended_s = float("inf")  # said once
            self.recorder.say(
                f"not ended, {LATE_S:g} s after others have: {rank_list(left)}", level="WARNING"
            )

    def _wait_for_rest(self, now_s: float, kill_at_s: float) -> None:
        left = [handle for handle in self.world.ranks if handle.is_alive]
        if left:
            is_due = now_s >= kill_at_s or (self._stop and self._signals.ends_at_once(now_s))
            for handle in left if is_due else ():
                if handle.state is not RankState.KILLING:
                    self.world.kill_rank(handle, now_s)
            return
        self._kill_at_s = None
        if self._stop is not None:
            self._note_attempt(None)
            self.run_end.at_once(
                Ending.of(
                    STATUS_OF_REASON[self._stop],
                    f"{self._stop.value}: all ranks have ended",
                    exit_code=_EXIT_CODE_OF_STOP.get(self._stop, 1),
                )
            )
            return
        self._judge(now_s)

    def _judge(self, now_s: float) -> None:
        """The attempt is over: start all again, or end the run."""
        left = [self._fault_of_leaving(one) for one in self._left.values() if not one.exit_code]
        culprit = first_cause(explained(self._faults, self._recorded()), left)
        failed = Attempt(
            fault=culprit,
            exit_code=self._codes.get(culprit.rank, 1),
            steps=self.facts.committed_step,
            at_s=now_s,
        )
        self._note_attempt(failed)
        log = f"; see {self._log_file(culprit.rank)}" if culprit.rank >= 0 else ""
        self._attempts.append(failed)
        self._has_saved |= any(handle.slot.get(Cell.SCRIPT_SAVES) for handle in self.world.ranks)
        plan = plan_restart(
            self._attempts,
            restarts=self._script.restarts,
            settings=self.plan.settings.recovery,
            counts_steps=not self._script.is_program,
        )
        what = culprit.cause
        if culprit.rank >= 0 and not what.startswith("rank "):
            what = f"rank {culprit.rank}: {what}"
        if not self._script.is_program:
            what += f" after {failed.steps:,} optimizer steps"
        if isinstance(plan, EndRun):
            reason = f"{what} ({plan.reason}){log}"
            if plan.status is RunStatus.GAVE_UP:
                reason = f"gave up: {plan.reason}; the last: {what}{log}"
            self.run_end.at_once(
                Ending.of(
                    plan.status,
                    reason,
                    exit_code=plan.exit_code,
                    detail=self._traceback_to_show(culprit),
                )
            )
            return
        if trace := self._traceback_to_show(culprit):
            self.recorder.say(trace, level="ERROR")
        self.recorder.say(
            f"{what} -> all {len(self.world.ranks)} ranks"
            f" start again (attempt {self.attempt}){log}",
            level="WARNING",
        )
        self._faults.clear()
        self._codes.clear()
        self._left.clear()
        self._left_when_asked.clear()
        self._hangs = ScriptHangs(self._script.hang_timeout_s, world=self.world)
        self.world.forget_stacks()
        self._again_at_s = now_s + plan.delay_s
        # What is in the store is of this attempt: torch keeps no prefix for each.
        store = self.node.helper(STORE)
        self._renews_store = store is not None
        self.node.kill(store)
        for handle in self.world.ranks:
            handle.member.advance(MembershipEvent.TO_REPLACE)
            handle.slot.clear()  # what it says is of the attempt that is over

    def _recorded(self) -> list[Fault]:
        """What ranks of this attempt have left in the files for their errors."""
        steps = ((one, one.slot.get(Cell.COMMITTED_STEP)) for one in self.world.ranks)
        found = (
            recorded_fault(
                error_file(self._log_file(one.rank)),
                rank=one.rank,
                step=step,
                hidden=self.outputs.hidden,
            )
            for one, step in steps
        )
        return [fault for fault in found if fault is not None]

    def _traceback_to_show(self, culprit: Fault) -> str:
        """The only one on the console: a Python's own is held back there. A program's is not."""
        shown = self._script.shown_ranks
        is_there = self._script.is_program and (shown is None or culprit.rank in shown)
        return "" if is_there else culprit.detail.rstrip()

    def _spawn(self, now_s: float) -> None:
        if not self.node.can_fork or now_s < self._again_at_s or self._renews_store:
            return
        if self.node.helper(STORE) is None:
            self.node.start_store()
        missing = [handle for handle in self.world.ranks if handle.needs_process]
        if not missing or any(handle.state not in NO_PROCESS_LEFT for handle in missing):
            return
        self._began_s = now_s
        resume_words, notes = words_to_resume(self._script.resume_with)
        for line in notes:
            self.recorder.say(line, level="WARNING")
        arguments = [*self._script.arguments, *resume_words]
        restarts = self.plan.settings.recovery.max_restarts if self._script.restarts else 0
        for handle in missing:
            log = self._log_file(handle.rank)
            call = ScriptCall(
                path=self._script.path,
                module=self._script.module,
                arguments=tuple(arguments),
                is_program=self._script.is_program,
                plain_saves=self._script.plain_saves,
                log_file=str(log),
                error_file=str(error_file(log)),
                run_id=self._script.rdzv_id or self._run_id,
                role=self._script.role,
                attempt=self.attempt,
                max_restarts=restarts,
            )
            start = RankStart(script=call, log_file=log, reads_stdin=handle.rank == 0)
            if self.world.spawn_rank(handle, start, now_s=now_s):
                handle.member.advance(MembershipEvent.REPLACED)

    def _end_if_it_does_not_resume(self) -> None:
        """It would train again what is trained, and overwrite what it has saved."""
        slots = [handle.slot for handle in self.world.ranks]
        if self._script.from_scratch or not does_not_resume(
            attempt=self.attempt,
            saved_before=self._has_saved,
            steps=max(slot.get(Cell.COMMITTED_STEP) for slot in slots),
            loads=max(slot.get(Cell.SCRIPT_LOADS) for slot in slots),
        ):
            return
        line = (
            f"attempt {self.attempt} began to train without torch.load, though one before it has saved:"
            " the script does not resume (--from-scratch allows that)"
        )
        self._note_attempt(None)
        self.run_end.at_once(Ending.of(RunStatus.FAILED, line))

    def _form(self, now_s: float) -> None:
        ready = all(
            handle.state is RankState.READY and handle.pid is not None
            for handle in self.world.ranks
        )
        if not ready or not self.node.has_ready_store:
            return
        if not self.recorder.may_write and not self._begin():
            return
        self._log_file(0).parent.mkdir(exist_ok=True)
        for handle in self.world.ranks:  # of an earlier launch
            error_file(self._log_file(handle.rank)).unlink(missing_ok=True)
        ranks = tuple(range(len(self.world.ranks)))
        shown = self._script.shown_ranks
        self.outputs.follow(
            [self._log_file(rank) for rank in ranks],
            shown=ranks if shown is None else shown,
            marks_lines=self._script.marks_lines,
        )
        self.facts.generation += 1
        self.facts.formed_at_s = now_s
        self.recorder.record(events.Forming(generation=self.facts.generation))
        self.world.form(self.facts.generation, run_id=self._run_id)

    def _begin(self) -> bool:
        """Every rank is there: the disk may be touched from here on."""
        self.facts.run_id = self._run_id
        try:
            self.directories.claim()
        except BadInputError as error:
            self.run_end.bad_input(str(error))
            return False
        self.outputs.open(shown_bytes=self._start.shown_bytes())
        threads = self.plan.threads_per_rank
        lines = (
            *self.plan.notes,
            f"{self._script.name} on {len(self.world.ranks)} ranks, {threads} threads each",
            f"what they write: {self._log_file(0).parent}/rank_<r>.log",
        )
        self.recorder.record(
            events.RunBegins(
                run_id=self._run_id,
                command=tuple(self.plan.command),
                world_size=self.plan.world_size,
                resumed_step=0,
                total_steps=0,
                lines=lines,
            )
        )
        return True

    def _log_file(self, rank: int) -> Path:
        folder = Path(self.plan.settings.run.log_dir, f"attempt_{self.attempt}")
        return folder / f"rank_{rank}.log"

    def _note_attempt(self, failed: Attempt | None) -> None:
        slots = [handle.slot for handle in self.world.ranks]
        first_ns = min((ns for slot in slots if (ns := slot.get(Cell.FIRST_STEP_NS))), default=0)
        fault = None if failed is None else failed.fault
        self._records.append(
            AttemptRecord(
                attempt=self.attempt,
                steps=self.facts.committed_step,
                seconds=round(self._clock.monotonic() - self._began_s, 3),
                first_step_s=round(first_ns / 1e9 - self._began_s, 3) if first_ns else None,
                rank=None if fault is None else fault.rank,
                cause="" if fault is None else fault.cause,
                detail="" if fault is None else fault.detail,
                exit_code=None if failed is None else failed.exit_code,
            )
        )

    def closing_words(self) -> str:
        """A script's checkpoints are its own."""
        return ""

    def summary(self, ending: Ending) -> ScriptSummary:
        """What summary.json holds."""
        return ScriptSummary(
            run_id=self._run_id,
            status=ending.status,
            exit_code=int(ending.exit_code),
            script=self._script.name,
            arguments=self._script.arguments,
            world_size=self.plan.world_size,
            steps=self.facts.committed_step,
            wall_s=round(self._clock.monotonic() - self._record.accounting.began_s, 3),
            attempts=tuple(self._records),
            name=self.plan.settings.run.name,
        )
