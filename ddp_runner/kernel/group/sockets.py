"""Lists this process's sockets as the kernel knows them. Closes none but its own duplicates."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat

Address = tuple[str, int]  # of an internet socket: see address_of_peer


def open_sockets() -> dict[int, int]:
    """Descriptor -> inode of every socket of this process."""
    found = {}
    for name in os.listdir("/dev/fd"):  # noqa: PTH208 - names only, in one call
        with contextlib.suppress(OSError):  # listdir's own descriptor is closed by now
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found


def duplicate_if_connected(descriptor: int) -> socket.socket | None:
    """A duplicate of a connected internet socket; None for every other one. May raise OSError."""
    duplicate = socket.socket(fileno=os.dup(descriptor))
    if duplicate.family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            # Shutting down gloo's listening socket would end the process.
            listening = duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            duplicate.getpeername()
            if not listening:
                return duplicate
    duplicate.close()
    return None


def address_of_peer(connection: socket.socket) -> Address | None:
    """Return the address and port of a connection's peer; None if the connection has just ended.

    An address has one form, independent of the socket's family: an IPv4 address mapped into IPv6
    becomes a plain IPv4 address, and a link-local one loses the name of its link.
    """
    try:
        host, port = connection.getpeername()[:2]
        address = ipaddress.ip_address(str(host).partition("%")[0])
    except (OSError, ValueError):
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address), int(port)


def connected_since(before: frozenset[int], *, port: int) -> frozenset[Address]:
    """Return the peers of connections to ``port`` whose inodes are not in ``before``."""
    found = set()
    for descriptor, inode in open_sockets().items():
        if inode in before:
            continue
        with contextlib.suppress(OSError):  # closed since it was listed
            duplicate = duplicate_if_connected(descriptor)
            if duplicate is not None:
                with duplicate:
                    address = address_of_peer(duplicate)
                if address is not None and address[1] == port:
                    found.add(address)
    return frozenset(found)


def listening_since(before: frozenset[int]) -> list[tuple[int, tuple[str, int]]]:
    """Family and address of each listening internet socket that is not in ``before``."""
    found = []
    for descriptor, inode in open_sockets().items():
        if inode in before:
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as duplicate:
            if duplicate.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.append((int(duplicate.family), duplicate.getsockname()[:2]))
    return found
