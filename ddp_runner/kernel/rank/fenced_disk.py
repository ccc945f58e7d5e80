"""The disk of a rank that may be declared dead: from then on it publishes and deletes nothing."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

from ddp_runner.kernel.system.disk import RealDisk
from ddp_runner.kernel.wire.board import Cell, Slot


def never() -> bool:
    """Return False, for ranks that nobody declares dead."""
    return False


def may_not_publish(slot: Slot, now_ns: int) -> bool:
    """Return whether this rank was declared dead, or its machine's lease from the coordinator has ended.

    ``now_ns``: by the clock that goes on while the machine is suspended, as others do meanwhile.
    """
    # INVARIANT lease: what a machine that is cut off publishes, it publishes before anybody can have
    # taken its place. Broken if: a file is renamed or removed after the lease has ended.
    # Guarded by: test_nothing_is_published_behind_a_fence_or_a_lease.
    lease_ns = slot.get(Cell.LEASE_NS)
    return bool(slot.get(Cell.FENCED)) or 0 < lease_ns < now_ns


class FencedDisk(RealDisk):
    """The operating system's disk until ``is_fenced``, which any thread may ask.

    A rank that was stopped is woken to write its stacks before it is killed. Its save would continue
    for that long: put a checkpoint in place that no other process has heard of, and delete older ones.
    """

    def __init__(self, is_fenced: Callable[[], bool] = never) -> None:
        self._is_fenced = is_fenced

    def replace(self, source: Path, target: Path) -> None:
        """rename(2)."""
        self._refuse_if_fenced(target)
        super().replace(source, target)

    def remove(self, path: Path) -> None:
        """unlink(2)."""
        self._refuse_if_fenced(path)
        super().remove(path)

    def _refuse_if_fenced(self, path: Path) -> None:
        if self._is_fenced():
            raise OSError(errno.EPERM, "this rank was declared dead", str(path))
