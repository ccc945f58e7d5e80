"""SafeDataLoader: each way in which a worker breaks is mended inside ``take``, and told clearly."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import signal
import stat
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from ddp_runner.core.faults import FaultError, FaultKind
from ddp_runner.core.loader_recovery import CALM_STEPS, VAIN_WAITS_MAX
from ddp_runner.data.loader import SafeDataLoader
from ddp_runner.data.order import SampleOrder
from ddp_runner.data.quarantine import Quarantine
from ddp_runner.data.workers.timeouts import SLICE_S, Wait
from ddp_runner.memory.kernel_kills import KernelKills
from tests.processes import poll, ranks

BAD = 17
LONG_S = 100.0  # no worker takes so long, however busy the machine
SOON_S = 25.0  # far below that
SHORT_S = 1.5
_hanging = mmap.mmap(-1, 8)  # the process that hangs for good


def hang():
    """Do so, in a worker, for all to know."""
    _hanging[:] = os.getpid().to_bytes(8, "little")
    time.sleep(600)


class ShownWait(Wait):
    """Its time is up as soon as one of the workers hangs, and not because the machine is slow."""

    def look(self):
        pid = int.from_bytes(_hanging[:], "little")
        if pid in self._pids and psutil.Process(pid).status() == psutil.STATUS_SLEEPING:
            self._deadline_s = 0.0
        super().look()


@pytest.fixture
def hangs_are_shown(monkeypatch):
    _hanging[:] = bytes(8)  # whoever hung in a former test has ended, and its pid may be another's
    monkeypatch.setattr("ddp_runner.data.workers.pool.Wait", ShownWait)


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
        return (lambda: index) if index == BAD else 0


def make(dataset, *, num_workers=1, **changes):
    order = SampleOrder(seed=0, dataset_size=64, global_batch_size=4, shuffle=False)
    settings = {"micro_batch_size": 4, "order": order, **changes}
    return SafeDataLoader(
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


@pytest.fixture(params=[False, True], ids=["plain", "pinned"])
def pin(request, monkeypatch):
    """Batches received directly, or through the pinning thread, also without a device."""
    if request.param and not torch.cuda.is_available():
        monkeypatch.setattr("ddp_runner.data.workers.system_limits.can_pin", lambda: True)
        monkeypatch.setattr("ddp_runner.data.workers.pool.pin_memory", lambda batch: batch)
    return request.param


def left_over(pids):
    """What the loader's workers left behind: processes and shared-memory names."""
    names = [p.name for pid in pids for p in Path("/dev/shm").glob(f"torch_{pid}_*")]
    return [pid for pid in pids if psutil.pid_exists(pid)] + names


def take_until(told, loader, first_step=0, *, count=1):
    """Take steps, each of them exact, until so much was told; the step and seconds of the last take."""
    for step in range(first_step, first_step + 200):
        pids = loader.worker_pids
        began_s = time.monotonic()
        (taken,) = loader.take(step)
        took_s = time.monotonic() - began_s
        assert taken.indices == indices_of(step)
        assert torch.as_tensor(taken.batch).tolist() == list(taken.indices)
        if len(told) >= count:
            assert left_over(pids) == []
            return step, took_s
    pytest.fail("nothing was told in 200 steps")


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


def test_killed_worker_is_replaced_at_once(pin):
    """A SIGKILL is told by worker, pid, signal and memory; no batch is lost, doubled or changed."""
    told, pids = [], []
    loader = make(
        Plain(), num_workers=2, pin_memory=pin, on_workers=pids.append, on_mended=told.append
    )
    with loader:
        loader.take(0)
        victim = loader.worker_pids[0]
        os.kill(victim, signal.SIGKILL)
        step, took_s = take_until(told, loader, 1)
        workers = loader.workers
        (mended,) = told
        fault = mended.fault
        assert (fault.kind, fault.step) == (FaultKind.LOADER_WORKER_DIED, step)
        assert f"worker 0 (pid {victim}) was killed by SIGKILL" in fault.cause
        assert "MB resident at most; " in fault.cause
        assert "\n" not in fault.cause
        assert "Traceback" in fault.detail
        assert f"{workers} loader worker" in mended.remedy
        assert mended.inexact_reason == ""
        assert took_s < SOON_S
        assert 0 < mended.seconds <= took_s
        assert len(loader.worker_pids) == workers
        assert victim not in loader.worker_pids
        assert pids[-1] == loader.worker_pids
        take_on(loader, step + 1)
        assert len(told) == 1


