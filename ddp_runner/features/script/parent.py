"""Runs a program of the user's own: starts its ranks, watches them, and starts all of them again where one is lost.

A rank of such a program has a state that nobody else can have: where its loops stand, and its data. So
one that is lost takes all with it, and they begin again from the script's own checkpoint.
"""

from __future__ import annotations

import signal
import uuid
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from ddp_runner.checkpoint.unreported import Published
from ddp_runner.cli.several import several_machines
from ddp_runner.core.launch_plan import LaunchPlan
from ddp_runner.features.script.attempt_files import AttemptFiles
from ddp_runner.features.script.hangs import ScriptHangs
from ddp_runner.features.script.live_attempt import LATE_S, LiveAttempt, fault_of_leaving
from ddp_runner.features.script.other_summary import AttemptRecord, ScriptSummary
from ddp_runner.features.script.own_checkpoint import words_to_resume
from ddp_runner.features.script.rules import (
    EXIT_CODE_OF_STOP,
    GRACE_AFTER_FAULT_S,
    STOPPED_MAX_S,
    Attempt,
    EndRun,
    ScriptCall,
    ScriptPlan,
    StartAgain,
    does_not_resume,
    failure_line,
    plan_restart,
    was_asked_to_end,
)
from ddp_runner.kernel.parent.node_keeper import NodeKeeper
from ddp_runner.kernel.parent.ports import Host
from ddp_runner.kernel.parent.rank_handle import RankHandle
from ddp_runner.kernel.parent.run_facts import Ending, RunFacts
from ddp_runner.kernel.parent.world import World
from ddp_runner.kernel.processes.children import Ended
from ddp_runner.kernel.processes.helper_process import HelperEnded, RankEnded, ZygoteEnded
from ddp_runner.kernel.processes.node import Node
from ddp_runner.kernel.processes.rank_process import WhatItWrote, exit_of
from ddp_runner.kernel.processes.rank_start import RankStart
from ddp_runner.kernel.processes.resources import remove_temporary_files
from ddp_runner.kernel.recovery.zygote_keeper import NoZygote
from ddp_runner.kernel.rules.classify import classify_exit
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.exits import (
    OF_SIGNAL,
    STATUS_OF_REASON,
    ExitCode,
    RunStatus,
    StopReason,
    exit_code_of,
)
from ddp_runner.kernel.rules.faults import Fault, FaultKind, Origin, rank_list
from ddp_runner.kernel.rules.helper_roles import STORE
from ddp_runner.kernel.rules.lifecycle import (
    NO_PROCESS_LEFT,
    RUN_TABLE,
    Machine,
    MembershipEvent,
    RankEvent,
    RankState,
    RunEvent,
    RunState,
)
from ddp_runner.kernel.rules.stopping import StopSignal, StopSignals
from ddp_runner.kernel.system.clock import Clock
from ddp_runner.kernel.wire import events
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.kernel.wire.messages import (
    CollectivesBegun,
    Finished,
    Leaving,
    Message,
    Ready,
    decode,
)
from ddp_runner.observe.format import counted
from ddp_runner.supervisor import assembly
from ddp_runner.supervisor.reporting.outputs import Outputs
from ddp_runner.supervisor.reporting.recorder import Recorder
from ddp_runner.supervisor.reporting.start_progress import Start
from ddp_runner.system.run_directories import RunDirectories


def supervise(plan: LaunchPlan, script: ScriptPlan | None, *, token_file: str = "") -> int:
    """Run a program to its end and return the exit code. ``script``: None where its loop attaches, and it is repaired in place."""
    if plan.nodes is None:
        agent = None if script is None else partial(ScriptAgent, script=script)
        return assembly.supervise(plan, agent=agent)
    return several_machines().run(plan, token_file=token_file, script=script)


