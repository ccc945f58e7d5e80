"""One save at a time beside training: a thread copies the state, then writes it. Never decides when.

All methods belong to the training thread, but for :meth:`BackgroundSave.copies_of`. The thread of a
save is its own and touches nothing but the snapshot and the disk; it is no daemon, so that a plain
script's end waits for its last save.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from ddp_runner.checkpoint.snapshot import HostMemory, Rooms, Snapshot, borrowed
from ddp_runner.checkpoint.store import Saved

Write = Callable[[dict[str, Any]], Saved | None]  # None of a copy that is to be no file


class BackgroundSave:
    """A save under way. ``blocked_s`` is what the training thread has given it so far.

    Nothing is written before :meth:`prove`, and nothing at all after :meth:`drop`.
    """

    def __init__(self, snapshot: Snapshot, write: Write) -> None:
        self.blocked_s = 0.0
        self._snapshot = snapshot
        self._write = write
        self._copied = threading.Event()
        self._is_whole = False
        self._decided = threading.Event()
        self._is_proven = False
        self._saved: Saved | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint-save")
        self._thread.start()

    def _run(self) -> None:
        """Thread: copy, let training change the state again, write what is proven."""
        try:
            try:
                self._snapshot.copy_steady()
                self._is_whole = True
            finally:
                self._copied.set()
            self._decided.wait()
            if self._is_proven:
                self._saved = self._write(self._snapshot.content)
        except BaseException as error:  # noqa: BLE001 - top of a thread: result() raises it
            self._failure = error

    @property
    def is_decided(self) -> bool:
        """True if the save was proven or dropped."""
        return self._decided.is_set()

    def prove(self) -> None:
        """The copy is what it should be: it is written."""
        self._is_proven = True
        self._decided.set()

    def drop(self) -> None:
        """The copy is not to be written."""
        self._decided.set()

    def copies_of(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return what will be written for these steady tensors. Waits for the copy; for any thread.

        Returns the tensors themselves if the copy has failed: it is not written then.
        """
        self._copied.wait()
        if not self._is_whole:
            return tensors
        return {name: self._snapshot.copy_of(tensor) for name, tensor in tensors.items()}

    @property
    def reads_state(self) -> bool:
        """True if the state must not be changed yet."""
        if self._snapshot.borrows:
            return self._thread.is_alive()
        return not self._copied.is_set()

    def wait_released(self) -> None:
        """Return once the state may be changed."""
        if self._snapshot.borrows:
            # INVARIANT verdict-before-change: who is about to change the state knows by then whether
            # what it was is to be written. Broken if: a commit or a restore comes before prove() or
            # drop(): it would wait for ever.
            # Guarded by: test_a_save_without_room_is_written_before_the_state_changes.
            assert self.is_decided, "the state changes before the verdict on it"
            self._thread.join()
        self._copied.wait()

    def wait_ended(self, timeout_s: float | None) -> bool:
        """Return True if the save has ended within ``timeout_s``; None waits without a limit."""
        assert self.is_decided or timeout_s is not None, "waits for a verdict that nobody gives"
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def result(self) -> Saved | None:
        """Return the result of an ended save; None if it was dropped or is no file. Raises what the save raised."""
        assert not self._thread.is_alive(), "result() before the end"
        if self._failure is not None:
            raise self._failure
        return self._saved


class BackgroundSaver:
    """Holds at most one save and the memory for its copy; a further one waits for the first's end."""

    def __init__(self, rooms: Rooms | None = None) -> None:
        """``rooms``: the memory for copies, where it is not this process's own."""
        self.memory = HostMemory(rooms)
        self._save: BackgroundSave | None = None

    @property
    def is_busy(self) -> bool:
        """True if a save is under way, or has ended and was not taken yet."""
        return self._save is not None

    def begin(
        self, state: Mapping[str, Any], *, steady: Iterable[Tensor], write: Write
    ) -> BackgroundSave:
        """Start saving ``state``; ``steady`` tensors must not change until :meth:`release_state`.

        Raises RuntimeError or MemoryError when there is no memory, or no thread, for the copy.
        """
        began_s = time.perf_counter()
        return self._start(self.memory.snapshot(state, steady=steady), write, began_s=began_s)

    def begin_borrowing(
        self, state: Mapping[str, Any], *, steady: Iterable[Tensor], write: Write
    ) -> BackgroundSave:
        """Begin a save like :meth:`begin`, without a copy: the state is released when it is written."""
        began_s = time.perf_counter()
        return self._start(borrowed(state, steady=steady), write, began_s=began_s)

    def take_up(self, wait: Callable[[], Saved | None]) -> None:
        """Go on with a save that another process has begun and proven: ``wait`` returns when it is written."""
        nothing = borrowed({}, steady=())
        self._start(nothing, lambda _: wait(), began_s=time.perf_counter()).prove()

    def _start(self, snapshot: Snapshot, write: Write, *, began_s: float) -> BackgroundSave:
        assert self._save is None, "one save at a time"
        self._save = BackgroundSave(snapshot, write)
        self._save.blocked_s = time.perf_counter() - began_s
        return self._save

    @property
    def undecided(self) -> BackgroundSave | None:
        """The save whose verdict has not come, if there is one."""
        save = self._save
        return None if save is None or save.is_decided else save

    @property
    def reads_state(self) -> bool:
        """True if steady tensors are still being read."""
        return self._save is not None and self._save.reads_state

    def release_state(self) -> None:
        """Wait until the steady tensors may change."""
        if self._save is not None and self._save.reads_state:
            began_s = time.perf_counter()
            self._save.wait_released()
            self._save.blocked_s += time.perf_counter() - began_s

    def take_ended(self, timeout_s: float | None = 0.0) -> BackgroundSave | None:
        """The save, if it ends within the time (None: waits for it); it is then no longer held."""
        save = self._save
        if save is None or not save.wait_ended(timeout_s):
            return None
        self._save = None
        return save
