"""What ranks and GPUs use, put together: for people, for metrics.jsonl and for the summary."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from ddp_runner.core.gpu_reading import EpochTally, GpuReading, Watched
from ddp_runner.core.launch_plan import DevicePlan, LaunchPlan, NodeOptions
from ddp_runner.core.settings import LogSettings, Settings
from ddp_runner.features.machines.rules.node_messages import FROM_FOLLOWER
from ddp_runner.kernel.parent.rank_handle import RankHandle
from ddp_runner.kernel.system.clock import SYSTEM_CLOCK
from ddp_runner.kernel.wire import packets as wire
from ddp_runner.kernel.wire.board import SLOT_BYTES, Board, Cell
from ddp_runner.supervisor.reporting.recorder import Recorder
from ddp_runner.supervisor.reporting.run_watch import RunWatch
from tests.processes import poll
from tests.supervisor.simulated import Clock

INTERVAL_S = 5.0


class Reader:
    """A reader whose readings a test makes up."""

    def __init__(self):
        self.gpus, self.read_at_s, self.count = (), None, 0

    def look(self):
        pass

    def read(self, now_s, *gpus):
        self.gpus, self.read_at_s, self.count = gpus, now_s, self.count + 1


def plan(*indices, interval_s=INTERVAL_S, ranks_per_node=None):
    found = LaunchPlan(
        settings=Settings(log=LogSettings(gpu_watch_s=interval_s)),
        origins={},
        devices=tuple(
            DevicePlan(device="cpu", name="CPU", visible_index=None)
            if index is None
            else DevicePlan(device=f"cuda:{index}", name="a GPU", visible_index=index)
            for index in indices
        ),
        world_size=len(indices),
        threads_per_rank=1,
        resume_key={},
        settings_digest="0",
        command=("test",),
        notes=(),
    )
    if ranks_per_node is None:
        return found
    most = len(indices) // ranks_per_node
    return replace(found, nodes=NodeOptions(least=most, most=most, host="a", port=1))


def handles(of):
    board = Board(memoryview(bytearray(of.world_size * SLOT_BYTES)), of.world_size)
    return [RankHandle(rank, slot=board.slot(rank)) for rank in range(of.world_size)]


def begun(of, reader=None, node=0):
    clock = Clock()
    ranks = handles(of)
    for handle in ranks:
        handle.begin(now_s=clock.now_s, loads=False)
    return clock, ranks, RunWatch(of, node=node, reader=reader, clock=clock)


def test_gpus_are_shown_with_the_memory_of_the_ranks_on_them():
    """The driver knows what all take, torch what each rank has; two ranks may share one."""
    reader = Reader()
    clock, ranks, watch = begun(plan(0, 0, 1), reader)
    ranks[0].metrics = {"device_allocated_bytes": 3.0, "device_reserved_bytes": 5.0}
    ranks[1].metrics = {"device_allocated_bytes": 4.0, "device_reserved_bytes": 6.0}
    reader.read(
        clock.now_s, GpuReading(index=0, use=0.9, memory_used_bytes=20), GpuReading(index=1)
    )
    clock.now_s += 3.0
    first, second = watch.gpus(ranks)
    assert (first.ranks, first.age_s, first.reading.use) == ((0, 1), 3.0, 0.9)
    assert (first.reading.allocated_bytes, first.reading.reserved_bytes) == (7, 11)
    assert (second.ranks, second.reading.allocated_bytes) == ((2,), None)


def test_a_rank_over_several_gpus_has_them_all():
    """With run.mode=data_parallel; what torch says is of the first."""
    of = plan(0)
    of = replace(of, devices=(replace(of.devices[0], others=("cuda:1",)),))
    _, ranks, watch = begun(of)
    ranks[0].metrics = {"device_allocated_bytes": 3.0}
    first, second = watch.gpus(ranks)
    assert [(gpu.reading.index, gpu.ranks) for gpu in (first, second)] == [(0, (0,)), (1, (0,))]
    assert (first.reading.allocated_bytes, second.reading.allocated_bytes) == (3, None)


def test_without_a_driver_to_ask_there_is_what_torch_knows():
    """Memory alone, without an age: no driver has said it."""
    _, ranks, watch = begun(plan(0))
    ranks[0].metrics = {
        "device_used_bytes": 20.0,
        "device_total_bytes": 80.0,
        "device_allocated_bytes": 3.0,
        "device_reserved_bytes": 5.0,
    }
    (gpu,) = watch.gpus(ranks)
    assert (gpu.age_s, gpu.reading.name, gpu.reading.use) == (None, "a GPU", None)
    assert (gpu.reading.memory_used_bytes, gpu.reading.memory_total_bytes) == (20, 80)
    watch.look(ranks)
    gpus, _ = watch.summary(ranks)
    assert gpus["0"]["memory_used_bytes"] == {"mean": 20, "peak": 20}


def test_a_logged_step_has_its_gpu_but_no_old_reading():
    """A driver that hangs leaves its last word for people, not in the curves."""
    reader = Reader()
    clock, _, watch = begun(plan(0, 1), reader)
    reader.read(clock.now_s, GpuReading(index=0, use=0.9), GpuReading(index=1, temperature_c=61.0))
    assert watch.figures(0) == {"gpu_use": 0.9}
    assert watch.figures(1) == {"gpu_temperature_c": 61.0}
    clock.now_s += 3 * INTERVAL_S
    assert watch.figures(0) == {}


def test_use_is_summed_up_for_each_epoch():
    """By the epoch that was logged last; of two ranks on a GPU the memory efficiency is the mean."""
    reader = Reader()
    clock, ranks, watch = begun(plan(0, 0), reader)
    for epoch, use in ((None, 0.1), (0, 0.5), (0, 0.7), (1, 0.9)):
        for handle, share in zip(ranks, (0.4, 0.8), strict=True):
            handle.metrics = {"memory_efficiency": share}
            if epoch is not None:
                handle.metrics["epoch"] = float(epoch)
        clock.now_s += INTERVAL_S
        reader.read(clock.now_s, GpuReading(index=0, use=use, memory_used_bytes=20, power_w=300.0))
        watch.look(ranks)
    gpus, _ = watch.summary(ranks)
    assert gpus["0"]["use"]["mean"] == pytest.approx(0.55)
    assert gpus["0"]["memory_efficiency"]["mean"] == pytest.approx(0.6)
    first, second = watch.epochs()
    assert (first["epoch"], second["epoch"]) == (0, 1)
    assert first["gpus"]["0"]["use"] == {"mean": pytest.approx(0.6), "peak": 0.7}
    assert second["gpus"]["0"]["use"] == {"mean": 0.9, "peak": 0.9}
    assert {*second["gpus"]["0"]} == {"use", "memory_used_bytes", "memory_efficiency", "power_w"}


def test_first_steps_propose_shares_once_where_that_is_asked_for():
    """Behind those that compile, each rank by its own part; nothing without data.shares=auto."""
    of = plan(None, None)
    asked = replace(of.settings, data=replace(of.settings.data, shares="auto"))
    for settings, shares in ((asked, (3, 1)), (of.settings, None)):
        _, ranks, watch = begun(replace(of, settings=settings))
        found = []
        for step in range(40):
            found.append(watch.shares(ranks))
            for handle, own_ns in zip(ranks, (10_000_000, 30_000_000), strict=True):
                handle.slot.add(Cell.OWN_NS, own_ns if step > 4 else 10**9)
                handle.slot.add(Cell.OWN_STEPS, 1)
        known = [one for one in found if one is not None]
        assert [one.shares for one in known] == ([] if shares is None else [shares])
        assert all(one.own_step_s == (0.01, 0.03) for one in known)


def test_a_long_run_keeps_its_newest_epochs():
    """What a summary has is bounded."""
    tally = EpochTally()
    for epoch in range(EpochTally.EPOCHS_MAX + 3):
        tally.add(epoch, "0", GpuReading(index=0, use=0.5))
    assert len(tally.record()) == EpochTally.EPOCHS_MAX
    assert tally.record()[0]["epoch"] == 3


def test_each_reading_counts_once_however_often_it_is_looked_at():
    """The mean of a summary is of what the driver said, not of how often somebody asked."""
    reader = Reader()
    clock, ranks, watch = begun(plan(0), reader)
    for use in (0.2, 0.4):
        reader.read(clock.now_s, GpuReading(index=0, use=use, memory_used_bytes=1))
        for _ in range(3):
            clock.now_s += INTERVAL_S
            watch.look(ranks)
    gpus, _ = watch.summary(ranks)
    assert gpus["0"]["looks"] == 2
    assert gpus["0"]["use"] == {"mean": pytest.approx(0.3), "peak": 0.4}


def test_an_interval_of_zero_looks_at_nothing():
    """Off is off: no process, no figure, no file that is read."""
    of = plan(0, interval_s=0.0)
    watch = RunWatch.of(of, node=0, clock=Clock(), say=print)
    assert watch.reader is None
    assert not watch.look(handles(of))
    assert (watch.gpus(handles(of)), watch.figures(0)) == ((), {})
    assert RunWatch.of(plan(None), node=0, clock=Clock(), say=print).reader is None
    assert RunWatch.of(plan(0), node=0, clock=Clock(), say=print).reader is not None


def test_cores_of_a_rank_and_its_loader_workers_are_measured():
    """By the kernel's count of their time, between two looks; a new process begins at zero."""
    of = plan(None, interval_s=0.05)
    (rank,) = handles(of)
    rank.begin(now_s=SYSTEM_CLOCK.monotonic(), loads=False)
    watch = RunWatch(of, node=0, reader=None, clock=SYSTEM_CLOCK)
    busy = "while True: pass"
    with subprocess.Popen([sys.executable, "-c", busy]) as worker:
        rank.pid, rank.rss_bytes, rank.loader_pids = os.getpid(), 100, (worker.pid,)
        rank.metrics = {"loader_bytes": 7.0}

        def is_busy():
            watch.look([rank])
            return (watch.cpu_share(0) or 0.0) > 0.1

        poll(is_busy, what="the loader's share", timeout_s=20.0)
        worker.kill()
    share = watch.cpu_share(0)
    assert share < 3.0
    assert watch.figures(0) == {"cpu_share": pytest.approx(share, abs=0.001)}
    _, used = watch.summary([rank])
    assert used["0"]["cpu_share"]["peak"] >= share
    assert used["0"]["rss_bytes"] == {"mean": 100, "peak": 100}
    assert used["0"]["loader_bytes"]["peak"] == 7
    rank.pid = os.getppid()
    while not watch.look([rank]):
        pass
    assert watch.cpu_share(0) is None