def take_on(loader, first_step, steps=20):
    """More steps, each exact."""
    for step in range(first_step, first_step + steps):
        assert loader.take(step)[0].indices == indices_of(step)


def test_death_while_the_rank_waits_is_seen_at_once():
    """The rank blocked on a slow worker learns of its death within the second, not by timeout."""
    told = []
    dataset = OnceStuck()
    with make(dataset, num_workers=1, on_mended=told.append) as loader:
        loader.take(0)
        killer = threading.Thread(target=_kill_once_stuck, args=(dataset, loader.worker_pids[0]))
        killer.start()
        _, took_s = take_until(told, loader, 1)
        killer.join()
    fault = told[0].fault
    assert fault.kind is FaultKind.LOADER_WORKER_DIED
    assert "loading sample 17 of samples 16, 17, 18, 19" in fault.cause
    assert took_s < SOON_S


def _kill_once_stuck(dataset, pid):
    poll(dataset.has_happened, what="the stuck sample")
    time.sleep(0.3)  # not a wait: the rank is most likely blocked by then
    os.kill(pid, signal.SIGKILL)


def test_exit_inside_a_sample_names_code_and_samples():
    """A worker that leaves by itself is reported with its exit code and what it was loading."""
    told = []
    with make(OnceExits(), on_mended=told.append) as loader:
        take_until(told, loader)
    assert told[0].fault.kind is FaultKind.LOADER_WORKER_DIED
    assert "exited with code 7, " in told[0].fault.cause
    assert "loading sample 17 of samples 16, 17, 18, 19" in told[0].fault.cause


class OnceDeaf(Once):
    """Closes its pipes, as a process does that ends, and ends after ``seconds``.

    Nothing else: torch ends a process that lets go of a tensor whose shared memory's file is closed.
    """

    def __init__(self, seconds):
        super().__init__()
        self._seconds = seconds

    def happen(self):
        for number in range(3, 1024):
            with contextlib.suppress(OSError):
                if stat.S_ISFIFO(os.fstat(number).st_mode):
                    os.close(number)
        time.sleep(self._seconds)
        os._exit(7)


@pytest.mark.parametrize(
    ("seconds", "reap_s", "told_as"),
    [(1.0, LONG_S, "exited with code 7, "), (600.0, 0.3, "MB resident; ")],
    ids=["ends", "lives on"],
)
def test_a_worker_without_its_files_is_told_by_its_end_or_replaced(
    monkeypatch, seconds, reap_s, told_as
):
    """Between the two a machine may hold it up; one that user code has cut off is not waited for."""
    monkeypatch.setattr("ddp_runner.data.workers.pool._REAP_S", reap_s)
    told = []
    with make(OnceDeaf(seconds), on_mended=told.append) as loader:
        take_until(told, loader)
    assert told[0].fault.kind is FaultKind.LOADER_WORKER_DIED
    assert told_as in told[0].fault.cause


def test_a_row_of_faults_ends_in_the_rank_itself():
    """Workers that die while they start: each fault in a row halves them, and no batch is lost."""
    told = []
    with make(DiesInAnyWorker(os.getpid()), num_workers=2, on_mended=told.append) as loader:
        loader.workers = 2  # also where the machine has one core
        step, _ = take_until(told, loader)
        assert (step, loader.workers, loader.worker_pids) == (0, 0, ())
        take_on(loader, 1)
    assert [mended.remedy for mended in told] == [
        "2 loader workers started anew",
        "1 loader worker instead of 2 after 2 faults in a row",
        "loading in the rank itself after 3 faults in a row",
    ]
    assert {mended.fault.kind for mended in told} == {FaultKind.LOADER_WORKER_DIED}