class ScriptAgent:
    """Runs a script from its first attempt to its ending, as the :class:`~..loop.Agent` of the loop.

    It acts on ranks through their world, so on whichever machine they are. Where the run stands is in
    the table of ``kernel/rules/lifecycle.py``, and what has become of the attempt in hand in a LiveAttempt.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        node: Node,
        *,
        script: ScriptPlan,
        outputs: Outputs,
        directories: RunDirectories,
        clock: Clock,
        others: Sequence[Host] = (),
    ) -> None:
        """``others``: the other machines of the run."""
        self.plan = plan
        self.node = node
        self.world = World(node, others)
        self.outputs = outputs
        self.directories = directories
        self.machine: Machine[RunState, RunEvent] = Machine(RUN_TABLE, RunState.STARTING)
        self.ending: Ending | None = None
        self.recorder = Recorder(
            outputs,
            name=plan.settings.run.name,
            published=Published(Path(plan.settings.run.checkpoint_dir)),
            clock=clock,
            host_of=self.world.host_of,
        )
        self.facts: RunFacts = self.recorder.facts
        self.start = Start(
            node=node,
            world=self.world,
            recorder=self.recorder,
            settings=plan.settings,
            waits_for=self._waits_for,
        )
        self._keeper = NodeKeeper(
            plan.settings.recovery,
            node=node,
            world=self.world,
            recorder=self.recorder,
            repair=self,
            clock=clock,
        )
        self._script = script
        self._clock = clock
        self._run_id = uuid.uuid4().hex[:12]
        self._files = AttemptFiles(plan.settings.run.log_dir)
        self._stop: StopReason | None = None
        self._signals = StopSignals()  # to this process, by a person or a scheduler
        self._failed: list[Attempt] = []
        self._records: list[AttemptRecord] = []
        self._has_saved = False  # in an attempt that has failed
        self._attempt = LiveAttempt(0, now_s=clock.monotonic())
        self._has_not_begun = True  # none of its ranks was asked for
        self._again_at_s = 0.0  # when the ranks of this attempt may be started
        self._hangs = ScriptHangs(script.hang_timeout_s, world=self.world)  # of this attempt

    # What comes in.

    def on_packet(self, packet: bytes, rank: int | None) -> None:
        """Take a packet in; ``rank`` is that of the process that sent it, None for one that is no rank."""
        self.on_message(decode(packet), rank)

    def on_message(self, message: Message, rank: int | None) -> None:
        """Hear a message, of whichever machine."""
        if self.ending is not None:
            return
        if rank is not None:
            self._on_rank_message(message, self.world.ranks[rank])
        elif (ended := self._keeper.on_message(message, self.start)) is not None:
            self.on_ended(ended)

    def _on_rank_message(self, message: Message, handle: RankHandle) -> None:
        match message:
            case Ready():
                if not self.world.is_here(handle):
                    handle.slot.clear()  # which may still mirror what the process before has done
                handle.ready = message
                handle.machine.advance(RankEvent.GOT_READY)
            case events.RankFormed():
                handle.machine.advance(RankEvent.GOT_FORMED)
                handle.has_formed = True
                self._on_formed(message)
            case CollectivesBegun():
                self._hangs.note(message)
            case events.Faulted(fault=fault):
                self._attempt.said_error(handle.rank)
                self._report(fault)
            case Leaving():
                self._attempt.heard_leaving(message)
            case events.LogOutage():
                self.recorder.record(message)
            case _:
                raise TypeError(f"a script's rank does not send {type(message).__name__}")

    def _on_formed(self, formed: events.RankFormed) -> None:
        self.recorder.record(replace(formed, pid=self.world.ranks[formed.rank].pid))
        if not self.world.counts.are_all_present(RankState.TRAINING):
            return
        self.facts.ever_formed = True
        self.start.formed(self._clock.monotonic())
        self.machine.advance(RunEvent.WORLD_FORMED)

    def on_ended(self, ended: Ended) -> None:
        """Note that a child process was reaped. What it still had to say is heard first."""
        self.start.show_output()
        for packet, rank in self.node.last_packets(ended.pid):
            self.on_packet(packet, rank)
        match self.node.departed(ended):
            case RankEnded(rank=rank, wrote=wrote):
                self.rank_ended(self.world.ranks[rank], ended, wrote)
            case (HelperEnded() | ZygoteEnded()) as departure if self.ending is None:
                match self._keeper.ended(departure):
                    case NoZygote(reason=reason, detail=said):
                        detail = self.start.without_shown(said)
                        self._end(Ending.of(RunStatus.FAILED, reason, detail=detail))
                    case Fault() as fault:
                        self._report(fault)

    def rank_ended(self, handle: RankHandle, ended: Ended, wrote: WhatItWrote) -> None:
        """Take note of how a rank has ended, on whichever machine."""
        attempt, was_killed = self._attempt, handle.state is RankState.KILLING
        is_done = ended.exit_code == 0 and handle.state is RankState.TRAINING
        if is_done and (not attempt.is_ending or self._had_gone_before(handle)):
            attempt.has_done(handle.rank, ended.at_ns)
        if is_done and not attempt.is_ending:
            step = handle.slot.get(Cell.COMMITTED_STEP)
            handle.finished = Finished(rank=handle.rank, reason=StopReason.COMPLETED, step=step)
            handle.machine.advance(RankEvent.GOT_FINISHED)
        handle.machine.advance(RankEvent.EXITED)
        left = attempt.left_with(handle.rank)
        if left is not None and left.exit_code:
            attempt.failed(handle.rank, left.exit_code)
            self._report_once(fault_of_leaving(left, handle))
        elif not is_done and not self._was_asked_to_end(ended, was_killed=was_killed):
            code = exit_code_of(exit_code=ended.exit_code, signal_number=ended.signal_number)
            attempt.failed(handle.rank, code)
            self._report_once(self._fault_of(handle, ended, wrote))
        if not handle.has_log:
            self.outputs.keep_words(handle.rank, wrote.before_log)
        handle.released()

    def _had_gone_before(self, handle: RankHandle) -> bool:
        """Return whether a rank that ended with 0 most likely did so before it was asked: its peers lose it before we can reap it."""
        is_silent = self._attempt.is_silent(handle.rank) and not self._script.is_program
        return is_silent and self._stop is None

    def _was_asked_to_end(self, ended: Ended, *, was_killed: bool) -> bool:
        return self._attempt.is_ending and was_asked_to_end(
            exit_code=ended.exit_code,
            signal_number=ended.signal_number,
            was_killed=was_killed,
            stops=self._stop is not None,
        )

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

    def _report_once(self, fault: Fault) -> None:
        """Report how a rank ended, unless it has said why itself."""
        if not self._attempt.has_fault_of(fault.rank):
            self._report(fault)

    def _report(self, fault: Fault) -> None:
        if self.ending is not None:
            return
        fault = self.recorder.shown(fault)
        self.recorder.record(events.Faulted(fault=fault))
        self._attempt.faults.append(fault)

    def ask_stop(self, reason: StopReason, *, by: StopSignal = StopSignal.OTHER) -> None:
        """Have the ranks end in order; :class:`StopSignals` knows who may ask for an end at once."""
        if self.ending is not None:
            return
        if not self.facts.ever_formed:
            line = f"{reason.value} before training began"
            self._end(Ending.of(STATUS_OF_REASON[reason], line))
            return
        self._signals.heard(by, self._clock.monotonic())
        if self._stop is not None:
            return
        self._stop = reason
        self.machine.advance(RunEvent.STOP_ASKED)
        grace_s = self._script.grace_period_s
        self.recorder.say(
            f"{reason.value}: the ranks get SIGTERM, and have {grace_s:g} s to end; again ends at once"
        )
        self._end_rest(grace_s)

    def ask_save(self) -> None:
        """Do nothing: a script saves when it does."""

    def schedule_respawn(self, handle: RankHandle) -> None:
        """Have a process started for a rank whose fork was lost with the zygote."""
        handle.member.advance(MembershipEvent.TO_REPLACE)

    # What is done about it.

    def advance(self) -> None:
        """Do whatever the facts allow now. Called after every event and every tick."""
        now_s = self._clock.monotonic()
        if self.ending is not None:
            return
        self.node.kernel_kills.look_sometimes(now_s)
        self.facts.committed_step = self._steps()
        self._keeper.look(now_s)
        self._look_for_stopped(now_s)
        self._end_after_fault()
        if self._attempt.rest_ends_by_s is not None:
            self._wait_for_rest(now_s, self._attempt.rest_ends_by_s)
        elif all(handle.has_finished for handle in self.world.present):
            self._complete()
        else:
            self._spawn(now_s)
            self._form(now_s)
            self._name_late_ones(now_s)
            self._end_if_it_does_not_resume()
            self._look_for_hung(now_s)

    def _steps(self) -> int:
        """Return the optimizer steps of this attempt; what another machine still shows of the one before does not count."""
        ready = [handle for handle in self.world.present if handle.ready is not None]
        if self._has_not_begun or not ready:
            return 0
        return max(handle.slot.get(Cell.COMMITTED_STEP) for handle in ready)

    def _look_for_stopped(self, now_s: float) -> None:
        """Report a rank that the system holds stopped: all others wait for it, and nobody may wake it."""
        for handle in self.world.ranks:
            if self._attempt.is_ending or self._attempt.faults:
                return
            if handle.is_alive and self.world.stopped_s(handle, now_s) > STOPPED_MAX_S:
                self._report_hung(
                    Fault(
                        kind=FaultKind.RANK_HUNG,
                        rank=handle.rank,
                        step=handle.slot.get(Cell.COMMITTED_STEP),
                        cause=f"rank {handle.rank} hung: stopped by a signal for {STOPPED_MAX_S:g} s",
                        at_ns=self._clock.monotonic_ns(),
                        origin=Origin.OUTSIDE,
                    )
                )

    def _look_for_hung(self, now_s: float) -> None:
        fault = self._hangs.look(now_s) if self._script.hang_timeout_s else None
        if fault is not None:
            self._report_hung(fault)

    def _report_hung(self, fault: Fault) -> None:
        self._attempt.failed(fault.rank, OF_SIGNAL + signal.SIGKILL)  # of which it will end
        self._report(fault)

    def _end_after_fault(self) -> None:
        """End the other ranks, once every end of this turn is known: a rank may have ended before it was asked."""
        attempt = self._attempt
        if attempt.faults and not attempt.is_ending and self._stop is None:
            self.machine.advance(RunEvent.INCIDENT_BEGAN)
            self._end_rest(GRACE_AFTER_FAULT_S, but=attempt.ending_themselves())

    def _end_rest(self, grace_s: float, *, but: Collection[int] = ()) -> None:
        """Send SIGTERM to whoever is left, ``but`` these ranks; all get SIGKILL after ``grace_s``."""
        self._attempt.rest_ends_by_s = self._clock.monotonic() + grace_s
        for handle in self.world.ranks:
            if handle.is_alive and handle.rank not in but:
                self.world.signal_rank(handle, signal.SIGTERM)
                if self.world.is_stopped(handle):
                    self.world.wake([handle])

    def _wait_for_rest(self, now_s: float, ends_by_s: float) -> None:
        alive = [handle for handle in self.world.ranks if handle.is_alive]
        is_asked_again = self._stop is not None and self._signals.ends_at_once(now_s)
        if alive and (now_s >= ends_by_s or is_asked_again):
            for handle in alive:
                if handle.state is not RankState.KILLING:
                    self.world.kill_rank(handle, now_s)
        if alive:
            return
        if self._stop is None:
            self._judge(now_s)
            return
        self._keep_record(None)
        line, code = f"{self._stop.value}: all ranks have ended", EXIT_CODE_OF_STOP[self._stop]
        self._end(Ending.of(STATUS_OF_REASON[self._stop], line, exit_code=code))

    def _complete(self) -> None:
        self._keep_record(None)
        if not self.facts.committed_step and not self._script.is_program:
            # Some scripts end with 0 where they miss a GPU.
            self.recorder.say("no rank has made an optimizer step", level="WARNING")
        self.machine.advance(RunEvent.ALL_FINISHED)
        self.ending = Ending.of(RunStatus.COMPLETED, RunStatus.COMPLETED.value)

    def _judge(self, now_s: float) -> None:
        """Start all ranks again, or end the run: the attempt is over."""
        steps = {one.rank: one.slot.get(Cell.COMMITTED_STEP) for one in self.world.present}
        failed = self._attempt.judged(
            self.world.ranks,
            self._files.recorded(self._attempt.number, steps, hidden=self.outputs.hidden),
            steps=self.facts.committed_step,
            now_s=now_s,
        )
        self._keep_record(failed)
        self._failed.append(failed)
        self._has_saved |= any(handle.slot.get(Cell.SCRIPT_SAVES) for handle in self.world.ranks)
        counts_steps = not self._script.is_program
        decided = plan_restart(
            self._failed,
            restarts=self._script.restarts,
            settings=self.plan.settings.recovery,
            counts_steps=counts_steps,
        )
        culprit = failed.fault
        what = failure_line(
            culprit,
            steps=failed.steps if counts_steps else None,
            place=self._place_of(culprit.rank),
        )
        log = f"; see {self._log_for_people(culprit.rank)}" if culprit.rank >= 0 else ""
        trace = self._traceback_to_show(culprit)
        match decided:
            case EndRun(reason=why, status=status, exit_code=code):
                reason = f"{what} ({why}){log}"
                if status is RunStatus.GAVE_UP:
                    reason = f"gave up: {why}; the last: {what}{log}"
                self._end(Ending.of(status, reason, exit_code=code, detail=trace))
            case StartAgain(delay_s=delay_s):
                if trace:
                    self.recorder.say(trace, level="ERROR")
                ranks, number = len(self.world.present), len(self._failed)
                all_start = "the rank starts" if ranks == 1 else f"all {ranks} ranks start"
                self.recorder.say(
                    f"{what} -> {all_start} again (attempt {number}){log}",
                    level="WARNING",
                )
                self._start_again(now_s, delay_s)

    def _start_again(self, now_s: float, delay_s: float) -> None:
        """Begin the next attempt; nothing of the one that is over is left but its record."""
        self._attempt = LiveAttempt(len(self._failed), now_s=now_s)
        self._has_not_begun = True
        self._again_at_s = now_s + delay_s
        self._hangs = ScriptHangs(self._script.hang_timeout_s, world=self.world)
        self.world.forget_stacks()
        self.world.renew_store()  # torch keeps no prefix for each attempt in it
        for handle in self.world.present:
            handle.member.advance(MembershipEvent.TO_REPLACE)
            handle.slot.clear()

    def _traceback_to_show(self, culprit: Fault) -> str:
        """Return the only traceback on the console: a Python's own is held back there, a program's is not."""
        shown = self._script.shown_ranks
        is_there = self._script.is_program and (shown is None or culprit.rank in shown)
        return "" if is_there else culprit.detail.rstrip()

    def _spawn(self, now_s: float) -> None:
        store = self.node.helper(STORE)
        is_store_leaving = store is not None and store.is_unwanted
        if not self.world.can_fork or now_s < self._again_at_s or is_store_leaving:
            return
        if store is None:
            self.world.start_store()
        if self._has_not_begun and not self._may_begin(now_s):
            return
        missing = [handle for handle in self.world.present if handle.needs_process]
        if not missing or any(handle.state not in NO_PROCESS_LEFT for handle in missing):
            return
        self._has_not_begun = False
        self._attempt.began_s = now_s
        resume_words, notes = words_to_resume(self._script.resume_with)
        for line in notes:
            self.recorder.say(line, level="WARNING")
        for handle in missing:
            call = self._call((*self._script.arguments, *resume_words))
            start = RankStart(
                call=asdict(call),
                log_name=self._files.name(self._attempt.number, handle.rank),
                reads_stdin=handle.rank == 0,
            )
            if self.world.spawn_rank(handle, start, now_s=now_s):
                handle.member.advance(MembershipEvent.REPLACED)

    def _waits_for(self) -> str:
        """Return in words which machines the run cannot begin without: none, as all its ranks are here."""
        return ""

    def _may_begin(self, now_s: float) -> bool:
        """Return whether the attempt may begin now."""
        del now_s
        return True

    def _may_form(self) -> bool:
        """Return whether the ranks, which are all ready, may form now."""
        return True

    def _call(self, arguments: tuple[str, ...]) -> ScriptCall:
        script = self._script
        return ScriptCall(
            path=script.path,
            module=script.module,
            arguments=arguments,
            is_program=script.is_program,
            plain_saves=script.plain_saves,
            run_id=script.rdzv_id or self._run_id,
            role=script.role,
            attempt=self._attempt.number,
            max_restarts=self.plan.settings.recovery.max_restarts if script.restarts else 0,
        )

    def _form(self, now_s: float) -> None:
        # A rank may be ready before its zygote has reported who it is. Until then nobody could end it.
        ranks = self.world.present
        are_ready = self.world.counts.are_all_present(RankState.READY)
        if not are_ready or any(one.pid is None for one in ranks) or not self.world.has_ready_store:
            return
        if not (self.recorder.may_write or self._begin()) or not self._may_form():
            return
        numbers, number = range(len(self.world.ranks)), self._attempt.number
        self._files.make(number, numbers)
        shown = self._script.shown_ranks
        self.outputs.follow(
            [self._log(rank) for rank in numbers],
            shown=numbers if shown is None else shown,
            marks_lines=self._script.marks_lines,
        )
        self.facts.generation += 1
        self.facts.formed_at_s = now_s
        self.recorder.record(events.Forming(generation=self.facts.generation))
        self.world.form(self.facts.generation, run_id=self._run_id)

    def _begin(self) -> bool:
        """Claim the folders and open the files: every rank is there."""
        self.facts.run_id = self._run_id
        try:
            self._claim()
        except (BadInputError, OSError) as error:
            line = str(error)
            code = ExitCode.BAD_USAGE
            self._end(Ending.of(RunStatus.FAILED, line, exit_code=code, error_line=line))
            return False
        self.outputs.open(shown_bytes=self.start.shown_bytes())
        threads = self.plan.threads_per_rank
        lines = (
            *self.plan.notes,
            f"{self._who()}, {threads} thread{'' if threads == 1 else 's'} each",
            f"output: {self._files.folder(self._attempt.number)}/rank_<r>.log",
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

    def _claim(self) -> None:
        """Take the folders of the run. Raises BadInputError and OSError."""
        self.directories.claim()

    def _place_of(self, rank: int) -> str:
        """Return the machine of a rank, for people; empty where there is only one."""
        del rank
        return ""

    def _who(self) -> str:
        on = f" of {machines}" if (machines := self.world.machines()) else ""
        return f"{self._script.name} on {counted(len(self.world.present), 'rank')}{on}"

    def _name_late_ones(self, now_s: float) -> None:
        """Name the ranks that still run when others have ended for a while: perhaps for ever, at their own end."""
        ranks = self.world.present
        left = [handle.rank for handle in ranks if not handle.has_finished]
        if self._attempt.are_others_late(len(left), of=len(ranks), now_s=now_s):
            line = f"not ended, {LATE_S:g} s after others have: {rank_list(left)}"
            self.recorder.say(line, level="WARNING")

    def _end_if_it_does_not_resume(self) -> None:
        """End a script that would train again what is trained, and overwrite what it has saved."""
        steps, now_ns = self._steps(), self._clock.monotonic_ns()
        known_ns = min(self.world.known_ns(now_ns))
        are_known = self._attempt.are_loads_known(steps, known_ns=known_ns, now_ns=now_ns)
        if (
            self._script.from_scratch
            or not are_known
            or not does_not_resume(
                attempt=self._attempt.number,
                saved_before=self._has_saved,
                steps=steps,
                loads=max(self.world.present_cells(Cell.SCRIPT_LOADS)),
            )
        ):
            return
        line = (
            f"attempt {self._attempt.number} began to train without torch.load, though one before it has"
            " saved: the script does not resume (--from-scratch allows that)"
        )
        self._keep_record(None)
        self._end(Ending.of(RunStatus.FAILED, line))

    def _log(self, rank: int) -> Path:
        return self._files.log(self._attempt.number, rank)

    def _first_step_ns(self) -> int:
        """Return when the first optimizer step of this attempt was done; 0: none is."""
        began_ns = int(self._attempt.began_s * 1e9)
        steps_ns = self.world.present_cells(Cell.FIRST_STEP_NS)
        return min((ns for ns in steps_ns if ns >= began_ns), default=0)

    def _log_for_people(self, rank: int) -> str:
        name = self._files.name(self._attempt.number, rank)
        return self.world.log_of(self.world.ranks[rank], self.plan.settings.run.log_dir, name)

    def _keep_record(self, failed: Attempt | None) -> None:
        """Add the attempt to those that summary.json holds; ``failed``: as what, None where it has not."""
        first_ns = self._first_step_ns()
        began_s, fault = self._attempt.began_s, None if failed is None else failed.fault
        self._records.append(
            AttemptRecord(
                attempt=self._attempt.number,
                steps=self.facts.committed_step,
                seconds=round(self._clock.monotonic() - began_s, 3),
                first_step_s=round(first_ns / 1e9 - began_s, 3) if first_ns else None,
                rank=None if fault is None else fault.rank,
                host="" if fault is None else self.world.host_of(fault.rank),
                cause="" if fault is None else fault.cause,
                detail="" if fault is None else fault.detail,
                exit_code=None if failed is None else failed.exit_code,
            )
        )

    # How it ends.

    def _end(self, ending: Ending) -> None:
        """End the run, which is not complete, as it is."""
        self.machine.advance(RunEvent.GAVE_UP)
        self.ending = ending

    def end_at_once(self, line: str) -> None:
        """End a run that has no ending as it is, as a failed one."""
        if self.ending is None:
            self._end(Ending.of(RunStatus.FAILED, line))

    def fail(self, detail: str) -> None:
        """End the run because this agent is at fault itself; one that has ended stays so."""
        if self.ending is not None:
            self.recorder.say(detail.strip(), level="ERROR")
            return
        last = detail.strip().splitlines()[-1]
        line = f"a bug in the supervisor: {last}"
        self._end(Ending.of(RunStatus.FAILED, line, detail=detail))

    @property
    def spare(self) -> dict[str, object]:
        """Nothing: no process waits to become a rank of a script."""
        return {}

    def tidy_up(self, *, has_successor: bool) -> None:
        """Remove what a save into the folder of the logs has left that was cut off; every process has ended."""
        del has_successor
        for path in remove_temporary_files(Path(self.plan.settings.run.log_dir)):
            self.recorder.say(f"removed {path}, which an interrupted save left")

    def closing_words(self) -> str:
        """Return nothing: a script's checkpoints are its own."""
        return ""

    def summary(self, ending: Ending) -> ScriptSummary:
        """Return what summary.json holds."""
        return ScriptSummary(
            run_id=self._run_id,
            status=ending.status,
            exit_code=int(ending.exit_code),
            script=self._script.name,
            arguments=self._script.arguments,
            world_size=len(self.world.present),
            steps=self.facts.committed_step,
            wall_s=round(self._clock.monotonic() - self.recorder.accounting.began_s, 3),
            attempts=tuple(self._records),
            name=self.plan.settings.run.name,
        )
