"""What the supervisor holds for a run, and removes where it has ended."""

from __future__ import annotations

import math

from ddp_runner.kernel.processes.resources import BoardMemory, remove_temporary_files
from tests.temporaries import of_a_dead_writer


def test_only_temporary_files_of_our_own_naming_are_removed(tmp_path):
    """A user's file may be called almost like one."""
    left = of_a_dead_writer(tmp_path / "step_00000010.pt")
    kept = tmp_path / ".userfile.tmp-keepme"
    kept.write_text("kept")
    assert remove_temporary_files(tmp_path) == [left]
    assert list(tmp_path.iterdir()) == [kept]
    assert remove_temporary_files(tmp_path / "not there") == []


def test_a_folder_that_cannot_be_read_stops_no_end(tmp_path):
    """Its disk may be gone, or a file may be in its place."""
    in_its_place = tmp_path / "checkpoints"
    in_its_place.touch()
    assert remove_temporary_files(in_its_place) == []


def test_a_loss_that_nobody_has_reported_is_no_zero():
    """A loop need not report one; status.json and the page then have none."""
    memory = BoardMemory(2)
    assert all(math.isnan(memory.board.slot(rank).read().loss) for rank in range(2))
    memory.close()
