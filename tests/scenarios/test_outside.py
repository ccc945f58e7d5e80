"""Under torchrun the command is a rank: torchrun restarts what died, and the run resumes exactly."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from ddp_runner.features.launchers.restart_log import read_restart_log, restart_log_path
from ddp_runner.kernel.wire.messages import RestartProgress
from tests import ready
from tests.scenarios import conftest
from tests.scenarios.conftest import LONG
from tests.scenarios.conftest import LONG_STEPS as STEPS
from tests.scenarios.harness import DEADLINE_S, Run, assert_every_sample_once, poll
from tests.scenarios.workload import TROUBLE_NAME

HUNGRY = f"{Path(__file__).with_name('hungry.py')}:HungryTask"

TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    *("--max-restarts", "2", "-m", "ddp_runner", "train"),
)


SETTINGS = (*conftest.WITHOUT_WORKERS, *LONG)
SLOWLY = ("task.pace_s=0.12",)  # what happens comes three seconds before the end, or so
TWO_STARTS_S = 180.0  # each of which imports torch in every process, on a machine that may be busy


def rank_process(run, rank):
    """The rank's process: it has this number in its environment, and nobody has who started it."""
    numbered = {}
    for found in run.processes():
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            process = psutil.Process(found.pid)
            if process.environ().get("RANK") == str(rank):
                numbered[found.pid] = (process.create_time(), process.ppid(), process)
    started = [(at, process) for at, parent, process in numbered.values() if parent not in numbered]
    return max(started, key=lambda one: one[0])[
        1
    ]  # a fork is younger than what stands in its place


def check_one_run(run, *, wall_s):
    """The summary is of both restarts: what ended the first one, its time, and one name for all."""
    summary = run.summary()
    [fault] = summary["faults"]
    assert (fault["kind"], fault["rank"], fault["generation"]) == ("rank_exited", 1, 1), fault
    assert fault["cause"] == "rank 1 ended without reporting an error: killed, or exited"
    assert fault["victims"] == [0]
    assert fault["step"] >= 22
    # Checkpoints are 10 steps apart, and that of step 20 was there; perhaps one was just made.
    assert 0 <= fault["steps_lost"] <= fault["step"] + 1 - 20
    assert 0 < fault["detected_s"] < fault["recovered_s"] < summary["wall_s"] < wall_s
    times = summary["time_s"]
    assert times["recovery"] == pytest.approx(fault["recovered_s"] - fault["detected_s"], abs=0.01)
    # Each step sleeps so long; those before the restart count as well.
    assert times["productive"] > (STEPS - 12) * 0.02
    assert sum(times.values()) <= summary["wall_s"]
    run_ids = {summary["run_id"]}
    for path in run.checkpoints.glob("step_*.json"):
        run_ids.add(json.loads(path.read_text(encoding="utf-8"))["run_id"])
    for rank in (0, 1):
        reported = read_restart_log(restart_log_path(run.logs, rank))
        formed = [one for one in reported if isinstance(one, RestartProgress) and one.formed_ns]
        assert {one.generation for one in formed} == {1, 2}
        run_ids |= {one.run_id for one in formed}
    assert len(run_ids) == 1, run_ids


def test_torchrun_restarts_a_killed_rank_and_no_bit_differs(fault_free, tmp_path):
    """The peers end with an exit code that makes torchrun restart all; they resume from the files."""
    began_s = time.monotonic()
    unread = "model.vocab_size=300"
    forks = {"command": TORCHRUN, "environment": ready.environment(programs=True)}
    with Run(tmp_path, *SETTINGS, *SLOWLY, unread, **forks) as run:
        run.wait_for_step(22)
        run.wait_for_checkpoint(20)
        pids = {rank_process(run, rank).pid for rank in (0, 1)}
        run.signal(signal.SIGKILL, rank_process(run, 1).pid)
        assert run.wait(TWO_STARTS_S) == 0, run.console
    assert run.digest == fault_free(2, *LONG).digest
    assert "PacedTask does not read model.vocab_size: it has no effect" in run.console
    summary = run.summary()
    assert (summary["exact"], summary["steps"], summary["exit_code"]) == (True, STEPS, 0)
    check_one_run(run, wall_s=time.monotonic() - began_s)
    generations = {line["generation"] for line in run.audit(2)[0].values()}
    assert generations == {1, 2}, "it was restarted once"
    assert not any(Path("/proc", str(pid)).exists() for pid in pids)
    assert_every_sample_once(run, 2, samples=192)


