"""Links, pipes and files that others put into a run's folders: nothing is read, emptied or awaited."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.scenarios.conftest import PATIENT
from tests.scenarios.harness import ROOT, Run

SHORT = ("-b", 8, "--max-steps", 12, "num_workers=0", "save_every_steps=6", "--audit", *PATIENT)
LINKED = (
    *("supervisor.log", "rank_0.log", "rank_1.log", "events.jsonl", "metrics.jsonl"),
    *("status.json", "summary.json", "config.yaml", "audit_rank_1.jsonl", "quarantine.jsonl"),
    *(".status.json.tmp", ".summary.json.tmp"),
)
KEPT = '{"event": "of the user alone"}\n'  # the harness reads it, too


def test_links_under_the_names_of_a_run_lead_it_nowhere(tmp_path):
    """It trains to its end, says which of its files it cannot write, and touches nothing behind a link."""
    logs, checkpoints, home = (tmp_path / name for name in ("logs", "checkpoints", "home"))
    for folder in (logs, checkpoints, home):
        folder.mkdir()
    for name in (*LINKED, "last", "best"):
        (home / name).write_text(KEPT)
    for name in LINKED:
        (logs / name).symlink_to(home / name)
    for name in ("last", "best"):
        (checkpoints / name).symlink_to(home / name)
    (logs / ".userfile.tmp-keepme").write_text(KEPT)
    with Run(tmp_path, *SHORT) as run:
        assert run.wait() == 0, run.console
    assert {path.read_text() for path in home.iterdir()} == {KEPT}
    assert (logs / ".userfile.tmp-keepme").read_text() == KEPT
    for name in ("supervisor.log", "events.jsonl", "metrics.jsonl", "rank_0.log", "rank_1.log"):
        assert str(logs / name) in run.console, run.console
    assert run.summary()["status"] == "completed"  # what is replaced is replaced, link or not
    assert run.status()["state"] == "done"
    assert not (logs / "config.yaml").is_symlink()
    assert (checkpoints / "last").read_text() == "step_00000012.pt\n"
    again = Run(tmp_path, *SHORT, "--resume", "last")
    with again:
        assert again.wait() == 0, again.console


@pytest.mark.parametrize(
    ("name", "option", "kind"),
    [
        ("checkpoints/.lock", "--checkpoint-dir", "link"),
        ("logs/.logs.lock", "--log-dir", "pipe"),
    ],
)
def test_a_lock_that_is_no_file_is_one_line(tmp_path, name, option, kind):
    """Exit 2 before anything is trained; what a link leads to keeps its content."""
    victim = tmp_path / "victim"
    victim.write_text(KEPT)
    path = tmp_path / name
    path.parent.mkdir()
    path.symlink_to(victim) if kind == "link" else os.mkfifo(path)
    with Run(tmp_path, *SHORT) as run:
        assert run.wait() == 2, run.console
    (line,) = [line for line in run.console.splitlines() if "error" in line]
    assert f"{option}={path.parent}: cannot be locked: {path.name} in it is " in line
    assert victim.read_text() == KEPT


def test_listing_waits_for_no_pipe(tmp_path):
    """A pipe as a manifest, a checkpoint and a pointer; a manifest of a terabyte."""
    for name in ("step_00000001.json", "step_00000002.pt", "last"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "step_00000003.json").touch()
    os.truncate(tmp_path / "step_00000003.json", 1 << 40)
    for action in ("list", "verify"):
        done = subprocess.run(
            [sys.executable, "-m", "ddp_runner", "checkpoints", action, "-c", tmp_path, "--json"],
            capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert done.returncode == (action == "verify"), done.stderr
        problems = {
            one["step"]: one["problem"] for one in map(json.loads, done.stdout.splitlines())
        }
        assert problems == {3: "a manifest without its file", 2: problems[2], 1: problems[1]}
        assert all(problems.values())
