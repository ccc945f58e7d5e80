"""The demo as a process: what it proves, what it tells, and that it leaves nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ddp_runner.cli.demo import Script
from ddp_runner.cli.repairs import read_repairs
from ddp_runner.core.injection import Injection, parse_injection

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0
_SHORT = (
    "import sys; from ddp_runner.cli.demo import Script, perform;"
    "sys.exit(perform(Script(steps={steps}, fault_interval_steps=10, faults={faults}),"
    " keep={keep}))"
)


def poll(check, what):
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        value = check()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"{what} did not come within {DEADLINE_S:g} s")


def demo_folders(tmp_path):
    """What demos have left; torch makes an empty cache folder there at every import."""
    return list((tmp_path / "folders").glob("ddp_runner*"))


@pytest.fixture
def start(tmp_path):
    """Start a demo whose temporary folder is ours; whatever it started ends with the test."""
    started = []

    def start(steps, faults, *, keep=False):
        code = _SHORT.format(steps=steps, faults=faults, keep=keep)
        output = (tmp_path / "output.txt").open("w")
        (tmp_path / "folders").mkdir()
        with output:
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "folders")},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()  # the run's supervisor dies with it, by the kernel, and so do its ranks
            process.wait()


def test_faults_are_repaired_and_the_weights_are_identical(start, tmp_path):
    """Two ranks and a loader worker: a row for each, the same weights, exit 0, nothing left."""
    demo = start(50, (("kill", "commit"), ("raise", "forward"), ("loader_kill", "data")))
    code = demo.wait(DEADLINE_S)
    text = (tmp_path / "output.txt").read_text()
    assert code == 0, text
    assert "1 of 2: in peace" in text
    assert "2 of 2: 3 faults, one every 10 steps" in text
    assert re.search(
        r"SIGKILL +1 +10 +optimizer +process ended +\d\.\d\d s +\d\.\d\d s +0 st", text
    )
    assert re.search(
        r"exception +0 +20 +forward +its own report +\d\.\d\d s +\d\.\d\d s +0 s", text
    )
    assert re.search(r"loader kill +1 +\d+ +data +its rank +\d\.\d\d s +\d\.\d\d s +0 st", text)
    first, second = re.findall(r"weights ([0-9a-f]{16})$", text, re.MULTILINE)
    assert first == second
    assert text.rstrip().endswith("identical weights: yes")
    assert demo_folders(tmp_path) == []


def test_a_fault_that_never_came_is_no_proof(start, tmp_path):
    """Equal weights without every fault in the journal: exit 1, and the folder is kept to look at."""
    demo = start(15, (("kill", "reduce"), ("kill", "reduce")))
    code = demo.wait(DEADLINE_S)
    text = (tmp_path / "output.txt").read_text()
    assert code == 1, text
    assert "only 1 of 2 faults are in the journal" in text
    (folder,) = demo_folders(tmp_path)
    assert f"logs and checkpoints of both runs: {folder}" in text
    assert (folder / "faults" / "logs" / "summary.json").is_file()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything_and_removes_the_folder(start, tmp_path, number):
    """Interrupted in the middle of training: exit 130, no process, no file."""
    demo = start(100_000, ())
    folders = tmp_path / "folders"
    status = poll(
        lambda: [path for path in folders.rglob("status.json") if '"running"' in path.read_text()],
        "a running run",
    )
    family = psutil.Process(demo.pid).children(recursive=True)
    assert {process.name() for process in family} >= {"ddp:rank0", "ddp:rank1", "ddp:store"}
    demo.send_signal(number)
    assert demo.wait(DEADLINE_S) == 130
    assert not [process for process in family if process.is_running()]
    assert not status[0].exists()
    assert demo_folders(tmp_path) == []
    assert "demo: interrupted" in (tmp_path / "output.txt").read_text()


def test_the_script_is_a_plan_that_the_command_accepts():
    """Every fault names a rank of the world and a step that the run reaches."""
    for world_size in (2, 3, 8):
        script = Script(world_size=world_size)
        for spec in script.injections:
            injection = parse_injection(spec, world_size=world_size)
            assert isinstance(injection, Injection)
            assert injection.step < script.steps
    assert {spec.partition(":")[0] for spec in Script().injections} == {
        "kill", "raise", "exit", "loader_kill", "loader_stop", "stop",
    }  # fmt: skip


def event(number, name, **fields):
    return {"id": number, "event": name, "mono_s": float(number), "cause": None, **fields}


def test_a_victim_that_spoke_first_does_not_become_the_culprit():
    """The row is the plan's culprit; the time to notice counts to the incident's first sign."""
    events = [
        event(1, "injected", kind="exit", rank=0),
        event(2, "fault", kind="collective_failed", rank=1, step=7, phase="reduce"),
        event(3, "fault", cause=2, kind="rank_exited", rank=0, step=7, phase="backward"),
        event(4, "plan", cause=2, culprit=0, kind="rank_exited"),
        event(6, "repaired", cause=2, steps_lost=1),
    ]
    (repair,) = read_repairs(events)
    assert (repair.what, repair.rank, repair.step, repair.phase) == ("exit(0)", 0, 7, "backward")
    assert repair.noticed_by == "process ended"
    assert (repair.noticed_s, repair.repaired_s, repair.steps_lost) == (1.0, 4.0, 1)


def test_a_fault_that_nobody_injected_is_told_as_such():
    """A real fault during the demo has a row of its own and takes no injection's place."""
    events = [
        event(1, "fault", kind="rank_killed", rank=1, step=3, phase="data"),
        event(2, "plan", cause=1, culprit=1, kind="rank_killed"),
        event(3, "repaired", cause=1, steps_lost=0),
        event(4, "injected", kind="kill", rank=1),
        event(5, "fault", kind="rank_killed", rank=1, step=9, phase="data"),
        event(6, "plan", cause=5, culprit=1, kind="rank_killed"),
    ]
    real, injected = read_repairs(events)
    assert (real.what, real.noticed_s) == ("not injected", None)
    assert (injected.what, injected.noticed_s, injected.repaired_s) == ("SIGKILL", 1.0, None)
