"""Where the copy of a save is made: in the supervisor's memory, in this process's own, or nowhere. Decides no save."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ddp_runner.checkpoint.background import BackgroundSaver, Write
from ddp_runner.checkpoint.snapshot import size_in_memory
from ddp_runner.checkpoint.store import Saved
from ddp_runner.memory.manager import MemoryManager
from ddp_runner.training.memory_copies import COPIES_HELD, MemoryCopies

ROOM_SHARE_MAX = 0.5  # of the memory that is left, for copies of the state


class SaveRoom:
    """One rank's. ``warn`` is called with what a person should know, once.

    ``saver`` is another one once there is no room in the supervisor's memory; never while it is busy.
    """

    def __init__(
        self, copies: MemoryCopies, memory: MemoryManager, *, warn: Callable[[str], None]
    ) -> None:
        self.saver = BackgroundSaver(copies.slots)
        self._copies = copies
        self._memory = memory
        self._warn = warn
        self._has_warned = False
        self._was_short = False

    def begin(
        self,
        state: Mapping[str, Any],
        *,
        steady: Iterable[Tensor],
        sealing: Callable[[], Write],
        to_file: Callable[[dict[str, Any]], Saved] | None,
    ) -> None:
        """Begin a save of a copy of ``state``; where there is no room for one, of the state itself.

        ``sealing``: what is done with a copy, by where it is made. ``to_file`` None: it is to be no file, and is not
        made where only this process would have it.

        Raises RuntimeError or MemoryError where there is no thread, or no memory at all, for it.
        """
        steady = list(steady)
        if self._has_room_for(size_in_memory(state)) and (to_file or self._copies.slots):
            try:
                self.saver.begin(state, steady=steady, write=sealing())
            except (RuntimeError, MemoryError) as error:
                if self._copies.slots is not None and _was_refused_memory(error):
                    self._do_without(size_in_memory(state))
                    self.begin(state, steady=steady, sealing=sealing, to_file=to_file)
                    return
                self._warn_of_waiting(f"no copy of the state can be made ({error})")
            else:
                return
        if to_file is not None:
            self.saver.begin_borrowing(state, steady=steady, write=to_file)

    def reserve(self, sizes_bytes: Sequence[int]) -> None:
        """Have the first save of a state whose memory has these sizes wait for none."""
        copies = 1 if self._copies.slots is None else COPIES_HELD
        if self._fits(copies * sum(sizes_bytes)):
            self.saver.memory.reserve(sizes_bytes)

    def _has_room_for(self, needed_bytes: int) -> bool:
        """Whether a copy of the state fits beside it. What is held for copies may be of a smaller state."""
        if self._copies.slots is not None:
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
        """Whether memory is short, as it was at the save before: what another program takes for a moment counts for nothing."""
        was_short, self._was_short = self._was_short, self._memory.host_is_short
        return was_short and self._was_short

    def _fits(self, more_bytes: int) -> bool:
        return more_bytes <= 0 or more_bytes <= ROOM_SHARE_MAX * self._memory.room_bytes()

    def _do_without(self, needed_bytes: int) -> None:
        self._copies.do_without(needed_bytes)
        self.saver = BackgroundSaver()

    def _warn_of_waiting(self, why: str) -> None:
        if not self._has_warned:
            self._warn(f"{why}: training waits for each checkpoint")
        self._has_warned = True


def _was_refused_memory(error: Exception) -> bool:
    """Whether the machine has none for it; a place that is still being written to a file is free soon."""
    cause = error.__cause__
    still_written = isinstance(cause, OSError) and cause.errno == errno.EBUSY
    return isinstance(error, MemoryError) and not still_written