@pytest.mark.slow  # that an exception restarts all: test_what_was_learnt_of_memory; the way back: above
def test_torchrun_restarts_ranks_after_an_exception_and_no_bit_differs(fault_free, tmp_path):
    """The rank that raised ends with an exit code that is no success, and so do its peers."""
    with Run(tmp_path, *SETTINGS, *SLOWLY, command=TORCHRUN) as run:
        run.wait_for_step(24)
        (tmp_path / TROUBLE_NAME).write_text("loss 1 raise", encoding="utf-8")
        assert run.wait(TWO_STARTS_S) == 0, run.console
    assert not (tmp_path / TROUBLE_NAME).exists(), "it was raised"
    assert run.digest == fault_free(2, *LONG).digest
    assert run.summary()["exact"] is True
    generations = {line["generation"] for line in run.audit(2)[0].values()}
    assert generations == {1, 2}, "it was restarted once"
    log = (run.logs / "rank_1.log").read_text(encoding="utf-8")
    assert "RuntimeError: trouble was asked for" in log


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("wait_s", [8, 60], ids=["soon", "by default"])
def test_torchrun_restarts_after_a_hang_and_no_bit_differs(fault_free, tmp_path, wait_s):
    """Nobody watches there: its peer's collective ends in time, and torchrun ends the one that hangs."""
    patience = ("num_workers=0", f"ddp.collective_timeout_s={wait_s}")
    began_s = time.monotonic()
    with Run(tmp_path, *SETTINGS, *patience, command=TORCHRUN) as run:
        run.wait_for_step(22)
        hung = rank_process(run, 1)
        run.signal(signal.SIGSTOP, hung.pid)
        assert run.wait(400.0) == 0, run.console
    print(f"{time.monotonic() - began_s:.0f} s in all")
    assert not hung.is_running()
    assert run.digest == fault_free(2, *LONG).digest
    summary = run.summary()
    assert (summary["exact"], summary["steps"], summary["exit_code"]) == (True, STEPS, 0)
    assert {line["generation"] for line in run.audit(2)[0].values()} == {1, 2}
    assert_every_sample_once(run, 2, samples=192)


def test_what_was_learnt_of_memory_outlives_a_restart_of_torchrun(tmp_path):
    """Half the micro-batch from the fault on, not the same fault again and again; the summary says so."""
    memory = (*SETTINGS, "--max-steps", 26, "task.pace_s=0")
    how = {"command": TORCHRUN, "environment": ready.environment(programs=True)}
    with Run(tmp_path, *memory, task=HUNGRY, **how) as run:
        assert run.wait(TWO_STARTS_S) == 0, run.console
    summary = run.summary()
    assert (summary["exact"], summary["steps"]) == (False, 26)
    assert summary["inexact_reasons"] == ["micro-batches of 4 samples from step 20"]
    generations = {line["generation"] for line in run.audit(2)[0].values()}
    assert generations == {1, 2}, "it was restarted once"
    assert_every_sample_once(run, 2, samples=192)


def alone(folder, *words, **environment):
    """A rank of a world of one, behind a shell that waits for it."""
    command = ("sh", "-c", '"$0" "$@" & wait', sys.executable, "-m", "ddp_runner", "train")
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", **environment}
    settings = (*SETTINGS, "--max-steps", 100_000, "num_workers=0", *words)
    return Run(folder, *settings, world=1, command=command, environment=environment)


def test_a_single_pod_trains_supervised(tmp_path):
    """Its RANK and WORLD_SIZE are the pod's: ranks are started here, and a line says so."""
    pod = {"RANK": "0", "WORLD_SIZE": "1", "PET_NNODES": "1", "PET_NPROC_PER_NODE": "2"}
    settings = (*SETTINGS, "--max-steps", 4, "num_workers=0")
    with Run(tmp_path, *settings, variables=pod) as run:
        assert run.wait() == 0, run.console
    assert run.summary()["world_size"] == 2
    assert "RANK=0 and WORLD_SIZE=1 of the environment are not used" in run.console


