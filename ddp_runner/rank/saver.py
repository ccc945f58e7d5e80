"""The process that writes checkpoints: of what ranks have left in memory, so that no rank's end stops a write.

It trains nothing and opens no device. It looks for orders when the bell is rung (a rank has written a byte to
its pipe), and by itself now and then.
"""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

import torch

from ddp_runner.checkpoint.disk import Disk, RealDisk
from ddp_runner.checkpoint.memory_slots import MemorySlots
from ddp_runner.checkpoint.ordered_saves import OrderedWriter
from ddp_runner.core.fork_specs import SaverSpec
from ddp_runner.core.messages import Fork
from ddp_runner.rank.faulty_disk import FaultyDisk
from ddp_runner.rank.process import shared_trouble
from ddp_runner.rank.signals import RUN_SIGNALS
from ddp_runner.system import parent_death
from ddp_runner.system.control_channel import Channel, ChannelClosedError
from ddp_runner.training.components.tensor_hash import tensor_hash

LOOK_S = 1.0
_RUNG_BYTES = 4096


def main(request: Fork, descriptors: list[int]) -> int:
    """Write until the supervisor hangs up. ``descriptors``: control channel, the bell's end, output."""
    control, bell, output = descriptors
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
    # Opened here: a lock that it holds is let go of by the kernel when it ends.
    files = [os.open(path, os.O_RDWR | os.O_CLOEXEC) for path in spec.memory_slots]
    writer = OrderedWriter(MemorySlots(files, checksum=tensor_hash), disk=_disk(spec))
    lines = select.poll()  # which takes descriptors above 1,023 too
    for descriptor in (bell, channel.fileno()):
        lines.register(descriptor, select.POLLIN)
    while True:
        while writer.write_next():
            pass
        readable = {descriptor for descriptor, _ in lines.poll(LOOK_S * 1000)}
        if bell in readable:
            os.read(bell, _RUNG_BYTES)
        if channel.fileno() in readable:
            try:
                channel.receive()
            except ChannelClosedError:
                return 0


def _disk(spec: SaverSpec) -> Disk:
    trouble = shared_trouble(spec.saver_trouble)
    if trouble is None:
        return RealDisk()
    return FaultyDisk(trouble=trouble, folder=Path(spec.folder))
