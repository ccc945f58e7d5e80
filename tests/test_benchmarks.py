"""``python -m benchmarks``: anyone can repeat the figures that README claims."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.processes import ROOT, poll

if TYPE_CHECKING:
    from pathlib import Path

BENCHMARKS = (sys.executable, "-m", "benchmarks")


def test_a_row_that_is_none_is_refused() -> None:
    done = subprocess.run(
        [*BENCHMARKS, "lunch"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(
        "no row lunch: choose from recovery, steps, launch, save, goodput"
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_table_has_each_contender_in_a_column(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    command = [*BENCHMARKS, "save", "launch", "--quick", "--json", str(path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    table = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert "| figure | ddp_runner | torchrun |" in table
    assert any(line.startswith("| launch to the first step: seconds |") for line in table)
    cells = json.loads(path.read_text())["cells"]
    assert {contender for _, contender, _ in cells} >= {"ddp_runner", "torchrun", "memcpy"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_benchmark_that_is_ended_ends_its_contenders() -> None:
    command = subprocess.Popen(
        [*BENCHMARKS, "recovery", "--quick"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    watched = psutil.Process(command.pid)
    started = poll(
        lambda: len(found := watched.children(recursive=True)) > 3 and found,
        what="a supervisor with its ranks",
    )
    command.send_signal(signal.SIGTERM)
    command.wait(60)
    _, alive = psutil.wait_procs(started, timeout=30)
    assert not alive
