"""Loader: workers that die, exit, are stopped or slow are repaired inside ``take``, and reported clearly."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import stat
import threading
import time
import weakref
from pathlib import Path

import psutil
import pytest
import torch

from ddp_runner.core.loader_recovery import CALM_STEPS
from ddp_runner.data.order import SampleOrder
from ddp_runner.data.workers.memory_files import SMALL_BYTES
from ddp_runner.data.workers.pool import _Mailboxes, garbage_kept
from ddp_runner.data.workers.timeouts import SLICE_S
from ddp_runner.kernel.rules.faults import FaultKind
from tests.data.failing import (
    BAD,
    LONG_S,
    SHORT_S,
    SOON_S,
    Counted,
    DiesInAnyWorker,
    Once,
    OnceExits,
    OnceStuck,
    Plain,
    Slow,
    Stuck,
    indices_of,
    is_gone,
    make,
    quarantine,
    take_fault,
    take_on,
    take_until,
)
from tests.processes import poll


def test_messages_to_workers_come_in_order_and_nobody_waits():
    """Small ones are written at once; those that do not fit into the pipe, and all after them, by a thread."""
    box, threads = _Mailboxes().Queue(), threading.active_count()
    sent = [b"small", *(bytes(3000) for _ in range(40)), bytes(100_000), b"last"]
    box.put(sent[0])
    assert threading.active_count() == threads
    for message in sent[1:]:
        box.put(message)  # of more than a pipe holds, while nobody reads
    assert [box.get(timeout=LONG_S) for _ in sent] == sent
    box.close()
    box.join_thread()


def test_a_message_waits_for_no_other_process_that_writes():
    """One may stand in a full pipe, or be killed there; the message then comes by a thread."""
    box = _Mailboxes().Queue()
    box._wlock.acquire()
    try:
        box.put(b"mine")
    finally:
        box._wlock.release()
    assert box.get(timeout=LONG_S) == b"mine"
    box.close()
    box.join_thread()


def test_killed_worker_is_replaced_at_once(pin):
    """A SIGKILL is reported by worker, pid, signal and memory; no batch is lost, doubled or changed."""
    reported, pids = [], []
    loader = make(
        Plain(), num_workers=2, pin_memory=pin, on_workers=pids.append, on_repaired=reported.append
    )
    with loader:
        loader.take(0)
        victim = loader.worker_pids[0]
        os.kill(victim, signal.SIGKILL)
        step, took_s = take_until(reported, loader, 1)
        workers = loader.workers
        (repaired,) = reported
        fault = repaired.fault
        assert (fault.kind, fault.step) == (FaultKind.LOADER_WORKER_DIED, step)
        assert f"worker 0 (pid {victim}) was killed by SIGKILL" in fault.cause
        assert "MB resident at most; " in fault.cause
        assert "\n" not in fault.cause
        assert "Traceback" in fault.detail
        assert f"{workers} loader worker" in repaired.action
        assert repaired.inexact_reason == ""
        assert took_s < SOON_S
        assert 0 < repaired.seconds <= took_s
        assert len(loader.worker_pids) == workers
        assert victim not in loader.worker_pids
        assert pids[-1] == loader.worker_pids
        take_on(loader, step + 1)
        assert len(reported) == 1


class OnDevice:
    """A tensor of a GPU, as it is in a fork: its destructor ends the process."""

    def __init__(self):
        self.itself = self  # the collector alone destroys it
        self._pid = os.getpid()

    def __del__(self):
        if os.getpid() != self._pid:
            os.abort()


class Collects(Plain):
    """Its samples make the worker's collector look at everything."""

    def __getitem__(self, index):
        gc.collect()
        return super().__getitem__(index)


def test_a_worker_never_collects_what_its_rank_has_left():
    """Garbage of the rank may hold a GPU's tensors, which no fork may destroy; the rank still collects it."""
    reported = []
    gc.collect()
    gc.disable()  # until the pool starts: the rank itself has not collected it yet
    try:
        left = weakref.ref(OnDevice())
        with make(Collects(), num_workers=1, on_repaired=reported.append) as loader:
            gc.disable()
            take_on(loader, 0)
            assert left() is not None
    finally:
        gc.enable()
    gc.collect()
    assert left() is None
    assert reported == []


