"""The coordinator's current address, in shared memory that the process's launcher updates when it moves."""

from __future__ import annotations

import os

VARIABLE = (
    "DDP_RUNNER_ENDPOINT_FD"  # the descriptor of those bytes, in the supervisor's environment
)
_BYTES = 320  # a name of 255, and a port


def endpoint_bytes(host: str, port: int) -> bytes:
    """Return the bytes to write at the start of the memory; their length never varies."""
    return f"{host} {port}".encode().ljust(_BYTES)


def read_endpoint(descriptor: int | None) -> tuple[str, int] | None:
    """Return host and port; None if none were written, or there is no descriptor."""
    if descriptor is None:
        return None
    try:
        host, port = os.pread(descriptor, _BYTES, 0).decode().split()
        return host, int(port)
    except (OSError, ValueError):
        return None
