"""Computes the host memory that is still free below every known limit. Reads only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil

from ddp_runner.kernel.processes.memory_limits import container_usage

if TYPE_CHECKING:
    from ddp_runner.kernel.processes.memory_limits import Limit


def free_bytes(limit: Limit | None) -> int:
    """Return the free bytes of this machine, or of this container if it has a ``limit`` and less is left of it."""
    machine = int(psutil.virtual_memory().available)
    if limit is None:
        return machine
    used = container_usage(limit)
    return machine if used is None else min(machine, max(0, limit.bytes - used))
