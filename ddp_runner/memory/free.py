"""How much host memory may still be taken, below every limit that is known. Reads only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil

from ddp_runner.memory.limits import container_usage

if TYPE_CHECKING:
    from ddp_runner.memory.limits import Limit


def free_bytes(limit: Limit | None) -> int:
    """Of this machine, and of this container where it has a ``limit``."""
    machine = int(psutil.virtual_memory().available)
    if limit is None:
        return machine
    used = container_usage(limit)
    return machine if used is None else min(machine, max(0, limit.bytes - used))
