"""Datasets whose samples break their worker, each in its way, and what tests of them ask of a loader."""

from __future__ import annotations

import mmap
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch

from ddp_runner.data.order import SampleOrder
from ddp_runner.data.quarantine import Quarantine
from ddp_runner.data.workers.timeouts import Wait
from ddp_runner.kernel.rules.faults import FaultError
from tests.data.mapped import map_loader
from tests.processes import poll

BAD = 17
LONG_S = 100.0  # no worker takes so long, however busy the machine
SOON_S = 25.0  # far below that
SHORT_S = 1.5
HANGING = mmap.mmap(-1, 8)  # the process that hangs for good


def hang():
    """Do so, in a worker, for all to know."""
    HANGING[:] = os.getpid().to_bytes(8, "little")
    time.sleep(600)


class ShownWait(Wait):
    """Its time is up as soon as one of the workers hangs, and not because the machine is slow."""

    def look(self):
        pid = int.from_bytes(HANGING[:], "little")
        if pid in self._pids and psutil.Process(pid).status() == psutil.STATUS_SLEEPING:
            self._deadline_s = 0.0
        super().look()


class Plain:
    def __getitem__(self, index):
        return torch.tensor(index)


class Raises(Plain):
    def __getitem__(self, index):
        if index == BAD:
            raise ValueError("broken image\nsecond line")
        return super().__getitem__(index)


class RaisesMany(Raises):
    deterministic = True

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Once(Plain):
    """Does something to the first process that loads BAD, and to no other."""

    def __init__(self):
        self._first = mmap.mmap(-1, 1)

    def has_happened(self):
        return self._first[0] == 1

    def __getitem__(self, index):
        if index == BAD and self._first[0] == 0:
            self._first[0] = 1
            self.happen()
        return super().__getitem__(index)


class OnceExits(Once):
    def happen(self):
        os._exit(7)


class OnceStuck(Once):
    def happen(self):
        hang()


class DiesInAnyWorker(Plain):
    def __init__(self, rank_pid):
        self._rank_pid = rank_pid

    def __getitem__(self, index):
        if os.getpid() != self._rank_pid:
            os.kill(os.getpid(), signal.SIGBUS)
        return super().__getitem__(index)


class Stuck(Plain):
    def __getitem__(self, index):
        if index == BAD:
            hang()
        return super().__getitem__(index)


class Slow(Plain):
    """BAD comes only once the rank has waited for it a while."""

    def __init__(self):
        self._has_waited = mmap.mmap(-1, 1)

    def note_wait(self):
        self._has_waited[0] = 1

    def __getitem__(self, index):
        if index == BAD:
            poll(lambda: self._has_waited[0], what="the wait")
        return super().__getitem__(index)


class Counted(Plain):
    """``loaded`` says how many different samples its workers have loaded."""

    def __init__(self):
        self._loaded = mmap.mmap(-1, 64)  # a byte each: two workers may load at once

    @property
    def loaded(self):
        return sum(self._loaded[:])

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        self._loaded[index] = 1
        return sample


class Unpicklable(Plain):
    def __getitem__(self, index):
        return (one for one in ()) if index == BAD else 0


def make(dataset, *, num_workers=1, **changes):
    order = SampleOrder(seed=0, dataset_size=64, global_batch_size=4, shuffle=False)
    settings = {"micro_batch_size": 4, "order": order, **changes}
    return map_loader(
        dataset,
        rank=0,
        world_size=1,
        total_steps=10_000,
        seed=1,
        num_workers=num_workers,
        timeout_s=LONG_S,
        **settings,
    )


def indices_of(step):
    """What the order gives to a step."""
    return tuple(range(step * 4 % 64, step * 4 % 64 + 4))


def left_over(pids):
    """What the loader's workers left behind: processes and shared-memory names."""
    names = [p.name for pid in pids for p in Path("/dev/shm").glob(f"torch_{pid}_*")]
    return [pid for pid in pids if psutil.pid_exists(pid)] + names


def take_until(reported, loader, first_step=0, *, count=1):
    """Take steps, each of them exact, until so much was reported; the step and seconds of the last take."""
    for step in range(first_step, first_step + 200):
        pids = loader.worker_pids
        began_s = time.monotonic()
        (taken,) = loader.take(step)
        took_s = time.monotonic() - began_s
        assert taken.indices == indices_of(step)
        assert torch.as_tensor(taken.batch).tolist() == list(taken.indices)
        if len(reported) >= count:
            assert left_over(pids) == []
            return step, took_s
    pytest.fail("nothing was reported in 200 steps")


def take_fault(loader):
    """The fault that ends the taking of steps."""
    step = pids = None

    def take_on():
        nonlocal step, pids
        for step in range(200):
            pids = loader.worker_pids
            loader.take(step)

    with pytest.raises(FaultError) as raised:
        take_on()
    fault = raised.value.fault
    assert (left_over(pids), loader.worker_pids, fault.step) == ([], (), step)
    return fault


def take_on(loader, first_step, steps=20):
    """More steps, each exact."""
    for step in range(first_step, first_step + steps):
        assert loader.take(step)[0].indices == indices_of(step)


class RaisesOnce(Once):
    def happen(self):
        raise OSError("the network is down for a moment")


class KillsMany(Plain):
    """Its worker dies; which sample did it cannot be seen from outside."""

    deterministic = True

    def __getitems__(self, indices):
        if BAD in indices:
            os.kill(os.getpid(), signal.SIGSEGV)
        return [self[index] for index in indices]


class Kills(Plain):
    def __getitem__(self, index):
        if index == BAD:
            os._exit(7)
        return super().__getitem__(index)


class KillsOrHangs(Plain):
    """The samples of ``bad`` break every worker; ``touched`` counts how often they were tried.

    Without a rank that survives it there would be nobody to report to, so there they only raise.
    """

    def __init__(self, *bad, hangs=False, many=False):
        self._bad = bad
        self._hangs = hangs
        self._rank_pid = os.getpid()
        self._touched = mmap.mmap(-1, 1)
        if many:
            self.deterministic = True
            self.__getitems__ = self._at_once

    @property
    def touched(self):
        return self._touched[0]

    def __getitem__(self, index):
        if index in self._bad:
            self._touched[0] += 1
            if os.getpid() == self._rank_pid:
                raise SystemExit(f"sample {index} was loaded in the rank itself")
            if not self._hangs:
                os.kill(os.getpid(), signal.SIGKILL)
            hang()
        return super().__getitem__(index)

    def _at_once(self, indices):
        return [self[index] for index in indices]


def quarantine(bad_max=3):
    return Quarantine(seed=0, dataset_size=64, bad_max=bad_max)


def is_gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
