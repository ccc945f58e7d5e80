"""The demo as a process: what it proves, what it tells, and that it leaves nothing."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ddp_runner.cli.acts import script_for
from ddp_runner.cli.repairs import read_repairs
from ddp_runner.core.injection import Injection, InjectKind, parse_injection

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 250.0  # a hang; three runs on a slow machine take minutes
_SHORT = (
    "import sys; from ddp_runner.cli.acts import Script; from ddp_runner.cli.demo import perform;"
    "sys.exit(perform(Script(world_size=2, steps={steps}, fault_interval_steps=10,"
    " harmless={harmless}, changing={changing}), keep=False))"
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


def name_of(process):
    """Its name for ``ps``; None for one that has ended, as what a zygote forks in between does."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name()
    return None


@pytest.fixture
def start(tmp_path):
    """Start a demo whose temporary folder is ours; whatever it started ends with the test."""
    started = []

    def start(steps, harmless, changing=()):
        code = _SHORT.format(steps=steps, harmless=harmless, changing=changing)
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
    """Ranks, a loader worker, a disk, a loss: a row for each, the same weights, nothing left."""
    harmless = (
        ("kill:phase=commit",), ("raise:phase=forward",), ("loader_kill:phase=data",),
        ("disk_error:rank=0,phase=checkpoint",),
    )  # fmt: skip
    demo = start(50, harmless)
    code = demo.wait(DEADLINE_S)
    text = (tmp_path / "output.txt").read_text()
    assert code == 0, text
    assert "1 of 2: without faults" in text
    assert "2 of 2: 4 faults that leave no trace in the weights, one every 10 steps" in text
    for row in (
        r"SIGKILL +1 +5 +optimizer +process ended",
        r"exception +0 +15 +forward +its report",
        r"loader kill +1 +\d+ +data +its rank",
        # Of step 40, or of 20 where the disk takes as long as that.
        r"I/O error +0 +\d+ +checkpoint +failed save",
    ):
        assert re.search(rf"{row} +\d+\.\d\d s +\d+\.\d\d s +0", text), row
    first, second = re.findall(r"weights ([0-9a-f]{16})  ", text)
    assert first == second
    assert text.rstrip().endswith("identical weights: yes")
    assert demo_folders(tmp_path) == []


def test_a_fault_that_never_came_is_no_proof(start, tmp_path):
    """Without every fault in the journal: exit 1, and the folder is kept to look at.

    Those that came and changed what is computed are told with what was done.
    """
    demo = start(20, (), (("oom:phase=backward",), ("nan",), ("nan",)))
    code = demo.wait(DEADLINE_S)
    text = (tmp_path / "output.txt").read_text()
    assert code == 1, text
    assert "2 of 2: 3 faults that change what is computed, one every 10 steps" in text
    assert re.search(r"out of memory +1 +5 +its exception +micro-batches of 8 samples, same", text)
    assert re.search(r"loss is NaN +0 +15 +all ranks +step skipped on all ranks", text)
    assert "exact: false, micro-batches of 8 samples from step 5" in text
    assert "only 2 of 3 faults are in the journal" in text
    first, second = re.findall(r"weights ([0-9a-f]{16})  ", text)
    assert first != second
    (folder,) = demo_folders(tmp_path)
    assert f"logs and checkpoints of the runs: {folder}" in text
    assert (folder / "with_changes" / "logs" / "summary.json").is_file()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything_and_removes_the_folder(start, tmp_path, number):
    """Interrupted in the middle of training: exit 130, no process, no file."""
    demo = start(100_000, ())
    folders = tmp_path / "folders"
    status = poll(
        # Not in every folder: others come and go, and a look into one that has gone is an error.
        lambda: [
            path
            for path in folders.glob("ddp_runner_demo_*/*/logs/status.json")
            if '"running"' in path.read_text()
        ],
        "a running run",
    )
    family = psutil.Process(demo.pid).children(recursive=True)
    assert {name_of(process) for process in family} >= {"ddp:rank0", "ddp:rank1", "ddp:store"}
    demo.send_signal(number)
    assert demo.wait(DEADLINE_S) == 130
    assert not [process for process in family if process.is_running()]
    assert not status[0].exists()
    assert demo_folders(tmp_path) == []
    assert "demo: interrupted" in (tmp_path / "output.txt").read_text()


