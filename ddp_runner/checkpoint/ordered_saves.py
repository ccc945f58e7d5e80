"""Files that another process writes of copies in memory: the one side orders and waits, the other writes.

Whichever of the two ends, the copy and its order stay: another one of its kind goes on with them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddp_runner.checkpoint import save_orders
from ddp_runner.checkpoint.disk import Disk
from ddp_runner.checkpoint.manifest import Manifest
from ddp_runner.checkpoint.memory_slots import MemorySlots
from ddp_runner.checkpoint.save_orders import SaveOrder
from ddp_runner.checkpoint.store import CheckpointStore, Saved
from ddp_runner.core.faults import Fault, FaultError, FaultKind
from ddp_runner.core.settings import JsonValue

POLL_S = (0.002, 0.02)  # until the first look for an answer; between later ones
PATIENCE_S = 20.0  # while nobody writes: a process that ended is replaced in a fraction of that
NO_PATIENCE_S = 1.0  # where nobody has written the one before
_NOBODY = "no process is there that writes checkpoints"


class NobodyWritesError(Exception):
    """There is no process that writes it, which the text says; the order is withdrawn."""


class OrderedSaves:
    """The side of whoever has copies to be written. ``store``: whose files they are to be.

    For any thread. ``ring``: says that there is an order.
    """

    def __init__(
        self, slots: MemorySlots, store: CheckpointStore, *, ring: Callable[[], None]
    ) -> None:
        self._slots = slots
        self._store = store
        self._ring = ring
        self._has_nobody = False  # to write: as the one before has shown
        self.for_file: dict[str, JsonValue] = {
            "directory": str(store.directory.absolute()),
            "keep_last": store.keep_last,
            "keep_every": store.keep_every,
        }

    def oldest(self) -> SaveOrder | None:
        """What is still to be written, whoever has ordered it."""
        waiting = save_orders.open_orders(self._slots.descriptors)
        return waiting[0][0] if waiting else None

    def wait(self, sealed: int) -> Saved:
        """Return once the copy of this number is a file on disk.

        Raises what its save has raised, RuntimeError where that was for another reason, and
        NobodyWritesError.
        """
        self._ring()
        pause_s, look_at_s, idle_s = POLL_S[0], time.monotonic(), 0.0
        while True:
            found = self._find(sealed)
            if found is None:
                raise RuntimeError("the copy in memory was given up before it was written")
            order, descriptor = found
            if not order.is_open:
                return self._outcome(save_orders.answer_of(descriptor, order), order.step)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_S[1])
            if time.monotonic() < look_at_s + 1.0:
                continue
            look_at_s = time.monotonic()
            idle_s = idle_s + 1.0 if self._is_idle(descriptor, order, idle_s=idle_s) else 0.0

    def _find(self, sealed: int) -> tuple[SaveOrder, int] | None:
        for descriptor in self._slots.descriptors:
            order = save_orders.read(descriptor)
            if order is not None and order.sealed == sealed:
                return order, descriptor
        return None

    def _is_idle(self, descriptor: int, order: SaveOrder, *, idle_s: float) -> bool:
        """Whether nobody writes now; one that nobody has written for long is withdrawn."""
        with contextlib.ExitStack() as all_held:
            # Also those that are to be written before it.
            is_idle = all(
                all_held.enter_context(save_orders.held(one, waits=False))
                for one in self._slots.descriptors
            )
            if is_idle and idle_s >= (NO_PATIENCE_S if self._has_nobody else PATIENCE_S):
                save_orders.answer(descriptor, order, {"problem": "withdrawn", "text": _NOBODY})
            elif is_idle:
                self._ring()
            return is_idle

    def _outcome(self, answer: dict[str, Any], step: int) -> Saved:
        text = str(answer.get("text", ""))
        self._has_nobody = answer.get("problem") == "withdrawn"
        match answer.get("problem"):
            case None:
                self._store.trust(answer["proved"])
                manifest = Manifest.from_json(answer["manifest"])
                return Saved(
                    path=self._store.directory / manifest.file,
                    manifest=manifest,
                    blocked_s=answer["blocked_s"],
                    write_s=answer["write_s"],
                    notes=tuple(answer["notes"]),
                )
            case "disk":
                raise FaultError(
                    Fault(
                        kind=FaultKind.STORAGE_FAILED,
                        rank=-1,
                        step=step,
                        cause=text,
                        phase="checkpoint",
                        at_ns=time.monotonic_ns(),
                    )
                )
            case "state":
                raise TypeError(text)
            case "withdrawn":
                raise NobodyWritesError(text)
            case _:
                raise RuntimeError(text)


class OrderedWriter:
    """The side of the process that writes; one at a time works at an order."""

    def __init__(self, slots: MemorySlots, *, disk: Disk) -> None:
        self._slots = slots
        self._disk = disk
        self._stores: dict[tuple[str, int, int], CheckpointStore] = {}

    def write_next(self) -> bool:
        """Write what was ordered first, and answer; False where nothing is to be written.

        Raises OSError where there is no memory for the answer.
        """
        waiting = save_orders.open_orders(self._slots.descriptors)
        if not waiting:
            return False
        order, descriptor = waiting[0]
        with save_orders.held(descriptor, waits=True):
            found = save_orders.read(descriptor)
            if found is None or not found.is_open:  # withdrawn meanwhile, or given up
                return True
            if found.tries >= save_orders.TRIES_MAX:
                ended = f"{found.tries} processes in a row have ended while they wrote it"
                # Nor is it left to the rank, which the same may end.
                save_orders.answer(descriptor, found, {"problem": "other", "text": ended})
                return True
            order = save_orders.begin(descriptor, found)
            save_orders.answer(descriptor, order, self._written(descriptor))
        return True

    def _written(self, descriptor: int) -> dict[str, Any]:
        """Write it; the answer."""
        try:
            saved, store = self._save(descriptor)
        except FaultError as error:
            return {"problem": "disk", "text": error.fault.cause}
        except (TypeError, ValueError) as error:
            return {"problem": "state", "text": f"{error}"}
        except Exception as error:  # noqa: BLE001 - a named boundary: who has ordered it reports it
            return {"problem": "other", "text": f"{type(error).__name__}: {error}"}
        return {
            "manifest": saved.manifest.to_json(),
            "blocked_s": saved.blocked_s,
            "write_s": saved.write_s,
            "notes": list(saved.notes),
            "proved": store.proved,
        }

    def _save(self, descriptor: int) -> tuple[Saved, CheckpointStore]:
        lent = self._slots.lent(descriptor)
        store = self._store_of(**lent.for_file)

        def confirm() -> None:
            """Before the file appears."""
            if problem := lent.wrong():
                raise RuntimeError(f"the copy in memory is of no use: {problem}")

        return store.save(lent.state, lent.facts, confirm=confirm), store

    def _store_of(self, *, directory: str, keep_last: int, keep_every: int) -> CheckpointStore:
        key = (directory, keep_last, keep_every)
        if key not in self._stores:
            self._stores[key] = CheckpointStore(
                Path(directory), keep_last=keep_last, keep_every=keep_every, disk=self._disk
            )
        return self._stores[key]


def ring(descriptor: int) -> None:
    """Wake whoever reads the other end; a pipe that is full has woken it."""
    try:
        os.write(descriptor, b"\1")
    except (BlockingIOError, BrokenPipeError):  # it looks by itself before long
        return
