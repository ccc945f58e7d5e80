"""Decides how ``run`` starts a program, and whether a failed program is started again. Values in, values out."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ddp_runner.core.settings import RecoverySettings
from ddp_runner.kernel.rules.classify import VICTIM_KINDS, attribute
from ddp_runner.kernel.rules.exits import OF_SIGNAL, ExitCode, RunStatus, StopReason
from ddp_runner.kernel.rules.faults import Fault, FaultKind, Origin
from ddp_runner.kernel.rules.recovery import budget_spent
from ddp_runner.kernel.rules.repeats import same_error

RANK = "ddp_runner.features.script.child"
NEWEST = "{}"
WRONG_ARGUMENTS = 2  # argparse's exit code, and that of most programs
GRACE_AFTER_FAULT_S = 1.0  # from SIGTERM to SIGKILL, for the ranks that are left
GRACE_AT_STOP_S = 30.0
EXIT_CODE_OF_STOP = {StopReason.INTERRUPTED: 130, StopReason.PREEMPTED: 143}
STOPPED_MAX_S = 10.0  # for which the system may hold a rank stopped
# What an exception may have led to in the same rank, and may not stand for.
_EXPLAINED = (FaultKind.RANK_EXITED, FaultKind.RANK_KILLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeWith:
    """Words that a script is given at each start at which a file exists; ``pattern`` is a glob.

    Where they have NEWEST in them, that stands for the newest match that is whole.
    """

    pattern: str
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptPlan:
    """A program of the user's: a Python file, a module as of ``python -m``, or a program as it is (``is_program``).

    ``path`` of a file is absolute, and as it was written with several machines; exactly one of ``path`` and
    ``module`` is not empty. ``restarts``: it may be
    started again, because the user has said how it resumes, or how often. ``preload``: modules that the
    zygote imports ahead. ``plain_saves``: torch.save is left as it is. ``from_scratch``: it may begin at its
    beginning where an attempt before has saved something. ``hang_timeout_s``: without a sign of any rank; 0: no limit. ``shown_ranks``: whose lines the console has,
    None: all; ``marks_lines``: and each says whose it is. ``role`` and ``rdzv_id``: for the variables that torchrun sets.
    """

    path: str
    module: str
    arguments: tuple[str, ...]
    restarts: bool
    grace_period_s: float = GRACE_AT_STOP_S
    preload: tuple[str, ...] = ()
    resume_with: tuple[ResumeWith, ...] = ()
    plain_saves: bool = False
    from_scratch: bool = False
    hang_timeout_s: float = 0.0
    is_program: bool = False
    shown_ranks: tuple[int, ...] | None = (0,)
    marks_lines: bool = False
    role: str = "default"
    rdzv_id: str = ""
    in_place: bool = False

    @property
    def name(self) -> str:
        """The name that people see: that of the file or of the module."""
        return self.module or self.path.rpartition("/")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptCall:
    """Holds what a rank of a script is given, with the values that torchrun passes on. ``is_program``: it is not a Python file.

    ``path``: relative where it was written so, as each of several machines may have its own working folder.
    """

    path: str
    module: str
    arguments: tuple[str, ...]
    is_program: bool
    plain_saves: bool
    run_id: str
    role: str
    attempt: int
    max_restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of all ranks that has failed: why, how many optimizer steps it had made, and when."""

    fault: Fault
    exit_code: int
    steps: int
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAgain:
    """All ranks, after so long."""

    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRun:
    """Not again: the run ends with ``exit_code``, that of the rank that failed first if nothing else is said."""

    reason: str
    status: RunStatus
    exit_code: int


def does_not_resume(*, attempt: int, saved_before: bool, steps: int, loads: int) -> bool:
    """Return whether an attempt trains without having read a checkpoint although an earlier attempt saved one.

    ``attempt`` counts from 0; ``steps`` and ``loads`` are of this one.
    """
    return attempt > 0 and saved_before and steps > 0 and loads == 0


