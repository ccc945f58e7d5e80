"""The faults of launches whose ranks a coordinator has taken over, from the journal. Never raises for a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ddp_runner.observe.files import read_tail
from ddp_runner.observe.history.fault_rows import FaultRow, FaultRows
from ddp_runner.observe.history.json_lines import epoch_s, parsed
from ddp_runner.observe.summary import FaultRecord

_READ_BYTES_MAX = 16 << 20  # of the end of a journal


def faults_before(path: Path, *, run_id: str) -> tuple[FaultRecord, ...]:
    """Those of the newest launch in the journal, and of those that it took over in its turn; oldest first."""
    launches: list[list[Mapping[str, Any]]] = []
    for event in parsed(read_tail(path, _READ_BYTES_MAX)):
        if event.get("event") == "run_begins":
            launches.append([])
        if launches:
            launches[-1].append(event)
    found: list[FaultRecord] = []
    for ago, launch in enumerate(reversed(launches), start=1):
        if launch[0].get("run_id") != run_id:
            break
        found = [*_faults_of(launch, ago), *found]
        if not launch[0].get("took_over"):
            break
    return tuple(found)


def _faults_of(launch: list[Mapping[str, Any]], ago: int) -> Iterator[FaultRecord]:
    rows = FaultRows()
    for event in launch:
        rows.add(event)
    for row in rows.rows:
        if not row.is_tolerated:
            yield _record(row, ago, began_s=epoch_s(launch[0].get("utc")) or 0.0)


def _record(row: FaultRow, ago: int, *, began_s: float) -> FaultRecord:
    detected_s, repair_s = round(row.at_s - began_s, 3), row.repair_s
    return FaultRecord(
        kind=row.kind,
        rank=row.rank,
        step=row.step,
        cause=row.text,
        detected_s=detected_s,
        recovered_s=None if repair_s is None else round(detected_s + repair_s, 3),
        steps_lost=row.steps_lost,
        generation=row.generation,
        detail=row.detail,
        victims=row.victims,
        all_ranks_dead=row.all_ranks_dead,
        seconds={} if repair_s is None else {"total": repair_s},
        phase=row.phase,
        action=row.plan,
        host=row.host,
        launches_ago=ago,
    )