def test_the_collector_of_rank_and_worker_is_on_after_a_start():
    """Held back for the fork alone; control: who has turned it off finds it so."""
    with garbage_kept() as collects:
        assert collects
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with garbage_kept() as collects:
            assert not collects
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_death_while_the_rank_waits_is_seen_at_once():
    """The rank blocked on a slow worker learns of its death within the second, not by timeout."""
    reported = []
    dataset = OnceStuck()
    with make(dataset, num_workers=1, on_repaired=reported.append) as loader:
        loader.take(0)
        killer = threading.Thread(target=_kill_once_stuck, args=(dataset, loader.worker_pids[0]))
        killer.start()
        _, took_s = take_until(reported, loader, 1)
        killer.join()
    fault = reported[0].fault
    assert fault.kind is FaultKind.LOADER_WORKER_DIED
    assert "loading sample 17 of samples 16, 17, 18, 19" in fault.cause
    assert took_s < SOON_S


def _kill_once_stuck(dataset, pid):
    poll(dataset.has_happened, what="the stuck sample")
    time.sleep(0.3)  # not a wait: the rank is most likely blocked by then
    os.kill(pid, signal.SIGKILL)


def test_exit_inside_a_sample_names_code_and_samples():
    """A worker that leaves by itself is reported with its exit code and what it was loading."""
    reported = []
    with make(OnceExits(), on_repaired=reported.append) as loader:
        take_until(reported, loader)
    assert reported[0].fault.kind is FaultKind.LOADER_WORKER_DIED
    assert "exited with code 7, " in reported[0].fault.cause
    assert "loading sample 17 of samples 16, 17, 18, 19" in reported[0].fault.cause


class OnceDeaf(Once):
    """Closes its pipes, as a process does that ends, and ends after ``seconds``.

    Nothing else: torch ends a process that lets go of a tensor whose shared memory's file is closed.
    """

    def __init__(self, seconds):
        super().__init__()
        self._seconds = seconds

    def happen(self):
        for number in [int(one.name) for one in Path("/proc/self/fd").iterdir()]:
            with contextlib.suppress(OSError):
                if stat.S_ISFIFO(os.fstat(number).st_mode):
                    os.close(number)
        time.sleep(self._seconds)
        os._exit(7)


@pytest.mark.parametrize(
    ("seconds", "reap_s", "reported_as"),
    [(1.0, LONG_S, "exited with code 7, "), (600.0, 0.3, "MB resident; ")],
    ids=["ends", "lives on"],
)
def test_a_worker_without_its_files_is_recognized_by_its_end_or_replaced(
    monkeypatch, seconds, reap_s, reported_as
):
    """Between the two a machine may hold it up; one that user code has cut off is not waited for."""
    monkeypatch.setattr("ddp_runner.data.workers.pool._REAP_S", reap_s)
    reported = []
    with make(OnceDeaf(seconds), on_repaired=reported.append) as loader:
        take_until(reported, loader)
    assert reported[0].fault.kind is FaultKind.LOADER_WORKER_DIED
    assert reported_as in reported[0].fault.cause


def test_a_row_of_faults_ends_in_the_rank_itself():
    """Workers that die while they start: each fault in a row halves them, and no batch is lost."""
    reported = []
    with make(DiesInAnyWorker(os.getpid()), num_workers=2, on_repaired=reported.append) as loader:
        loader.workers = 2  # also where the machine has one core
        step, _ = take_until(reported, loader)
        assert (step, loader.workers, loader.worker_pids) == (0, 0, ())
        take_on(loader, 1)
    assert [repaired.action for repaired in reported] == [
        "2 loader workers restarted",
        "1 loader worker instead of 2 after 2 faults in a row",
        "loading in the rank itself after 3 faults in a row",
    ]
    assert {repaired.fault.kind for repaired in reported} == {FaultKind.LOADER_WORKER_DIED}


