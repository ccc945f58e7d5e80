"""Loader: memory that is refused or taken back while samples are loaded."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import time

import numpy as np
import pytest
import torch

from ddp_runner.kernel.processes.memory_limits import KernelKills
from ddp_runner.kernel.rules.faults import FaultError, FaultKind
from tests.data.failing import BAD, Plain, make, quarantine, take_fault, take_on


class NeedsMemory(Plain):
    """Is refused what BAD asks for, ``times`` times: as torch or as numpy is."""

    def __init__(self, times, where="sample"):
        self._left = mmap.mmap(-1, 1)
        self._left[0] = times
        self._where = where

    def ask(self, where):
        if where == self._where and self._left[0]:
            self._left[0] -= 1
            if self._left[0] % 2:
                torch.empty(2**62, dtype=torch.uint8)
            np.empty(2**62, dtype=np.uint8)

    def __getitem__(self, index):
        if index == BAD:
            self.ask("sample")
        return super().__getitem__(index)

    def collate(self, samples):
        if BAD in samples:
            self.ask("collate")
        return torch.stack(samples)


class RaisesThenNeedsMemory(NeedsMemory):
    """Raises for another reason first; memory is short when the sample is looked for."""

    def __getitem__(self, index):
        if index == BAD and self._left[0] == 3:
            self._left[0] -= 1
            raise ValueError("out of reach")
        return super().__getitem__(index)


@pytest.mark.parametrize("where", ["sample", "collate"])
def test_refused_memory_in_a_worker_costs_workers_and_no_sample(where):
    """Two workers, then one, then the rank itself: no good sample is called bad."""
    dataset, reported, known = NeedsMemory(3, where), [], quarantine()
    with make(
        dataset,
        num_workers=2,
        on_repaired=reported.append,
        quarantine=known,
        collate_fn=dataset.collate,
    ) as loader:
        take_on(loader, 0)
        assert loader.workers == 0
    assert [repaired.fault.kind for repaired in reported] == [FaultKind.OUT_OF_MEMORY] * 3
    assert [repaired.inexact_reason for repaired in reported] == [""] * 3
    assert str(BAD) in reported[0].fault.cause
    assert not len(known)


@pytest.mark.parametrize("where", ["sample", "collate"])
def test_refused_memory_in_the_rank_is_reported_as_that(where):
    """The rank then takes smaller micro-batches, and the same step."""
    dataset, known = NeedsMemory(1, where), quarantine()
    with make(dataset, num_workers=0, quarantine=known, collate_fn=dataset.collate) as loader:
        fault = take_fault(loader)
        assert fault.kind is FaultKind.OUT_OF_MEMORY
        assert fault.may_retry
        take_on(loader, fault.step)
    assert not len(known)


@pytest.mark.parametrize("workers", [0, 1])
def test_refused_memory_while_a_bad_sample_is_looked_for_makes_none_bad(workers):
    """Nothing is known then: the batch is tried again as it is, and loads."""
    known = quarantine()
    with make(RaisesThenNeedsMemory(3), num_workers=workers, quarantine=known) as loader:
        with contextlib.suppress(FaultError):  # for the second refusal, in the rank itself
            take_on(loader, 0)
        take_on(loader, 0)
    assert not len(known)


class KilledForMemory(Plain):
    """Its workers end as the kernel ends them; ``counts``: it counts that too."""

    def __init__(self, root, *, counts):
        self._events = root / "sys/fs/cgroup/memory.events"
        self._events.parent.mkdir(parents=True)
        own = root / "proc/self/cgroup"
        own.parent.mkdir(parents=True)
        own.write_text("0::/\n")
        self._counts = counts
        self._kills = mmap.mmap(-1, 1)
        self._write_events()

    @property
    def kills(self):
        return self._kills[0]

    def _write_events(self):
        """At once, as the kernel does: the rank may be reading."""
        new = self._events.with_name("new")
        new.write_text(f"oom_kill {self.kills if self._counts else 0}\n")
        new.replace(self._events)

    def __getitem__(self, index):
        if index == BAD:
            self._kills[0] += 1
            self._write_events()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.parametrize("counts", [True, False])
def test_kills_for_memory_during_the_search_are_claimed_and_reported(tmp_path, counts):
    """None is left over for a rank that is killed by hand later; control: SIGKILLs that were no such kills."""
    reported, dataset = [], KilledForMemory(tmp_path, counts=counts)
    kills = KernelKills(tmp_path)
    with make(dataset, on_repaired=reported.append, quarantine=quarantine(), kills=kills) as loader:
        take_on(loader, 0, 4)
        loader.take(4)
    assert [repaired.fault.kind for repaired in reported][-1] is FaultKind.BAD_SAMPLE
    assert dataset.kills > 2
    assert sum(repaired.kernel_kills for repaired in reported) == (dataset.kills if counts else 0)
    assert not kills.claim(time.monotonic())
