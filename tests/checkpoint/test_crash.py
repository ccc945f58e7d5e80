"""A loss of power at every disk operation of a save leaves a checkpoint that loads."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch

from ddp_runner.checkpoint import publish
from ddp_runner.checkpoint.store import CheckpointStore

from .crashing_disk import CrashingDisk, SimulatedCrash, Survival
from .states import save

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OPERATIONS_MAX = 400


@dataclass(frozen=True)
class Scenario:
    """What was announced before, and the save that loses power."""

    before: Callable[[Path, CrashingDisk], None]
    last_save: Callable[[Path, CrashingDisk], None]
    newest_after: tuple[int, ...]
    best_after: tuple[int, ...]


def _saves(*steps: tuple[int, float]) -> Callable[[Path, CrashingDisk], None]:
    def run(directory: Path, disk: CrashingDisk) -> None:
        for step, monitored in steps:
            save(directory, step, monitored=monitored, disk=disk)

    return run


SCENARIOS = {
    "second save": Scenario(_saves((10, 3.0)), _saves((20, 4.0)), (10, 20), (10,)),
    "retention, pointers, new best": Scenario(
        _saves((10, 3.0), (20, 4.0), (30, 5.0)), _saves((40, 1.0)), (30, 40), (10, 40)
    ),
    "back to an earlier step": Scenario(
        _saves((10, 3.0), (20, 2.0), (30, 1.0)), _saves((15, 4.0)), (30, 20, 15), (30, 20, 10, 15)
    ),
}


def _prepare(root: Path, scenario: Scenario) -> Path:
    """A directory as it is before the last save."""
    before = root / "before"
    before.mkdir()
    scenario.before(before, CrashingDisk(before))
    return before


def _crash(path: Path, scenario: Scenario, *, at: int, survival: Survival) -> bool:
    """Run the last save with a crash in it; False once the save ends before the crash."""
    shutil.copytree(path.parent / "before", path)
    disk = CrashingDisk(path, crash_at=at)
    try:
        scenario.last_save(path, disk)
    except SimulatedCrash:
        disk.restart(survival)
        return True
    return False


def _check_content(loaded) -> None:
    assert loaded is not None
    step = loaded.manifest.step
    assert loaded.state["counters"]["step"] == step
    assert torch.equal(loaded.state["model"]["weight"], torch.full((3, 5), float(step)))
    assert loaded.rejected == ()


@pytest.mark.parametrize("survival", Survival)
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_crash_at_any_disk_operation_keeps_the_newest_announced_checkpoint(
    tmp_path: Path, name: str, survival: Survival
):
    """Whatever survives of unsynced writes, the newest load is whole, and the next save works."""
    scenario = SCENARIOS[name]
    _prepare(tmp_path, scenario)
    for at in range(1, OPERATIONS_MAX):
        path = tmp_path / str(at)
        if not _crash(path, scenario, at=at, survival=survival):
            assert at > 15, "the save took fewer operations than it must"
            return
        store = CheckpointStore(path, keep_last=2)
        newest, best = store.load(), store.load("best")
        _check_content(newest)
        _check_content(best)
        assert newest.manifest.step in scenario.newest_after
        assert best.manifest.step in scenario.best_after
        _check_the_next_run(path)
    pytest.fail(f"no end of the save within {OPERATIONS_MAX} operations")


def test_a_crash_while_a_large_file_is_written_keeps_the_last(tmp_path: Path, monkeypatch):
    """Pieces that are large go through a thread of their own: the same promise, at every piece."""
    monkeypatch.setattr(publish, "_PIECE_BYTES_MIN", 60)
    test_a_crash_at_any_disk_operation_keeps_the_newest_announced_checkpoint(
        tmp_path, "second save", Survival.NAMES
    )


def _check_the_next_run(path: Path) -> None:
    disk = CrashingDisk(path)
    save(path, 50, monitored=9.0, disk=disk)
    assert CheckpointStore(path, keep_last=2).load().manifest.step == 50
    assert list(path.glob(".*")) == []


@pytest.mark.parametrize("survival", Survival)
def test_saving_the_same_step_again_survives_a_crash_anywhere(tmp_path: Path, survival: Survival):
    """While a step's file is replaced by another of that step, one of the two always loads."""

    def old(path: Path, disk: CrashingDisk) -> None:
        save(path, 10, mark="old", disk=disk)

    def new(path: Path, disk: CrashingDisk) -> None:
        save(path, 10, mark="new", disk=disk)

    scenario = Scenario(old, new, (), ())
    _prepare(tmp_path, scenario)
    for at in range(1, OPERATIONS_MAX):
        path = tmp_path / str(at)
        crashed = _crash(path, scenario, at=at, survival=survival)
        loaded = CheckpointStore(path, keep_last=2).load()
        _check_content(loaded)
        assert loaded.state["counters"]["mark"] in ("old", "new")
        if not crashed:
            assert loaded.state["counters"]["mark"] == "new"
            return
    pytest.fail(f"no end of the save within {OPERATIONS_MAX} operations")


@pytest.mark.parametrize("survival", Survival)
def test_a_crash_in_the_first_save_leaves_nothing_or_a_checkpoint(
    tmp_path: Path, survival: Survival
):
    """A relaunch after a first save that was cut off starts afresh or resumes; it never fails."""
    found = set()
    scenario = Scenario(_saves(), _saves((10, 1.0)), (), ())
    _prepare(tmp_path, scenario)
    for at in range(1, OPERATIONS_MAX):
        path = tmp_path / str(at)
        if not _crash(path, scenario, at=at, survival=survival):
            break
        loaded = CheckpointStore(path, keep_last=2).load()
        found.add(loaded is not None)
        if loaded is not None:
            _check_content(loaded)
    assert found == {False, True}
