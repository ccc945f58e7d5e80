"""The walks of the house, as counts that may only fall: how many files one meets on the way of something.

A count that has fallen is to be written down here and in ARCHITECTURE.md, lower.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.supervisor.judging import assert_done
from tests.walks import Walk

ROOT = Path(__file__).parents[2]
WALKS = {
    "before `train` supervises": 32,
    "before `run` supervises": 32,
    "a quiet turn of the supervisor": 38,
    "a killed rank, in the supervisor": 51,
}


def _files_before_supervising(*words, folder):
    ran = subprocess.run(
        [sys.executable, "-m", "tests.walks", *words, "--cpu", "-n", "2", "-l", folder / "logs"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return len(ran.stdout.split())


def _files_of_a_repair(simulate):
    """Of half a second in which nothing happens, and from a SIGKILL to the repaired generation."""
    run = simulate()
    run.to_step(15)
    with Walk().watched() as quiet:
        run.pass_time(0.5)
    with Walk().watched() as killed:
        run.kill(1)
        run.run_until(lambda: run.events("repaired"))
    assert_done(run)
    return len(quiet.files), len(killed.files)


def test_the_walks_of_the_house_are_those_that_are_known(simulate, tmp_path):
    """None has become longer; one that has become shorter is written down, also for readers."""
    script = tmp_path / "script.py"
    script.write_text("print('trained')\n")
    quiet, killed = _files_of_a_repair(simulate)
    measured = {
        "before `train` supervises": _files_before_supervising("train", folder=tmp_path),
        "before `run` supervises": _files_before_supervising("run", script, folder=tmp_path),
        "a quiet turn of the supervisor": quiet,
        "a killed rank, in the supervisor": killed,
    }
    assert measured == WALKS
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert {
        name: int(found[1])
        for name in WALKS
        if (found := re.search(rf"\| {re.escape(name)} \| (\d+) \|", text))
    } == WALKS
