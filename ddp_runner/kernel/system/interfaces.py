"""Finds the network interface that leads to another machine, for gloo and NCCL."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

import psutil

_ANY_PORT = 9  # nothing is sent: a datagram socket that connects only asks for the way


def address_towards(host: str) -> str:
    """The address of this machine from which ``host`` is reached; empty where there is no way."""
    # Of text Python imports a codec for foreign names first, which takes a new process milliseconds.
    name = host.encode() if host.isascii() else host
    try:
        found = socket.getaddrinfo(name, _ANY_PORT, type=socket.SOCK_DGRAM)
    except OSError:
        return ""
    for family, kind, _, _, where in found:
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    return ""


def is_loopback(address: str) -> bool:
    """Return whether the address reaches only this machine. ``address``: numeric, not a name."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interface_to(host: str) -> str:
    """The name of that interface; empty where there is no way, and for this machine itself."""
    address = address_towards(host)
    return "" if not address or is_loopback(address) else interface_of(address)


def interface_of(address: str) -> str:
    """The name of the interface with this address; empty where there is none."""
    if not address:
        return ""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return name
    return ""