def test_a_rank_of_a_launcher_is_as_quiet_as_asked(tmp_path):
    """No line a step and no start block; what is logged is in the files all the same."""
    named = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    settings = ("--max-steps", 4, "num_workers=0", "log_interval=1", "-q")
    with Run(tmp_path, *settings, world=1, variables=named) as run:
        assert run.wait() == 0, run.console
    assert "step 4" not in run.console
    assert "global batch" not in run.console
    assert (run.logs / "metrics.jsonl").read_text().count('"loss":') == 4


def test_a_launch_beside_another_is_refused(tmp_path):
    """Also where the shell that started the first one has ended: that is none of its business."""
    with alone(tmp_path, **ready.environment()) as run:
        run.wait_for_step(3)
        rank = rank_process(run, 0).pid
        run.signal(signal.SIGKILL)
        run.process.wait(DEADLINE_S)
        step = run.committed()
        with by_hand(tmp_path, 0, free_port()) as second:
            assert second.process.wait(DEADLINE_S) == 2, second.console
            assert f"another run (pid {rank}) is using it" in second.console
        assert run.committed() > step
        run.signal(signal.SIGKILL, rank)
        run.assert_gone()


def test_a_rank_of_torchrun_saves_when_asked_and_ends_with_it(tmp_path):
    """SIGUSR2, as srun's scancel sends it: it would end a process that does not take it.

    Without its torchrun it would go on, and save beside the ranks of the next one.
    """
    no_saves = ("save_every_steps=0", "save_interval=0")
    with alone(tmp_path, *no_saves, TORCHELASTIC_RUN_ID="a launch") as run:
        run.wait_for_step(3)
        [rank] = [process.pid for process in run.processes() if process.pid != run.process.pid]
        for count in (1, 2):
            run.signal(signal.SIGUSR2, rank)
            saved = partial(run.checkpoints.glob, "step_*.json")
            poll(lambda files=saved, wanted=count: len(list(files())) == wanted, what="a save")
        run.wait_for_step(run.committed() + 3)
        run.signal(signal.SIGKILL)
        run.assert_gone()


def by_hand(folder, rank, port, *, wait_s=60):
    """A rank as srun, or a person, starts it, by its environment alone; a fork that has imported torch."""
    named = {"RANK": rank, "WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    named["DDP_RUNNER_PLAIN_RANK"] = 1
    variables = {name: str(value) for name, value in named.items()}
    patience = ("num_workers=0", f"ddp.collective_timeout_s={wait_s}")
    return Run(folder, *SETTINGS, *SLOWLY, *patience, world=3, variables=variables)


def free_port():
    """One that the kernel gives to nobody who asks for any: it must still be free a little later."""
    given = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
    ports = range(10_000, int(given[0])) or range(10_000, int(given[1]))
    while True:
        port = random.choice(ports)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def test_a_port_that_another_program_has_is_one_line(tmp_path):
    """Rank 0 hosts the store where no launcher does; the variables may be left over in a shell."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with by_hand(tmp_path, 0, port) as first:
            assert first.wait() == 2, first.console
    assert "Traceback" not in first.console
    named = f"MASTER_PORT={port}: name this machine and a free port: no store at 127.0.0.1 ("
    assert first.console.splitlines()[-1].startswith(f"ddp_runner: error: {named}")


def test_ranks_that_are_started_by_hand_resume_when_they_are_started_again(
    fault_free, tmp_path, monkeypatch
):
    """No torchrun: rank 0 hosts the store, who waits too long for a peer ends, files bring all back."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # the ranks share the cores by themselves
    port = free_port()
    started = partial(by_hand, tmp_path, port=port, wait_s=8)  # also for who is started last
    with started(0) as first, started(1) as second:
        with started(2) as third:
            first.wait_for_step(22)
            third.signal(signal.SIGSTOP)
            for waiting in (first, second):
                assert waiting.process.wait(DEADLINE_S) == 1, waiting.console
            assert third.process.poll() is None, "whoever has started it has to end it"
        assert third.process.returncode == -signal.SIGKILL
    port = free_port()
    with (
        by_hand(tmp_path, 0, port) as first,
        by_hand(tmp_path, 1, port) as second,
        by_hand(tmp_path, 2, port) as third,
    ):
        for rank in (first, second, third):
            assert rank.wait() == 0, rank.console
    assert first.digest == fault_free(3, *LONG).digest
    assert first.summary()["exact"] is True
    assert_every_sample_once(first, 3, samples=192)