def test_workers_come_back_when_it_is_calm_again():
    """Two quick kills cost the only worker; a calm stretch later it is there again, and told."""
    told, lines = [], []
    with make(Plain(), on_mended=told.append, log=lines.append) as loader:
        loader.take(0)
        os.kill(loader.worker_pids[0], signal.SIGKILL)
        step, _ = take_until(told, loader, 1)
        os.kill(loader.worker_pids[0], signal.SIGKILL)
        step, _ = take_until(told, loader, step + 1, count=2)
        assert loader.workers == 0
        take_on(loader, step + 1, CALM_STEPS + 1)
        assert len(loader.worker_pids) == 1
    assert lines == ["loading with 1 workers again, instead of 0"]


def test_faults_with_progress_in_between_keep_the_workers():
    """Control: what is killed now and then, by chance, does not cost the rank its workers."""
    told = []
    with make(Plain(), on_mended=told.append) as loader:
        step = 0
        for count in range(1, 5):
            take_on(loader, step, 10)
            os.kill(loader.worker_pids[0], signal.SIGKILL)
            step = 1 + take_until(told, loader, step + 10, count=count)[0]
        assert loader.workers == 1
    assert {mended.remedy for mended in told} == {"1 loader worker started anew"}


def test_no_death_interrupts_the_rank_elsewhere():
    """Between takes, a worker's death raises nothing in the rank's own code."""
    told = []
    with make(Plain(), num_workers=1, on_mended=told.append) as loader:
        loader.take(0)
        process = psutil.Process(loader.worker_pids[0])
        process.kill()
        poll(lambda: process.status() == psutil.STATUS_ZOMBIE, what="its end")
        take_until(told, loader, 1)
    assert told[0].fault.kind is FaultKind.LOADER_WORKER_DIED


def test_a_death_while_the_first_batches_are_handed_out_is_told_like_any_other():
    """A bad sample may end its worker sooner than the rank has asked all workers for their first batch."""
    told, dataset, held_up = [], OnceExits(), []

    class HeldUp(SampleOrder):
        def share_of(self, step, **options):
            if step == 5 and not held_up:
                held_up.append(step)
                poll(dataset.has_happened, what="the sample")
                poll(lambda: any(is_gone(each.pid) for each in psutil.Process().children()))
            return super().share_of(step, **options)

    order = HeldUp(seed=0, dataset_size=64, global_batch_size=4, shuffle=False)
    with make(dataset, order=order, on_mended=told.append) as loader:
        take_until(told, loader, 4)
    assert "exited with code 7, " in told[0].fault.cause
    assert "loading sample 17 of samples 16, 17, 18, 19" in told[0].fault.cause


def test_stopped_worker_is_a_timeout_that_names_it(pin, monkeypatch):
    """A worker that stops is reported with its state and memory after timeout_s, and replaced."""
    monkeypatch.setattr("ddp_runner.data.workers.timeouts.STOPPED_S", LONG_S)  # the next test's
    told, dataset = [], Counted()
    loader = make(dataset, num_workers=2, pin_memory=pin, on_mended=told.append)
    with loader:
        loader.take(0)
        _wait_until_loaded_ahead(dataset, loader)
        loader._timeout_s = SHORT_S  # now that they have started, which takes what it takes
        number = loader.workers - 1  # a machine may have one core only
        victim = loader.worker_pids[number]
        os.kill(victim, signal.SIGSTOP)
        _, took_s = take_until(told, loader, 1)
        cause = told[0].fault.cause
    assert told[0].fault.kind is FaultKind.LOADER_TIMEOUT
    assert (
        f"no batch within {SHORT_S:g} s: loader worker {number} (pid {victim}) is stopped" in cause
    )
    assert "MB resident; " in cause
    assert SHORT_S <= took_s < SHORT_S + SOON_S


def test_stopped_worker_is_not_waited_for_as_long_as_a_slow_one(pin):
    """What the system says is stopped is replaced after two seconds, whatever timeout_s is."""
    told = []
    with make(Plain(), pin_memory=pin, on_mended=told.append) as loader:
        loader.take(0)
        victim = loader.worker_pids[0]
        os.kill(victim, signal.SIGSTOP)
        _, took_s = take_until(told, loader, 1)
    assert told[0].fault.kind is FaultKind.LOADER_TIMEOUT
    assert f"stopped for 2 s: loader worker 0 (pid {victim}) is stopped" in told[0].fault.cause
    assert took_s < 2.0 + SOON_S


