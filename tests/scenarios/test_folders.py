"""Somebody tidies up: a live run's folders are removed or moved away under it."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from .conftest import PATIENT
from .harness import Run, poll

FILES = (
    "supervisor.log",
    "events.jsonl",
    "metrics.jsonl",
    "config.yaml",
    "rank_0.log",
    "rank_1.log",
)
SETTINGS = (
    *("-b", 8, "num_workers=0", "save_every_steps=5", "log_interval=1", "--audit"),
    *PATIENT,
)


def test_folders_that_are_removed_are_made_again_and_locked(tmp_path):
    """The run goes on, says so once, saves at once, and is found and locked where it was."""
    with Run(tmp_path, *SETTINGS, "--max-steps", 1_000_000) as run:
        run.wait_for_checkpoint(5)
        removed = tmp_path / "removed"
        for folder in (run.logs, run.checkpoints):
            folder.rename(removed)  # as a whole: what is written meanwhile stops no removal
            shutil.rmtree(removed)
            folder_files = FILES if folder == run.logs else (".lock", "last")
            poll(
                lambda made=[folder / name for name in folder_files]: all(
                    path.exists() for path in made
                ),
                what=f"the files in {folder}",
            )
        run.wait_for_checkpoint(1)
        for option in ("-c", "-l"):
            folder = run.checkpoints if option == "-c" else run.logs
            with Run(tmp_path / f"other{option}", *SETTINGS, option, folder) as second:
                assert second.wait() == 2, second.console
            assert f"another run (pid {run.process.pid})" in second.console
        before = run.status()["step"]
        poll(lambda: run.status()["step"] > before, what="a step in the new status.json")
        run.signal(15)
        assert run.wait() == 75, run.console
    for folder in (run.logs, run.checkpoints):
        said = f"WARNING: {folder} was removed or moved away: it is made again"
        assert run.console.count(said) == 1, run.console
    assert "cannot be written" not in run.console
    summary = run.summary()
    assert (summary["status"], summary["faults"]) == ("preempted", [])
    last = run.checkpoints / f"step_{summary['steps']:08d}.pt"
    assert f"saved {last} (" in run.console
    log = (run.logs / "rank_0.log").read_text()
    assert f"saved {last} (" in log
    assert len(run.events("folder_made_again")) == 2
    with Run(tmp_path, *SETTINGS, "--max-steps", summary["steps"] + 5) as run:
        assert run.wait() == 0, run.console
    assert run.summary()["steps"] == summary["steps"] + 5


def test_a_file_in_place_of_the_checkpoints_leaves_a_summary_and_a_rescued_state(tmp_path):
    """The last save goes to the log folder, and the end is said as for any disk that refuses."""
    settings = (*SETTINGS, "recovery.checkpoint_timeout_s=3", "save_every_steps=50")
    with Run(tmp_path, *settings, "--max-steps", 1_000_000) as run:
        run.wait_for_checkpoint(50)
        removed = tmp_path / "removed"
        run.checkpoints.rename(removed)
        run.checkpoints.touch()
        run.signal(15)
        assert run.wait() == 1, run.console
    assert "Traceback" not in run.console
    summary = run.summary()
    assert summary["status"] == "failed"
    rescued = Path(summary["checkpoint"])
    assert rescued.parent.parent == run.logs
    assert torch.load(rescued, weights_only=True)["counters"]["committed_step"] == summary["steps"]
