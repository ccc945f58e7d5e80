"""A disk that refuses any one operation of a save: a fault that is reported, and nothing lost."""

from __future__ import annotations

import errno
import subprocess
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch

from ddp_runner.checkpoint.file_hash import digest_of
from ddp_runner.checkpoint.store import CheckpointStore
from ddp_runner.core.faults import Fault, FaultError, FaultKind
from ddp_runner.system.disk import RealDisk

from .states import save
from .test_processes import small_disk

if TYPE_CHECKING:
    from pathlib import Path

OPERATIONS_MAX = 100
OPERATIONS = (
    "open_temporary", "write", "sync_file", "replace", "sync_directory", "remove", "make_directory",
)  # fmt: skip


@dataclass
class RefusingDisk(RealDisk):
    """Refuses operation number ``at`` (from 1), once or from then on, with ``code``."""

    at: int
    code: int
    for_good: bool
    count: int = 0

    def __getattribute__(self, name: str):
        if name in OPERATIONS:
            self.count += 1
            if self.count == self.at or (self.for_good and self.count > self.at):
                raise OSError(self.code, errno.errorcode[self.code])
        return super().__getattribute__(name)


def _reported_by_a_save(directory: Path, disk: RefusingDisk) -> Fault | tuple[str, ...]:
    """The fault, or the notes of a save that counts."""
    try:
        return save(directory, 40, monitored=1.0, disk=disk).notes
    except FaultError as error:
        return error.fault


@pytest.mark.parametrize(
    ("code", "for_good"), [(errno.EIO, False), (errno.EROFS, True)], ids=["once", "for good"]
)
def test_any_refused_operation_is_reported_and_keeps_what_was_announced(
    tmp_path: Path, code: int, for_good: bool
):
    """Whichever operation of a save fails: old or new checkpoint loads whole, the next save works.

    What fails once the new one counts is no fault of the save, and reported as a note.
    """
    for at in range(1, OPERATIONS_MAX):
        directory = tmp_path / str(at)
        for step in (10, 20, 30):
            save(directory, step, monitored=float(step))
        disk = RefusingDisk(at, code, for_good)
        reported = _reported_by_a_save(directory, disk)
        if disk.count < at:
            assert at > 12, "the save took fewer operations than it must"
            assert reported == ()
            return
        loaded = CheckpointStore(directory, keep_last=2).load()
        if isinstance(reported, tuple):
            assert loaded.manifest.step == 40
            (note,) = reported
            assert "step_00000040.pt is saved, but not all" in note
        else:
            assert loaded.manifest.step in (30, 40)
            assert reported.kind is FaultKind.STORAGE_FAILED
            assert "step_00000040.pt" in reported.cause
        assert loaded.rejected == ()
        assert loaded.state["counters"]["step"] == loaded.manifest.step
        save(directory, 50, monitored=9.0)
        assert CheckpointStore(directory, keep_last=2).load().manifest.step == 50
        assert list(directory.glob(".*")) == []
    pytest.fail(f"no end of the save within {OPERATIONS_MAX} operations")


def test_a_disk_that_lets_nothing_be_set_aside_ends_no_resume(tmp_path: Path):
    """Whichever operation it refuses; control: one that lets it moves the damaged file away."""
    for at in range(1, OPERATIONS_MAX):
        directory = tmp_path / str(at)
        save(directory, 10)
        save(directory, 20).path.write_bytes(b"damaged")
        disk = RefusingDisk(at, errno.EROFS, for_good=True)
        loaded = CheckpointStore(directory, keep_last=2, disk=disk).load(set_bad_aside=True)
        assert loaded.manifest.step == 10
        ((path, why),) = loaded.rejected
        if disk.count < at:
            assert (path.exists(), "not set aside" in why) == (False, False)
            return
        assert "not set aside: EROFS" in why
        assert CheckpointStore(directory, keep_last=2).load().manifest.step == 10
    pytest.fail(f"no end of it within {OPERATIONS_MAX} operations")


@pytest.mark.parametrize("at", [3, 6, 12])
def test_a_write_that_fails_within_a_large_file_ends_its_threads(tmp_path: Path, at: int):
    """Torch goes on handing over bytes; none reaches the disk any more, and nothing is left."""
    save(tmp_path, 30)
    disk = RefusingDisk(at, errno.ENOSPC, for_good=False)
    large = {f"weight {number}": torch.randn(100_000) for number in range(12)}
    with pytest.raises(FaultError, match="ENOSPC"):
        save(tmp_path, 40, disk=disk, state=large)
    assert disk.count <= at + 2  # its temporary file is removed
    assert not [t.name for t in threading.enumerate() if t.name.startswith("checkpoint")]
    assert list(tmp_path.glob(".*")) == []
    saved = save(tmp_path, 50, state=large)
    loaded = CheckpointStore(tmp_path, keep_last=2).load()
    assert loaded.manifest.step == 50
    assert all(torch.equal(loaded.state[name], weight) for name, weight in large.items())
    assert digest_of(saved.path) == saved.manifest.sha256


def test_a_file_system_that_became_read_only_is_a_storage_fault(tmp_path: Path):
    """As the kernel makes one after an error: what is there loads, and saves work once it is back."""
    directory = tmp_path / "small"
    with small_disk(directory, size_kb=2048):
        save(directory, 10)
        save(directory, 15).path.write_bytes(b"damaged")
        subprocess.run(["mount", "-o", "remount,ro", str(directory)], check=True)
        with pytest.raises(FaultError, match="Read-only file system") as caught:
            save(directory, 20)
        assert caught.value.fault.kind is FaultKind.STORAGE_FAILED
        loaded = CheckpointStore(directory, keep_last=2).load(set_bad_aside=True)
        assert loaded.manifest.step == 10
        ((path, why),) = loaded.rejected
        assert path.name == "step_00000015.pt"
        assert why.endswith("(not set aside: Read-only file system)")
        subprocess.run(["mount", "-o", "remount,rw", str(directory)], check=True)
        save(directory, 30)
        assert CheckpointStore(directory, keep_last=2).load().manifest.step == 30
