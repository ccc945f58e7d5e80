"""Under torchrun the command is a rank: torchrun restarts what died, and the run resumes exactly."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import psutil

from tests.scenarios.conftest import SETTINGS, STEPS
from tests.scenarios.harness import Run, assert_every_sample_once

TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    *("--max-restarts", "2", "-m", "ddp_runner", "train"),
)


def rank_process(run, rank):
    """The rank's process: a child of torchrun with this number in its environment."""
    children = psutil.Process(run.process.pid).children()
    (found,) = [each for each in children if each.environ().get("RANK") == str(rank)]
    return found


def test_torchrun_restarts_a_killed_rank_and_no_bit_differs(peace, tmp_path):
    """The peers end with an exit code that makes torchrun restart all; they resume from the files."""
    with Run(tmp_path, *SETTINGS, command=TORCHRUN) as run:
        run.wait_for_step(34)
        pids = {rank_process(run, rank).pid for rank in (0, 1)}
        run.signal(signal.SIGKILL, rank_process(run, 1).pid)
        assert run.wait(90.0) == 0, run.console
    assert run.digest == peace(2).digest
    summary = run.summary()
    assert (summary["exact"], summary["steps"], summary["exit_code"]) == (True, STEPS, 0)
    generations = {line["generation"] for line in run.audit(2)[0].values()}
    assert generations == {1, 2}, "it was restarted once"
    assert not any(Path("/proc", str(pid)).exists() for pid in pids)
    assert_every_sample_once(run, 2, samples=192)
