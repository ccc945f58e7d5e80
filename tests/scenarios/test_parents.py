"""The processes above and beside the ranks die: supervisor, shell, zygote, store, loader worker."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

import psutil
import pytest

from tests.scenarios.conftest import SETTINGS
from tests.scenarios.harness import ROOT, Run, poll
from tests.scenarios.workload import TROUBLE_NAME

SHELL = ("bash", str(ROOT / "launch_training.sh"), "train")
PYTHON = (sys.executable, "-m", "ddp_runner", "train")


@pytest.mark.parametrize("command", [PYTHON, SHELL], ids=["supervisor", "shell"])
def test_a_killed_supervisor_leaves_no_process_and_a_run_that_resumes(peace, tmp_path, command):
    """Everything is gone within 2 s; the same command resumes, and no lock is stale."""
    environment = {"DDP_RUNNER_PYTHON": sys.executable}
    with Run(tmp_path, *SETTINGS, command=command, environment=environment) as run:
        run.wait_for_step(33)
        run.signal(signal.SIGKILL)
        run.assert_gone(within_s=2.0)
        run.assert_machine_clean()
    with Run(tmp_path, *SETTINGS, command=command, environment=environment) as run:
        assert run.wait() == 0, run.console
    assert run.digest == peace(2).digest
    assert run.events("run_begins")[-1]["resumed_step"] >= 30


def test_a_rank_that_holds_the_interpreter_lock_dies_with_its_supervisor(tmp_path):
    """No thread of such a rank can run, so only the kernel can end it."""
    with Run(tmp_path, *SETTINGS) as run:
        run.wait_for_step(5)
        (tmp_path / TROUBLE_NAME).write_text("loss 1 gil30")
        poll(lambda: not (tmp_path / TROUBLE_NAME).exists(), what="the stuck rank")
        run.signal(signal.SIGKILL)
        run.assert_gone(within_s=2.0)
        run.assert_machine_clean()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_loader_worker_is_named_and_costs_no_weight(peace, tmp_path, rank):
    """The fault says that a loader died and of which rank; the weights are those of peace."""
    with Run(tmp_path, *SETTINGS, "log_interval=5") as run:
        run.wait_for_step(12)
        workers = psutil.Process(run.rank_pid(rank)).children()
        assert workers, "no loader worker: the test would prove nothing"
        os.kill(workers[0].pid, signal.SIGKILL)
        assert run.wait() == 0, run.console
    assert run.digest == peace(2).digest
    faults = run.summary()["faults"]
    assert len(faults) == 1, faults
    assert (faults[0]["kind"], faults[0]["rank"]) == ("loader_worker_died", rank)
    assert "loader" in faults[0]["cause"]


def test_a_killed_zygote_is_replaced_and_forks_the_next_replacement(peace, tmp_path):
    """Ranks live on without their zygote, and a later fault is repaired by another one."""
    with Run(tmp_path, *SETTINGS, "task.pace_s=0.05") as run:
        run.wait_for_step(8)
        run.signal(signal.SIGKILL, run.named("ddp:zygote").pid)
        run.wait_for_event("zygote_ended")
        run.signal(signal.SIGKILL, run.rank_pid(1))
        assert run.wait() == 0, run.console
    assert run.digest == peace(2).digest
    assert [fault["kind"] for fault in run.summary()["faults"]] == ["rank_killed"]


@pytest.mark.parametrize(("times", "code"), [(1, 0), (3, 1)], ids=["once", "every time"])
def test_a_zygote_killed_while_it_imports_is_replaced(tmp_path, times, code):
    """Nothing has begun yet and nothing is lost: the run starts a little later, or says why not."""
    with Run(tmp_path, *SETTINGS, "-e", 1) as run:
        for _ in range(times):
            zygote = poll(lambda: importing(run), what="the zygote")
            run.signal(signal.SIGKILL, zygote.pid)
            poll(lambda zygote=zygote: not zygote.is_running(), what="its end")
        assert run.wait() == code, run.console
    assert run.console.count("the zygote died; another one is being started") == min(times, 2)
    if code:
        assert "the process that imports torch died" in run.console
    else:
        assert run.summary()["faults"] == []


def importing(run):
    """The zygote before it is ready, that is, before it has the name for ``ps``."""
    for process in psutil.Process(run.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "ddp_runner.rank.zygote" in process.cmdline() and process.name() != "ddp:zygote":
                return process
    return None


def test_a_killed_store_is_replaced(peace, tmp_path):
    """The store may die alone, or together with a rank that needs it for the next generation."""
    with Run(tmp_path, *SETTINGS) as run:
        run.wait_for_step(8)
        run.signal(signal.SIGKILL, run.named("ddp:store").pid)
        run.wait_for_step(25)
        store, rank = run.named("ddp:store").pid, run.rank_pid(0)
        run.signal(signal.SIGKILL, store)
        run.signal(signal.SIGKILL, rank)
        assert run.wait() == 0, run.console
    assert run.digest == peace(2).digest