def test_batches_of_a_stopped_worker_that_are_ready_are_served():
    """What a worker has finished can be had without it: unpacking never waits for the sender."""
    told = []
    dataset = Counted()
    with make(dataset, prefetch_factor=4, on_mended=told.append) as loader:
        loader.take(0)
        _wait_until_loaded_ahead(dataset, loader)
        os.kill(loader.worker_pids[0], signal.SIGSTOP)
        for step in range(1, 5):
            assert loader.take(step)[0].batch.tolist() == list(indices_of(step))
        assert told == []
        take_until(told, loader, 5)
    assert told[0].fault.kind is FaultKind.LOADER_TIMEOUT


def _wait_until_loaded_ahead(dataset, loader):
    """After the first step: all that may be loaded ahead is sent, and no worker holds their lock."""
    steps = 1 + loader.workers * loader.prefetch_factor
    poll(lambda: dataset.loaded == 4 * steps, what="what is loaded ahead")
    for pid in loader.worker_pids:
        _wait_until_idle(pid)


def _wait_until_idle(pid):
    """Until all threads of the worker sleep at once, one looked at after the other: all is sent.

    One that only waits for a processor has more to do; one that has run since has switched.
    """
    poll(
        lambda: all_asleep(before := threads_of(pid)) and threads_of(pid) == before, what="its rest"
    )


def threads_of(pid):
    """Of each thread its state and how often it has given up the processor."""
    told = ("State:", "voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:")
    texts = {task: (task / "status").read_text() for task in Path(f"/proc/{pid}/task").iterdir()}
    return {
        task: [line for line in text.splitlines() if line.startswith(told)]
        for task, text in texts.items()
    }


def all_asleep(threads):
    return all("S (sleeping)" in facts[0] for facts in threads.values())


@pytest.mark.parametrize("dataset", [Raises(), RaisesMany()], ids=["one", "many"])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_raising_sample_is_named(dataset, workers):
    """An exception of the dataset is a bad sample, with its index, first line and traceback."""
    with make(dataset, num_workers=workers) as loader:
        fault = take_fault(loader)
    assert (fault.kind, fault.step) == (FaultKind.BAD_SAMPLE, 4)
    assert (
        fault.cause
        == "sample 17 (epoch 0) could not be loaded: ValueError: broken image (data.on_bad_sample=substitute would replace it)"
    )
    assert "in __getitem__" in fault.detail


def test_samples_that_do_not_fit_together_are_named_together():
    """Where collating fails, the smallest part of the micro-batch that fails is named."""

    class Ragged(Plain):
        def __getitem__(self, index):
            return torch.zeros(index % 2)

    with make(Ragged()) as loader:
        fault = take_fault(loader)
    assert fault.kind is FaultKind.BAD_SAMPLE
    assert "one of the samples 0, 1 " in fault.cause


def test_sample_that_cannot_be_sent_is_a_bad_sample():
    """What cannot be pickled is reported at once, not lost in a queue until the timeout."""
    with make(Unpicklable(), collate_fn=list) as loader:
        fault = take_fault(loader)
    assert (fault.kind, fault.step) == (FaultKind.BAD_SAMPLE, 4)
    assert "could not be loaded" in fault.cause


class RaisesOnce(Once):
    def happen(self):
        raise OSError("the network is down for a moment")


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
    dataset, told, known = NeedsMemory(3, where), [], quarantine()
    with make(
        dataset, num_workers=2, on_mended=told.append, quarantine=known, collate_fn=dataset.collate
    ) as loader:
        take_on(loader, 0)
        assert loader.workers == 0
    assert [mended.fault.kind for mended in told] == [FaultKind.OUT_OF_MEMORY] * 3
    assert [mended.inexact_reason for mended in told] == [""] * 3
    assert str(BAD) in told[0].fault.cause
    assert not len(known)


