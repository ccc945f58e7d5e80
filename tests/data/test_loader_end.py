"""Loader: what a closed loader, a lost one and a killed rank leave behind."""

from __future__ import annotations

import gc
import signal
import time
from pathlib import Path

import pytest

from tests.data.failing import SOON_S, Plain, Stuck, is_gone, left_over, make
from tests.processes import poll, ranks


@pytest.mark.parametrize("dataset", [Plain(), Stuck()], ids=["idle", "stuck"])
def test_close_leaves_nothing(dataset):
    """close() ends idle and stuck workers, promptly and twice without harm."""
    with make(Plain()) as first:
        first.take(0)  # multiprocessing opens one file of its own, once
    open_before = _open_files()
    loader = make(dataset, num_workers=2, prefetch_factor=3)
    loader.take(0)
    pids = loader.worker_pids
    began_s = time.monotonic()
    loader.close()
    loader.close()
    assert time.monotonic() - began_s < SOON_S
    assert left_over(pids) == []
    assert _open_files_come_down_to(open_before)


def test_nothing_waits_for_the_garbage_collector():
    """Descriptors and shared memory of a batch go with it, those of a pool with its end."""
    with make(Plain()) as first:
        first.take(0)
    open_before = _open_files()
    loader = make(Plain(), num_workers=1)
    gc.disable()
    try:
        for step in range(0, 60, 10):
            loader.take(step)
            loader.take(step + 1)
            loader.seek(0)
        assert _open_files_come_down_to(open_before)
    finally:
        gc.enable()
        loader.close()


def _open_files_come_down_to(limit):
    """Whether they do, once the feeder threads of torch's queues have ended."""
    return poll(lambda: _open_files() <= limit, what="the end of the open files")


def _open_files():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _load_one_step(me):
    loader = make(Stuck(), num_workers=2)
    loader.take(0)
    me.say(loader.worker_pids)
    signal.pause()


def test_no_worker_outlives_a_killed_rank():
    """SIGKILL on the rank ends its workers by the kernel, also one that is stuck in a sample."""
    with ranks(_load_one_step, 1) as (rank,):
        pids = rank.hear()
        assert pids
        assert not any(is_gone(pid) for pid in pids), "control"
        rank.signal(signal.SIGKILL)
        poll(lambda: all(is_gone(pid) for pid in pids), what="the end of its workers")
