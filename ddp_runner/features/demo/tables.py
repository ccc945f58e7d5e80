"""Tables of ``demo`` and ``check``: the faults of a run with their repairs, read from its summary, and what was checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_runner.core.injection import FOR_DRILLS, SHOWS_AS, InjectKind
from ddp_runner.kernel.rules.faults import FaultKind
from ddp_runner.observe.format import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddp_runner.observe.summary import FaultRecord, InjectedRecord, RunSummary

_WHAT_WAS_DONE = {
    InjectKind.KILL: "SIGKILL",
    InjectKind.STOP: "SIGSTOP",
    InjectKind.EXIT: "exit(0)",
    InjectKind.RAISE: "exception",
    InjectKind.HANG: "sleep",
    InjectKind.SPIN: "endless loop",
    InjectKind.GIL: "GIL held",
    InjectKind.SLOW: "slow rank",
    InjectKind.LOADER_KILL: "loader kill",
    InjectKind.LOADER_STOP: "loader stop",
    InjectKind.OOM: "out of memory",
    InjectKind.UNUSED: "unused layer",
    InjectKind.NAN: "loss is NaN",
    InjectKind.SPIKE: "loss x 10,000",
    InjectKind.DIVERGE: "flipped bit",
    InjectKind.WRONG_GRADIENT: "bad gradient",
    InjectKind.HIDDEN_STATE: "hidden state",
    InjectKind.BAD_SAMPLE: "bad sample",
    InjectKind.DISK_FULL: "disk full",
    InjectKind.DISK_ERROR: "I/O error",
    InjectKind.SLOW_DISK: "slow disk",
    InjectKind.CORRUPT_CHECKPOINT: "file damaged",
}
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
    kind = InjectKind(injected.kind)
    by = done = "waited for"
    if kind in FOR_DRILLS:
        by, done = "drills only", "nothing: no drill of that step was due"
    return Repaired(
        injected=kind,
        rank=injected.rank,
        step=injected.step,
        phase=injected.phase,
        noticed_by=by,
        noticed_s=None,
        repaired_s=None,
        steps_lost=0,
        done=done,
    )


def _kind_of(injected: InjectedRecord | None, kind: str) -> InjectKind | None:
    """Return the kind of the injected fault; a bad sample lies in the data, and is not injected at a moment."""
    if injected is not None:
        return InjectKind(injected.kind)
    return InjectKind.BAD_SAMPLE if kind == FaultKind.BAD_SAMPLE.value else None


def show_repairs(repairs: Sequence[Repaired]) -> None:
    """Print one row for each, with its times; at most 80 columns."""
    _show(
        ("fault", "rank", "step", "phase", "noticed by", "after", "repaired", "lost"),
        (
            (
                *_what_and_where(repair),
                repair.phase or "-",
                repair.noticed_by,
                _seconds(repair.noticed_s),
                _seconds(repair.repaired_s),
                str(repair.steps_lost),
            )
            for repair in repairs
        ),
    )


def show_changes(repairs: Sequence[Repaired]) -> None:
    """Print one row for each, with what was done; at most 80 columns."""
    _show(
        ("fault", "rank", "step", "noticed by", "what is done"),
        ((*_what_and_where(repair), repair.noticed_by, repair.done) for repair in repairs),
        last_wraps=True,
    )


def show_checked(rows: Iterable[tuple[str, bool, float | None, str]]) -> None:
    """Print one row for each thing that was checked: whether it holds, how long it took, and why not."""
    _show(
        ("what", "holds", "seconds", ""),
        (
            (what, "yes" if holds else "NO", "-" if seconds is None else f"{seconds:.2f}", says)
            for what, holds, seconds, says in rows
        ),
        last_wraps=True,
    )


def _what_and_where(repair: Repaired) -> tuple[str, str, str]:
    what = "not injected" if repair.injected is None else _WHAT_WAS_DONE[repair.injected]
    return what, "all" if repair.others else str(repair.rank), str(repair.step)


def _show(
    titles: Sequence[str], rows: Iterable[Sequence[str]], *, last_wraps: bool = False
) -> None:
    from rich.box import SIMPLE_HEAD  # noqa: PLC0415 - rich is big
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in titles:
        right = title in ("rank", "step", "after", "repaired", "lost", "seconds")
        wraps = last_wraps and title == titles[-1]
        table.add_column(title, justify="right" if right else "left", no_wrap=not wraps)
    for row in rows:
        # As text: rich would read its own markup in what came from a run.
        table.add_row(*(Text(printable(cell)) for cell in row))
    Console(highlight=False).print(table)


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"
