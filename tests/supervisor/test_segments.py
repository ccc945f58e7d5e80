"""Shared memory of processes that died while they made it, on the real /dev/shm."""

from __future__ import annotations

import os
import signal
from _multiprocessing import SemLock
from multiprocessing import synchronize
from pathlib import Path

import pytest

from ddp_runner.kernel.processes.children import reap_children
from ddp_runner.kernel.system import parent_death

SHARED_MEMORY = Path("/dev/shm")


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="needs /dev/shm")
def test_a_segment_goes_with_the_process_that_made_it():
    """Only segments of the process that was reaped: those of others may be in use."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        (SHARED_MEMORY / f"torch_{os.getpid()}_1_0").write_bytes(b"x")
        parent_death.mark_own_children()
        kept = SemLock(1, 1, 1, synchronize.SemLock._make_name(), False)  # as killed in between
        assert kept
        os.write(writer, b"x")
        signal.pause()
    other = SHARED_MEMORY / f"torch_{os.getpid()}_1_0"
    other.write_bytes(b"x")
    try:
        os.read(reader, 1)
        os.kill(child, signal.SIGKILL)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        semaphores = f"sem.{parent_death.semaphores_of(child)}*"
        assert len(list(SHARED_MEMORY.glob(semaphores))) == 1
        assert child in [ended.pid for ended in reap_children()]
        assert not (SHARED_MEMORY / f"torch_{child}_1_0").exists()
        assert not list(SHARED_MEMORY.glob(semaphores))
        assert other.exists()
    finally:
        other.unlink()
        os.close(reader)
        os.close(writer)
