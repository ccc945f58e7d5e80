"""Saves whose files another process writes: begun, taken over and reported by whoever is rank 0."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import pytest

from ddp_runner.checkpoint.disk import RealDisk
from ddp_runner.checkpoint.memory_slots import MemorySlots
from ddp_runner.checkpoint.ordered_saves import OrderedWriter
from ddp_runner.checkpoint.store import CheckpointStore
from ddp_runner.core.board import Cell
from ddp_runner.core.messages import FaultTolerated
from ddp_runner.training.components.tensor_hash import tensor_hash
from tests.processes import poll, run_ranks

from .building import build_state
from .test_saving import RecordingRuntime, make_saving


class Lines:
    """What a supervisor has: two memory files and a bell; and, for so long, somebody who writes."""

    def __init__(self):
        self._files = [os.memfd_create(f"slot{number}") for number in (0, 1)]
        self.bell, self._rung = os.pipe()
        own = f"/proc/{os.getpid()}/fd"
        self.paths = tuple(f"{own}/{one}" for one in self._files)
        self.bell_path = f"{own}/{self._rung}"
        self.slots = MemorySlots(
            [os.open(one, os.O_RDWR) for one in self.paths], checksum=tensor_hash
        )
        self.written = 0

    def write(self, disk=None):
        """Be that one, for all that is ordered until it is rung."""
        writer = OrderedWriter(self.slots, disk=disk or RealDisk())

        def serve():
            os.read(self.bell, 64)
            while writer.write_next():
                self.written += 1

        thread = threading.Thread(target=serve)
        thread.start()
        return thread


def saving_of(lines, folder, state, **how):
    """A rank's, of a supervisor with these lines."""
    made = RecordingRuntime.__init__

    def begin(self, folder):
        made(self, folder)
        self.rank_info = replace(
            self.rank_info, memory_slots=lines.paths, saver_bell=lines.bell_path
        )
        self.tolerated = []
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
    saving.due("interval")
    saving.prove()
    state.before_change()


def _written_elsewhere(me, folder):
    del me
    lines, state = Lines(), build_state()
    saving, runtime, store = saving_of(lines, folder, state)
    for step in (1, 2):
        writer = lines.write()
        save(saving, state, step)
        saving.settle()
        writer.join()
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
    before, _, _ = saving_of(lines, folder / "before", state)
    save(before, state, 3)
    poll(lambda: lines.slots.newest_step == 3, what="a whole copy")
    os.read(lines.bell, 64)
    saving, runtime, _ = saving_of(lines, folder, build_state())
    saving._state.committed_step = 3
    saving.take_over()
    busy = saving._saver.is_busy
    makes_up = saving.has_to_make_up(), saving.asks_copy()
    writer = lines.write()
    saving.settle()
    writer.join()
    saving.take_over()
    again = saving._saver.is_busy
    return busy, makes_up, runtime.saved_steps, again, lines.written


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
    writer = lines.write(RefusingDisk())
    save(saving, state, 1)
    saving.settle()
    writer.join()
    return runtime.saved_steps, runtime.tolerated, runtime.log()


def test_what_the_disk_refuses_another_is_the_ranks_to_report(tmp_path):
    """As if it had written itself."""
    reported, tolerated, log = run_ranks(_refused, 1, tmp_path)[0]
    assert reported == []
    ((kind, cause),) = tolerated
    assert kind == "storage_failed"
    assert "Read-only file system" in cause
    assert "training goes on" in log


def _writes_itself(me, folder, why):
    del me
    lines, state = Lines(), build_state()
    how = {"room_bytes": 1_000_000} if why == "no room" else {}
    saving, runtime, store = saving_of(lines, folder, state, **how)
    if why == "declared dead":
        runtime.slot.set(Cell.FENCED, 1)
    if why == "declared dead meanwhile":
        checksum = saving._copies.slots._checksum

        def fence(tensor):
            runtime.slot.set(Cell.FENCED, 1)
            return checksum(tensor)

        saving._copies.slots._checksum = fence
    save(saving, state, 1)
    saving.settle()
    ordered = saving._copies.left_to_write()
    steps = [one.step for one in CheckpointStore(store.directory, keep_last=1).catalog.entries()]
    return steps, ordered, lines.slots.newest_step, runtime.log()


def test_a_rank_that_is_declared_dead_while_it_seals_orders_nothing(tmp_path):
    """To seal a large state takes seconds, in which another rank may be asked to save a later one."""
    why = "declared dead meanwhile"
    steps, ordered, newest, _ = run_ranks(_writes_itself, 1, tmp_path, why)[0]
    assert (steps, ordered, newest) == ([], None, 1)


@pytest.mark.parametrize(("why", "copy"), [("no room", None), ("declared dead", 1)])
def test_a_rank_writes_itself_where_it_must_not_order(tmp_path, why, copy):
    """Without memory for copies, and from when others may take its place: its own disk refuses it then."""
    steps, ordered, newest, log = run_ranks(_writes_itself, 1, tmp_path, why)[0]
    assert (steps, ordered, newest) == ([1], None, copy)
    assert ("which rank 0 writes itself" in log) == (why == "no room")
