"""How many loader workers a rank has: what was asked for, or its part of the cores. Starts none."""

from __future__ import annotations

import os
from typing import Literal

AUTO: Literal["auto"] = "auto"
AUTO_MAX = 2

WorkersAsked = int | Literal["auto"]


def cores_here() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def worker_count(asked: WorkersAsked, *, local_world_size: int, cores: int) -> int:
    """``asked``, whatever the cores are: data that waits for disks or networks needs none of them.

    ``auto``: :data:`AUTO_MAX`, or the rank's part of the cores where that is less, but one: that
    still keeps the user's loading code, and its crashes, out of the rank.
    """
    if asked == AUTO:
        return min(AUTO_MAX, max(cores // local_world_size, 1))
    return asked


def worker_notes(asked: WorkersAsked, *, local_world_size: int, cores: int) -> tuple[str, ...]:
    """What to show people of that count: where it is cut, or more than the cores are good for."""
    count = worker_count(asked, local_world_size=local_world_size, cores=cores)
    ranks = "1 rank" if local_world_size == 1 else f"{local_world_size} ranks"
    has = f"{cores} core{'' if cores == 1 else 's'} for {ranks}"
    workers = f"{count} loader worker{'' if count == 1 else 's'} per rank"
    if asked == AUTO:
        return (f"{workers} (num_workers=auto): {has}",) if count < AUTO_MAX else ()
    if count > max(cores // local_world_size, 1):
        auto = worker_count(AUTO, local_world_size=local_world_size, cores=cores)
        only = "so many only help where data waits for disks or networks"
        return (f"{workers}, {has}: {only}; num_workers=auto is {auto} here",)
    return ()
