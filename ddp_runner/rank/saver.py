"""The process that writes checkpoints: of what ranks have left in memory, so that no rank's end stops a write.

It trains nothing and opens no device. It writes what the supervisor sends it, one after the other; an order that it
has not answered when it ends is the next one's.
"""

from __future__ import annotations

import os
import signal

import torch

from ddp_runner import installed
from ddp_runner.checkpoint.memory_slots import MemorySlots
from ddp_runner.checkpoint.writer import CopyWriter
from ddp_runner.kernel.rank.signals import RUN_SIGNALS
from ddp_runner.kernel.system import parent_death
from ddp_runner.kernel.system.control_channel import Channel, ChannelClosedError
from ddp_runner.kernel.system.disk import Disk, RealDisk
from ddp_runner.kernel.wire.fork_specs import SaverSpec
from ddp_runner.kernel.wire.messages import Fork, SaverReady, WriteCopy


def main(request: Fork, descriptors: list[int]) -> int:
    """Write until the supervisor hangs up. ``descriptors``: control channel, output."""
    control, output = descriptors
    spec = request.spec
    assert isinstance(spec, SaverSpec)
    parent_death.set_process_name("ddp:saver")
    for number in (signal.SIGINT, *RUN_SIGNALS):  # which the supervisor decides about
        signal.signal(number, signal.SIG_IGN)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    torch.set_num_threads(1)
    channel = Channel.from_descriptor(control)
    files = [os.open(path, os.O_RDWR | os.O_CLOEXEC) for path in spec.memory_slots]
    writer = CopyWriter(MemorySlots(files), disk=_disk(spec))
    try:
        channel.send(SaverReady())
        while True:
            order, _ = channel.receive()
            assert isinstance(order, WriteCopy), "nothing else is sent to it"
            channel.send(writer.write(order))
    except ChannelClosedError:
        return 0


def _disk(spec: SaverSpec) -> Disk:
    """Return the disk, or what a feature gives in place of it: ``disk_of_saver()`` of a ``child.py``."""
    makers = [part for part in installed.parts("child") if hasattr(part, "disk_of_saver")]
    disks: list[Disk | None] = [part.disk_of_saver(spec) for part in makers if spec.saver_trouble]
    return next((disk for disk in disks if disk is not None), RealDisk())
