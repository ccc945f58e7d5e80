"""A probe of which one rank does what breaks it. For tests.

``DDP_TEST_PROBE`` names what; the rest of it is the real one.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

from ddp_runner.kernel.group.abort import AbortSwitch
from ddp_runner.rank import probe
from tests.kernel.group import silent

VARIABLE = "DDP_TEST_PROBE"
FAILING = 1  # this rank
_real_sum = probe.RankOfProbe.add_up


def segment(pid):
    """A file in shared memory as NCCL makes them, for the processes that ``pid`` has forked."""
    return Path(f"/dev/shm/nccl-test{pid}")


def _map_segment():
    path = segment(os.getppid())
    path.write_bytes(bytes(4096))
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 4096)


def _add_up(me, group):
    if me.membership.rank == FAILING:
        how = os.environ[VARIABLE]
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "segment":
            held = _map_segment()
            os.kill(os.getpid(), signal.SIGSTOP)
            held.close()
        elif how == "raise":
            raise RuntimeError("CUDA error: out of memory\nand more lines")
        elif how == "exit":
            os._exit(7)
        elif how == "hold the interpreter":
            ctypes.PyDLL(None).sleep(600)
        elif how == "add wrongly":
            group = SimpleNamespace(
                rank=10, world_size=group.world_size, all_reduce=group.all_reduce
            )
    _real_sum(me, group)


def main(words):
    """As the probe's own."""
    how = os.environ[VARIABLE]
    probe.RankOfProbe.add_up = _add_up
    if how == "hear no abort":
        AbortSwitch.trip = lambda _: None
    elif how == "hear no cut":
        AbortSwitch.cut = lambda _: None
    return probe.main(words)


def run_here(_me, how, backend, devices, limit_s):
    """In a process of tests.processes: what the probe says, and how long it took."""
    os.environ[VARIABLE] = how
    silent.register()
    reader, writer = os.pipe()
    spec = json.dumps({"backend": backend, "devices": devices, "limit_s": limit_s})
    began_s = time.monotonic()
    main([str(writer), str(os.getppid()), spec])
    took_s = time.monotonic() - began_s
    with os.fdopen(reader, encoding="utf-8") as pipe:
        imported, answer = pipe.read().splitlines()
    assert imported == probe.IMPORTED
    left = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return json.loads(answer), took_s, left, segment(os.getpid()).exists()