def test_workers_come_back_when_it_is_calm_again():
    """Two quick kills cost the only worker; a calm stretch later it is there again, and reported."""
    reported, lines = [], []
    with make(Plain(), on_repaired=reported.append, log=lines.append) as loader:
        loader.take(0)
        os.kill(loader.worker_pids[0], signal.SIGKILL)
        step, _ = take_until(reported, loader, 1)
        os.kill(loader.worker_pids[0], signal.SIGKILL)
        step, _ = take_until(reported, loader, step + 1, count=2)
        assert loader.workers == 0
        take_on(loader, step + 1, CALM_STEPS + 1)
        assert len(loader.worker_pids) == 1
    assert lines == ["loading with 1 workers again, instead of 0"]


def test_faults_with_progress_in_between_keep_the_workers():
    """Control: what is killed now and then, by chance, does not cost the rank its workers."""
    reported = []
    with make(Plain(), on_repaired=reported.append) as loader:
        step = 0
        for count in range(1, 5):
            take_on(loader, step, 10)
            os.kill(loader.worker_pids[0], signal.SIGKILL)
            step = 1 + take_until(reported, loader, step + 10, count=count)[0]
        assert loader.workers == 1
    assert {repaired.action for repaired in reported} == {"1 loader worker restarted"}


def test_no_death_interrupts_the_rank_elsewhere():
    """Between takes, a worker's death raises nothing in the rank's own code."""
    reported = []
    with make(Plain(), num_workers=1, on_repaired=reported.append) as loader:
        loader.take(0)
        process = psutil.Process(loader.worker_pids[0])
        process.kill()
        poll(lambda: process.status() == psutil.STATUS_ZOMBIE, what="its end")
        take_until(reported, loader, 1)
    assert reported[0].fault.kind is FaultKind.LOADER_WORKER_DIED


def test_a_death_while_the_first_batches_are_handed_out_is_reported():
    """A bad sample may end its worker sooner than the rank has asked all workers for their first batch."""
    reported, dataset, held_up = [], OnceExits(), []

    class HeldUp(SampleOrder):
        def share_of(self, step, **options):
            if step == 5 and not held_up:
                held_up.append(step)
                poll(dataset.has_happened, what="the sample")
                poll(lambda: any(is_gone(each.pid) for each in psutil.Process().children()))
            return super().share_of(step, **options)

    order = HeldUp(seed=0, dataset_size=64, global_batch_size=4, shuffle=False)
    with make(dataset, order=order, on_repaired=reported.append) as loader:
        take_until(reported, loader, 4)
    assert "exited with code 7, " in reported[0].fault.cause
    assert "loading sample 17 of samples 16, 17, 18, 19" in reported[0].fault.cause


def test_stopped_worker_is_a_timeout_that_names_it(pin, monkeypatch):
    """A worker that stops is reported with its state and memory after timeout_s, and replaced."""
    monkeypatch.setattr("ddp_runner.data.workers.timeouts.STOPPED_S", LONG_S)  # the next test's
    reported, dataset = [], Counted()
    loader = make(dataset, num_workers=2, pin_memory=pin, on_repaired=reported.append)
    with loader:
        loader.take(0)
        _wait_until_loaded_ahead(dataset, loader)
        loader._timeout_s = SHORT_S  # now that they have started, which takes what it takes
        number = loader.workers - 1  # a machine may have one core only
        victim = loader.worker_pids[number]
        os.kill(victim, signal.SIGSTOP)
        _, took_s = take_until(reported, loader, 1)
        cause = reported[0].fault.cause
    assert reported[0].fault.kind is FaultKind.LOADER_TIMEOUT
    assert (
        f"no batch within {SHORT_S:g} s: loader worker {number} (pid {victim}) is stopped" in cause
    )
    assert "MB resident; " in cause
    assert SHORT_S <= took_s < SHORT_S + SOON_S


