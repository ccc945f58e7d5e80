"""Copies of the state that outlive the ranks: the memory they are made in, and when the next one is due."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ddp_runner.checkpoint.background import BackgroundSave
from ddp_runner.checkpoint.manifest import CheckpointFacts
from ddp_runner.checkpoint.memory_slots import MemorySlots
from ddp_runner.checkpoint.ordered_saves import NobodyWritesError, OrderedSaves, ring
from ddp_runner.checkpoint.save_orders import SaveOrder
from ddp_runner.checkpoint.store import CheckpointStore, Saved
from ddp_runner.core.board import Cell
from ddp_runner.core.checkpoint_interval import CopyInterval
from ddp_runner.core.settings import Settings
from ddp_runner.training.components.tensor_hash import tensor_hash
from ddp_runner.training.runtime import RankInfo, Runtime

COPIES_HELD = 2  # the one in hand, and a whole one


def open_slots(info: RankInfo) -> MemorySlots | None:
    """The memory of this rank's supervisor; None where it has none for copies, or there is no supervisor."""
    try:
        descriptors = [os.open(path, os.O_RDWR | os.O_CLOEXEC) for path in info.memory_slots]
    except OSError:  # it has just ended, and so does this rank
        return None
    return MemorySlots(descriptors, checksum=tensor_hash) if descriptors else None


class MemoryCopies:
    """One rank's. All calls come from the training thread, but for what :meth:`sealing` returns.

    ``store``: whose files are made of copies, by a process of their own where the supervisor has one.
    """

    def __init__(self, settings: Settings, runtime: Runtime, store: CheckpointStore) -> None:
        self.slots = open_slots(runtime.rank_info)
        self._runtime = runtime
        self._logger = runtime.logger
        self._left: MemorySlots | None = None  # in which no more copies are made; one may be whole
        self._orders: OrderedSaves | None = None
        bell = runtime.rank_info.saver_bell
        if self.slots is not None and bell:
            with contextlib.suppress(OSError):  # as above
                end = os.open(bell, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                self._orders = OrderedSaves(self.slots, store, ring=partial(ring, end))
        self._every_steps = settings.checkpoint.memory_every  # or "auto": by time
        self._interval = CopyInterval(now_s=time.monotonic())
        if self.slots is not None:
            # Ranks 0 that die one soon after the other must not put copies off for good.
            self._interval.began(now_s=time.monotonic() - self.slots.age_s)
        self._compare_s = 0.0

    def is_due(self, step: int, *, step_s: float, is_busy: bool = False) -> bool:
        """Whether a copy is due once ``step`` steps are committed; by time, not while one is being made.

        A save makes one too.
        """
        if self.slots is None or not self._every_steps:
            return False
        if self._every_steps == "auto":
            return not is_busy and self._interval.is_due(now_s=time.monotonic(), step_s=step_s)
        return step % self._every_steps == 0

    def begun(self) -> None:
        """A copy is being made, for a file or for itself."""
        self._interval.began(now_s=time.monotonic())
        self._compare_s = 0.0

    def compared(self, compare_s: float) -> None:
        """So long training has waited for the comparison that proves the one in hand."""
        self._compare_s = compare_s
        self._interval.compared(compare_s)

    def stepped(self, step_s: float, *, beside_copy: bool) -> None:
        """A step has taken so long, less what it waited for a copy."""
        if self.slots is not None:
            self._interval.stepped(step_s, beside_save=beside_copy)

    def ended(self, copy: BackgroundSave) -> None:
        """The one in hand, which is no file, has ended; without it the one before is still there."""
        try:
            copy.result()
        except (MemoryError, OSError, RuntimeError) as error:
            cause = f"{type(error).__name__}: {error}"
            self._logger.warning(f"no copy of the state could be kept in memory ({cause})")
        self._interval.measured(blocked_s=copy.blocked_s, write_s=math.inf)

    def do_without(self, needed_bytes: int) -> None:
        """There is no room for two copies of a state of this size: none outlives the ranks.

        The newest does until :meth:`file_is_there`.
        """
        self._logger.warning(
            f"no room in memory for {COPIES_HELD} copies of the state"
            f" ({COPIES_HELD * needed_bytes / 1e9:.2f} GB): where all ranks end at once, the run goes on"
            " from the newest file, which rank 0 writes itself (checkpoint.memory_every=0 does not ask for them)"
        )
        self._left, self.slots, self._orders = self.slots, None, None

    def file_is_there(self) -> None:
        """A file has been written: what is held of copies that are made no more is not needed."""
        if self._left is not None:
            self._left.release()
            self._left = None

    def left_to_write(self) -> SaveOrder | None:
        """What a rank before has left to the process that writes, if that is not done yet."""
        return None if self._orders is None else self._orders.oldest()

    def written(self, order: SaveOrder) -> Saved | None:
        """Return once that is done; raises what came of it. For any thread."""
        assert self._orders is not None, "only who can order is asked to wait"
        try:
            return self._orders.wait(order.sealed)
        except NobodyWritesError as error:
            raise RuntimeError(str(error)) from error

    def sealing(
        self, facts: CheckpointFacts, write: Callable[[dict[str, Any]], Saved] | None
    ) -> Callable[[dict[str, Any]], Saved | None]:
        """What a thread does with a copy that is proven: say that it is whole, then ``write`` the file."""
        slots, orders = self.slots, self._orders if write is not None else None

        def seal(content: dict[str, Any]) -> Saved | None:
            if slots is None:
                return None if write is None else write(content)
            if orders is None or self._is_fenced():
                slots.seal(content, facts)
                return None if write is None else write(content)
            sealed = slots.seal(
                content,
                facts,
                for_file=orders.for_file,
                may_order=lambda: not self._is_fenced(),  # to seal a large state takes seconds
            )
            try:
                return orders.wait(sealed)
            except NobodyWritesError as error:
                assert write is not None
                self._logger.warning(f"{error}: this rank writes the checkpoint")
                return write(content)

        return seal

    def _is_fenced(self) -> bool:
        return bool(self._runtime.slot.get(Cell.FENCED))

    def forget(self) -> None:
        """The state is to be an older one: nothing of the course that is left may be gone back to."""
        for slots in (self.slots, self._left):
            if slots is not None:
                slots.clear()
