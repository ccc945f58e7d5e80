"""The store host: a process of its own for the TCPStore, so that no rank's death takes it along."""

from __future__ import annotations

import os
import signal
import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from ddp_runner.core.messages import StoreReady
from ddp_runner.rank.signals import RUN_SIGNALS
from ddp_runner.system import parent_death
from ddp_runner.system.control_channel import Channel, ChannelClosedError


def host(control_descriptor: int, listening_descriptor: int, output_descriptor: int) -> int:
    """Serve a TCPStore on an already bound, listening socket until the supervisor hangs up.

    The socket is the supervisor's: a store that dies is replaced on the very same port.
    """
    parent_death.set_process_name("ddp:store")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in RUN_SIGNALS:  # in a thread of the store's a handler would cut calls short
        signal.signal(number, signal.SIG_IGN)
    os.dup2(output_descriptor, 1)
    os.dup2(output_descriptor, 2)
    channel = Channel.from_descriptor(control_descriptor)
    with socket.socket(fileno=os.dup(listening_descriptor)) as listening:
        host_name, port = listening.getsockname()[:2]
    store = TCPStore(
        host_name,
        port,
        world_size=None,
        is_master=True,
        timeout=timedelta(seconds=30),
        wait_for_workers=False,
        master_listen_fd=listening_descriptor,
    )
    channel.send(StoreReady(port=store.port))
    try:
        while True:
            channel.receive()
    except ChannelClosedError:
        return 0
