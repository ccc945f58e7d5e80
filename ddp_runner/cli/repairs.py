"""The incidents of a run with their repairs: read from its journal, as values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddp_runner.core.faults import FaultKind
from ddp_runner.core.injection import InjectKind
from ddp_runner.system.run_files import from_json, read_lines

if TYPE_CHECKING:
    from pathlib import Path

Event = Mapping[str, Any]

_SIGNS = {
    InjectKind.KILL: (FaultKind.RANK_KILLED,),
    InjectKind.EXIT: (FaultKind.RANK_EXITED,),
    InjectKind.RAISE: (FaultKind.RANK_RAISED,),
    **dict.fromkeys(
        (InjectKind.STOP, InjectKind.HANG, InjectKind.SPIN, InjectKind.GIL),
        (FaultKind.RANK_HUNG, FaultKind.COLLECTIVE_STUCK),
    ),
    InjectKind.LOADER_KILL: (FaultKind.LOADER_WORKER_DIED,),
    InjectKind.LOADER_STOP: (FaultKind.LOADER_TIMEOUT,),
    InjectKind.OOM: (FaultKind.OUT_OF_MEMORY,),
    InjectKind.UNUSED: (FaultKind.REDUCTION_UNFINISHED,),
    InjectKind.NAN: (FaultKind.NON_FINITE,),
    InjectKind.SPIKE: (FaultKind.LOSS_EXPLODED,),
    InjectKind.DIVERGE: (FaultKind.REPLICA_DIVERGED,),
    InjectKind.BAD_SAMPLE: (FaultKind.BAD_SAMPLE,),
    InjectKind.DISK_FULL: (FaultKind.STORAGE_FAILED,),
    InjectKind.DISK_ERROR: (FaultKind.STORAGE_FAILED,),
    InjectKind.CORRUPT_CHECKPOINT: (FaultKind.CHECKPOINT_BAD,),
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
    FaultKind.REDUCTION_UNFINISHED.value: "gradient check",
    FaultKind.NON_FINITE.value: "all ranks",
    FaultKind.LOSS_EXPLODED.value: "all ranks",
    FaultKind.REPLICA_DIVERGED.value: "its hash",
    FaultKind.BAD_SAMPLE.value: "its rank",
    FaultKind.STORAGE_FAILED.value: "failed save",
    FaultKind.CHECKPOINT_BAD.value: "its SHA-256",
}
_DONE = {
    "ReplaceRanks": "new process",
    FaultKind.REPLICA_DIVERGED.value: "the majority's state taken over",
}
_OVER_WITH = {FaultKind.STORAGE_FAILED.value: "checkpoint_saved"}  # the next one of these


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """One incident and its repair, as the journal has it.

    ``injected`` is the kind that caused it, None where nobody did; ``others`` are ranks that it hit
    at the same moment. ``noticed_s`` counts from the injection to the first sign of it; None where
    nobody injected it, or where nobody had to notice. ``repaired_s`` from there until every rank
    trained again, or a save succeeded; None where they never did, or nothing had to be repaired.
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


def read_journal(log_dir: Path) -> list[Event]:
    """Every event of the run that finished there. Raises OSError or ValueError if it cannot."""
    return [from_json(line) for line in read_lines(log_dir / "events.jsonl")]


def read_repairs(events: Sequence[Event]) -> list[Repaired]:
    """Every incident of a run's journal, in the order in which they were told.

    Those are the repairs of the supervisor, what was mended within a rank, what was noted because
    it needed no repair, and injections that nobody had to notice.
    """
    injected = _Injected(events)
    found, save_fails = [], False
    for event in events:
        match event["event"]:
            case "plan":
                found.append(_repaired(event, injected, events))
            case "repaired_in_place" | "mended":  # as it was called before
                fault = next(e for e in events if e["id"] == event["cause"])
                found.append(_mended(event, fault, injected))
            case "fault_tolerated" | "noted":
                # One trouble of a disk may cost several saves.
                fails = event["kind"] == FaultKind.STORAGE_FAILED.value
                if not (fails and save_fails):
                    found.append(_noted(event, injected, events))
                save_fails = save_fails or fails
            case "checkpoint_saved":
                save_fails = False
            case "injected" if InjectKind(event["kind"]) not in _SIGNS:
                found.append(_unnoticed(event))
    return found


