"""Under torchrun the command is a rank: torchrun restarts what died, and the run resumes exactly."""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path

import psutil

from tests.scenarios.conftest import SETTINGS, STEPS
from tests.scenarios.harness import DEADLINE_S, Run, assert_every_sample_once
from tests.scenarios.workload import TROUBLE_NAME

HUNGRY = f"{Path(__file__).with_name('hungry.py')}:HungryTask"

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


def test_torchrun_restarts_ranks_after_an_exception_and_no_bit_differs(peace, tmp_path):
    """The rank that raised ends with an exit code that is no success, and so do its peers."""
    with Run(tmp_path, *SETTINGS, command=TORCHRUN) as run:
        run.wait_for_step(24)
        (tmp_path / TROUBLE_NAME).write_text("loss 1 raise", encoding="utf-8")
        assert run.wait(90.0) == 0, run.console
    assert not (tmp_path / TROUBLE_NAME).exists(), "it was raised"
    assert run.digest == peace(2).digest
    assert run.summary()["exact"] is True
    generations = {line["generation"] for line in run.audit(2)[0].values()}
    assert generations == {1, 2}, "it was restarted once"
    log = (run.logs / "rank_1.log").read_text(encoding="utf-8")
    assert "RuntimeError: trouble was asked for" in log


def test_what_was_learnt_of_memory_outlives_a_restart_of_torchrun(tmp_path):
    """Half the micro-batch from the fault on, not the same fault again and again; the summary says so."""
    memory = (*SETTINGS, "num_workers=0", "task.pace_s=0")
    with Run(tmp_path, *memory, task=HUNGRY, command=TORCHRUN) as run:
        assert run.wait(90.0) == 0, run.console
    summary = run.summary()
    assert (summary["exact"], summary["steps"]) == (False, STEPS)
    assert summary["inexact_reasons"] == ["micro-batches of 4 samples from step 20"]
    generations = {line["generation"] for line in run.audit(2)[0].values()}
    assert generations == {1, 2}, "it was restarted once"
    assert_every_sample_once(run, 2, samples=192)


def by_hand(folder, rank, port):
    """A rank as srun, or a person, starts it: by its environment alone."""
    named = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = {name: str(value) for name, value in named.items()}
    return Run(folder, *SETTINGS, environment=environment)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_ranks_that_are_started_by_hand_resume_when_they_are_started_again(
    peace, tmp_path, monkeypatch
):
    """No torchrun: rank 0 hosts the store, a lost peer ends a rank, and files bring both back."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # the ranks share the cores by themselves
    port = free_port()
    with by_hand(tmp_path, 0, port) as first, by_hand(tmp_path, 1, port) as second:
        first.wait_for_step(34)
        second.signal(signal.SIGKILL)
        assert second.process.wait(DEADLINE_S) == -signal.SIGKILL
        assert first.process.wait(DEADLINE_S) == 1, first.console
    port = free_port()
    with by_hand(tmp_path, 0, port) as first, by_hand(tmp_path, 1, port) as second:
        assert first.wait() == 0, first.console
        assert second.wait() == 0, second.console
    assert first.digest == peace(2).digest
    assert first.summary()["exact"] is True
    assert_every_sample_once(first, 2, samples=192)
