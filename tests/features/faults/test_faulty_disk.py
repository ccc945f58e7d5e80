"""What is injected into a disk really happens to files, and only then."""

from __future__ import annotations

import time

import pytest
import torch

from ddp_runner.checkpoint.store import CheckpointStore
from ddp_runner.core.board import SLOT_BYTES, Board, Cell
from ddp_runner.core.faults import FaultError
from ddp_runner.features.faults.faulty_disk import TROUBLE_BYTES, FaultyDisk
from ddp_runner.rank.fenced_disk import FencedDisk
from tests.checkpoint.states import save, steps_in


def test_a_full_disk_is_one_that_the_system_refuses_to_write(tmp_path):
    """The refusal is the kernel's own; what was there stays, and afterwards all is as before."""
    disk = FaultyDisk()
    save(tmp_path, 10, disk=disk)
    disk.fill(seconds=60.0)
    with pytest.raises(FaultError, match="File too large"):
        save(tmp_path, 20, disk=disk)
    (tmp_path / "other").write_text("another file of this process")
    disk.fill(seconds=0.0)
    save(tmp_path, 30, disk=disk)
    assert steps_in(tmp_path) == [10, 30]


class _FencedMeanwhile(FencedDisk):
    """Its rank is declared dead while the file is being written."""

    def __init__(self, slot):
        super().__init__(lambda: bool(slot.get(Cell.FENCED)))
        self._slot = slot

    def sync_file(self, handle):
        super().sync_file(handle)
        self._slot.set(Cell.FENCED, 1)


def test_a_rank_that_is_declared_dead_publishes_and_deletes_nothing(tmp_path):
    """The save that it is in the middle of ends there, and what other processes see stays as it is."""
    slot = Board(memoryview(bytearray(SLOT_BYTES)), 1).slot(0)
    fenced = FencedDisk(lambda: bool(slot.get(Cell.FENCED)))
    for step in (10, 20):
        save(tmp_path, step, disk=fenced, keep_last=2)
    visible = {path.name: path.read_bytes() for path in tmp_path.glob("[!.]*")}
    with pytest.raises(FaultError, match="declared dead"):
        save(tmp_path, 30, disk=_FencedMeanwhile(slot), keep_last=2)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("[!.]*")} == visible
    slot.set(Cell.FENCED, 0)
    save(tmp_path, 30, disk=fenced, keep_last=2)
    assert steps_in(tmp_path) == [20, 30]


def test_an_io_error_meets_one_save_and_keeps_what_was_there(tmp_path):
    """It is reported as one; the save after it works."""
    disk = FaultyDisk()
    save(tmp_path, 10, disk=disk)
    disk.fail_next_sync()
    with pytest.raises(FaultError, match="Input/output error"):
        save(tmp_path, 20, disk=disk)
    assert steps_in(tmp_path) == [10]
    save(tmp_path, 30, disk=disk)
    assert steps_in(tmp_path) == [10, 30]


def test_a_slow_disk_takes_its_time_once(tmp_path, monkeypatch):
    """The next write only: the others are no slower than the disk is."""
    slept_s, sleep, disk = [], time.sleep, FaultyDisk()
    monkeypatch.setattr(time, "sleep", lambda seconds: (slept_s.append(seconds), sleep(seconds)))
    disk.slow_down(seconds=0.3)
    began_s = time.monotonic()
    save(tmp_path, 10, disk=disk)
    assert time.monotonic() - began_s >= 0.3
    for step in (20, 30):
        save(tmp_path, step, disk=disk)
    assert slept_s == [0.3]


def test_what_is_asked_in_one_process_another_one_does(tmp_path):
    """By memory that they share: the rank asks, and who writes its checkpoints has the trouble."""
    shared = memoryview(bytearray(TROUBLE_BYTES))
    asked = FaultyDisk(trouble=shared, folder=tmp_path)
    writes = FaultyDisk(trouble=shared, folder=tmp_path)
    save(tmp_path, 10, disk=writes)
    asked.fail_next_sync()
    with pytest.raises(FaultError, match="Input/output error"):
        save(tmp_path, 20, disk=writes)
    asked.fill(seconds=60.0)
    with pytest.raises(FaultError, match="File too large"):
        save(tmp_path, 20, disk=writes)
    asked.fill(seconds=0.0)
    assert not asked.has_checkpoint
    save(tmp_path, 30, disk=writes)
    assert asked.has_checkpoint
    asked.damage_newest()
    catalog = CheckpointStore(tmp_path, keep_last=1).catalog
    assert catalog.verify(catalog.entries()[0]) is not None


def test_a_damaged_checkpoint_is_the_newest_and_is_found(tmp_path):
    """Before there is one there is nothing to damage; afterwards a load falls back."""
    disk = FaultyDisk()
    disk.damage_newest()
    assert not disk.has_checkpoint
    for step in (10, 20):
        state = {"weight": torch.full((1000,), float(step))}
        save(tmp_path, step, disk=disk, state=state)
    assert disk.has_checkpoint
    disk.damage_newest()
    loaded = CheckpointStore(tmp_path, keep_last=2).load()
    assert loaded.manifest.step == 10
    [(path, reason)] = loaded.rejected
    assert path.name == "step_00000020.pt"
    assert "SHA-256" in reason
