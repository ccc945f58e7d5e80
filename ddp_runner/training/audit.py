"""The audit: which samples each rank gave to each committed step. Never decides anything.

A rank may die after it has given its gradient and before it has written its line, while the others
commit that step. The source of the next generation then writes the line in its place, so that the
audits of all ranks together name every sample of every committed step.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_runner.core.settings import Settings
from ddp_runner.data.order import SampleOrder
from ddp_runner.data.quarantine import Quarantine
from ddp_runner.observe.files import LineFile, Warn
from ddp_runner.system.run_files import from_json, open_to_change

_LINE_BYTES = 1 << 20  # more than the longest line


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationMembers:
    """Who trains a generation: ``slots`` by rank, from ``first_step`` committed steps on."""

    generation: int
    slots: tuple[int, ...]
    first_step: int


def open_audit(settings: Settings, slot: int, *, warn: Warn) -> LineFile | None:
    """The audit file of a slot, to append to; None where none was asked for.

    A disk that takes no line costs a warning, not the run.
    """
    if not settings.run.audit:
        return None
    return LineFile(audit_path(settings, slot), warn=warn)


def audit_path(settings: Settings, slot: int) -> Path:
    """Where the audit of a slot stands."""
    return Path(settings.run.log_dir) / f"audit_rank_{slot}.jsonl"


def audit_line(
    *, generation: int, step: int, epoch: int, indices: Sequence[int], loss: float
) -> bytes:
    """One line; ``step`` counts from 1."""
    record = {
        "generation": generation,
        "step": step,
        "epoch": epoch,
        "indices": list(indices),
        "loss_hex": float(loss).hex(),
    }
    return json.dumps(record).encode() + b"\n"


def complete_audits(
    settings: Settings,
    members: GenerationMembers | None,
    *,
    slots: Collection[int],
    step: int,
    order: SampleOrder,
    quarantine: Quarantine,
    loss: float,
    warn: Warn,
) -> None:
    """Write the lines of ``step``, the newest committed one, that ``members`` have not written.

    ``members``: of the newest generation that this process trained in; ``slots``: those whose audits
    are for this rank to complete. One rank has a slot, and calls it while no other one trains.
    """
    if not settings.run.audit or members is None or step <= members.first_step:
        return
    quarantine.refresh()
    epoch, _ = order.position(step - 1)
    order = order.of_ranks(members.slots)
    for rank, slot in enumerate(members.slots):
        path = audit_path(settings, slot)
        if slot not in slots:
            continue
        if _last_step(path) >= step:
            continue
        mine = order.share_of(step - 1, rank=rank, world_size=len(members.slots))
        line = audit_line(
            generation=members.generation,
            step=step,
            epoch=epoch,
            indices=[quarantine.stand_in(int(index)) for index in mine],
            loss=loss,
        )
        file = LineFile(path, warn=warn)
        file.append(line)
        file.close()


def _last_step(path: Path) -> int:
    """The step of the last line; a torn one, of a rank that died while writing, is cut off."""
    try:
        with os.fdopen(open_to_change(path), "rb+") as file:
            start = max(0, file.seek(0, os.SEEK_END) - _LINE_BYTES)
            file.seek(start)
            tail = file.read()
            whole, _, torn = tail.rpartition(b"\n")
            if torn:
                file.truncate(start + len(tail) - len(torn))
    except OSError:
        return 0  # there is none, or it cannot be read: then the line is written, if need be twice
    last = whole.rpartition(b"\n")[2]
    with contextlib.suppress(
        ValueError, KeyError, TypeError, OverflowError
    ):  # of others: then it is written twice
        return int(from_json(last)["step"]) if last else 0
    return 0
