"""Processes that are forked from a rank while its threads are at work: loader workers, above all."""

from __future__ import annotations

import io
import os
import signal
import threading
import time

import torch

from ddp_runner.checkpoint.snapshot import HostMemory
from ddp_runner.training.components.tensor_hash import tensor_hash
from ddp_runner.training.starting.fork_safety import make_forks_safe
from tests.processes import run_ranks

TRIES = 12  # two or three of them go wrong where nothing was called before
FORKS_MAX = 60
STUCK_S = 20.0


def _beside_the_step(tensors):
    """As the threads that hash and save do, which make no tensor of their own."""
    for tensor in tensors:
        tensor_hash(tensor)
        snapshot = HostMemory().snapshot({"tensor": tensor}, steady=[tensor])
        snapshot.copy_steady()
        torch.save(snapshot.content, io.BytesIO())


def _first_sample():
    """As a dataset does that no rank ever asks for a sample in its own process."""
    numbers = torch.randn(8, generator=torch.Generator().manual_seed(1))
    (0.05 * numbers + 1)[:2].sum().unsqueeze(0)


def _in_a_process(act):
    """The pid of a fork that does ``act`` and ends with what it returns."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os._exit(act() or 0)
    finally:
        os._exit(255)


def _fork_all_along():
    """How many are stuck of those that are forked while the thread is at work."""
    tensors = [torch.ones(size) for size in (9, 128, 4096)]
    thread = threading.Thread(target=_beside_the_step, args=(tensors,))
    thread.start()
    forks = []
    while thread.is_alive() and len(forks) < FORKS_MAX:
        forks.append(_in_a_process(_first_sample))
    thread.join()
    give_up_s = time.monotonic() + STUCK_S
    while forks and time.monotonic() < give_up_s:
        forks = [pid for pid in forks if os.waitpid(pid, os.WNOHANG) == (0, 0)]
        time.sleep(0.002)
    for pid in forks:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return len(forks)


def _stuck(me):
    """Of as many ranks as there are tries, each of which starts fresh."""
    make_forks_safe()
    return [
        os.waitstatus_to_exitcode(os.waitpid(_in_a_process(_fork_all_along), 0)[1])
        for _ in range(TRIES)
    ]


def test_a_process_forked_beside_the_threads_of_a_rank_is_never_stuck():
    """Locks of the C and C++ runtimes, held by a thread at a fork, are held in that fork for ever."""
    assert run_ranks(_stuck, 1) == [[0] * TRIES]
