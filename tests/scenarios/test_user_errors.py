"""Mistakes in user code that no retry repairs: the run ends soon, with the cause reported once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.conftest import WITHOUT_WORKERS as SETTINGS
from tests.scenarios.harness import WORKLOAD, Run

# Sample 100 of 192 comes once an epoch, always at the same step and on the same rank.
BAD_SAMPLE = 100


def test_an_exception_that_always_comes_ends_the_run_with_its_traceback(tmp_path):
    """The same error at the same step again is the user's: exit 1, reported once, with the log's path."""
    with Run(tmp_path, *SETTINGS, f"task.raise_at_sample={BAD_SAMPLE}") as run:
        assert run.wait() == 1, run.console
    console = run.console
    assert console.count('raise RuntimeError("this step never works")') == 1, console
    summary = run.summary()
    assert (summary["status"], summary["exit_code"]) == ("failed", 1)
    last = summary["faults"][-1]
    assert (last["kind"], last["recovered_s"]) == ("rank_raised", None)
    assert str(run.logs / f"rank_{last['rank']}.log") in console
    reported = [event for event in run.events("fault") if event["kind"] == "rank_raised"]
    for detail in (last["detail"], *(event["detail"] for event in reported)):
        assert detail.rstrip().endswith("RuntimeError: this step never works"), detail
        assert "in loss\n" in detail
    victims = [event for event in run.events("fault") if event["kind"] == "collective_failed"]
    assert all(event["detail"] == "" for event in victims)


def test_a_hook_that_freezes_a_layer_ends_the_run(tmp_path):
    """It is not called again, where it would find nothing to change and training would go on with the change."""
    (tmp_path / "freezing.py").write_text(
        "from tests.scenarios.workload import PacedTask\n"
        "class Task(PacedTask):\n"
        "    def on_epoch_end(self, context):\n"
        "        next(context.model.parameters()).requires_grad_(False)\n"
    )
    settings = (*SETTINGS, "task.pace_s=0")
    with Run(tmp_path, *settings, task=f"{tmp_path / 'freezing.py'}:Task") as run:
        assert run.wait() == 2, run.console
    assert "error: --task: on_epoch_end() changed requires_grad of " in run.console
    assert len(run.summary()["faults"]) == 1


def test_a_task_that_starts_a_thread_is_imported_by_each_rank(tmp_path):
    """A fork beside a thread may inherit its locks: said when it is known, and no rank is such a fork."""
    (tmp_path / "threaded.py").write_text(
        "import threading\n"
        "from tests.scenarios.workload import PacedTask\n"
        "import os\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "open('imported', 'a').write(f'{os.getpid()}\\n')\n"
        "class Task(PacedTask):\n    pass\n"
    )
    settings = (
        *SETTINGS,
        "task.pace_s=0",
        "recovery.warm_spare=false",
    )  # which would import it too
    with Run(tmp_path, *settings, task=f"{tmp_path / 'threaded.py'}:Task") as run:
        assert run.wait() == 0, run.console
    warning = (
        "the task is imported by each rank, not ahead of them: after importing it 2 threads run"
    )
    importers = (tmp_path / "imported").read_text().split()
    assert len(set(importers)) == 3, "a zygote once, and each rank"
    assert run.console.count(warning) == 1, run.console
    assert run.console.index(warning) < run.console.index("parameters")


def test_a_task_that_cannot_be_built_ends_before_anything_is_written(tmp_path):
    """An error while building is reported once, and no folder is made."""
    with Run(tmp_path, *SETTINGS, task=f"{WORKLOAD}:FailsInModel") as run:
        assert run.wait() in (1, 2), run.console
    check_reported_once(run, 'raise RuntimeError("no model today")')


def test_a_task_that_cannot_be_imported_ends_before_anything_is_written(tmp_path):
    """The same for an error while the user's file is read."""
    (tmp_path / "broken.py").write_text(
        "import no_such_module_anywhere\n\n\nclass Task:\n    pass\n"
    )
    with Run(tmp_path, *SETTINGS, task=f"{tmp_path / 'broken.py'}:Task") as run:
        assert run.wait() in (1, 2), run.console
    check_reported_once(run, "no_such_module_anywhere")


def test_a_rank_that_dies_at_every_start_ends_the_run(tmp_path):
    """No start succeeds: the run gives up in bounded time and names what happened first."""
    with Run(tmp_path, *SETTINGS, task=f"{WORKLOAD}:DiesInModel") as run:
        assert run.wait() in (1, 3), run.console
    assert "exited with code 9" in run.console
    assert not run.logs.exists()
    assert not run.checkpoints.exists()


def check_reported_once(run, text):
    console = run.console
    assert console.count("Traceback (most recent call last)") <= 1, console
    assert sum(text in line for line in console.splitlines()) in (1, 2), console
    assert not run.logs.exists()
    assert not run.checkpoints.exists()


@pytest.mark.parametrize(
    ("name", "gave", "steps"),
    [
        ("DetachedLoss", "a tensor without a graph to the parameters: nothing would be trained", 0),
        ("DictOfEvaluation", "a dict of loss, logits (return the loss of it), not a scalar", 2),
    ],
)
def test_a_loss_that_is_no_number_ends_the_run_at_once(tmp_path, name, gave, steps):
    """Exit 1 with what came and what is expected; no process is replaced to try it again."""
    task = f"{Path(__file__).with_name('mistaken.py')}:{name}"
    with Run(tmp_path, "-b", 8, "--max-steps", 2, "num_workers=0", task=task) as run:
        assert run.wait() == 1, run.console
    errors = [line for line in run.console.splitlines() if "ERROR" in line]
    assert len(errors) == 1, run.console
    assert f"loss() returned {gave}" in errors[0]
    assert "Traceback" not in run.console
    plans = [(plan["plan"], plan["kind"]) for plan in run.events("plan")]
    assert plans == [("GiveUp", "rank_raised")]
    assert run.summary()["steps"] == steps
