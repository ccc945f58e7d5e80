"""The save after which there is none: tried for a while, then elsewhere; and what is said of room at all."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddp_runner.checkpoint.store import CheckpointStore
from ddp_runner.config import from_flat
from ddp_runner.kernel.rules.exits import StopReason
from ddp_runner.kernel.rules.faults import Fault, FaultError, FaultKind
from ddp_runner.kernel.system.disk import RealDisk
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.training.saves import last_save
from ddp_runner.training.saves.disk_faults import DiskFaults
from ddp_runner.training.saves.last_save import BEFORE_END, LastSave, checkpoint_room
from tests.checkpoint.states import facts_of, state_of

from .building import build_state
from .test_saving import RecordingRuntime

COMPLETED = StopReason.COMPLETED.value
STEP = 20


class Disk:
    """Refuses the first ``count`` saves in the folder of checkpoints, and ``elsewhere`` or not."""

    def __init__(
        self, folder, *, count, elsewhere=False, kind=FaultKind.STORAGE_FAILED, why="no room"
    ):
        self._home = folder / "checkpoints"
        self._count, self._elsewhere, self._kind, self._why = count, elsewhere, kind, why
        self.tries = 0

    def save(self, store):
        is_home = store.directory == self._home
        self.tries += is_home
        if self.tries <= self._count if is_home else self._elsewhere:
            store.directory.mkdir(exist_ok=True)
            cause = f"{store.directory}: {self._why}"
            raise FaultError(Fault(kind=self._kind, rank=-1, step=STEP, cause=cause))
        return store.save(state_of(STEP), facts_of(STEP))


@pytest.fixture
def make(tmp_path, monkeypatch):
    """``make(disk, reason, **settings)``: the last save of a rank; what it has said is its ``log``."""
    monkeypatch.setattr(last_save, "FIRST_PAUSES_S", (0.01,))
    monkeypatch.setattr(last_save, "PAUSE_S", 0.02)
    runtime = RecordingRuntime(tmp_path)
    runtime.run_id = "run-1"

    def made(disk, reason=COMPLETED, **settings):
        store = CheckpointStore(tmp_path / "checkpoints", keep_last=3)
        asked = from_flat({"log_dir": str(tmp_path / "logs"), **settings})
        disk_faults = DiskFaults(SimpleNamespace(committed_step=STEP), runtime)
        return LastSave(asked, store, runtime, disk_faults=disk_faults).make(
            disk.save, reason=reason
        )

    made.runtime, made.log = runtime, runtime.log
    return made


def step_in(path):
    return CheckpointStore(Path(path).parent, keep_last=1).load(str(path)).manifest.step


def test_what_is_freed_in_time_is_saved_where_it_belongs(make, tmp_path):
    """However often it was refused; said once, with the time that is left."""
    saved, refusal = make(Disk(tmp_path, count=6))
    assert (refusal, saved.path.parent) == (None, tmp_path / "checkpoints")
    assert make.log().count("no room; tried again for 600 s") == 1


@pytest.mark.parametrize("rescue_dir", ["", "rescue"])
def test_what_is_not_freed_is_saved_elsewhere(make, tmp_path, rescue_dir):
    """In the log directory or where it was asked for, in a folder of this run; and how to resume it is said."""
    asked = {"checkpoint.rescue_dir": str(tmp_path / rescue_dir)} if rescue_dir else {}
    saved, refusal = make(Disk(tmp_path, count=10**9), **asked, checkpoint_timeout_s=0.1)
    assert saved.path.parent == tmp_path / (rescue_dir or "logs") / "rescued_run-1"
    assert step_in(saved.path) == STEP
    assert refusal.cause.startswith(f"{tmp_path / 'checkpoints'}: no room; saved as {saved.path}")
    assert refusal.cause.endswith(f"--resume {saved.path}")


def test_where_no_place_takes_it_both_reasons_are_reported(make, tmp_path):
    """Only then is the work lost. No empty folder is left of it, and the wait is time of checkpoints."""
    disk = Disk(tmp_path, count=10**9, elsewhere=True)
    with pytest.raises(FaultError) as caught:
        make(disk, checkpoint_timeout_s=0.1)
    home, elsewhere = tmp_path / "checkpoints", tmp_path / "logs" / "rescued_run-1"
    assert caught.value.fault.cause == f"{home}: no room; nor elsewhere: {elsewhere}: no room"
    assert disk.tries > 2
    assert home.exists()
    assert not elsewhere.exists()
    assert make.runtime.slot.get(Cell.CHECKPOINT_NS) >= 0.05e9


def test_a_file_that_is_too_large_is_not_tried_again(make, tmp_path):
    """Nothing that people free makes room for it: it is saved elsewhere at once."""
    disk = Disk(tmp_path, count=10**9, why=os.strerror(errno.EFBIG))
    saved, _ = make(disk)
    assert (disk.tries, step_in(saved.path)) == (1, STEP)


@pytest.mark.parametrize(
    ("reason", "limits"),
    [
        (COMPLETED, {"checkpoint_timeout_s": 0.4}),
        (BEFORE_END, {"checkpoint_timeout_s": 0.8}),
        (StopReason.PREEMPTED.value, {"stop_timeout_s": 0.8}),
    ],
)
def test_each_end_grants_the_time_that_it_has(make, tmp_path, reason, limits):
    """A last save at the end all of it; one before an end, or in a stop, leaves some for the other place."""
    began_s = time.monotonic()
    make(Disk(tmp_path, count=10**9), reason, **limits)
    assert time.monotonic() - began_s >= 0.4
    assert "tried again for 0 s" in make.log()


def test_who_asks_for_a_stop_meanwhile_need_not_wait(make, tmp_path, monkeypatch):
    """The other place is taken at once; control: a stop that was asked for before changes nothing."""
    asked = iter([None, None, StopReason.INTERRUPTED])
    monkeypatch.setattr(make.runtime, "stop_asked", lambda: next(asked))
    disk = Disk(tmp_path, count=10**9)
    assert make(disk)[1] is not None
    assert disk.tries == 2
    monkeypatch.setattr(make.runtime, "stop_asked", lambda: StopReason.INTERRUPTED)
    assert make(Disk(tmp_path, count=4), "interrupted")[1] is None


def test_what_no_disk_has_refused_is_raised_at_once(make, tmp_path):
    """Nor does a rank try again that is about to be killed."""
    disk = Disk(tmp_path, count=10**9, kind=FaultKind.CHECKPOINT_BAD)
    with pytest.raises(FaultError, match="no room"):
        make(disk)
    make.runtime.slot.set(Cell.FENCED, 1)
    fenced = Disk(tmp_path, count=10**9)
    with pytest.raises(FaultError, match="no room"):
        make(fenced)
    assert (disk.tries, fenced.tries) == (1, 1)


def test_checkpoints_that_are_kept_for_good_make_no_room(tmp_path):
    """Those that newer ones replace do."""
    state = build_state()
    for step in (10, 20):
        CheckpointStore(tmp_path, keep_last=3).save(state_of(step), facts_of(step))
    both = checkpoint_room(state, CheckpointStore(tmp_path, keep_last=3), RealDisk())
    one = checkpoint_room(state, CheckpointStore(tmp_path, keep_last=3, keep_every=20), RealDisk())
    assert one.kept_bytes == next(tmp_path.glob("*10.pt")).stat().st_size
    assert both.kept_bytes > one.kept_bytes
