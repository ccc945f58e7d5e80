"""``check`` as a process: what holds of a sound task, what does not of others, and that nothing is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from ddp_runner.__main__ import main
from ddp_runner.features.demo.check import KILLS
from tests import ready
from tests.processes import poll
from tests.scenarios.conftest import NO_SPARE
from tests.scenarios.harness import MARK
from tests.scenarios.leftovers import processes_with

ROOT = Path(__file__).resolve().parents[3]
SCENARIOS = ROOT / "tests" / "scenarios"
SOUND = f"{SCENARIOS / 'workload.py'}:PacedTask"
FORGETFUL = f"{SCENARIOS / 'differing.py'}:Forgetful"
DEADLINE_S = 500.0  # a hang; runs on a slow machine take minutes
# A check that finds something repeats each of its kills alone: one of them is enough here.
_ONE_KILL = (
    "import sys; from ddp_runner.features.demo import check; check.KILLS = check.KILLS[1:2];"
    " sys.exit(check.DECLARATION.run(sys.argv[1:]))"
)


@pytest.fixture
def start(tmp_path):
    """Start a check whose temporary folder is ours; whatever it started ends with the test.

    Its runs are forks of the ready process, known by their environment: they are not its descendants.
    """
    started = []

    def start(*words, command=("-m", "ddp_runner", "check"), batch=("-b", "8")):
        (tmp_path / "folders").mkdir()
        variables = {**ready.environment(), MARK: tmp_path.name}
        process = subprocess.Popen(
            [sys.executable, *command, "--cpu", *batch, *words],
            cwd=tmp_path,
            env={**os.environ, **variables, "TMPDIR": str(tmp_path / "folders")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


def folders(tmp_path):
    return list((tmp_path / "folders").glob("ddp_runner*"))


@pytest.mark.timeout(600)
def test_all_holds_of_a_sound_task(start, tmp_path):
    """A row for each kill, with its repair; the folder is gone."""
    check = start("--json", "--task", SOUND, "--max-steps", "20", "num_workers=0")
    text, progress = check.communicate(timeout=DEADLINE_S)
    assert check.returncode == 0, text + progress
    reported = json.loads(text)
    assert reported["holds"] is True
    assert re.fullmatch(r"[0-9a-f]{64}", reported["weights_sha256"])
    rows = {row["what"]: row for row in reported["rows"]}
    assert {"without faults", *(what for what, _ in KILLS), "stopped and resumed"} <= rows.keys()
    assert all(row["holds"] and not row["says"] for row in rows.values() if row["seconds"])
    for what, _ in KILLS:
        assert 0 < rows[what]["seconds"] < DEADLINE_S
    assert "without faults" in progress
    assert folders(tmp_path) == []


@pytest.mark.timeout(600)
def test_what_a_replacement_cannot_know_is_found(start, tmp_path):
    """State in a global of the module: the row says no, exit 1, and the folder is kept to look at."""
    words = ("--task", FORGETFUL, "--max-steps", "20", "num_workers=0", NO_SPARE)
    check = start(*words, command=("-c", _ONE_KILL))
    text, errors = check.communicate(timeout=DEADLINE_S)
    assert check.returncode == 1, text + errors
    assert re.search(r"a rank killed in forward +NO +\d", text)
    assert re.search(r"stopped and resumed +NO +\d", text)
    assert "other weights" in text
    assert "Traceback" not in text + errors
    (folder,) = folders(tmp_path)
    assert f"logs and checkpoints of the runs: {folder}" in text.replace("\n", "")
    assert (folder / "kills" / "logs" / "summary.json").is_file()
    assert (folder / "stopped" / "resumed.txt").is_file()


def test_a_loop_is_checked_with_its_own_arguments(start, tmp_path):
    """Its length is its own, and words behind the file are the program's; a counter in a library of its is found."""
    loop = SCENARIOS / "loops" / "drilled.py"
    words = (NO_SPARE, "--loop", str(loop), "--steps", "24", "--hidden")
    check = start(*words, command=("-c", _ONE_KILL), batch=())
    text, errors = check.communicate(timeout=DEADLINE_S)
    assert check.returncode == 1, text + errors
    assert re.search(r"a rank killed in forward +NO +\d", text)
    assert re.search(r"stopped and resumed +NO +\d", text)
    shown = " ".join(text.split())
    assert "model.0.weight" in shown or "run.keep() was not given" in shown, text
    (folder,) = folders(tmp_path)
    assert (folder / "kills" / "logs" / "summary.json").is_file()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--task", SOUND, "--kep"), "--kep: unknown option"),
        (("--task", SOUND, "learning_rate=-1"), "learning_rate=-1: must be a number, above 0"),
        (("--task", f"{SCENARIOS / 'workload.py'}:NoSuchTask"), "NoSuchTask"),
    ],
)
def test_wrong_input_is_one_line(start, tmp_path, words, line):
    """What check itself refuses, what its first run refuses, and what a rank does."""
    check = start(*words)
    text, errors = check.communicate(timeout=DEADLINE_S)
    assert check.returncode == 2, text + errors
    (reported,) = [one for one in errors.splitlines() if one.startswith("ddp_runner: error: ")]
    assert line in reported
    assert "without faults" not in text
    assert folders(tmp_path) == []


def test_what_check_does_not_take_is_one_line(tmp_path, monkeypatch, capsys):
    """Exit 2, before there is a folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for words, line in (
        (("--loop",), "--loop: needs a value: FILE.py is what is checked"),
        (("--loop", "none.py"), "--loop=none.py: is no file: give FILE.py, and its arguments"),
        (("--resume=none", "--loop", __file__), "--resume: is set by check itself: leave it out"),
        ((), "--task: is needed: FILE.py:NAME is what is checked"),
        (("--task", SOUND, "--max-steps", "5"), "--max-steps=5: must be 20 or more"),
        (("--task", SOUND, "--resume", "none"), "resume: is set by check itself: leave it out"),
        (("--task", SOUND, "-l", "x"), "log_dir: is set by check itself: leave it out"),
    ):
        assert main(["check", "--cpu", "-b", "8", *words]) == 2
        said = capsys.readouterr()
        assert said.err.startswith(f"ddp_runner: error: {line}")
        assert (said.out, said.err.count("\n")) == ("", 1)
    assert list(tmp_path.iterdir()) == []


def test_a_signal_ends_everything_and_removes_the_folder(start, tmp_path):
    check = start("--task", SOUND, "--max-steps", "100000", "num_workers=0")
    deadline_s = time.monotonic() + DEADLINE_S
    while not any(path.stat().st_size for path in tmp_path.glob("folders/*/*/logs/metrics.jsonl")):
        assert check.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    family = processes_with(f"{MARK}={tmp_path.name}")
    assert {"ddp:rank0", "ddp:rank1"} <= {one.name for one in family}
    check.send_signal(signal.SIGINT)
    text, _ = check.communicate(timeout=DEADLINE_S)
    assert check.returncode == 130
    assert "check: interrupted" in text
    # They end with it, by the kernel: its own end may be a moment before theirs.
    poll(lambda: processes_with(f"{MARK}={tmp_path.name}") == [], what="the end of its runs")
    assert folders(tmp_path) == []
