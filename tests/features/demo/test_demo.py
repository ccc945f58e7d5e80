"""The demo as a process: what it proves, what it reports, and that it leaves nothing."""

from __future__ import annotations

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
from ddp_runner.core.injection import Injection, InjectKind, parse_injection
from ddp_runner.features.demo.demo import script_for
from ddp_runner.features.demo.tables import read_repairs
from ddp_runner.kernel.rules.exits import ExitCode, RunStatus
from ddp_runner.observe.summary import FaultRecord, InjectedRecord, RunSummary, TimeShares
from tests import ready
from tests.scenarios.harness import MARK
from tests.scenarios.leftovers import processes_with

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 250.0  # a hang; three runs on a slow machine take minutes
# Its own model is a quarter of what a run of fifty steps takes.
_SMALLER = (
    "model.hidden_size=16",
    "model.num_layers=1",
    "model.seq_len=8",
    "model.dataset_size=2000",
)
_SHORT = (
    "import sys; from ddp_runner.features.demo import demo; from ddp_runner.features.demo.demo import Script, perform;"
    f"demo.SETTINGS += {_SMALLER!r};"
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


@pytest.fixture
def start(tmp_path):
    """Start a demo whose temporary folder is ours; whatever it started ends with the test.

    Its runs are forks of the ready process, known by their environment: they are not its descendants.
    """
    started = []

    def start(steps, harmless, changing=()):
        code = _SHORT.format(steps=steps, harmless=harmless, changing=changing)
        output = (tmp_path / "output.txt").open("w")
        (tmp_path / "folders").mkdir()
        variables = {**ready.environment(), MARK: tmp_path.name}
        with output:
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                env={**os.environ, **variables, "TMPDIR": str(tmp_path / "folders")},
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
    """Without every fault in the summary: exit 1, and the folder is kept to look at.

    Those that came and changed what is computed are reported with what was done.
    """
    demo = start(30, (), (("oom:phase=backward",), ("nan",), ("raise:phase=compile",)))
    code = demo.wait(DEADLINE_S)
    text = (tmp_path / "output.txt").read_text()
    assert code == 1, text
    assert "2 of 2: 3 faults that change what is computed, one every 10 steps" in text
    assert re.search(r"out of memory +1 +5 +its exception +micro-batches of 8 samples, same", text)
    assert re.search(r"loss is NaN +0 +15 +all ranks +step skipped on all ranks", text)
    assert "exact: false, micro-batches of 8 samples from step 5" in text
    assert "only 2 of 3 faults are in the summary" in text
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
    family = processes_with(f"{MARK}={tmp_path.name}")
    assert {one.name for one in family} >= {"ddp:rank0", "ddp:rank1", "ddp:store"}
    demo.send_signal(number)
    assert demo.wait(DEADLINE_S) == 130
    assert processes_with(f"{MARK}={tmp_path.name}") == []
    assert not status[0].exists()
    assert demo_folders(tmp_path) == []
    assert "demo: interrupted" in (tmp_path / "output.txt").read_text()


_REMOVES = """
import sys
from ddp_runner.cli.scratch import in_temporary_folder

def work(folder):
    for number in range(2000):
        (folder / str(number)).touch()
    print("working", flush=True)
    sys.stdin.read()

sys.exit(in_temporary_folder("demo", work, keep=False))
"""


def test_one_ctrl_c_after_the_other_leaves_no_part_of_the_folder(tmp_path):
    """They come while the folder is being removed, too."""
    process = subprocess.Popen(
        [sys.executable, "-c", _REMOVES],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with process:
        assert process.stdout.readline() == b"working\n"
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
    assert list(tmp_path.iterdir()) == []


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


def summary(*, faults=(), tolerated=(), injected=()):
    return RunSummary(
        run_id="a run", status=RunStatus.COMPLETED, exit_code=0, steps=9, epochs=1, samples=36, world_size=2,
        final_loss=0.25, weights_sha256="ab", exact=True, wall_s=20.0, time_s=TimeShares(), checkpoint=None,
        faults=tuple(faults), tolerated=tuple(tolerated), injected=tuple(injected),
    )  # fmt: skip


def blow(kind, rank, at_s):
    return InjectedRecord(kind=kind, rank=rank, number=0, step=3, phase="forward", at_s=at_s)


def fault(kind, rank, detected_s, recovered_s, *injected, **changes):
    return FaultRecord(
        kind=kind, rank=rank, step=7, cause="a cause", detected_s=detected_s, recovered_s=recovered_s,
        steps_lost=1, generation=1, phase="backward", injected=injected, **changes,
    )  # fmt: skip


def test_a_row_has_what_was_done_and_when_it_was_noticed():
    """From the injection to the first sign, and from there until the ranks trained again."""
    (row,) = read_repairs(
        summary(
            faults=[fault("rank_exited", 0, 2.0, 6.0, blow("exit", 0, 1.0), action="respawned")]
        )
    )
    assert (row.injected, row.rank, row.step, row.phase) == (InjectKind.EXIT, 0, 7, "backward")
    assert (row.noticed_by, row.done) == ("process ended", "respawned")
    assert (row.noticed_s, row.repaired_s, row.steps_lost) == (1.0, 4.0, 1)


def test_a_fault_that_nobody_injected_is_reported_as_such():
    """A real fault during the demo has a row of its own; a bad sample is in the data from the start."""
    real, sample = read_repairs(
        summary(faults=[fault("rank_killed", 1, 2.0, None), fault("bad_sample", 1, 3.0, 3.5)])
    )
    assert (real.injected, real.noticed_s, real.repaired_s, real.done) == (None, None, None, "-")
    assert (sample.injected, sample.noticed_s) == (InjectKind.BAD_SAMPLE, None)


def test_rows_stand_in_the_order_of_their_time():
    """What needed no repair and what nobody had to notice have theirs among the others."""
    full, kill, slow = blow("disk_full", 0, 2.0), blow("kill", 1, 5.0), blow("slow", 1, 4.0)
    rows = read_repairs(
        summary(
            faults=[fault("rank_killed", 1, 5.5, 6.0, kill)],
            tolerated=[fault("storage_failed", 0, 3.0, 7.0, full)],
            injected=[full, slow, kill],
        )
    )
    kinds = [InjectKind.DISK_FULL, InjectKind.SLOW, InjectKind.KILL]
    assert [row.injected for row in rows] == kinds
    assert (rows[1].noticed_by, rows[1].noticed_s, rows[1].repaired_s) == ("waited for", None, None)


def test_ranks_that_are_lost_together_are_one_row():
    """It names the others; a fault that blames nobody is shown with the rank that it was done to."""
    kills = blow("kill", 1, 1.0), blow("kill", 0, 1.0)
    together, differs = read_repairs(
        summary(
            faults=[
                fault("rank_killed", 1, 2.0, 6.0, *kills),
                fault("replica_diverged", -1, 7.0, 7.5, blow("diverge", 1, 6.5)),
            ]
        )
    )
    assert (together.rank, together.others) == (1, (0,))
    assert (differs.rank, differs.others, differs.noticed_s) == (1, (), 0.5)


def test_without_a_temporary_folder_it_is_one_line(tmp_path, monkeypatch, capsys):
    """A container may have none that can be written."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    assert main(["demo"]) == ExitCode.BAD_USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ddp_runner: error: TMPDIR: no temporary folder can be made: ")
