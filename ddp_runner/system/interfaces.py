"""Which network interface leads to another machine: what gloo and NCCL are told to use."""

from __future__ import annotations

import socket

import psutil

_ANY_PORT = 9  # nothing is sent: a datagram socket that connects only asks for the way


def address_towards(host: str) -> str:
    """The address of this machine from which ``host`` is reached; empty where there is no way."""
    try:
        for family, kind, _, _, where in socket.getaddrinfo(
            host, _ANY_PORT, type=socket.SOCK_DGRAM
        ):
            with socket.socket(family, kind) as probe:
                probe.connect(where)
                return str(probe.getsockname()[0])
    except OSError:
        pass
    return ""


def interface_to(host: str) -> str:
    """The name of that interface; empty where there is no way, and for this machine itself."""
    address = address_towards(host)
    return "" if address.startswith("127.") or address == "::1" else interface_of(address)


def interface_of(address: str) -> str:
    """The name of the interface with this address; empty where there is none."""
    if not address:
        return ""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return name
    return ""
