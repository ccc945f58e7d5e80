"""Saves whose files another process writes: begun, taken over and reported by whoever is rank 0."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

from ddp_runner.checkpoint.memory_slots import MemorySlots
from ddp_runner.checkpoint.writer import CopyWriter
from ddp_runner.kernel.system.disk import RealDisk
from ddp_runner.kernel.wire.events import FaultTolerated
from ddp_runner.kernel.wire.messages import CopyWritten
from tests.processes import poll, run_ranks

from .building import build_state
from .test_saving import RecordingRuntime, due, make_saving


class Lines:
    """What a supervisor has: two memory files; and, from when it is let, somebody who writes."""

    def __init__(self):
        self._files = [os.memfd_create(f"slot{number}") for number in (0, 1)]
        self.paths = tuple(f"/proc/{os.getpid()}/fd/{one}" for one in self._files)
        self.slots = MemorySlots([os.open(one, os.O_RDWR) for one in self.paths])
        self.ordered, self.written = [], 0
        self._answers, self._one_writes = {}, threading.Lock()
        self.writes = threading.Event()
        self.disk = RealDisk()

    def order(self, order):
        """What comes of it, as the supervisor passes it on."""
        self.ordered.append(order)
        assert self.writes.wait(30)
        with self._one_writes:
            if order.sealed not in self._answers:
                self.written += 1
                writer = CopyWriter(self.slots, disk=self.disk)
                self._answers[order.sealed] = writer.write(order)
            return self._answers[order.sealed]


def saving_of(lines, folder, state, *, owed=None, **how):
    """A rank's, of a supervisor with these lines."""
    made = RecordingRuntime.__init__

    def begin(self, folder):
        made(self, folder)
        self.rank_info = replace(self.rank_info, memory_slots=lines.paths, has_saver=True)
        self.order, self.tolerated, left = lines.order, [], [owed]
        self.take_owed = lambda: left.pop() if left else None
        report = self.report

        def keep(message):
            if isinstance(message, FaultTolerated):
                self.tolerated.append((message.fault.kind.value, message.fault.cause))
            report(message)

        self.report = keep

    RecordingRuntime.__init__ = begin
    try:
        return make_saving(folder, state, save_every_steps=1, **how)
    finally:
        RecordingRuntime.__init__ = made


def save(saving, state, step):
    state.committed_step = step
    due(saving)
    state.before_change()


def _written_elsewhere(me, folder):
    del me
    lines, state = Lines(), build_state()
    saving, runtime, store = saving_of(lines, folder, state)
    lines.writes.set()
    for step in (1, 2):
        save(saving, state, step)
        saving.settle()
    catalog = store.catalog
    sound = [(one.step, catalog.verify(one)) for one in catalog.entries()]
    return lines.written, runtime.saved_steps, sound, lines.slots.newest_step


def test_a_save_is_written_by_another_and_reported_by_its_rank(tmp_path):
    """The file is whole, and the copy stays."""
    written, reported, sound, newest = run_ranks(_written_elsewhere, 1, tmp_path)[0]
    assert (written, reported, newest) == (2, [1, 2], 2)
    assert sound == [(2, None), (1, None)]


def _taken_over(me, folder):
    """The rank that has ordered a file is gone; another process is rank 0 by now."""
    del me
    lines, state = Lines(), build_state()
    before, _, _ = saving_of(lines, folder, state)
    save(before, state, 3)
    poll(lambda: lines.ordered, what="an order")
    saving, runtime, _ = saving_of(lines, folder, build_state(), owed=lines.ordered[0])
    saving._state.committed_step = 3
    owed = saving.lead(is_leader=True, is_first_here=True)
    busy = saving._saver.is_busy
    makes_up = owed.is_due, saving.vote(is_asked=False).copy
    lines.writes.set()
    saving.settle()
    saving.lead(is_leader=True, is_first_here=True)
    return busy, makes_up, runtime.saved_steps, saving._saver.is_busy, lines.written


def test_the_next_rank_0_goes_on_with_a_save_left(tmp_path):
    """It reports the file, makes no other of that step, and no copy meanwhile; once it is over there is nothing."""
    busy, makes_up, reported, again, written = run_ranks(_taken_over, 1, tmp_path)[0]
    assert (busy, makes_up, reported, again, written) == (True, (False, False), [3], False, 1)


class RefusingDisk(RealDisk):
    def write(self, handle, data):
        raise OSError(30, os.strerror(30), "the disk")


def _refused(me, folder):
    del me
    lines, state = Lines(), build_state()
    saving, runtime, _ = saving_of(lines, folder, state)
    lines.disk = RefusingDisk()
    lines.writes.set()
    save(saving, state, 1)
    saving.settle()
    return runtime.saved_steps, runtime.tolerated, runtime.log()


def test_what_the_disk_refuses_another_is_the_ranks_to_report(tmp_path):
    """As if it had written itself."""
    reported, tolerated, log = run_ranks(_refused, 1, tmp_path)[0]
    assert reported == []
    ((kind, cause),) = tolerated
    assert kind == "storage_failed"
    assert "Read-only file system" in cause
    assert "training continues" in log


def _writes_itself(me, folder):
    del me
    lines, state = Lines(), build_state()
    saving, runtime, store = saving_of(lines, folder, state, room_bytes=1_000_000)
    save(saving, state, 1)
    saving.settle()
    steps = [one.step for one in store.catalog.entries()]
    return steps, lines.ordered, lines.slots.newest_step, runtime.log()


def test_a_rank_writes_itself_without_memory_for_copies(tmp_path):
    """Which is said."""
    steps, ordered, newest, log = run_ranks(_writes_itself, 1, tmp_path)[0]
    assert (steps, ordered, newest) == ([1], [], None)
    assert "which rank 0 writes itself" in log


def _refused_by_everybody(me, folder):
    del me
    lines, state = Lines(), build_state()
    saving, runtime, store = saving_of(lines, folder, state)
    runtime.order = lambda order: CopyWritten(
        sealed=order.sealed, step=order.step, problem="nobody", text="none is there"
    )
    save(saving, state, 1)
    saving.settle()
    return [one.step for one in store.catalog.entries()], runtime.saved_steps, runtime.log()


def test_a_rank_writes_itself_what_nobody_else_does(tmp_path):
    """The same copy, by the same function."""
    steps, reported, log = run_ranks(_refused_by_everybody, 1, tmp_path)[0]
    assert (steps, reported) == ([1], [1])
    assert "none is there: this rank writes the checkpoint" in log