@pytest.mark.parametrize("where", ["sample", "collate"])
def test_refused_memory_in_the_rank_is_told_as_that(where):
    """The rank then takes smaller micro-batches, and the same step."""
    dataset, known = NeedsMemory(1, where), quarantine()
    with make(dataset, num_workers=0, quarantine=known, collate_fn=dataset.collate) as loader:
        fault = take_fault(loader)
        assert fault.kind is FaultKind.OUT_OF_MEMORY
        assert fault.may_retry
        take_on(loader, fault.step)
    assert not len(known)


@pytest.mark.parametrize("workers", [0, 1])
def test_refused_memory_while_a_bad_sample_is_looked_for_condemns_none(workers):
    """Nothing is known then: the batch is tried again as it is, and loads."""
    known = quarantine()
    with make(RaisesThenNeedsMemory(3), num_workers=workers, quarantine=known) as loader:
        with contextlib.suppress(FaultError):  # for the second refusal, in the rank itself
            take_on(loader, 0)
        take_on(loader, 0)
    assert not len(known)


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

    Without a rank that survives it there would be nobody to tell, so there they only raise.
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


@pytest.mark.parametrize("dataset", [Kills(), KillsMany()], ids=["stamped", "bisected"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_sample_that_kills_every_worker_is_found(dataset, workers):
    """Two deaths over one batch: its parts are tried alone, and the sample is named."""
    with make(dataset, num_workers=workers) as loader:
        fault = take_fault(loader)
    assert fault.kind is FaultKind.BAD_SAMPLE
    assert fault.cause.startswith("sample 17 (epoch 0) could not be loaded: no worker survives it")


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
        self._tell()

    @property
    def kills(self):
        return self._kills[0]

    def _tell(self):
        """At once, as the kernel does: the rank may be reading."""
        new = self._events.with_name("new")
        new.write_text(f"oom_kill {self.kills if self._counts else 0}\n")
        new.replace(self._events)

    def __getitem__(self, index):
        if index == BAD:
            self._kills[0] += 1
            self._tell()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.parametrize("counts", [True, False])
def test_kills_for_memory_during_the_search_are_claimed_and_told(tmp_path, counts):
    """None is left over for a rank that is killed by hand later; control: SIGKILLs that were no such kills."""
    told, dataset = [], KilledForMemory(tmp_path, counts=counts)
    kills = KernelKills(tmp_path)
    with make(dataset, on_mended=told.append, quarantine=quarantine(), kills=kills) as loader:
        take_on(loader, 0, 4)
        loader.take(4)
    assert [mended.fault.kind for mended in told][-1] is FaultKind.BAD_SAMPLE
    assert dataset.kills > 2
    assert sum(mended.kernel_kills for mended in told) == (dataset.kills if counts else 0)
    assert not kills.claim(time.monotonic())


def test_a_sample_that_hangs_every_worker_is_found(hangs_are_shown):
    """The same for one that never returns; the rank waits three times for it."""
    with make(Stuck()) as loader:
        fault = take_fault(loader)
    assert fault.kind is FaultKind.BAD_SAMPLE
    assert "sample 17 " in fault.cause
    assert "is sleeping" in fault.cause
    assert "loading sample 17 of samples 16, 17, 18, 19" in fault.cause


@pytest.mark.parametrize("dataset", [Raises(), Kills(), KillsMany()], ids=["raises", "one", "many"])
def test_a_bad_sample_is_replaced_once_and_for_all(dataset):
    """The stand-in takes its place in every epoch; the workers stay; the rest is untouched."""
    told, known = [], quarantine()
    with make(dataset, on_mended=told.append, quarantine=known) as loader:
        for step in range(40):
            (taken,) = loader.take(step)
            expected = tuple(known.stand_in(index) for index in indices_of(step))
            assert taken.indices == expected
            assert taken.batch.tolist() == list(expected)
        assert loader.workers == 1
    assert known.stand_in(BAD) != BAD
    assert told[-1].fault.kind is FaultKind.BAD_SAMPLE
    assert "not tried again" in told[-1].remedy
    assert told[-1].inexact_reason
    assert [mended.fault.kind for mended in told].count(FaultKind.BAD_SAMPLE) == 1


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("bad", "many"),
    [((17, 18, 19), False), ((17, 21), True), ((17, 21, 25), False), ((0, 1, 2, 3), True)],
    ids=["one batch", "two batches", "three batches", "all of the first"],
)
def test_several_samples_that_kill_every_worker_are_all_replaced(bad, workers, many):
    """In one batch or in successive ones, which workers load at a time: none reaches the rank."""
    told, known = [], quarantine(bad_max=len(bad))
    dataset = KillsOrHangs(*bad, many=many)
    with make(dataset, num_workers=workers, on_mended=told.append, quarantine=known) as loader:
        loader.workers = workers  # also where the machine has one core
        for step in range(20):
            (taken,) = loader.take(step)
            expected = [known.stand_in(index) for index in indices_of(step)]
            assert taken.batch.tolist() == expected
        assert loader.workers >= 1
    assert [known.stand_in(index) == index for index in bad] == [False] * len(bad)
    assert len(known) == len(bad)
    named = [one.fault for one in told if one.fault.kind is FaultKind.BAD_SAMPLE]
    assert len(named) == len(bad)


def test_the_first_sample_of_a_run_may_be_the_bad_one():
    """Alone in its batch, with nothing loaded before it that could show that others load."""
    known = quarantine()
    with make(KillsOrHangs(0), micro_batch_size=1, quarantine=known) as loader:
        first = loader.take(0)
    assert first[0].indices == (known.stand_in(0),) != (0,)


def test_a_hanging_sample_is_waited_for_a_bounded_number_of_times(hangs_are_shown):
    """However large its batch, which is loaded all at once: the other ranks wait meanwhile."""
    size = 32
    dataset, known = KillsOrHangs(BAD, hangs=True, many=True), quarantine()
    order = SampleOrder(seed=0, dataset_size=64, global_batch_size=size, shuffle=False)
    settings = {"order": order, "micro_batch_size": size, "quarantine": known}
    with make(dataset, **settings) as loader:
        for step in range(BAD // size + 1):
            loader.take(step)
    assert known.stand_in(BAD) != BAD
    assert dataset.touched <= VAIN_WAITS_MAX


def test_a_batch_that_only_hangs_as_a_whole_is_named_as_one(hangs_are_shown):
    """Control: no sample of it can be blamed alone."""

    class HangsTogether(Plain):
        deterministic = True

        def __getitems__(self, indices):
            if BAD in indices and len(indices) > 1:
                hang()
            return [self[index] for index in indices]

    with make(HangsTogether(), quarantine=quarantine()) as loader:
        fault = take_fault(loader)
    assert fault.kind is FaultKind.BAD_SAMPLE
    assert fault.cause.startswith("one of the samples 16, 17, 18, 19 (epoch 0)")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_loads_when_it_is_tried_again_is_kept(workers):
    """Control: a moment without its storage makes no bad sample, and no bit differs."""
    told = []
    with make(RaisesOnce(), num_workers=workers, on_mended=told.append) as loader:
        take_until(told, loader)
        take_on(loader, 5)
    (mended,) = told
    assert mended.remedy == "loaded when it was tried again"
    assert mended.inexact_reason == ""


def test_bad_samples_beyond_the_budget_end_the_run():
    """The last one is named, and so is the budget."""

    class OddRaises(Plain):
        def __getitem__(self, index):
            if index in (3, 9, 17):
                raise ValueError("broken")
            return torch.tensor(index)

    known = quarantine(bad_max=2)
    with make(OddRaises(), quarantine=known) as loader:
        fault = take_fault(loader)
    assert len(known) == 2
    assert fault.cause.startswith("sample 17 ")
    assert "data.max_bad_samples=2" in fault.cause


@pytest.mark.parametrize("workers", [1, 2])
def test_slow_worker_within_the_timeout_is_no_fault(workers):
    """Control: a slow sample is waited for, and the wait is measured."""
    dataset, told = Slow(), []
    settings = {"prefetch_factor": 1, "on_wait": dataset.note_wait, "on_mended": told.append}
    with make(dataset, num_workers=workers, **settings) as loader:
        waits = []
        for step in range(8):
            assert loader.take(step)[0].indices[0] == step * 4
            waits.append(loader.waited_s)
    assert max(waits) > SLICE_S / 2
    assert told == []


def test_workers_ignore_the_signals_of_the_run():
    """Control: Ctrl-C, SIGTERM and a preemption notice leave the workers loading."""
    with make(Plain(), num_workers=2) as loader:
        loader.take(0)
        for pid in loader.worker_pids:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                os.kill(pid, number)
        pids = loader.worker_pids
        for step in range(1, 20):
            loader.take(step)
        assert loader.worker_pids == pids


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


def is_gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_no_worker_outlives_a_killed_rank():
    """SIGKILL on the rank ends its workers by the kernel, also one that is stuck in a sample."""
    with ranks(_load_one_step, 1) as (rank,):
        pids = rank.hear()
        assert pids
        assert not any(is_gone(pid) for pid in pids), "control"
        rank.signal(signal.SIGKILL)
        poll(lambda: all(is_gone(pid) for pid in pids), what="the end of its workers")


class Mutable:
    """Samples of one changeable tensor each."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((2,), float(index))


class Rows:
    """Samples as people write them: a dict of a tensor, an array and a list, collated to lists."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        rows = torch.full((2,), float(index))
        return {"x": rows, "array": np.full(2, index), "words": [str(index)]}


def listed(samples):
    return {key: [sample[key] for sample in samples] for key in samples[0]}


def _shown(batches):
    return repr([(each.indices, each.batch) for each in batches])


CHANGES = {
    "in place": lambda batch: batch["x"][0].mul_(2),
    "assigned": lambda batch: batch.update(x=[2 * x for x in batch["x"]]),
    "popped": lambda batch: batch.pop("x"),
    "as an array": lambda batch: np.multiply(batch["x"][0].numpy(), 2, out=batch["x"][0].numpy()),
    "an array": lambda batch: np.multiply(batch["array"][0], 2, out=batch["array"][0]),
    "a list": lambda batch: batch["words"][0].append("more"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_step_taken_again_is_as_it_was_whatever_was_done_to_it(num_workers, change):
    """What was prefetched is used once only; the workers that are ahead stay."""
    with make(Rows(), num_workers=num_workers, collate_fn=listed) as loader:
        loader.take(3)
        first = loader.take(4)
        before, pids = _shown(first), loader.worker_pids
        for _ in range(2):
            for each in first:
                change(each.batch)
            assert _shown(first) != before, "control"
            first = loader.take(4)
            assert _shown(first) == before
        assert loader.worker_pids == pids
        assert [each.indices for each in loader.take(5)] != [each.indices for each in first]
        assert loader.worker_pids == pids


class Kept(Rows):
    """Hands out what it keeps."""

    def __init__(self):
        self.rows = [super(Kept, self).__getitem__(index) for index in range(64)]

    def __getitem__(self, index):
        return self.rows[index]


def _arrays_as_tensors(samples):
    return {"x": [torch.from_numpy(sample["array"]) for sample in samples]}


@pytest.mark.parametrize(
    "collate_fn", [list, listed, _arrays_as_tensors], ids=["list", "dict", "the same memory"]
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_is_no_part_of_the_dataset(num_workers, collate_fn):
    """What a loss does to its batch is not done to the next epoch."""
    with make(Kept(), num_workers=num_workers, collate_fn=collate_fn) as loader:
        batch = loader.take(1)[0].batch
        before = repr(batch)
        for rows in [batch[0]["x"]] if isinstance(batch, list) else batch["x"]:
            rows.mul_(3)
        assert repr(batch) != before, "control"
        assert repr(loader.take(1)[0].batch) == before


def test_a_batch_that_is_made_anew_is_not_copied():
    """Nor is it looked at for long."""
    made = []

    def stacked(samples):
        made.append(torch.stack([sample["x"] for sample in samples]))
        return made[-1]

    with make(Kept(), num_workers=0, collate_fn=stacked) as loader:
        for step in range(3):
            assert loader.take(step)[0].batch is made[-1]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_copy_for_a_use_before_a_step_leaves_the_step_what_it_has(num_workers):
    """Also where there is no copy: then the step is loaded again."""

    def uncopied(samples):
        return [*samples, (each for each in ())] if num_workers == 0 else samples

    for collate_fn in (listed, uncopied):
        with make(Rows(), num_workers=num_workers, collate_fn=collate_fn) as loader:
            copy = loader.take_copy(2)
            assert len(copy) == 1
            content = copy[0].batch if collate_fn is listed else copy[0].batch[0]
            content.pop("x")
            batch = loader.take(2)[0].batch
            assert "x" in (batch if collate_fn is listed else batch[0])
            if collate_fn is listed:
                assert loader.waited_s < 0.01
            assert loader.take(3)[0].indices != copy[0].indices


def test_a_copy_that_is_not_taken_holds_nobody_up():
    """Another step, another share: what is at hand is of no use then."""
    with make(Rows(), num_workers=1, collate_fn=listed) as loader:
        two = loader.take_copy(2)
        five = loader.take(5)
        assert five[0].indices != two[0].indices
        loader.take_copy(6)
        loader.assign(rank=1, world_size=2, micro_batch_size=4)
        assert len(loader.take(6)[0].indices) == 2


class DiesAgain(Rows):
    """Loads each sample once, by the files that say so; then its worker dies, so often."""

    def __init__(self, folder, *, index, times):
        self._folder, self._index, self._left = folder, index, times

    def __getitem__(self, index):
        tries = len(list(self._folder.glob(f"{index}_*")))
        (self._folder / f"{index}_{tries}").touch()
        if index == self._index and 1 <= tries <= self._left:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_workers_that_die_as_they_load_again_are_mended_as_any(tmp_path):
    """One death costs the workers that were ahead, and nothing else; another one is told."""
    told = []
    for times, faults in ((1, 0), (2, 1)):
        folder = tmp_path / str(times)
        folder.mkdir()
        dataset = DiesAgain(folder, index=9, times=times)
        told.clear()
        with make(dataset, num_workers=1, collate_fn=listed, on_mended=told.append) as loader:
            before = _shown(loader.take(2))
            assert 9 in loader.take(2)[0].indices
            assert _shown(loader.take(2)) == before
            assert loader.take(3)[0].indices == (12, 13, 14, 15)
        assert len(told) == faults


def test_another_share_is_loaded_after_assign():
    """Fewer ranks share the same global batch; nobody loads what is not theirs."""
    with make(Mutable(), num_workers=1) as loader:
        alone = [i for batch in loader.take(2) for i in batch.indices]
        loader.assign(rank=1, world_size=2, micro_batch_size=4)
        half = [i for batch in loader.take(2) for i in batch.indices]
        assert half == alone[-len(half) :]
        assert 2 * len(half) == len(alone)


@pytest.mark.parametrize(
    ("dataset", "replaced"),
    [(Stuck(), True), (Plain(), False), (DiesInAnyWorker(0), False)],
    ids=["hangs again", "loads now", "loads in no worker"],
)
def test_what_the_process_before_was_loading_is_tried_by_a_worker_first(
    hangs_are_shown, dataset, replaced
):
    """Without workers, a sample that hangs would end one process after the other."""
    seen = []
    if isinstance(dataset, DiesInAnyWorker):
        dataset._rank_pid = os.getpid()
    with make(
        dataset, num_workers=0, suspect=BAD, quarantine=quarantine(1), on_sample=seen.append,
    ) as loader:  # fmt: skip
        steps = range(BAD // 4 + 1)
        taken = [index for step in steps for each in loader.take(step) for index in each.indices]
    assert (len(loader.quarantine), BAD in taken) == (int(replaced), not replaced)
    assert [index for index in seen if index is not None] == taken
    assert seen[-1] is None


def test_what_hangs_again_is_named_where_nothing_may_replace_it(hangs_are_shown):
    """The run ends with the sample, instead of one hang after the other."""
    with make(Stuck(), num_workers=0, suspect=BAD, quarantine=quarantine(0)) as loader:
        fault = take_fault(loader)
    assert fault.kind is FaultKind.BAD_SAMPLE
    assert fault.cause.startswith(
        f"sample {BAD} (epoch 0) could not be loaded: no process survives"
    )
