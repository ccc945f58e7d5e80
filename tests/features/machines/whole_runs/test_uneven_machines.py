"""Machines that are not alike: a disk that is full for a while, a clock that is a day wrong."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from datetime import datetime
from pathlib import Path

import pytest

from tests import ready
from tests.disks import small_disk
from tests.features.machines.whole_runs.test_two_nodes import SLOW
from tests.scenarios.harness import ended, poll

DAY_S = 86_400


def fill(folder):
    """Every free byte of the file system of ``folder``, in a file whose path this gives."""
    path = folder / "filler"
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return path


@pytest.mark.parametrize("where", [0, 1], ids=["coordinator's", "other machine's"])
def test_a_disk_that_is_full_for_a_while_costs_no_bit(nodes, one_machine, where):
    """Logs and checkpoints of one machine; a rank there is killed meanwhile and replaced."""
    nodes.ranks = 1
    disk = nodes.folder / "disk"
    with small_disk(disk, size_kb=4096):
        folders = ("-l", disk / "logs", "-c", disk / "checkpoints")
        runs = [nodes.start(k, SLOW, *(folders if k == where else ())) for k in (0, 1)]

        def step():
            text = (disk / "logs" if where == 0 else runs[0].logs) / "status.json"
            return json.loads(text.read_text())["step"] if text.exists() else -1

        poll(lambda: step() >= 8, what="training")
        filler = fill(disk)
        os.kill(runs[where].rank_pid(where), signal.SIGKILL)
        poll(lambda: f"rank {where} on" in runs[0].console, what="the fault")
        poll(lambda: "cannot be written (" in runs[0].console, what="a warning")
        filler.unlink()
        assert ended(*runs) == (0, 0), runs[0].console + runs[1].console
        logs = disk / "logs" if where == 0 else runs[0].logs
        summary = json.loads((logs / "summary.json").read_text())
    assert [(one["kind"], one["steps_lost"]) for one in summary["faults"]] == [("rank_killed", 0)]
    assert (summary["exact"], summary["weights_sha256"]) == (True, one_machine(2))


@pytest.fixture(scope="module")
def other_clock(tmp_path_factory):
    """How launches start that have another wall clock: as forks of a process that has preloaded it."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    library = tmp_path_factory.mktemp("clock") / "other_clock.so"
    source = Path(__file__).with_name("other_clock.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    launcher = ready.Launcher(LD_PRELOAD=str(library))
    preloads = {"LD_PRELOAD": str(library)}  # what it starts is no fork
    yield lambda seconds: {
        "launcher": launcher,
        "variables": {**preloads, "OTHER_CLOCK_S": str(seconds)},
    }
    launcher.close()


def hours_wrong(run, *, line):
    """How far the clock of a rank of the second machine is ahead, by a line of its log."""
    lines = (run.logs / "rank_1.log").read_text(encoding="utf-8").splitlines()
    written = datetime.fromisoformat(lines[line][:26])
    return (written - datetime.now()).total_seconds() / 3600  # noqa: DTZ005


def test_a_clock_that_is_a_day_wrong_costs_nothing(nodes, one_machine, other_clock):
    """The other machine's, ahead: lost and taken back, with a clock that is behind by as much.

    Then the coordinator, whose ranks' state it has kept.
    """
    nodes.ranks = 1
    ahead, behind = other_clock(DAY_S), other_clock(-DAY_S)
    words = ("task.pace_s=0.1", "recovery.coordinator_wait_s=60")
    first, second = nodes.start(0, *words), nodes.start(1, *words, **ahead)
    first.wait_for_step(8)
    assert abs(hours_wrong(second, line=0) - 24) < 1
    second.signal(signal.SIGKILL)
    second.assert_gone()
    second = nodes.start(1, *words, **behind)
    first.wait_for_step(18)
    assert abs(hours_wrong(second, line=-1) + 24) < 1
    first.signal(signal.SIGKILL)
    first.assert_gone()
    first = nodes.start(0, *words)
    assert ended(first, second) == (0, 0), first.console + second.console
    summary = first.summary()
    assert (summary["exact"], first.digest) == (True, one_machine(2)), summary
    assert 0 < sum(summary["time_s"].values()) < 300
