"""Lists what opens no incident: injections, faults repaired within a generation, and those that need no repair.

Each list is bounded, for a run may take months. Decides nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from ddp_runner.core.injection import SHOWS_AS, InjectKind
from ddp_runner.kernel.rules.faults import FaultKind
from ddp_runner.kernel.wire import events
from ddp_runner.observe.summary import FaultRecord, InjectedRecord

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
