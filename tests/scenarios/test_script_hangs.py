"""``run --hang-timeout``: ranks of a script that show no sign of life, and those that do."""

from __future__ import annotations

import re

import pytest

from .test_scripts import TRAIN, run_script

# One optimizer step on each rank, and then what a test wants.
ONE_STEP = """
import os, sys, threading, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
w = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([w], lr=0.1)
def step():
    (w * w).sum().backward(); dist.all_reduce(w.grad); optimizer.step(); optimizer.zero_grad()
"""


def own(folder, code):
    script = folder / "own.py"
    script.write_text(ONE_STEP + code, encoding="utf-8")
    return script


# In C, with the lock of the interpreter: no signal ends that, and it takes no time of a core.
LOCKED_TWICE = "c = ctypes.PyDLL(None); m = ctypes.create_string_buffer(64); "
LOCKED_TWICE += "c.pthread_mutex_lock(m); c.pthread_mutex_lock(m)"


@pytest.mark.parametrize(
    ("rank", "harm", "says"),
    [
        (
            1,
            "import time; time.sleep(1000)",
            r"rank 1 hung in wait_for_harm, train.py:\d+; rank 0 waits in main, train.py:\d+: no",
        ),
        (0, f"import ctypes; {LOCKED_TWICE}", "it did not answer"),
    ],
    ids=["sleeps", "holds the lock of the interpreter"],
)
def test_who_hangs_is_named_and_all_start_again(tmp_path, rank, harm, says):
    """The stacks of all stand in their logs before anybody is ended."""
    (tmp_path / f"harm_{rank}_1").write_text(harm, encoding="utf-8")
    options = ("--hang-timeout", 2, "--max-restarts", 1)
    with run_script(tmp_path, TRAIN, options=options) as run:
        assert run.wait() == 0, run.console
    first, second = run.summary()["attempts"]
    assert (first["rank"], first["exit_code"], second["exit_code"]) == (rank, 137, None)
    assert re.search(says, first["cause"])
    assert first["detail"].count("most recent call first") == 2
    assert "no step, collective, line or heartbeat of any rank for 2 s" in run.console
    for each in range(2):
        log = (run.logs / "attempt_0" / f"rank_{each}.log").read_text()
        assert "train.py" in log
        assert "most recent call first" in log


def test_without_a_limit_nobody_hangs(tmp_path):
    """The same script; a limit alone asks for no restart."""
    script = own(tmp_path, "step(); time.sleep(4 if rank else 0); step()")
    with run_script(tmp_path, script) as run:
        assert run.wait() == 0, run.console
    with run_script(tmp_path, script, options=("--hang-timeout", 2)) as run:
        assert run.wait() == 137, run.console
    assert "rank 1 hung in <module>, own.py:" in run.console
    assert "collectives begun: rank 0 2, rank 1 1" in run.console


SIGNS = """
import ddp_runner
rank or print('.', flush=True)
for _ in range(5): time.sleep(0.4); rank or print('.')
step()
for _ in range(5): time.sleep(0.4); rank or print('.', end='', flush=True)
for _ in range(5): time.sleep(0.4); dist.barrier()
for _ in range(5): time.sleep(0.4); rank or ddp_runner.heartbeat()
"""


def test_signs_of_one_rank_are_enough(tmp_path):
    """However long it goes on: lines before the first step, then parts of one, collectives, heartbeats."""
    with run_script(tmp_path, own(tmp_path, SIGNS), options=("--hang-timeout", 1.5)) as run:
        assert run.wait() == 0, run.console
    assert "hung" not in run.console


def test_ranks_that_all_hang_alike_are_not_named(tmp_path):
    """No one is named where none has begun fewer collectives, before the first step; it is a fault all the same."""
    script = own(tmp_path, "time.sleep(1000)")
    with run_script(tmp_path, script, options=("--hang-timeout", 1)) as run:
        assert run.wait() == 137, run.console
    assert (
        "all ranks hung in <module>, own.py:10: no step, collective, line or heartbeat"
        in run.console
    )


def test_one_that_never_ends_when_the_others_have_is_found(tmp_path):
    """It has nobody to wait for."""
    script = own(tmp_path, "step()\nif rank: time.sleep(1000)\nos._exit(0)")
    with run_script(tmp_path, script, options=("--hang-timeout", 2)) as run:
        assert run.wait() == 137, run.console
    assert "rank 1 hung in <module>, own.py:" in run.console


def test_a_heartbeat_outside_of_a_run_does_nothing():
    """So that a script may have it wherever it runs."""
    import ddp_runner

    assert ddp_runner.heartbeat() is None


def test_a_script_that_destroys_its_group_under_a_replica_ends(tmp_path):
    """With plain torch 2.13 the second or third of these rounds never ends: a thread waits for its own waiter."""
    script = tmp_path / "own.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\n"
        "rank, world = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])\n"
        "def once(number):\n"
        "    meet = f'file://{os.getcwd()}/meet_{number}'\n"
        "    dist.init_process_group('gloo', init_method=meet, rank=rank, world_size=world)\n"
        "    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    loss = model(torch.randn(8, 8)).sum()\n"
        "    loss.backward(); optimizer.step()\n"
        "    dist.all_gather([torch.empty(()) for _ in range(world)], loss.detach())\n"
        "    dist.destroy_process_group()\n"
        "for number in range(20): once(number)\n",
        encoding="utf-8",
    )
    with run_script(tmp_path, script) as run:
        assert run.wait() == 0, run.console
