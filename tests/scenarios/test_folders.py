"""Somebody tidies up: a live run's folders are removed or moved away under it."""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path

import torch

from .conftest import NO_SPARE, PATIENT
from .harness import ROOT, Run, poll
from .test_names import SHORT, TASK

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
    *(*PATIENT, NO_SPARE),
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


def test_a_file_in_place_of_the_checkpoints_leaves_a_summary(tmp_path):
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


LEAVES = (
    'import os\nos.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), "elsewhere"))\n'
)


def leaving(source, place, name, *, is_behind=False):
    """``source`` with lines before ``place``, or behind its line, that go into the folder ``name``."""
    head, found, rest = source.partition(place)
    assert found
    indent = len(place) - len(place.lstrip())
    if is_behind:
        line, _, rest = rest.partition("\n")
        head, found, indent = f"{head}{found}{line}\n", "", indent + 4
    lines = textwrap.indent(LEAVES.replace("elsewhere", name), " " * indent)
    return f"{head}{lines}{found}{rest}"


def test_a_task_that_changes_the_working_directory_keeps_its_files(tmp_path):
    """Relative folders, the task's file and a checkpoint to resume from mean what they meant at the launch.

    It goes when it is imported, when its data is made, and once more when its model is.
    """
    source = textwrap.dedent(TASK)
    source = leaving(source, "class ", "first")
    source = leaving(source, "    def build_datasets", "second", is_behind=True)
    source = leaving(source, "        return ", "third")
    places = [tmp_path / name for name in ("first", "second", "third")]
    for place in places:
        place.mkdir()
    (tmp_path / "mine.py").write_text(source)
    words = ("--task", "mine.py", "recovery.drill_at=2", "save_every_steps=4")
    kill = ("--inject", "kill:rank=0,step=6")
    with Run(tmp_path, *words, *SHORT, 12, *kill, task=None) as run:
        assert run.wait() == 0, run.console
    run.logs, folder = tmp_path / "logs" / "mine", Path("checkpoints", "mine")
    summary = run.summary()
    assert summary["exact"] is True, summary["inexact_reasons"]
    assert summary["checkpoint"] == str(folder / "step_00000012.pt")
    assert f"saved {folder / 'step_00000012.pt'} (" in run.console
    assert "cannot be written" not in run.console
    assert (tmp_path / folder / "final.pt").exists()
    assert "saved" in (run.logs / "rank_0.log").read_text()
    assert [list(place.iterdir()) for place in places] == [[], [], []]
    resume = ("--resume", folder / "step_00000008.pt")
    with Run(tmp_path, *words, *SHORT, 12, *resume, task=None) as run:
        assert run.wait() == 0, run.console
    run.logs = tmp_path / "logs" / "mine"
    assert run.digest == summary["weights_sha256"]


def test_a_loop_that_changes_the_working_directory_resumes_from_its_checkpoints(tmp_path):
    """So does Hydra before a program's own lines, and many a program at its top."""
    program = (ROOT / "docs/examples/my_loop.py").read_text()
    assert "max_steps=200" in program
    program = program.replace("max_steps=200", "max_steps=60")
    (tmp_path / "mine.py").write_text(program.replace("run = ddp", f"{LEAVES}run = ddp", 1))
    (tmp_path / "elsewhere").mkdir()
    words = ("save_every_steps=20", "recovery.drill_at=2")
    with Run(
        tmp_path, *words, "--inject", "kill:rank=1,step=30", "mine.py", task=None, verb="run"
    ) as run:
        assert run.wait() == 0, run.console
    run.logs = tmp_path / "logs" / "mine"
    assert run.summary()["exact"] is True, run.summary()["inexact_reasons"]
    assert (tmp_path / "checkpoints" / "mine" / "last").read_text() == "step_00000060.pt\n"
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["product.pt"]
