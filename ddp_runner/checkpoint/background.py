"""One save at a time beside training: a thread copies the state, then writes it. Never decides when.

All methods belong to the training thread. The thread of a save is its own and touches nothing but
the snapshot and the disk; it is no daemon, so that a plain script's end waits for its last save.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from ddp_runner.checkpoint.snapshot import HostMemory, Snapshot
from ddp_runner.checkpoint.store import Saved

Write = Callable[[dict[str, Any]], Saved]


class BackgroundSave:
    """A save under way. ``blocked_s`` is what the training thread has given it so far."""

    def __init__(self, snapshot: Snapshot, write: Write) -> None:
        self.blocked_s = 0.0
        self._snapshot = snapshot
        self._write = write
        self._copied = threading.Event()
        self._saved: Saved | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint-save")
        self._thread.start()

    def _run(self) -> None:
        """Thread: copy, let training change the state again, write."""
        try:
            try:
                self._snapshot.copy_steady()
            finally:
                self._copied.set()
            self._saved = self._write(self._snapshot.content)
        except BaseException as error:  # noqa: BLE001 - top of a thread: result() raises it
            self._failure = error

    @property
    def is_copied(self) -> bool:
        """Whether the state may be changed."""
        return self._copied.is_set()

    def wait_copied(self) -> None:
        """Return once the state may be changed."""
        self._copied.wait()

    def wait_ended(self, timeout_s: float | None) -> bool:
        """Whether the save has ended, within the time; None: however long it takes."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def result(self) -> Saved:
        """What was saved, once it has ended. Raises what the save raised."""
        if self._failure is not None:
            raise self._failure
        assert self._saved is not None, "result() of a save that has not ended"
        return self._saved


class BackgroundSaver:
    """Holds at most one save and the memory for its copy; a further one waits for the first's end."""

    def __init__(self) -> None:
        self.memory = HostMemory()
        self._save: BackgroundSave | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way, or has ended and was not taken yet."""
        return self._save is not None

    def begin(self, state: Mapping[str, Any], *, steady: Iterable[Tensor], write: Write) -> None:
        """Start saving ``state``; ``steady`` tensors must not change until :meth:`release_state`.

        Raises RuntimeError or MemoryError when there is no memory for the copy.
        """
        assert self._save is None, "one save at a time"
        began_s = time.perf_counter()
        self._save = BackgroundSave(self.memory.snapshot(state, steady=steady), write)
        self._save.blocked_s = time.perf_counter() - began_s

    @property
    def reads_state(self) -> bool:
        """Whether steady tensors are still being copied."""
        return self._save is not None and not self._save.is_copied

    def release_state(self) -> None:
        """Wait until the steady tensors may change."""
        if self._save is not None and not self._save.is_copied:
            began_s = time.perf_counter()
            self._save.wait_copied()
            self._save.blocked_s += time.perf_counter() - began_s

    def take_ended(self, timeout_s: float | None = 0.0) -> BackgroundSave | None:
        """The save, if it ends within the time (None: waits for it); it is then no longer held."""
        save = self._save
        if save is None or not save.wait_ended(timeout_s):
            return None
        self._save = None
        return save
