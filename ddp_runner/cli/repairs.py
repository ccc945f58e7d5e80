"""The faults of a run with their repairs, as rows for the demo: read from its summary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_runner.core.faults import FaultKind
from ddp_runner.core.injection import SHOWS_AS, InjectKind

if TYPE_CHECKING:
    from ddp_runner.observe.summary import FaultRecord, InjectedRecord, RunSummary

_NOTICED_BY = {
    FaultKind.RANK_KILLED.value: "process ended",
    FaultKind.RANK_EXITED.value: "process ended",
    FaultKind.RANK_RAISED.value: "its report",
    FaultKind.RANK_HUNG.value: "no progress",
    FaultKind.COLLECTIVE_STUCK.value: "no progress",
    FaultKind.LOADER_WORKER_DIED.value: "its rank",
    FaultKind.LOADER_TIMEOUT.value: "its rank",
    FaultKind.OUT_OF_MEMORY.value: "its exception",
    FaultKind.COMPILATION_FAILED.value: "its exception",
    FaultKind.REDUCTION_UNFINISHED.value: "gradient check",
    FaultKind.NON_FINITE.value: "all ranks",
    FaultKind.LOSS_EXPLODED.value: "all ranks",
    FaultKind.REPLICA_DIVERGED.value: "its hash",
    FaultKind.BAD_SAMPLE.value: "its rank",
    FaultKind.STORAGE_FAILED.value: "failed save",
    FaultKind.CHECKPOINT_BAD.value: "its SHA-256",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """One fault and its repair.

    ``injected`` is the kind of injection that caused it, None for a fault that was not injected; ``others`` are ranks
    that it hit at the same moment. ``noticed_s`` counts from the injection to the first sign of it; None if
    it was not injected, or did not need noticing. ``repaired_s`` counts from there until every rank
    trained again, or a save succeeded; None if that never happened, or no repair was needed.
    """

    injected: InjectKind | None
    rank: int
    step: int
    phase: str
    noticed_by: str
    noticed_s: float | None
    repaired_s: float | None
    steps_lost: int
    done: str
    others: tuple[int, ...] = ()


def read_repairs(summary: RunSummary) -> list[Repaired]:
    """Return every fault of a run, in the order of notice, and the injections that did not need noticing."""
    rows = [(fault.detected_s, _of_fault(fault)) for fault in (*summary.faults, *summary.tolerated)]
    rows += [
        (one.at_s, _unnoticed(one))
        for one in summary.injected
        if InjectKind(one.kind) not in SHOWS_AS
    ]
    return [row for _, row in sorted(rows, key=lambda timed: timed[0])]


def _of_fault(fault: FaultRecord) -> Repaired:
    first = fault.injected[0] if fault.injected else None
    over_s = fault.recovered_s
    return Repaired(
        injected=_kind_of(first, fault.kind),
        # Where what noticed it blames nobody: the rank that it was done to.
        rank=first.rank if first is not None and fault.rank < 0 else fault.rank,
        others=tuple(one.rank for one in fault.injected[1:]),
        step=fault.step,
        phase=fault.phase,
        noticed_by=_NOTICED_BY.get(fault.kind, fault.kind),
        noticed_s=None if first is None else max(0.0, fault.detected_s - first.at_s),
        repaired_s=None if over_s is None else over_s - fault.detected_s,
        steps_lost=fault.steps_lost,
        done=fault.action or "-",
    )


def _unnoticed(injected: InjectedRecord) -> Repaired:
    return Repaired(
        injected=InjectKind(injected.kind),
        rank=injected.rank,
        step=injected.step,
        phase=injected.phase,
        noticed_by="waited for",
        noticed_s=None,
        repaired_s=None,
        steps_lost=0,
        done="waited for",
    )


def _kind_of(injected: InjectedRecord | None, kind: str) -> InjectKind | None:
    """Return the kind of the injected fault; a bad sample lies in the data, and is not injected at a moment."""
    if injected is not None:
        return InjectKind(injected.kind)
    return InjectKind.BAD_SAMPLE if kind == FaultKind.BAD_SAMPLE.value else None
