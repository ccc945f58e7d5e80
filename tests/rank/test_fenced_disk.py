"""What a rank may still publish: nothing once it was declared dead, or its machine is cut off."""

from __future__ import annotations

import pytest

from ddp_runner.kernel.rank.fenced_disk import FencedDisk, may_not_publish
from ddp_runner.kernel.wire.board import SLOT_BYTES, Board, Cell


@pytest.mark.parametrize(
    ("fenced", "lease_ns", "may"),
    [(0, 0, True), (1, 0, False), (0, 100, True), (0, 99, False), (1, 200, False)],
    ids=["one machine", "declared dead", "lease holds", "lease is over", "both"],
)
def test_nothing_is_published_behind_a_fence_or_a_lease(tmp_path, fenced, lease_ns, may):
    """At 100 ns: neither a file put in place nor one removed."""
    slot = Board(memoryview(bytearray(SLOT_BYTES)), 1).slot(0)
    slot.set(Cell.FENCED, fenced)
    slot.set(Cell.LEASE_NS, lease_ns)
    disk = FencedDisk(lambda: may_not_publish(slot, 100))
    for name in ("old", "new"):
        (tmp_path / name).write_text(name)
    acts = (
        lambda: disk.replace(tmp_path / "new", tmp_path / "published"),
        lambda: disk.remove(tmp_path / "old"),
    )
    for act in acts:
        if may:
            act()
        else:
            with pytest.raises(OSError, match="declared dead"):
                act()
    assert (tmp_path / "published").exists() is may
    assert (tmp_path / "old").exists() is not may
