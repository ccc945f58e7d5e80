"""Ends a run: at once, or once the newest state that is left is on disk. Holds the only Ending."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from ddp_runner.kernel.parent.ports import ShownStart
from ddp_runner.kernel.parent.rank_handle import RankHandle
from ddp_runner.kernel.parent.run_context import RunContext
from ddp_runner.kernel.parent.run_facts import Ending
from ddp_runner.kernel.processes.children import Ended
from ddp_runner.kernel.processes.rank_process import WhatItWrote, is_self_made
from ddp_runner.kernel.recovery.communicator_cut import Cutting
from ddp_runner.kernel.recovery.last_save import LastSave
from ddp_runner.kernel.rules.exits import (
    STATUS_OF_REASON,
    ExitCode,
    RunStatus,
    StopReason,
    exit_code_of,
)
from ddp_runner.kernel.rules.faults import Fault, FaultKind, fault_line
from ddp_runner.kernel.rules.last_save import SaveOutcome, closing_words
from ddp_runner.kernel.rules.lifecycle import RunEvent
from ddp_runner.kernel.rules.recovery import GiveUp
from ddp_runner.kernel.wire.messages import WriteCopy


def _never(ending: Ending) -> bool:
    """Return False: by default, no state exists outside of files."""
    del ending
    return False


class RunEnd:
    """Driven by :class:`Supervisor`, which says that the run ends, and why. ``ending`` is None until then.

    ``is_open``: the reason is known, and the newest state is still on its way to disk.
    """

    def __init__(
        self, run: RunContext, *, start: ShownStart, cutting: Cutting, owed: Collection[WriteCopy]
    ) -> None:
        """``owed``: what the saver still has to write."""
        self._clock = run.clock
        self._start = start
        self._log_dir = run.log_dir
        self._resume = run.resume
        self._requires_exact = run.settings.require_exact
        self._facts = run.facts
        self._machine = run.machine
        self._recorder = run.record
        self._world = run.world
        self._published = run.published
        self.last_save = LastSave(run, cutting=cutting)
        self._owed = owed
        self._write_timeout_s = run.settings.checkpoint_timeout_s
        self._write_by_s = 0.0
        self.ending: Ending | None = None
        self._after_save: Ending | None = None
        # Whether ranks that have not formed yet hold a state that must be saved before such an ending.
        self.saves_unformed: Callable[[Ending], bool] = _never

    @property
    def is_open(self) -> bool:
        """True if a last save is being made."""
        return self.ending is None and self._after_save is not None

    @property
    def is_known(self) -> bool:
        """True if the way in which the run ends is known, at once or after a save."""
        return self.ending is not None or self._after_save is not None

    def refuse_inexact(self, may_be_withdrawn: Collection[str] = ()) -> None:
        """End a run that is to be exact and is not any more, or was not when it was resumed.

        A reason that ``may_be_withdrawn`` is waited for; once the run is complete it counts like any other.
        """
        # INVARIANT undone-first: a run that is to be exact does not end for what may be undone.
        # Broken if: it is refused as soon as a drill has failed. Guarded by: test_a_run_that_must_be_exact_goes_back_first.
        stays = any(one not in may_be_withdrawn for one in self._facts.inexact_reasons)
        if self._is_refused and stays and not self.is_known:
            self.begin(Ending.of(RunStatus.FAILED, self._refusal()))

    @property
    def _is_refused(self) -> bool:
        return self._requires_exact and bool(self._facts.inexact_reasons)

    def _refusal(self) -> str:
        reasons = "; ".join(self._facts.inexact_reasons)
        return f"the run is not exact, and recovery.require_exact is set: {reasons}"

    def begin(self, ending: Ending, *, causes: Sequence[Fault] = ()) -> None:
        """End the run, once the newest state that is left is on disk."""
        if self.is_known:
            return
        if not (
            self._facts.ever_formed or self.saves_unformed(ending)
        ):  # there is none that is newer
            self.at_once(ending)
            return
        self._after_save, now_s = ending, self._clock.monotonic()
        self._write_by_s = now_s + self._write_timeout_s
        self._machine.advance(RunEvent.LAST_SAVE_BEGAN)
        self.last_save.begin(causes, now_s)

    def give_up(self, plan: GiveUp, *, refusal: Callable[[str], str] | None = None) -> None:
        """End the run because of a fault that is not repaired. ``refusal``: as :attr:`Stages.refusal`."""
        fault = plan.fault
        where = ""
        if fault.rank >= 0:
            where = self._world.machine_of(self._world.ranks[fault.rank])
        if fault.kind is FaultKind.BAD_INPUT:
            self._refused(f"{where}{fault.cause}", refusal)
            return
        has_log = self._recorder.may_write
        log = ""
        if has_log and fault.rank >= 0:
            log = f"; see {self._world.log_of(self._world.ranks[fault.rank], self._log_dir)}"
        reason = f"{fault_line(fault)} ({plan.reason}){log}"
        if plan.status is RunStatus.GAVE_UP:
            reason = f"{given_up_line(plan, committed_step=self._facts.committed_step)}{log}"
        detail = "" if has_log else self._start.without_shown(fault.detail)
        if fault.kind is FaultKind.CHECKPOINT_BAD and not has_log:
            reason, detail = (
                f"{where}{fault.cause}",
                "",
            )  # which says it all; our own lines explain nothing
        causes = self._recorder.history[-1].attribution.causes
        self.begin(Ending.of(plan.status, reason, detail=detail), causes=causes)

    def bad_input(self, line: str) -> None:
        """End the run because of what the user has given it."""
        self.begin(Ending.of(RunStatus.FAILED, line, exit_code=ExitCode.BAD_USAGE, error_line=line))

    def _refused(self, line: str, refusal: Callable[[str], str] | None) -> None:
        """End the run because a rank cannot train what it is given, or such a stage of it."""
        if refusal is not None:
            line = refusal(line)
        if refusal is None or not self._facts.ever_formed:
            self.bad_input(line)
        else:  # what was trained before is kept
            self.begin(Ending.of(RunStatus.FAILED, line))

    def program_ended(self, handle: RankHandle, ended: Ended, wrote: WhatItWrote) -> None:
        """End a run whose training has ended where a rank's program has failed behind it."""
        if ended.exit_code == 0:
            return
        code = exit_code_of(exit_code=ended.exit_code, signal_number=ended.signal_number)
        log = self._world.log_of(handle, self._log_dir)
        # Who is killed from outside says nothing of it: its last words are lines of training.
        is_killed = ended.signal_number is not None and not is_self_made(ended.signal_number)
        said = "" if is_killed else wrote.last
        self.failed_behind(f"rank {handle.rank} ended with code {code}; see {log}", said)

    def failed_behind(self, why: str, detail: str = "") -> None:
        """End a run whose training has ended, because the program that trained has not come to its own end."""
        line = f"training had ended, and the program failed behind it: {why}"
        self.begin(Ending.of(RunStatus.FAILED, line, detail=detail))

    def at_once(self, ending: Ending) -> None:
        """End the run as it is."""
        self._machine.advance(RunEvent.GAVE_UP)
        self.ending = ending

    def completed(self, reason: StopReason, *, objections: Sequence[str] = ()) -> None:
        """Every rank has finished. A complete run with ``objections`` has failed all the same."""
        if reason is StopReason.COMPLETED and objections:
            line = f"training is complete, but {'; '.join(objections)}"
            self.at_once(Ending.of(RunStatus.FAILED, line))
            return
        if self._is_refused and not self._facts.was_complete:
            self.at_once(Ending.of(RunStatus.FAILED, self._refusal()))
            return
        self._machine.advance(RunEvent.ALL_FINISHED)
        status = STATUS_OF_REASON[reason]
        self.ending = Ending.of(status, status.value)

    def look(self, now_s: float, *, stop: StopReason | None) -> None:
        """Go on with the last save; the end follows it. ``stop``: what the ranks were asked for before."""
        ending = self._after_save
        if ending is None:
            return
        self.last_save.look(now_s, is_owed=bool(self._owed))
        if self.last_save.outcome is None or (self._owed and now_s <= self._write_by_s):
            return
        for order in self._owed:
            self._recorder.say(
                f"the copy of step {order.step} in memory is not written: it is lost with the run",
                level="WARNING",
            )
        if stop is not None and self.is_saved and _ends_as_stopped(ending):
            line = f"{stop.value}, and saved in spite of it: {ending.reason}"
            ending = Ending.of(STATUS_OF_REASON[stop], line)
        self.at_once(ending)

    @property
    def is_saved(self) -> bool:
        """True if the newest state is in the checkpoint folder."""
        outcome, newest = self.last_save.outcome, self._published.newest()
        if outcome is not None and outcome.is_saved and not outcome.is_rescued:
            return True
        return newest is not None and newest[0] >= self._facts.committed_step

    def cut_short(self) -> None:
        """End now, without the save that is being made."""
        if self._after_save is not None:
            self.at_once(self._after_save)

    def closing_words(self) -> str:
        """Return which step is on disk, and how to resume; empty if this run has made no file."""
        if not self._recorder.may_write:
            return ""
        return closing_words(
            self.last_save.outcome or SaveOutcome(),
            newest=self._published.newest(),
            committed_step=self._facts.committed_step,
            resume=self._resume,
        )


def given_up_line(plan: GiveUp, *, committed_step: int) -> str:
    """Return ``gave up at step 481: 11 repairs within an hour (--max-restarts 10); the last: rank 0 killed``."""
    last, began = fault_line(plan.fault), ""
    if plan.began is not None and fault_line(plan.began) != last:
        began = f"; it began with: {fault_line(plan.began)}"
    return f"gave up at step {committed_step}: {plan.reason}{began}; the last: {last}"


def _ends_as_stopped(ending: Ending) -> bool:
    """Return True if a run that had to stop and save has now saved, so that it ends as was asked."""
    return ending.is_late_stop or ending.status is RunStatus.GAVE_UP
