"""A command for each checkpoint that hangs while a rank is replaced: training does not notice."""

from __future__ import annotations

import signal
import time

import psutil

from tests.scenarios.conftest import WITHOUT_WORKERS
from tests.scenarios.harness import Run

SETTINGS = (*WITHOUT_WORKERS, "save_every_steps=5", "save_interval=0")


def test_a_command_that_hangs_delays_no_repair_and_no_end(fault_free, tmp_path):
    """Rank 0 is killed meanwhile; the weights are those of a run without, and what hangs is killed."""
    pids = tmp_path / "pids"
    command = f"echo $$ {{path}} >> {pids}; exec sleep 600"
    words = (f"after_save={command}", "after_save_grace_s=0.5", "--inject", "kill:rank=0,step=12")
    with Run(tmp_path / "run", *SETTINGS, *words) as run:
        assert run.wait() == 0, run.console
    ((pid, path),) = [line.split() for line in pids.read_text().splitlines()]
    assert path.endswith("step_00000005.pt"), "one at a time"
    assert not psutil.pid_exists(int(pid))
    assert (run.summary()["exact"], run.digest) == (True, fault_free(2).digest)
    assert len(run.summary()["faults"]) == 1
    log = (run.logs / "supervisor.log").read_text()
    assert "checkpoint.after_save for step_00000005.pt: killed: the run has ended" in log
    assert "checkpoint.after_save: not run for step_00000010.pt" in log
    assert "checkpoint.after_save: not run for step_00000024.pt" in log


def test_a_command_ends_with_a_supervisor_that_is_killed(tmp_path):
    """While it trains; nothing is left, though the command is in a session of its own."""
    pids = tmp_path / "pids"
    command = f"echo $$ {{path}} >> {pids}; sleep 600"
    words = (f"after_save={command}", "task.pace_s=0.1")
    with Run(tmp_path / "run", *SETTINGS, *words) as run:
        run.wait_for_checkpoint(5)
        deadline_s = time.monotonic() + 20
        while not pids.exists() or not pids.read_text().endswith("\n"):
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        shell = psutil.Process(int(pids.read_text().split()[0]))
        everybody = [shell, *shell.children(recursive=True)]
        run.signal(signal.SIGKILL)
        assert run.process.wait(20) == -signal.SIGKILL
        while any(one.is_running() for one in everybody):
            assert time.monotonic() < deadline_s + 20
            time.sleep(0.02)