def test_the_script_is_a_plan_that_the_command_accepts():
    """Every fault names a rank of the world and a step that the run reaches."""
    for world_size in (2, 3, 8):
        script = script_for(world_size)
        kinds = set()
        for spec in script.injections(script.harmless) + script.injections(script.changing):
            injection = parse_injection(spec, world_size=world_size)
            assert isinstance(injection, Injection)
            assert injection.step < script.steps
            kinds.add(injection.kind)
        assert kinds == set(InjectKind), "every kind there is"


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
    assert (repair.injected, repair.rank, repair.step) == (InjectKind.EXIT, 0, 7)
    assert repair.phase == "backward"
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
    assert (real.injected, real.noticed_s) == (None, None)
    assert (injected.injected, injected.noticed_s) == (InjectKind.KILL, 1.0)
    assert injected.repaired_s is None


def test_what_needs_no_repair_has_its_row():
    """A disk that refuses two saves is one fault, over with the next save; slow is no fault."""
    refused = {"kind": "storage_failed", "rank": 0, "phase": "checkpoint", "remedy": "goes on"}
    events = [
        event(1, "injected", kind="slow", rank=1, step=3, phase="forward"),
        event(2, "injected", kind="disk_full", rank=0, step=9, phase="checkpoint"),
        event(3, "fault_tolerated", step=9, **refused),
        event(4, "fault_tolerated", step=19, **refused),
        event(6, "checkpoint_saved"),
        event(7, "fault_tolerated", step=29, **refused),
    ]
    slow, full, real = read_repairs(events)
    assert (slow.injected, slow.rank, slow.step) == (InjectKind.SLOW, 1, 3)
    assert (slow.noticed_s, slow.repaired_s) == (None, None)
    assert (full.injected, full.step) == (InjectKind.DISK_FULL, 9)
    assert (full.noticed_s, full.repaired_s) == (1.0, 3.0)
    assert (real.injected, real.repaired_s) == (None, None)


def test_ranks_that_are_lost_together_are_one_row():
    """Each has an injection; none of them is left over for a later fault."""
    events = [
        event(1, "injected", kind="kill", rank=1),
        event(2, "injected", kind="kill", rank=0),
        event(3, "fault", kind="rank_killed", rank=1, step=9, phase="data"),
        event(4, "fault", cause=3, kind="rank_killed", rank=0, step=9, phase="data"),
        event(5, "plan", cause=3, culprit=1, kind="rank_killed"),
        event(6, "repaired", cause=3, steps_lost=4),
        event(8, "fault", kind="rank_killed", rank=0, step=19, phase="data"),
        event(9, "plan", cause=8, culprit=0, kind="rank_killed"),
    ]
    together, real = read_repairs(events)
    assert (together.rank, together.others, together.steps_lost) == (1, (0,), 4)
    assert (real.injected, real.noticed_s) == (None, None)


def test_a_fault_that_blames_nobody_is_shown_with_its_victim():
    """Two replicas differ, and neither can be believed: the table knows better than the run."""
    events = [
        event(1, "injected", kind="diverge", rank=1),
        event(2, "fault", kind="replica_diverged", rank=-1, step=9, phase="compare"),
        event(
            3,
            "repaired_in_place",
            cause=2,
            seconds=0.5,
            remedy="rolled back to step 5",
            steps_lost=4,
        ),
    ]
    (repair,) = read_repairs(events)
    assert (repair.injected, repair.rank, repair.steps_lost) == (InjectKind.DIVERGE, 1, 4)
    assert (repair.done, repair.noticed_s, repair.repaired_s) == ("rolled back to step 5", 1.5, 0.5)
