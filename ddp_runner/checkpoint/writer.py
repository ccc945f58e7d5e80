"""Makes files of copies in memory, as they are ordered; the process that writes runs it. Never decides when."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from ddp_runner.checkpoint.manifest import Manifest
from ddp_runner.checkpoint.memory_slots import MemorySlots
from ddp_runner.checkpoint.store import CheckpointStore, Saved
from ddp_runner.core.faults import Fault, FaultError, FaultKind
from ddp_runner.core.messages import CopyWritten, WriteCopy
from ddp_runner.system.disk import Disk

NOTES_MAX = 20  # of an answer, which must fit into one packet
TEXT_MAX = 20_000  # characters of it


class NobodyWritesError(Exception):
    """Raised if no process writes copies; the rank that made a copy then writes it."""


class CopyWriter:
    """Writes ordered copies to files. One process has one writer, with the supervisor's memory slots."""

    def __init__(self, slots: MemorySlots, *, disk: Disk) -> None:
        self._slots = slots
        self._disk = disk
        self._stores: dict[tuple[str, int, int], CheckpointStore] = {}

    def write(self, order: WriteCopy) -> CopyWritten:
        """Make the file; the answer, whatever came of it."""
        problem = ""
        try:
            return self._written(order)
        except FaultError as error:
            problem, text = "disk", error.fault.cause
        except (TypeError, ValueError) as error:
            problem, text = "state", f"{error}"
        except Exception as error:  # noqa: BLE001 - a named boundary: who has ordered it reports it
            problem, text = "other", f"{type(error).__name__}: {error}"
        if not self._slots.has(order.sealed):
            problem = "gone"  # a roll-back, or a start from a file: nobody wants it
        return CopyWritten(
            sealed=order.sealed, step=order.step, problem=problem, text=text[:TEXT_MAX]
        )

    def _written(self, order: WriteCopy) -> CopyWritten:
        lent = self._slots.lent(order.sealed)
        store = self._store_of(order)

        def confirm() -> None:
            """Check the copy before the file appears."""
            if problem := lent.wrong():
                raise RuntimeError(f"the copy in memory is of no use: {problem}")

        saved = store.save(lent.state, lent.facts, confirm=confirm)
        return CopyWritten(
            sealed=order.sealed,
            step=order.step,
            manifest=_short(saved.manifest).to_json(),
            blocked_s=saved.blocked_s,
            write_s=saved.write_s,
            notes=saved.notes[:NOTES_MAX],
            proved=tuple(store.proved),
        )

    def _store_of(self, order: WriteCopy) -> CheckpointStore:
        """One for each folder, which knows what it has read once more."""
        key = (order.directory, order.keep_last, order.keep_every)
        if key not in self._stores:
            self._stores[key] = CheckpointStore(
                Path(order.directory),
                keep_last=order.keep_last,
                keep_every=order.keep_every,
                disk=self._disk,
            )
        return self._stores[key]


def _short(manifest: Manifest) -> Manifest:
    """Return the manifest without its unbounded fields: the file has them, and its maker needs none."""
    return replace(manifest, about={}, meaning={}, recipe={}, changes=(), data={})


def saved_of(answer: CopyWritten, store: CheckpointStore) -> Saved | None:
    """Return what ``store.save`` would have, or None for a copy that was dropped.

    Raises what ``store.save`` raises, and NobodyWritesError where no process writes copies.
    """
    match answer.problem:
        case "":
            store.trust(answer.proved)
            manifest = Manifest.from_json(answer.manifest)
            return Saved(
                path=store.directory / manifest.file,
                manifest=manifest,
                blocked_s=answer.blocked_s,
                write_s=answer.write_s,
                notes=answer.notes,
            )
        case "disk":
            raise FaultError(
                Fault(
                    kind=FaultKind.STORAGE_FAILED,
                    rank=-1,
                    step=answer.step,
                    cause=answer.text,
                    phase="checkpoint",
                    at_ns=time.monotonic_ns(),
                )
            )
        case "state":
            raise TypeError(answer.text)
        case "gone":
            return None
        case "nobody":
            raise NobodyWritesError(answer.text)
        case _:
            raise RuntimeError(answer.text)
