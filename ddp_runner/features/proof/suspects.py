"""Has drills that failed diagnosed, and decides what follows where a rank is proved wrong. Never forks or kills."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ddp_runner.checkpoint.catalog import Catalog
from ddp_runner.features.proof.rules import (
    Case,
    Cause,
    cause_of,
    diagnosis_line,
    doubt_line,
    where_to_go_back,
)
from ddp_runner.kernel.parent.ports import Found
from ddp_runner.kernel.rules.faults import Fault, FaultKind
from ddp_runner.kernel.wire import events
from ddp_runner.supervisor.around import OfRun


class Suspects:
    """The ranks whose drills have failed: has each diagnosed, once, and decides what follows where one is proved wrong."""

    def __init__(self, around: OfRun) -> None:
        self._plan = around.plan
        self._recorder = around.recorder
        self._world = around.world
        self._folder = Path(around.plan.settings.run.checkpoint_dir)
        self._wanted = around.plan.settings.recovery.on_wrong_gradient
        self._rollbacks_left = around.plan.settings.recovery.rollbacks_max
        self._case: Case | None = None  # that is being diagnosed
        self._settled: set[int] = (
            set()
        )  # ranks of which the cause is known, and is no wrong gradient
        self._times: dict[int, int] = {}  # rank -> how often it was proved wrong
        self._trusted: dict[
            int, int
        ] = {}  # rank -> the step that follows its newest drill that has passed
        self._begun: int | None = None
        self._found: Found | None = None
        self._left: Case | None = None  # that all ranks go back for
        self._back_at = 0

    @property
    def to_diagnose(self) -> int | None:
        """The rank whose next share is to be computed in several ways; None: nobody's, or that is not known yet."""
        case = self._case
        is_there = case is not None and self._world.ranks[case.rank].processes == case.process
        return case.rank if case is not None and is_there else None

    def take_found(self) -> Found | None:
        """Return what the supervisor has to repair, once."""
        found, self._found = self._found, None
        return found

    def forms(self, processes: Sequence[int]) -> None:
        """Take note of the processes of a generation: what a process had, another one has no more."""
        held = [one.ready.committed_step for one in self._world.present if one.ready is not None]
        if self._begun is None:
            self._begun = max(held, default=0)
        case = self._case
        if case is not None and processes[case.rank] != case.process:
            is_asked = case.is_another and case.process < 0
            self._case = replace(case, process=processes[case.rank]) if is_asked else None
        left, self._left = self._left, None
        if left is not None:
            self._trusted = {r: min(step, self._back_at) for r, step in self._trusted.items()}
            self._recorder.record(
                events.Undone(
                    rank=left.rank, of_step=left.step, step=self._back_at, withdrawn=left.reason
                )
            )

    def passed(self, rank: int, *, step: int) -> None:
        """A drill of this rank has passed: it has computed that step right."""
        self._trusted[rank] = max(step + 1, self._trusted.get(rank, 0))

    def failed(self, drill: events.Drill) -> None:
        """Take in a drill that has found a difference; that of another rank is diagnosed first."""
        rank = drill.rank
        if self._case is not None or rank in self._settled:
            return
        self._case = Case(
            rank=rank,
            step=drill.step,
            differs=drill.differs,
            trusted=self._trusted.get(rank, self._begun or 0),
            is_proved=rank in self._trusted,
            repeats=drill.repeats,
            process=self._world.ranks[rank].processes,
            reason=drill.inexact_reason,
            are_alike=bool(self._trusted),
        )

    def diagnosed(self, message: events.Diagnosed, now_s: float) -> Cause | None:
        """Say what a difference comes from, and what follows; returns the cause."""
        case = self._case
        if case is None or case.rank != message.rank:
            return None
        self._case = None
        cause = cause_of(case, message)
        # A kernel may do what looks like a wrong device.
        run, on_cpu = self._plan.settings.run, self._plan.devices[case.rank].device == "cpu"
        is_certain = on_cpu or run.deterministic
        is_wrong = is_certain and cause in (Cause.ONCE, Cause.DEVICE)
        self._recorder.record(
            replace(
                message,
                of_step=case.step,
                first_in=case.differs,
                source=cause.value,
                line=diagnosis_line(case, message, cause),
                is_warning=is_wrong,
            )
        )
        if is_wrong:
            self._times[case.rank] = (
                2 if cause is Cause.DEVICE else 1 + self._times.get(case.rank, 0)
            )
            self._decide(case, now_s)
        elif is_certain and cause is Cause.LASTING and self._wanted != "continue":
            # Only another process of the same rank shows whether it is the device or what this one has hidden.
            self._case = replace(case, is_another=True, process=-1)
            words = "other bits than any process with its state: replaced, to see if its device is wrong"
            self._found = Found(fault=self._fault(case, words, now_s))
        else:
            self._settled.add(case.rank)
        return cause

    def _decide(self, case: Case, now_s: float) -> None:
        last = max(self._recorder.facts.committed_step, case.step + 1)
        is_lost = self._times[case.rank] > 1
        cause = f"a wrong gradient, first in {case.differs}"
        fault = self._fault(case, cause, now_s, is_lost=is_lost)
        back = None
        then = "recovery.on_wrong_gradient=continue: the run goes on"
        if self._wanted == "stop":
            then = "recovery.on_wrong_gradient=stop"
            self._found = Found(fault=replace(fault, may_retry=False))
        elif self._wanted == "rollback":
            saved = [entry.step for entry in Catalog(self._folder).entries()]
            back = where_to_go_back(
                saved, trusted=case.trusted, failed=case.step, begun=self._begun or 0
            )
            if not self._rollbacks_left:
                back, then = None, "recovery.rollbacks_max is used up: the run goes on"
            elif back is None:
                then = "no checkpoint from before that is left: the run goes on"
            else:
                self._rollbacks_left -= 1
                rest = "" if back.is_sound else ", the newest left from before the wrong step"
                then = f"all ranks go back to step {back.step:,}{rest}"
                self._found = Found(fault=fault, not_after=back.step)
                self._back_at = back.step
                self._left = case if back.is_sound else None
        if self._found is None and is_lost:
            self._found = Found(fault=fault)
        line = doubt_line(case, last=last, then=then)
        self._recorder.record(
            events.InDoubt(rank=case.rank, first=case.trusted + 1, last=last, line=line)
        )

    @staticmethod
    def _fault(case: Case, cause: str, now_s: float, *, is_lost: bool = False) -> Fault:
        kind = FaultKind.DEVICE_LOST if is_lost else FaultKind.WRONG_GRADIENT
        again = " again: its device is given up" if is_lost else ""
        return Fault(
            kind=kind,
            rank=case.rank,
            step=case.step,
            cause=f"rank {case.rank} has computed {cause}{again}",
            at_ns=int(now_s * 1e9),
        )