def explained(faults: Sequence[Fault], recorded: Sequence[Fault]) -> list[Fault]:
    """Return ``faults`` with what was recorded: a rank that has exited did so because of its exception.

    A rank that somebody else has killed was; one that was ended because of others, and had raised before, counts.
    """
    by_rank = {fault.rank: fault for fault in recorded}
    found = []
    for fault in faults:
        said = by_rank.pop(fault.rank, None)
        if said is None or fault.origin is Origin.OUTSIDE:
            found.append(fault)
        elif fault.kind in _EXPLAINED:
            found.append(said)
        else:  # it has said so itself, with all of the traceback
            found.append(replace(fault, at_ns=min(fault.at_ns, said.at_ns)))
    return found + list(by_rank.values())


def first_cause(faults: Sequence[Fault], left: Sequence[Fault]) -> Fault:
    """Return the fault that ended an attempt, where ``left`` holds the ranks that ended with 0 before.

    Ending is no fault by itself. But a rank that only lost its peer lost the one that ended first.
    """
    culprit = attribute(faults).culprit
    others = [fault for fault in left if fault.rank != culprit.rank]
    if culprit.kind in VICTIM_KINDS and others:
        return min(others, key=lambda fault: fault.at_ns)
    return culprit


def was_asked_to_end(
    *, exit_code: int | None, signal_number: int | None, was_killed: bool, stops: bool
) -> bool:
    """Return whether a rank, once what is left of an attempt was asked to end, has ended because of that.

    One that had failed before may be reaped later. ``stops``: all were asked, for the end of the run.
    """
    asked = signal.SIGTERM
    by_signal = signal_number == asked or was_killed
    return by_signal or exit_code in (0, OF_SIGNAL + asked) or stops


def failure_line(fault: Fault, *, steps: int | None, place: str = "") -> str:
    """Return who has failed and how, after so many optimizer steps; None: they are not counted.

    ``place``: the machine of that rank, where there are several.
    """
    what = fault.cause
    if fault.kind is not FaultKind.NODE_LOST:
        if fault.rank >= 0 and not what.startswith("rank "):
            what = f"rank {fault.rank}: {what}"
        what = f"{place}: {what}" if place else what
    return what if steps is None else f"{what} after {steps:,} optimizer steps"


def plan_restart(
    attempts: Sequence[Attempt],
    *,
    restarts: bool,
    settings: RecoverySettings,
    counts_steps: bool = True,
) -> StartAgain | EndRun:
    """Return what follows the newest of ``attempts``, all of which have failed, oldest first.

    A script that does not resume starts over and overwrites its results, so no script is
    restarted unless the user asked for that. If no steps are counted (``counts_steps``), only the budget ends the run.
    """
    newest, earlier = attempts[-1], attempts[:-1]

    def end(reason: str) -> EndRun:
        return EndRun(reason=reason, status=RunStatus.FAILED, exit_code=newest.exit_code)

    if newest.exit_code == WRONG_ARGUMENTS and newest.fault.kind is FaultKind.RANK_EXITED:
        return end("its arguments are wrong")
    if not restarts:
        return end("restarted only with --max-restarts or --resume-with")
    is_of_script = newest.fault.kind is not FaultKind.NODE_LOST
    if is_of_script and counts_steps and not any(attempt.steps for attempt in attempts):
        return end("it failed before the first optimizer step")
    kind, origin = newest.fault.kind, newest.fault.origin
    is_own = kind in (FaultKind.RANK_RAISED, FaultKind.RANK_EXITED) or (
        kind in (FaultKind.RANK_HUNG, FaultKind.COLLECTIVE_STUCK) and origin is Origin.OWN
    )
    is_own = is_own and counts_steps
    if is_own and any(
        attempt.steps == newest.steps and same_error(attempt.fault, newest.fault)
        for attempt in earlier
    ):
        return end("the same error after as many steps again")
    since_s = newest.at_s - settings.restart_window_s
    recent = [attempt for attempt in earlier if attempt.at_s >= since_s]
    if len(recent) >= settings.max_restarts:
        return EndRun(
            reason=budget_spent(len(recent) + 1, "restart", settings),
            status=RunStatus.GAVE_UP,
            exit_code=int(ExitCode.GAVE_UP),
        )
    return StartAgain(delay_s=settings.backoff_first_s)
