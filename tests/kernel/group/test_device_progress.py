"""To which sum a rank's device has come: written by the device, when it comes there, for the supervisor to read."""

from __future__ import annotations

import mmap
import os
import threading

import pytest
import torch

from ddp_runner.core.settings import DdpSettings
from ddp_runner.kernel.group.device import (
    COUNT_BITS,
    DeviceProgress,
    WrittenByDevice,
    device_progress,
)
from ddp_runner.kernel.replica.replica import Replica
from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.kernel.wire.board import SLOT_BYTES, Board, Cell
from tests.processes import hosted_store, poll, ranks, results

from .joining import join
from .silent import BACKEND, device, register
from .test_replica import batch_of, fresh_model, loss_of, make_slot, no_votes

CPU = torch.device("cpu")
FIRST = 1 << COUNT_BITS  # what stands for no sum of the first generation


def test_what_a_device_writes_is_read_in_its_rank_s_slot():
    """The board is memory of two processes; each generation begins above all of the one before."""
    descriptor = os.memfd_create("board")
    os.ftruncate(descriptor, 2 * SLOT_BYTES)
    maps = [memoryview(mmap.mmap(descriptor, 0)) for _ in range(2)]
    os.close(descriptor)
    ours, theirs = (Board(memory, 2) for memory in maps)
    progress = WrittenByDevice(ours.slot(1), CPU)
    seen = []
    for generation in (1, 2):
        progress.begin(generation)
        for _ in range(3):
            seen.append(theirs.slot(1).get(Cell.DEVICE_SUMS))
            progress.come_to_sum()
    first, second = (generation << COUNT_BITS for generation in (1, 2))
    assert seen == [first, first + 1, first + 2, second, second + 1, second + 2]
    assert theirs.slot(0).get(Cell.DEVICE_SUMS) == 0
    assert sum(theirs.slot(1).get(cell) for cell in Cell) == seen[-1] + 1, "no other cell"


def test_on_the_cpu_nothing_is_written_and_old_values_are_gone():
    """Host and device are one there: the phase says all there is to know."""
    slot, said = make_slot(), []
    slot.set(Cell.DEVICE_SUMS, 5)
    progress = device_progress(slot, CPU, warn=said.append)
    progress.begin(1)
    progress.come_to_sum()
    progress.close()
    assert type(progress) is DeviceProgress
    assert (slot.get(Cell.DEVICE_SUMS), said) == (0, [])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the board can be pinned here")
def test_a_board_that_cannot_be_pinned_is_said_and_not_written():
    """As of torch without CUDA, whose call fails: the rank trains all the same."""
    slot, said = make_slot(), []
    slot.set(Cell.DEVICE_SUMS, 5)
    progress = device_progress(slot, torch.device("cuda", 0), warn=said.append)
    progress.begin(1)
    progress.come_to_sum()
    assert slot.get(Cell.DEVICE_SUMS) == 0
    (line,) = said
    assert line.startswith("the progress board cannot be pinned (")
    assert "\n" not in line


class _Later(WrittenByDevice):
    def _write(self):
        device.enqueue(self._cell.copy_, self._count.clone())


def _sums_behind_a_kernel(me, port):
    """Of rank 1 the device is busy until the test says otherwise; what the board shows after each sum."""
    register()
    slot, kernel = make_slot(), threading.Event()
    progress = _Later(slot, CPU)
    with join(me, port, backend=BACKEND) as group:
        replica = Replica(
            fresh_model(), loss_of, group=group, settings=DdpSettings(), slot=slot, device=progress
        )
        progress.begin(1)
        device.comes_here().wait(10.0)
        if me.rank == 1:
            device.enqueue(kernel.wait)
        threading.Thread(target=_say_what_is_shown, args=(me, slot, kernel)).start()
        shown = []
        for act in (
            lambda: replica.forward(batch_of(me.rank), weight=0.5, votes=no_votes()).backward(),
            lambda: replica.share_buffers([torch.zeros(3)]),
            lambda: replica.sum_over_ranks([1.0]),
        ):
            act()
            shown.append(slot.get(Cell.DEVICE_SUMS) - FIRST)
        replica.close()
    return shown


def _say_what_is_shown(me, slot, kernel):
    """Once the host waits in the first sum, and of rank 0 the device too."""
    poll(lambda: slot.read().phase is Phase.REDUCE, what="the sum")
    if me.rank == 0:
        poll(lambda: slot.get(Cell.DEVICE_SUMS) > FIRST, what="the device")
    me.say(slot.get(Cell.DEVICE_SUMS) - FIRST)
    me.hear()
    kernel.set()


def test_a_device_before_the_sum_shows_less_than_one_that_waits():
    """Both hosts stand in the same phase. Then every sum and broadcast counts, on all ranks alike."""
    with hosted_store() as port, ranks(_sums_behind_a_kernel, 2, port) as world:
        assert [process.hear() for process in world] == [1, 0]
        for process in world:
            process.say("go on")
        assert results(world) == [[1, 2, 3]] * 2
