"""The disk port: the real one and the crashing one keep the same contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ddp_runner.kernel.system.disk import Disk, RealDisk

from .crashing_disk import CrashingDisk, SimulatedCrash, Survival

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(params=["real", "crashing"])
def disk(request, tmp_path: Path) -> Disk:
    return RealDisk() if request.param == "real" else CrashingDisk(tmp_path)


def _put(disk: Disk, path: Path, *pieces: bytes) -> None:
    handle = disk.open_temporary(path)
    for piece in pieces:
        disk.write(handle, memoryview(piece))
    disk.sync_file(handle)
    disk.close(handle)


def test_pieces_are_appended_and_sized(disk: Disk, tmp_path: Path):
    """A file holds every piece in order; one that is there is never opened to be written."""
    _put(disk, tmp_path / "a", b"one", b"", b"two")
    with pytest.raises(FileExistsError):
        disk.open_temporary(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"onetwo"
    assert disk.size_bytes(tmp_path / "a") == 6


def test_room_set_aside_is_no_part_of_the_file(disk: Disk, tmp_path: Path):
    """A file has what was written, whether that is less or more than what was said, also of more than there is."""
    for size_bytes in (1, 1 << 16, 1 << 60):
        path = tmp_path / str(size_bytes)
        handle = disk.open_temporary(path)
        disk.set_room_aside(handle, size_bytes)
        disk.write(handle, memoryview(b"all of it"))
        disk.sync_file(handle)
        disk.close(handle)
        assert path.read_bytes() == b"all of it"


def test_replace_moves_over_an_older_file(disk: Disk, tmp_path: Path):
    """After a replace the target has the new content and the source is gone, also across folders."""
    _put(disk, tmp_path / "a", b"new")
    _put(disk, tmp_path / "b", b"old")
    disk.replace(tmp_path / "a", tmp_path / "b")
    disk.make_directory(tmp_path / "c" / "d")
    disk.replace(tmp_path / "b", tmp_path / "c" / "d" / "b")
    disk.sync_directory(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert (tmp_path / "c" / "d" / "b").read_bytes() == b"new"


def test_remove_and_absence(disk: Disk, tmp_path: Path):
    """A removed file is gone, and what is not there cannot be removed or sized."""
    _put(disk, tmp_path / "a", b"x")
    disk.remove(tmp_path / "a")
    disk.make_directory(tmp_path)
    with pytest.raises(FileNotFoundError):
        disk.remove(tmp_path / "a")
    with pytest.raises(FileNotFoundError):
        disk.size_bytes(tmp_path / "a")
    with pytest.raises(FileNotFoundError):
        disk.open_temporary(tmp_path / "no such folder" / "a")
    assert disk.free_bytes(tmp_path) > 0


@pytest.mark.parametrize("survival", Survival)
def test_crashing_disk_keeps_what_was_synced(tmp_path: Path, survival: Survival):
    """Content after a file sync and names after a directory sync survive any crash."""
    disk = CrashingDisk(tmp_path)
    _put(disk, tmp_path / "a", b"kept")
    disk.sync_directory(tmp_path)
    disk.crash_at = disk.operations + 1
    with pytest.raises(SimulatedCrash):
        disk.remove(tmp_path / "a")
    with pytest.raises(SimulatedCrash):
        disk.sync_directory(tmp_path)
    disk.restart(survival)
    assert (tmp_path / "a").read_bytes() == b"kept"


def test_crashing_disk_loses_what_was_not_synced(tmp_path: Path):
    """The fake must be able to show a missing sync: unsynced names and content do not survive."""
    disk = CrashingDisk(tmp_path)
    handle = disk.open_temporary(tmp_path / "a")
    disk.write(handle, memoryview(b"12345678"))
    disk.restart(Survival.NAMES)
    assert (tmp_path / "a").read_bytes() == b"1234"
    disk.restart(Survival.NOTHING)
    assert list(tmp_path.iterdir()) == []
