"""The command ``kill``: it ends the rank that is named, and no other process ever."""

from __future__ import annotations

import os
import re

import pytest

from ddp_runner.cli import kill
from ddp_runner.kernel.rules.errors import BadInputError
from tests.scenarios.conftest import WITHOUT_WORKERS
from tests.scenarios.harness import Run, poll


def refused(*words):
    with pytest.raises(BadInputError) as caught:
        kill.DECLARATION.run(words)
    (line,) = str(caught.value).splitlines()
    return line


def test_the_rank_that_is_named_is_killed_and_replaced(tmp_path, capsys):
    """One line says which process; the fault is a kill; what is no rank or no run is refused."""
    with Run(tmp_path, *WITHOUT_WORKERS, "task.pace_s=0.1") as run:
        run.wait_for_step(3)
        pid = poll(run.status)["ranks"][1]["pid"]
        folder = ("-l", str(run.logs))
        assert "kill=2: must be the number of a rank" in refused("2", *folder)
        assert "the ranks 0, 1" in refused("rank1", *folder)
        assert kill.DECLARATION.run(["1", *folder]) == 0
        assert (
            capsys.readouterr().out == f"killed rank 1, process {pid}, of the run in {run.logs}\n"
        )
        assert run.wait() == 0, run.console
    (fault,) = run.summary()["faults"]
    assert (fault["kind"], fault["rank"]) == ("rank_killed", 1)
    assert "is not training on this machine" in refused("1", *folder)
    for rank in range(2):
        log = (run.logs / f"rank_{rank}.log").read_text(encoding="utf-8")
        assert not re.search(r"[ \t]$", log, re.MULTILINE), log


def test_a_process_that_is_no_rank_of_the_run_is_never_killed(tmp_path):
    """A status file of a run that has ended, or of anybody's making, names pids that are others' by now."""
    (tmp_path / "status.json").write_text(
        f'{{"state": "running", "pid": {os.getppid()}, "ranks": [{{"rank": 1, "pid": {os.getpid()}}}]}}'
    )
    assert "is not training on this machine" in refused("1", "-l", str(tmp_path))
    assert "kill: needs the number of a rank" in refused()
    assert "no such folder" in refused("1", "-l", str(tmp_path / "gone"))


def test_without_a_run_no_rank_is_asked_for(tmp_path, monkeypatch):
    """Whatever the rank is called: there is none to choose from."""
    monkeypatch.chdir(tmp_path)
    assert refused("x").startswith("kill=x: no run is training there: --log-dir=logs: holds no run")
