"""The incidents of a run with their repairs: read from its journal, shown as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddp_runner.core.faults import FaultKind
from ddp_runner.core.injection import InjectKind

if TYPE_CHECKING:
    from pathlib import Path

Event = Mapping[str, Any]

_WHAT_WAS_DONE = {
    InjectKind.KILL.value: "SIGKILL",
    InjectKind.STOP.value: "SIGSTOP",
    InjectKind.EXIT.value: "exit(0)",
    InjectKind.RAISE.value: "exception",
    InjectKind.LOADER_KILL.value: "loader kill",
    InjectKind.LOADER_STOP.value: "loader stop",
}
_NOTICED_BY = {
    FaultKind.RANK_KILLED.value: "process ended",
    FaultKind.RANK_EXITED.value: "process ended",
    FaultKind.RANK_RAISED.value: "its own report",
    FaultKind.RANK_HUNG.value: "no progress",
    FaultKind.COLLECTIVE_STUCK.value: "no progress",
    FaultKind.LOADER_WORKER_DIED.value: "its rank",
    FaultKind.LOADER_TIMEOUT.value: "its rank",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """One incident and its repair, as the journal has it.

    ``noticed_s`` counts from the injection to the first sign of it, None where nobody injected it;
    ``repaired_s`` from there until every rank trained again, None where they never did.
    """

    what: str
    rank: int
    step: int
    phase: str
    noticed_by: str
    noticed_s: float | None
    repaired_s: float | None
    steps_lost: int


def read_journal(log_dir: Path) -> list[Event]:
    """Every event of the run that finished there. Raises OSError or ValueError if it cannot."""
    lines = (log_dir / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def read_repairs(events: Sequence[Event]) -> list[Repaired]:
    """Every incident of a run's journal, and every fault mended within a rank, oldest first."""
    injected = [event for event in events if event["event"] == "injected"]
    faults = {event["id"]: event for event in events if event["event"] == "fault"}
    found = []
    for event in events:
        if event["event"] == "plan":
            done = _take_injection(injected, rank=event["culprit"], before=event)
            found.append(_repaired(event, done, events))
        elif event["event"] == "mended":
            fault = faults[event["cause"]]
            done = _take_injection(injected, rank=fault["rank"], before=event)
            found.append(_mended(event, fault, done))
    return found


def _take_injection(injected: list[Event], *, rank: int, before: Event) -> Event | None:
    """Take out the oldest injection into ``rank`` that came before the event; None without one."""
    done = next((e for e in injected if e["rank"] == rank and e["id"] < before["id"]), None)
    if done is not None:
        injected.remove(done)
    return done


def _mended(mended: Event, fault: Event, done: Event | None) -> Repaired:
    """A fault that its rank tells of once it has mended it."""
    noticed_at_s = mended["mono_s"] - mended["seconds"]
    kind = str(fault["kind"])
    return Repaired(
        what=_what(done),
        rank=fault["rank"],
        step=fault["step"],
        phase=fault["phase"],
        noticed_by=_NOTICED_BY.get(kind, kind),
        noticed_s=max(0.0, noticed_at_s - done["mono_s"]) if done else None,
        repaired_s=mended["seconds"],
        steps_lost=0,
    )


def _repaired(plan: Event, done: Event | None, events: Sequence[Event]) -> Repaired:
    signs = [
        event
        for event in events
        if event["event"] == "fault" and plan["cause"] in (event["id"], event["cause"])
    ]
    noticed_at_s = signs[0]["mono_s"]
    culprit = next(
        (e for e in signs if e["rank"] == plan["culprit"] and e["kind"] == plan["kind"]), signs[0]
    )
    kind = str(culprit["kind"])
    repaired = next((e for e in events if e["event"] == "repaired" and e["id"] > plan["id"]), None)
    return Repaired(
        what=_what(done),
        rank=plan["culprit"],
        step=culprit["step"],
        phase=culprit["phase"],
        noticed_by=_NOTICED_BY.get(kind, kind),
        noticed_s=noticed_at_s - done["mono_s"] if done else None,
        repaired_s=repaired["mono_s"] - noticed_at_s if repaired else None,
        steps_lost=repaired["steps_lost"] if repaired else 0,
    )


def _what(done: Event | None) -> str:
    if done is None:
        return "not injected"
    kind = str(done["kind"])
    return _WHAT_WAS_DONE.get(kind, kind)


def show_table(repairs: Sequence[Repaired]) -> None:
    """Print one row for each; at most 80 columns."""
    from rich.box import SIMPLE_HEAD  # noqa: PLC0415 - rich is big
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in ("fault", "rank", "step", "phase", "noticed by", "after", "repaired", "lost"):
        right = title in ("rank", "step", "after", "repaired")
        table.add_column(title, justify="right" if right else "left", no_wrap=True)
    for repair in repairs:
        table.add_row(
            repair.what,
            str(repair.rank),
            str(repair.step),
            repair.phase,
            repair.noticed_by,
            _seconds(repair.noticed_s),
            _seconds(repair.repaired_s),
            f"{repair.steps_lost} step{'' if repair.steps_lost == 1 else 's'}",
        )
    Console(highlight=False).print(table)


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"
