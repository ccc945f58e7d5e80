"""Checks if this machine reaches itself over the network, as its ranks need to."""

from __future__ import annotations

import errno
import socket

LOOPBACK = "127.0.0.1"
OWN_ADDRESS_S = 2.0  # for a connection that never leaves the machine
_NO_INTERFACE = (errno.ENETUNREACH, errno.EADDRNOTAVAIL)


def why_unreachable(address: str) -> str:
    """Return why this machine cannot connect to its own ``address``, and the cure; empty where it can.

    A machine reaches each of its addresses over the loopback interface. Takes 4 s at most.
    """
    error = _failure_at(address)
    if error is None:
        return ""
    over_loopback = error if address == LOOPBACK else _failure_at(LOOPBACK)
    if over_loopback is not None and over_loopback.errno in _NO_INTERFACE:
        cure = "the loopback interface is down: run `ip link set lo up`, or give the sandbox one"
    else:
        cure = "allow connections from this machine to itself (firewall, sandbox)"
    return f"cannot be reached from this machine itself ({error.strerror or error}); {cure}"


def _failure_at(address: str) -> OSError | None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with (
            socket.create_server((address, 0), family=family) as server,
            socket.create_connection(server.getsockname()[:2], timeout=OWN_ADDRESS_S),
        ):
            return None
    except OSError as error:
        return error