def test_stopped_worker_is_not_waited_for_as_long_as_a_slow_one(pin):
    """What the system says is stopped is replaced after two seconds, whatever timeout_s is."""
    reported = []
    with make(Plain(), pin_memory=pin, on_repaired=reported.append) as loader:
        loader.take(0)
        victim = loader.worker_pids[0]
        os.kill(victim, signal.SIGSTOP)
        _, took_s = take_until(reported, loader, 1)
    assert reported[0].fault.kind is FaultKind.LOADER_TIMEOUT
    assert f"stopped for 2 s: loader worker 0 (pid {victim}) is stopped" in reported[0].fault.cause
    assert took_s < 2.0 + SOON_S


def _as_large_ones(samples):
    """A batch that is sent as large ones are: by the descriptor of its memory."""
    memory = torch.zeros(SMALL_BYTES, dtype=torch.int64)
    return torch.stack(samples, out=memory[: len(samples)])


def test_batches_of_a_stopped_worker_that_are_ready_are_served():
    """What a worker has finished can be had without it: unpacking never waits for the sender."""
    reported = []
    dataset = Counted()
    more = {"prefetch_factor": 4, "collate_fn": _as_large_ones}
    with make(dataset, on_repaired=reported.append, **more) as loader:
        loader.take(0)
        assert reported == []
        _wait_until_loaded_ahead(dataset, loader)
        os.kill(loader.worker_pids[0], signal.SIGSTOP)
        for step in range(1, 5):
            assert loader.take(step)[0].batch.tolist() == list(indices_of(step))
        assert reported == []
        take_until(reported, loader, 5)
    assert reported[0].fault.kind is FaultKind.LOADER_TIMEOUT


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
    reported = ("State:", "voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:")
    texts = {task: (task / "status").read_text() for task in Path(f"/proc/{pid}/task").iterdir()}
    return {
        task: [line for line in text.splitlines() if line.startswith(reported)]
        for task, text in texts.items()
    }


def all_asleep(threads):
    return all("S (sleeping)" in facts[0] for facts in threads.values())


@pytest.mark.parametrize("workers", [1, 2])
def test_slow_worker_within_the_timeout_is_no_fault(workers):
    """Control: a slow sample is waited for, and the wait is measured."""
    dataset, reported = Slow(), []
    settings = {"prefetch_factor": 1, "on_wait": dataset.note_wait, "on_repaired": reported.append}
    with make(dataset, num_workers=workers, **settings) as loader:
        waits = []
        for step in range(8):
            assert loader.take(step)[0].indices[0] == step * 4
            waits.append(loader.waited_s)
    assert max(waits) > SLICE_S / 2
    assert reported == []


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


@pytest.mark.parametrize(
    ("dataset", "replaced"),
    [(Stuck(), True), (Plain(), False), (DiesInAnyWorker(0), False)],
    ids=["hangs again", "loads now", "loads in no worker"],
)
def test_what_the_process_before_was_loading_is_tried_by_a_worker_first(
    hangs_are_shown, dataset, replaced
):
    """Without workers, a sample that hangs would end one process after the other."""
    seen, bad = [], quarantine(1)
    if isinstance(dataset, DiesInAnyWorker):
        dataset._rank_pid = os.getpid()
    with make(
        dataset, num_workers=0, suspect=BAD, quarantine=bad, on_sample=seen.append,
    ) as loader:  # fmt: skip
        steps = range(BAD // 4 + 1)
        taken = [index for step in steps for each in loader.take(step) for index in each.indices]
    assert (len(bad), BAD in taken) == (int(replaced), not replaced)
    assert [index for index in seen if index is not None] == taken
    assert seen[-1] is None


def test_what_hangs_again_is_named_where_nothing_may_replace_it(hangs_are_shown):
    """The run ends with the sample, instead of one hang after the other."""
    with make(Stuck(), num_workers=0, suspect=BAD, quarantine=quarantine(0)) as loader:
        fault = take_fault(loader)
    assert fault.kind is FaultKind.BAD_SAMPLE
    assert fault.cause.startswith(
        f"sample {BAD} (epoch 1) could not be loaded: no process survives"
    )
