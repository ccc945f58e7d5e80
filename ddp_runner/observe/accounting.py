"""Keeps account of a run: its incidents, where the time went, and the summary of both."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ddp_runner.core.injection import SHOWS_AS, InjectKind
from ddp_runner.kernel.rules.exits import RunStatus
from ddp_runner.kernel.rules.faults import FaultKind
from ddp_runner.kernel.rules.recovery import Incident, ReplaceRanks
from ddp_runner.kernel.wire import events
from ddp_runner.kernel.wire.board import SlotReading
from ddp_runner.observe.summary import (
    EndOfRun,
    ExactProof,
    FaultRecord,
    InjectedRecord,
    RunFindings,
    RunSummary,
    StageRecord,
    TimeShares,
)
from ddp_runner.observe.view import FaultView

INJECTED_KEPT = 1000  # of the newest injections, each
REPAIRED_KEPT = 500  # of the first faults that ranks repaired themselves, and of the last: each
TOLERATED_KEPT = 500  # of the newest faults that needed no repair, each


class Injections:
    """The injections of ``--inject``, and those that have not been noticed yet."""

    def __init__(self, *, began_s: float) -> None:
        self._began_s = began_s
        self.records: deque[InjectedRecord] = deque(maxlen=INJECTED_KEPT)
        self._unnoticed: deque[InjectedRecord] = deque(maxlen=INJECTED_KEPT)

    def happened(self, event: events.Injected, now_s: float) -> None:
        """Record an injection that happens now."""
        record = InjectedRecord(
            kind=event.kind,
            rank=event.rank,
            number=event.number,
            step=event.step,
            phase=event.phase,
            at_s=round(now_s - self._began_s, 3),
        )
        self.records.append(record)
        if InjectKind(record.kind) in SHOWS_AS:
            self._unnoticed.append(record)

    def noticed(self, kind: FaultKind, rank: int) -> tuple[InjectedRecord, ...]:
        """The oldest one into ``rank`` (-1: any) that shows as such a fault; it belongs to no other."""
        for record in self._unnoticed:
            if rank in (record.rank, -1) and kind in SHOWS_AS[InjectKind(record.kind)]:
                self._unnoticed.remove(record)
                return (record,)
        return ()


class MinorFaults:
    """Filled by the account of a run. Times are monotonic seconds."""

    def __init__(self, injections: Injections, *, began_s: float) -> None:
        self._injections = injections
        self._began_s = began_s
        self._first: list[FaultRecord] = []
        self._last: deque[FaultRecord] = deque(maxlen=REPAIRED_KEPT)
        self.left_out = 0  # of the repaired ones
        self._tolerated: deque[FaultRecord] = deque(maxlen=TOLERATED_KEPT)
        self._failing_saves: FaultRecord | None = None  # until one succeeds

    @property
    def repaired(self) -> list[FaultRecord]:
        """The faults that ranks repaired within a generation: the first ones, and the last ones."""
        return [*self._first, *self._last]

    def newest_repaired(self, count: int) -> list[FaultRecord]:
        """The last of those, oldest first."""
        last = list(self._last)[-count:]
        return [*self._first[max(0, len(self._first) - count + len(last)) :], *last]

    @property
    def tolerated(self) -> list[FaultRecord]:
        """The faults that needed no repair, oldest first."""
        failing = [] if self._failing_saves is None else [self._failing_saves]
        return sorted([*self._tolerated, *failing], key=lambda record: record.detected_s)

    def repair(self, event: events.RepairedInPlace, now_s: float) -> None:
        """A rank has repaired a fault within its generation; it counts in no budget."""
        record = replace(
            self._record(event, at_s=now_s - event.seconds),
            recovered_s=round(now_s - self._began_s, 3),
            steps_lost=event.steps_lost,
            detail=event.fault.detail,
            seconds={"total": round(event.seconds, 4)},
        )
        if len(self._first) < REPAIRED_KEPT:
            self._first.append(record)
            return
        self.left_out += len(self._last) == REPAIRED_KEPT
        self._last.append(record)

    def tolerate(self, event: events.FaultTolerated, now_s: float) -> None:
        """The run goes on in spite of a fault. One trouble of a disk may cost several saves."""
        fails = event.fault.kind is FaultKind.STORAGE_FAILED
        if fails and self._failing_saves is not None:
            times = self._failing_saves.times + 1
            self._failing_saves = replace(self._failing_saves, times=times)
            return
        record = replace(self._record(event, at_s=now_s), detail=event.detail)
        if fails:
            self._failing_saves = record
        else:
            self._tolerated.append(record)

    def saved(self, now_s: float) -> None:
        """A save has succeeded."""
        if self._failing_saves is not None:
            over_s = round(now_s - self._began_s, 3)
            self._tolerated.append(replace(self._failing_saves, recovered_s=over_s))
            self._failing_saves = None

    def _record(
        self, event: events.RepairedInPlace | events.FaultTolerated, *, at_s: float
    ) -> FaultRecord:
        """Return a fault that was detected at ``at_s``, and that has cost nothing so far."""
        fault = event.fault
        return FaultRecord(
            kind=fault.kind.value,
            rank=fault.rank,
            step=fault.step,
            cause=fault.cause,
            detected_s=round(at_s - self._began_s, 3),
            recovered_s=None,
            steps_lost=0,
            generation=event.generation,
            phase=fault.phase,
            action=event.action,
            injected=self._injections.noticed(fault.kind, fault.rank),
            host=fault.host,
        )


@dataclass(slots=True, kw_only=True)
class OpenFault:
    """An incident whose repair is under way or done."""

    incident: Incident
    began_s: float
    generation: int
    event_id: int
    outcome: str  # of the plan, for the line that reports the repair
    action: str = ""  # all that was done
    injected: tuple[InjectedRecord, ...] = ()  # what has brought it about, if that was asked for
    all_ranks_dead: bool = False
    recovered_s: float | None = None
    steps_lost: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


class RunAccounting:
    """Filled by the events of a run, in their order. Times are monotonic seconds."""

    def __init__(self, *, began_s: float) -> None:
        self.began_s = began_s
        self.first_step_s: float | None = None
        self.faults: list[OpenFault] = []
        self.before: tuple[FaultRecord, ...] = ()  # of launches whose ranks this one took over
        self.restarts = 0
        self._injections = Injections(began_s=began_s)
        self._minor = MinorFaults(self._injections, began_s=began_s)
        self.checkpoint = ""
        self.checkpoint_step: int | None = None
        self._launch_step: int | None = None
        self._parts: dict[str, float] = {}  # seconds of the generation that forms
        self._productive_at_save: dict[int, int] = {}
        self._lost_ns = 0
        self._before_ns = (
            0  # productive, in a launch whose ranks this one took over on its own machine
        )
        self._recovery_s = 0.0
        self._recovered_until_s = began_s  # what came before is counted
        self._unfinished_s = 0.0  # in steps that a fault cut short, detection included
        self._stage_ended_s: float | None = None  # until ranks train the next one
        self._between_stages_s = 0.0

    def count_from(self, productive_ns: int) -> None:
        """Count only what ranks do from here on: their processes have trained in another launch before."""
        self._before_ns = productive_ns

    @property
    def history(self) -> list[Incident]:
        """The incidents so far, oldest first."""
        return [fault.incident for fault in self.faults]

    @property
    def faults_total(self) -> int:
        """Incidents, and faults that ranks repaired themselves, also those that are not listed."""
        listed = (*self.before, *self.faults, *self._minor.repaired)
        return len(listed) + self._minor.left_out

    def newest_faults(self, count: int, *, now_s: float) -> tuple[FaultView, ...]:
        """The newest that were repaired, or are to be, oldest first."""
        found = [
            FaultView(
                text=_said_of(one.incident.culprit.rank, one.incident.culprit.cause),
                step=one.incident.culprit.step,
                age_s=now_s - one.began_s,
                repaired_s=None if one.recovered_s is None else one.recovered_s - one.began_s,
                is_being_repaired=any(one is open_one for open_one in self._open),
            )
            for one in self.faults[-count:]
        ]
        found += [
            FaultView(
                text=_said_of(one.rank, one.cause),
                step=one.step,
                age_s=now_s - self.began_s - one.detected_s,
                repaired_s=one.seconds.get("total", 0.0),
                is_being_repaired=False,
            )
            for one in self._minor.newest_repaired(count)
        ]
        return tuple(sorted(found, key=lambda one: -one.age_s)[-count:])

    def take(  # noqa: C901, PLR0912 - one row an event
        self, event: events.Event, *, now_s: float, cause: int | None = None
    ) -> None:
        """Account for an event; most need no account."""
        match event:
            case events.CheckpointSaved():
                self.newest_checkpoint((event.step, event.path))
                self._minor.saved(now_s)
                if event.productive_ns is not None:
                    self.saved(event.step, event.productive_ns)
            case events.Plan():
                self.incident(event, event_id=-1 if cause is None else cause)
            case events.TuningChanged(fault_free=True, plain_retry=True):
                self.plain_retry(event.rank)
            case events.CopyTaken(step=step):
                for fault in self._open:
                    fault.action += f" (in memory, of step {step})"
            case events.RepairedInPlace():
                self._minor.repair(event, now_s)
            case events.FaultTolerated():
                self._minor.tolerate(event, now_s)
            case events.Injected():
                self._injections.happened(event, now_s)
            case events.Forming():
                self.forming(now_s)
            case events.StageEnds():
                self._stage_ended_s = now_s
            case events.WorldFormed(step=step):
                self._stage_begun(now_s)
                self._begin_at(step, steps_lost=0, productive_ns=0)
            case events.Repaired():
                self._close(event, now_s)
            case events.RankFormed():
                seconds = {
                    "group": event.group_s,
                    "transfer": event.transfer_s,
                    "rebuild": event.rebuild_s,
                }
                for name, value in seconds.items():  # the slowest rank's count
                    self._parts[name] = max(self._parts.get(name, 0.0), value)
            case _:
                pass

    def newest_checkpoint(self, newest: tuple[int, str] | None) -> None:
        """The checkpoint that the run would leave now, as step and path; None if nobody knows better."""
        if newest is not None:
            self.checkpoint_step, self.checkpoint = newest

    def saved(self, step: int, productive_ns: int) -> None:
        """A checkpoint was published; what comes after it may be lost."""
        # Net of what was lost before, so that each rollback counts its own work once.
        self._productive_at_save[step] = productive_ns - self._before_ns - self._lost_ns
        while len(self._productive_at_save) > 64:
            del self._productive_at_save[min(self._productive_at_save)]

    def incident(self, plan: events.Plan, *, event_id: int) -> None:
        """An incident is closed and being repaired, if it is; ``event_id`` of its first fault."""
        if self._stage_ended_s is not None:  # no step was cut short
            self._stage_begun(plan.began_s)
        elif not self._open and plan.kind != FaultKind.STORAGE_FAILED.value:  # behind the last step
            self._unfinished_s += max(0.0, plan.began_s - plan.since_s)
        fault = OpenFault(
            incident=plan.incident,
            began_s=plan.began_s,
            generation=plan.generation,
            event_id=event_id,
            outcome=plan.outcome,
            action=plan.action,
            injected=tuple(
                one
                for cause in plan.incident.attribution.causes
                for one in self._injections.noticed(cause.kind, cause.rank)
            ),
            all_ranks_dead=plan.all_ranks_dead,
        )
        if plan.detect_s is not None:
            fault.seconds["detect"] = plan.detect_s
            fault.seconds["abort"] = plan.incident.at_s - plan.began_s
        self.faults.append(fault)
        self.restarts += plan.plan == ReplaceRanks.__name__

    def plain_retry(self, rank: int) -> None:
        """The process that follows this rank's has nothing left to change: its end is to count."""
        for fault in reversed(self.faults):
            if any(cause.rank == rank for cause in fault.incident.attribution.causes):
                fault.incident = replace(fault.incident, plain_retry=True)
                return

    def forming(self, now_s: float) -> None:
        """Note that every rank that is needed is there: the forming of the generation follows."""
        self._parts = dict.fromkeys(("group", "transfer", "rebuild"), 0.0)
        for fault in self._open:
            fault.seconds["fork"] = now_s - fault.incident.at_s

    @property
    def _open(self) -> list[OpenFault]:
        return [fault for fault in self.faults if fault.recovered_s is None]

    def repairs_at(
        self, now_s: float, *, generation: int, step: int, productive_ns: int
    ) -> list[tuple[events.Repaired, int]]:
        """Return the repairs that end once the world trains at ``step``, oldest first, with the ids of their causes.

        Changes nothing: the caller records them. Of incidents that end together, the last one has cost
        the steps.
        """
        before = max((fault.incident.committed_step for fault in self._open), default=step)
        return [
            (
                events.Repaired(
                    generation=generation,
                    steps_lost=max(0, before - step) if fault is self._open[-1] else 0,
                    is_last=fault is self._open[-1],
                    seconds=round(now_s - fault.began_s, 4),
                    culprit=fault.incident.culprit,
                    outcome=fault.outcome,
                    step=step,
                    productive_ns=productive_ns,
                ),
                fault.event_id,
            )
            for fault in self._open
        ]

    def _close(self, repaired: events.Repaired, now_s: float) -> None:
        """The oldest open incident is over."""
        fault = self._open[0]
        fault.recovered_s = now_s
        fault.steps_lost = repaired.steps_lost
        fault.seconds.update(self._parts, total=now_s - fault.began_s)
        self._recovery_s += now_s - max(fault.began_s, self._recovered_until_s)
        self._recovered_until_s = now_s
        if not self._open:
            self._begin_at(
                repaired.step,
                steps_lost=repaired.steps_lost,
                productive_ns=repaired.productive_ns,
            )

    def _stage_begun(self, now_s: float) -> None:
        """Count the time since a stage ended as the start of the next one; after a fault it is recovery time."""
        if self._stage_ended_s is not None:
            self._between_stages_s += max(0.0, now_s - self._stage_ended_s)
            self._stage_ended_s = None

    def _begin_at(self, step: int, *, steps_lost: int, productive_ns: int) -> None:
        """The world trains from ``step`` on; ``steps_lost`` of those after it were done before."""
        if steps_lost:
            net_ns = productive_ns - self._before_ns - self._lost_ns
            self._lost_ns += max(0, net_ns - self._kept_ns(step, step + steps_lost, net_ns))
        elif self._launch_step is None:
            self._launch_step = step

    def _kept_ns(self, step: int, before: int, net_ns: int) -> int:
        """Return the part of the work up to step ``before`` that led to ``step``: spread evenly since a save."""
        known = {self._launch_step or 0: 0, **self._productive_at_save}
        saved = max((one for one in known if one <= step), default=step)
        saved_ns = known.get(saved, 0)
        return saved_ns + (net_ns - saved_ns) * (step - saved) // (before - saved)

    def summary(
        self,
        end: EndOfRun,
        *,
        facts: RunFindings,
        world_size: int,
        steps_per_epoch: int,
        own_step_s: Mapping[int, float | None],
    ) -> RunSummary:
        """Sum up the run. ``own_step_s``: by rank, the time of a step in which it waits for nobody."""
        repaired = [*self._minor.repaired, *(self._record(fault) for fault in self.faults)]
        return RunSummary(
            run_id=facts.run_id,
            name=facts.name,
            stage=facts.stage,
            stages=_stages(facts.stages, end),
            world_size=world_size,
            epochs=end.whole("epochs", facts.own_steps(end.steps) // max(1, steps_per_epoch)),
            exact=_is_exact(facts, end),
            inexact_reasons=tuple(facts.inexact_reasons),
            exact_proof=ExactProof.of(facts.proved, facts.repairs_proved, facts.differences),
            wall_s=round(end.now_s - self.began_s, 3),
            time_s=self.shares(end.reading, now_s=end.now_s),
            faults=(*self.before, *sorted(repaired, key=lambda record: record.detected_s)),
            tolerated=tuple(self._minor.tolerated),
            injected=tuple(self._injections.records),
            faults_left_out=self._minor.left_out,
            checkpoint=str(end.report.get("checkpoint") or self.checkpoint) or None,
            checkpoint_step=end.steps if end.report.get("checkpoint") else self.checkpoint_step,
            own_step_s={
                str(rank): round(seconds, 6)
                for rank, seconds in own_step_s.items()
                if seconds is not None
            },
            stragglers={str(rank): factor for rank, factor in facts.stragglers.items()},
            machines_lost=dict(facts.machines_lost),
            **end.reported(),
            **self._rates(end, ranks=world_size),
        )

    def _rates(self, end: EndOfRun, *, ranks: int) -> dict[str, Any]:
        """Return the average rates of this launch's steps, over its time since the first of them."""
        seconds = 0.0 if self.first_step_s is None else end.now_s - self.first_step_s
        done = end.steps - (self._launch_step or 0)
        if done <= 0 or seconds <= 0.0:
            return {}
        share = done / end.steps / seconds
        rates = {"samples_per_s": end.samples * share} if end.samples else {}
        tokens = end.number("all_tokens")
        if tokens is not None:
            rates["tokens_per_s"] = tokens * share
            flops, peak = map(end.number, ("flops_per_token", "peak_flops"))
            if flops is not None and peak:
                rates["flops_utilization"] = tokens * share * flops / (peak * ranks)
        return {name: round(value, 6) for name, value in rates.items()}

    def shares(self, reading: SlotReading, *, now_s: float) -> TimeShares:
        """Return the uses of time up to now. ``reading``: of a rank that was there all along."""
        first_step_s = self.first_step_s if self.first_step_s is not None else now_s
        startup_s = first_step_s - self.began_s
        return TimeShares(
            startup=round(startup_s + self._between_stages_s, 3),
            productive=round((reading.productive_ns - self._before_ns - self._lost_ns) / 1e9, 3),
            data_wait=round(reading.data_wait_ns / 1e9, 3),
            checkpoint=round(reading.checkpoint_ns / 1e9, 3),
            comparison=round(reading.comparison_ns / 1e9, 3),
            evaluation=round(reading.evaluation_ns / 1e9, 3),
            recovery=round(self._recovery_s, 3),
            lost=round(self._lost_ns / 1e9 + self._unfinished_s, 3),
        )

    def _record(self, fault: OpenFault) -> FaultRecord:
        culprit = fault.incident.culprit
        recovered = fault.recovered_s
        return FaultRecord(
            kind=culprit.kind.value,
            rank=culprit.rank,
            step=culprit.step,
            cause=culprit.cause,
            detected_s=round(fault.began_s - self.began_s, 3),
            recovered_s=None if recovered is None else round(recovered - self.began_s, 3),
            steps_lost=fault.steps_lost,
            generation=fault.generation,
            detail=culprit.detail,
            victims=tuple(victim.rank for victim in fault.incident.attribution.victims),
            all_ranks_dead=fault.all_ranks_dead,
            seconds={name: round(value, 4) for name, value in fault.seconds.items()},
            phase=culprit.phase,
            action=fault.action,
            injected=fault.injected,
            host=culprit.host,
        )


def _said_of(rank: int, cause: str) -> str:
    """Return a line with the rank and the cause."""
    first = cause.split("\n", maxsplit=1)[0]
    who = f"rank {rank}"
    return first if rank < 0 or first.startswith((f"{who} ", f"{who}'")) else f"{who}: {first}"


def _is_exact(facts: RunFindings, end: EndOfRun) -> bool | None:
    """Return whether the run is exact; None if it has no reason to be inexact and has made no step either."""
    if facts.inexact_reasons:
        return False
    return True if end.steps else None


def _stages(stages: Sequence[StageRecord], end: EndOfRun) -> tuple[StageRecord, ...]:
    """Return the stages; the last one has ended with the run, if that is completed."""
    if not stages or not end.finished or end.status is not RunStatus.COMPLETED:
        return tuple(stages)
    last = replace(stages[-1], last_step=end.steps, loss=end.number("loss"))
    return (*stages[:-1], last)
