"""The memory that copies of the state are made in, and what becomes of a copy. Decides no save.

In the supervisor's memory a copy outlives the ranks, and its file is written by the saver; where there is no room for
that, it is made in this process's own; where there is none at all, the state itself is written.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ddp_runner.checkpoint.background import BackgroundSaver
from ddp_runner.checkpoint.manifest import CheckpointFacts
from ddp_runner.checkpoint.memory_slots import MemorySlots
from ddp_runner.checkpoint.snapshot import size_in_memory
from ddp_runner.checkpoint.store import CheckpointStore, Saved
from ddp_runner.checkpoint.writer import NobodyWritesError, saved_of
from ddp_runner.kernel.step.runtime import RankInfo, Runtime
from ddp_runner.kernel.wire.messages import WriteCopy
from ddp_runner.memory.manager import MemoryManager

COPIES_HELD = 2  # in the supervisor's memory: the one in hand, and a whole one
ROOM_SHARE_MAX = 0.5  # of the memory that is left, for copies of the state


def open_slots(info: RankInfo) -> MemorySlots | None:
    """The memory of this rank's supervisor; None where it has none for copies, or there is no supervisor."""
    try:
        descriptors = [os.open(path, os.O_RDWR | os.O_CLOEXEC) for path in info.memory_slots]
    except OSError:  # it has just ended, and so does this rank
        return None
    return MemorySlots(descriptors) if descriptors else None


class SaveRoom:
    """One rank's. All calls come from the training thread; what a save does in its thread touches nothing here.

    ``saver`` is another one once there is no room in the supervisor's memory; never while it is busy.
    """

    def __init__(self, store: CheckpointStore, memory: MemoryManager, runtime: Runtime) -> None:
        self.slots = open_slots(runtime.rank_info)
        self.saver = BackgroundSaver(self.slots)
        self._left: MemorySlots | None = None  # in which no more copies are made; one may be whole
        self.store = store
        self._memory = memory
        self._runtime = runtime
        self._has_warned = False
        self._was_short = False

    def begin(
        self,
        state: Mapping[str, Any],
        facts: CheckpointFacts,
        *,
        steady: Iterable[Tensor],
        is_file: bool,
    ) -> None:
        """Begin a save of a copy of ``state``; where there is no room for one, of the state itself.

        One that is to be no file is not made where only this process would have it. Raises RuntimeError or
        MemoryError where there is no thread, or no memory at all, for it.
        """
        steady = list(steady)
        if self._has_room_for(size_in_memory(state)) and (is_file or self.slots):
            end = partial(self._sealed, facts=facts, slots=self.slots, is_file=is_file)
            try:
                self.saver.begin(state, steady=steady, write=end)
            except (RuntimeError, MemoryError) as error:
                if self.slots is not None and isinstance(error, MemoryError):
                    self._do_without(size_in_memory(state))
                    self.begin(state, facts, steady=steady, is_file=is_file)
                    return
                self._warn_of_waiting(f"no copy of the state can be made ({error})")
            else:
                return
        if is_file:
            write = partial(self.store.save, facts=facts)
            self.saver.begin_borrowing(state, steady=steady, write=write)

    def take_up(self, order: WriteCopy) -> None:
        """Wait for the file that a rank before this one has ordered."""
        self.saver.take_up(partial(self._ordered, order))

    def _sealed(
        self,
        content: dict[str, Any],
        *,
        facts: CheckpointFacts,
        slots: MemorySlots | None,
        is_file: bool,
    ) -> Saved | None:
        """Thread: the copy is proven. Say that it is whole, and have the file made of it."""
        sealed, info = 0 if slots is None else slots.seal(content, facts), self._runtime.rank_info
        if not is_file:
            return None
        if sealed and info.has_saver:
            order = WriteCopy(
                rank=info.rank,
                sealed=sealed,
                step=facts.step,
                directory=str(self.store.directory.absolute()),
                keep_last=self.store.keep_last,
                keep_every=self.store.keep_every,
            )
            try:
                return self._ordered(order)
            except NobodyWritesError as error:
                self._runtime.logger.warning(f"{error}: this rank writes the checkpoint")
        return self.store.save(content, facts)

    def _ordered(self, order: WriteCopy) -> Saved | None:
        """Thread: wait for the saver's answer; raises what came of it."""
        return saved_of(self._runtime.order(order), self.store)

    def reserve(self, sizes_bytes: Sequence[int]) -> None:
        """Have the first save of a state whose memory has these sizes wait for none."""
        copies = 1 if self.slots is None else COPIES_HELD
        if self._fits(copies * sum(sizes_bytes)):
            self.saver.memory.reserve(sizes_bytes)

    def file_is_there(self) -> None:
        """A file has been written: what is held of copies that are made no more is not needed."""
        if self._left is not None:
            self._left.release()
            self._left = None

    def forget_later_than(self, step: int) -> None:
        """The ranks stand at ``step``: a later copy here is of a course that was left while this machine looked away."""
        # INVARIANT copies-of-this-course: no copy on any machine is of a later step than all ranks have agreed on. Broken
        # if: the run goes on from a file on one machine, and a later copy on another one stays.
        # Guarded by: test_a_copy_later_than_what_all_agreed_on_is_cleared.
        newest = None if self.slots is None else self.slots.newest_step
        if newest is not None and newest > step:
            self.forget()

    def forget(self) -> None:
        """The state is to be an older one: nothing of the course that is left may be gone back to."""
        for slots in (self.slots, self._left):
            if slots is not None:
                slots.clear()

    def _has_room_for(self, needed_bytes: int) -> bool:
        """Return True if a copy of the state fits into memory. The memory held for copies may be of a smaller state."""
        if self.slots is not None:
            more_bytes = COPIES_HELD * needed_bytes - self.saver.memory.size_bytes
            if self._fits(more_bytes) and not self._has_been_short():
                return True
            self._do_without(needed_bytes)
        if self._fits(needed_bytes - self.saver.memory.size_bytes):
            return True
        self._warn_of_waiting(
            f"no room in memory for a copy of the state ({needed_bytes / 1e9:.2f} GB)"
        )
        return False

    def _has_been_short(self) -> bool:
        """Return True if memory is short now and was at the last save: a short peak does not count."""
        was_short, self._was_short = self._was_short, self._memory.host_is_short
        return was_short and self._was_short

    def _fits(self, more_bytes: int) -> bool:
        return more_bytes <= 0 or more_bytes <= ROOM_SHARE_MAX * self._memory.room_bytes()

    def _do_without(self, needed_bytes: int) -> None:
        """There is no room for two copies of a state of this size: none outlives the ranks.

        The newest does until :meth:`file_is_there`.
        """
        self._runtime.logger.warning(
            f"no room in memory for {COPIES_HELD} copies of the state"
            f" ({COPIES_HELD * needed_bytes / 1e9:.2f} GB): where all ranks end at once, the run goes on"
            " from the newest file, which rank 0 writes itself (checkpoint.memory_every=0 does not ask for them)"
        )
        self._left, self.slots, self.saver = self.slots, None, BackgroundSaver()

    def _warn_of_waiting(self, why: str) -> None:
        if not self._has_warned:
            self._runtime.logger.warning(f"{why}: training waits for each checkpoint")
        self._has_warned = True
