"""The store host: a separate process for the TCPStore, so that no rank's death takes it along."""

from __future__ import annotations

import os
import signal
import socket

from ddp_runner.kernel.group.tcp_store import serve_store
from ddp_runner.kernel.rank.signals import RUN_SIGNALS
from ddp_runner.kernel.system import parent_death
from ddp_runner.kernel.system.control_channel import Channel, ChannelClosedError
from ddp_runner.kernel.wire.messages import Fork, StoreReady

_TIMEOUT_S = 30.0


def main(request: Fork, descriptors: list[int]) -> int:
    """Serve a TCPStore on an already bound, listening socket until the supervisor hangs up.

    ``descriptors``: control channel, the socket, output. The socket is the supervisor's: a store that
    dies is replaced on the very same port.
    """
    del request
    control, listening_descriptor, output = descriptors
    parent_death.set_process_name("ddp:store")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in RUN_SIGNALS:  # in a thread of the store's a handler would cut calls short
        signal.signal(number, signal.SIG_IGN)
    for stream in (1, 2):
        os.dup2(output, stream)
    channel = Channel.from_descriptor(control)
    with socket.socket(fileno=os.dup(listening_descriptor)) as listening:
        host_name, port = listening.getsockname()[:2]
    store = serve_store(
        host_name, port, listening_descriptor=listening_descriptor, timeout_s=_TIMEOUT_S
    )
    channel.send(StoreReady(port=store.port))
    try:
        while True:
            channel.receive()
    except ChannelClosedError:
        return 0
