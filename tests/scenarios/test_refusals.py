"""Launches on a directory that another run holds, or that holds another run, and damaged files."""

from __future__ import annotations

import hashlib
import shutil
import signal

import pytest

from tests.scenarios.conftest import NO_SPARE, STEPS, WITHOUT_WORKERS
from tests.scenarios.harness import Run
from tests.scenarios.workload import HOLD_NAME

SETTINGS = (*WITHOUT_WORKERS, NO_SPARE)


def contents(folder):
    """Name -> SHA-256 of every file below ``folder`` but the lock."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def names(folder):
    """The files of a live run, but for those that are there for a moment only."""
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


@pytest.fixture
def finished(fault_free, tmp_path):
    """A folder with the checkpoints of a finished run."""
    folder = tmp_path / "finished"
    shutil.copytree(fault_free(2).checkpoints, folder / "checkpoints")
    return folder


def test_a_second_live_run_on_the_same_checkpoints_is_refused(fault_free, tmp_path):
    """One line and exit 2, at once; the first run does not notice."""
    hold = tmp_path / HOLD_NAME  # however long the second one takes
    hold.touch()
    with Run(tmp_path, *SETTINGS) as first:
        first.wait_for_event("world_formed")
        before = names(first.logs)
        with Run(tmp_path / "other", *SETTINGS, "-c", first.checkpoints) as second:
            assert second.wait() == 2, second.console
        lines = second.console.strip().splitlines()
        assert len(lines) == 1, lines
        assert f"pid {first.process.pid}" in lines[0]
        assert not second.logs.exists()
        hold.unlink()
        assert first.wait() == 0, first.console
        assert before <= names(first.logs)
    assert first.digest == fault_free(2).digest
    assert first.summary()["faults"] == []


def test_resume_none_sets_old_files_aside_and_trains_from_the_start(fault_free, finished):
    """Nothing is deleted: every old file is in one folder beside the new ones."""
    before = contents(finished / "checkpoints")
    with Run(finished, *SETTINGS, "--resume", "none") as run:
        assert run.wait() == 0, run.console
    aside = list(run.checkpoints.glob("set_aside_*"))
    assert len(aside) == 1
    assert contents(aside[0]) == before
    assert run.digest == fault_free(2).digest
    assert run.events("run_begins")[-1]["resumed_step"] == 0


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        (("--seed", 5), "run.seed: 1234 -> 5"),
        (
            ("--max-steps", 20),
            f"--max-steps=20: the run would end at step 20, and {{}} is at step {STEPS}",
        ),
    ],
    ids=["seed", "end"],
)
def test_a_launch_that_means_another_run_is_refused_with_the_difference(finished, change, reported):
    """Exit 2, one line that names setting, old and new value; nothing is touched."""
    before = contents(finished / "checkpoints")
    with Run(finished, *SETTINGS, *change) as run:
        assert run.wait() == 2, run.console
    assert reported.format(run.checkpoints / f"step_{STEPS:08d}.pt") in run.console
    assert run.console.count("ddp_runner: error:") == 1
    assert "Traceback" not in run.console
    assert contents(finished / "checkpoints") == before
    assert not run.logs.exists()


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_resumed(fault_free, tmp_path):
    """One flipped bit is found; the run falls back, says so, and ends with the fault-free weights."""
    settings = (
        *SETTINGS,
        "save_every_steps=5",
        "task.pace_s=0.24",
    )  # the signal must come well before the end
    with Run(tmp_path, *settings) as run:
        run.wait_for_step(11)
        run.wait_for_checkpoint(10)
        run.signal(signal.SIGTERM)
        assert run.wait() == 75, run.console
    newest = max(run.checkpoints.glob("step_*.pt"))
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    with Run(tmp_path, *settings) as run:
        assert run.wait() == 0, run.console
    assert run.digest == fault_free(2).digest
    damaged_step = int(newest.stem.removeprefix("step_"))
    assert 10 <= run.events("run_begins")[-1]["resumed_step"] < damaged_step
    assert f"{newest.name} is unusable" in run.console
    assert list(run.checkpoints.glob(f"{newest.name}.bad*"))
