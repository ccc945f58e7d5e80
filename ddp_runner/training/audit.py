"""The audit: which samples each rank gave to each committed step. Never decides anything.

A rank may die after it has given its gradient and before it has written its line, while the others
commit that step. The source of the next generation then writes the line in its place, so that the
audits of all ranks together name every sample of every committed step. A step that a rank does once more
is marked, ``"again": true``: of its lines the last one counts.
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
from ddp_runner.kernel.system.run_files import from_json, open_to_change
from ddp_runner.observe.files import LineFile, Warn
from ddp_runner.system.launch_folder import at_launch

_TAIL_BYTES = 1 << 20  # more than the longest line


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationMembers:
    """The ranks of a generation: ``slots`` by rank, from ``first_step`` committed steps on."""

    generation: int
    slots: tuple[int, ...]
    first_step: int


class Audit:
    """The audit file of a slot, to append to. A disk that takes no line costs a warning, not the run."""

    def __init__(self, path: Path, *, warn: Warn) -> None:
        self._file = LineFile(path, warn=warn)
        self._newest_step = max(_steps(path), default=0)

    def write(
        self, *, generation: int, step: int, epoch: int, indices: Sequence[int], loss: float
    ) -> None:
        """Append a line; ``step`` counts from 1."""
        record = {
            "generation": generation,
            "step": step,
            "epoch": epoch,
            "indices": list(indices),
            "loss_hex": float(loss).hex(),
        }
        if step <= self._newest_step:
            record["again"] = True
        self._newest_step = max(step, self._newest_step)
        self._file.append(json.dumps(record).encode() + b"\n")

    def close(self) -> None:
        """Close the file; a later line opens it again."""
        self._file.close()


def open_audit(settings: Settings, slot: int, *, warn: Warn) -> Audit | None:
    """The audit of a slot; None where none was asked for."""
    return Audit(audit_path(settings, slot), warn=warn) if settings.run.audit else None


def audit_path(settings: Settings, slot: int) -> Path:
    """Return the path of a slot's audit."""
    return at_launch(settings.run.log_dir) / f"audit_rank_{slot}.jsonl"


def who_completes(folders: Sequence[int], *, steps: Sequence[int]) -> dict[int, int]:
    """Return for each log folder the rank that completes its records: the lowest one at the newest step.

    ``folders`` and ``steps`` by rank. A folder whose ranks are all behind has none.
    """
    found: dict[int, int] = {}
    for rank, (folder, step) in enumerate(zip(folders, steps, strict=True)):
        if step == max(steps):
            found.setdefault(folder, rank)
    return found


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
        if max(_steps(path)[-1:], default=0) >= step:
            continue
        mine = order.share_of(step - 1, rank=rank, world_size=len(members.slots))
        file = Audit(path, warn=warn)
        file.write(
            generation=members.generation,
            step=step,
            epoch=epoch,
            indices=[quarantine.stand_in(int(index)) for index in mine],
            loss=loss,
        )
        file.close()


def _steps(path: Path) -> list[int]:
    """The steps of the last lines; a torn one, of a rank that died while writing, is cut off.

    None where the file cannot be read, and of no line of others: such a step is written, if need be twice.
    """
    try:
        with os.fdopen(open_to_change(path), "rb+") as file:
            start = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
            file.seek(start)
            tail = file.read()
            whole, _, torn = tail.rpartition(b"\n")
            if torn:
                file.truncate(start + len(tail) - len(torn))
    except OSError:
        return []
    found = []
    for line in whole.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
            found.append(int(from_json(line)["step"]))
    return found