class _Injected:
    """The injections of a journal, each to be taken once: by what it has brought about."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._left = [event for event in events if event["event"] == "injected"]

    def take(self, kind: str, *, rank: int, before: Event) -> Event | None:
        """The oldest one into ``rank`` (-1: any) before the event that shows as ``kind``."""
        done = next(
            (
                one
                for one in self._left
                if one["id"] < before["id"]
                and rank in (one["rank"], -1)
                and FaultKind(kind) in _SIGNS.get(InjectKind(one["kind"]), ())
            ),
            None,
        )
        if done is not None:
            self._left.remove(done)
        return done


def _mended(mended: Event, fault: Event, injected: _Injected) -> Repaired:
    """A fault that its rank tells of once it has mended it."""
    kind = str(fault["kind"])
    done = injected.take(kind, rank=fault["rank"], before=mended)
    noticed_at_s = mended["mono_s"] - mended["seconds"]
    return Repaired(
        injected=_kind_of(done, kind),
        rank=_rank_of(done, fault),
        step=fault["step"],
        phase=fault["phase"],
        noticed_by=_NOTICED_BY.get(kind, kind),
        noticed_s=max(0.0, noticed_at_s - done["mono_s"]) if done else None,
        repaired_s=mended["seconds"],
        steps_lost=mended.get("steps_lost", 0),
        done=mended["remedy"],
    )


def _noted(noted: Event, injected: _Injected, events: Sequence[Event]) -> Repaired:
    kind = str(noted["kind"])
    done = injected.take(kind, rank=noted["rank"], before=noted)
    over = next(
        (e for e in events if e["event"] == _OVER_WITH.get(kind) and e["id"] > noted["id"]), None
    )
    return Repaired(
        injected=_kind_of(done, kind),
        rank=_rank_of(done, noted),
        step=noted["step"],
        phase=noted["phase"],
        noticed_by=_NOTICED_BY.get(kind, kind),
        noticed_s=noted["mono_s"] - done["mono_s"] if done else None,
        repaired_s=over["mono_s"] - noted["mono_s"] if over else None,
        steps_lost=0,
        done=noted["remedy"],
    )


def _unnoticed(injected: Event) -> Repaired:
    return Repaired(
        injected=InjectKind(injected["kind"]),
        rank=injected["rank"],
        step=injected["step"],
        phase=injected["phase"],
        noticed_by="waited for",
        noticed_s=None,
        repaired_s=None,
        steps_lost=0,
        done="waited for",
    )


def _repaired(plan: Event, injected: _Injected, events: Sequence[Event]) -> Repaired:
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
    done = injected.take(kind, rank=plan["culprit"], before=plan)
    together = [e["rank"] for e in signs if e["rank"] != plan["culprit"] and e["kind"] == kind]
    repaired = next(
        (e for e in events if e["event"] == "repaired" and e["cause"] == plan["cause"]), None
    )
    own = [
        event["remedy"]
        for event in events
        if event["event"] == "adjusted"
        and (event["rank"], event["step"]) == (plan["culprit"], culprit["step"])
    ]
    return Repaired(
        injected=_kind_of(done, kind),
        rank=plan["culprit"],
        others=tuple(
            rank for rank in together if injected.take(kind, rank=rank, before=plan) is not None
        ),
        step=culprit["step"],
        phase=culprit["phase"],
        noticed_by=_NOTICED_BY.get(kind, kind),
        noticed_s=noticed_at_s - done["mono_s"] if done else None,
        repaired_s=repaired["mono_s"] - noticed_at_s if repaired else None,
        steps_lost=repaired["steps_lost"] if repaired else 0,
        done=own[0] if own else _DONE.get(kind, _DONE.get(plan.get("plan", ""), "-")),
    )


def _kind_of(done: Event | None, kind: str) -> InjectKind | None:
    """What was injected; a bad sample is in the data, and nothing of it happens at a moment."""
    if done is not None:
        return InjectKind(done["kind"])
    return InjectKind.BAD_SAMPLE if kind == FaultKind.BAD_SAMPLE.value else None


def _rank_of(done: Event | None, fault: Event) -> int:
    """The rank that it was done to, where what noticed it blames nobody."""
    return int(done["rank"] if done and fault["rank"] < 0 else fault["rank"])