def test_another_machine_says_what_it_uses():
    """Its ranks and GPUs stand beside those of this one, by its number; the clocks differ."""
    of = plan(0, 1, 0, 1, ranks_per_node=2)
    reader = Reader()
    clock, ranks, there = begun(of, reader, node=1)
    reader.read(clock.now_s - 2.0, GpuReading(index=1, use=0.7, memory_used_bytes=9))
    there._cpu_share[3] = 1.5
    message = wire.decode(wire.encode(there.watched()), FROM_FOLLOWER)
    assert isinstance(message, Watched)
    clock, ranks, here = begun(of, Reader())
    clock.now_s += 7000.0
    here.hear(1, message)
    ranks[3].metrics = {"device_allocated_bytes": 3.0}
    assert here.cpu_share(3) == 1.5
    assert here.figures(3) == {"cpu_share": 1.5, "gpu_use": 0.7, "gpu_memory_used_bytes": 9.0}
    shown = {(gpu.node, gpu.reading.index): gpu for gpu in here.gpus(ranks)}
    assert shown[1, 1].age_s == 2.0
    assert shown[1, 1].reading.allocated_bytes == 3
    assert shown[0, 1].age_s is None
    here.look(ranks)
    assert here.summary(ranks)[0]["1:1"]["use"] == {"mean": 0.7, "peak": 0.7}


def test_a_line_of_an_evaluation_has_its_own_figures_alone():
    """Trackers know by that what is evaluated again after a resume."""

    class Outputs:
        def __init__(self):
            self.lines = []

        def metrics(self, step, rank, values, *, stage=""):
            self.lines.append(values)

    outputs = Outputs()
    recorder = Recorder(outputs, name="r", published=None, clock=Clock())
    recorder.readings.append(lambda rank: {"cpu_share": 0.5 + rank})
    recorder.metrics(3, 1, {"loss": 2.0, "step_s": 0.1})
    recorder.metrics(3, 1, {"validation_loss": 2.0})
    assert outputs.lines == [
        {"loss": 2.0, "step_s": 0.1, "cpu_share": 1.5},
        {"validation_loss": 2.0},
    ]
