"""The process groups of a script: how many collectives it has begun in them, and that none is destroyed too early."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch.distributed as dist

_held: dict[int, dist.ProcessGroup] = {}  # by id; also those that the script has destroyed


def hold_groups() -> None:
    """Keep the groups that there are now until this process ends. Called at each optimizer step.

    INVARIANT groups-held: no group is destroyed while a script still runs. A replica whose script has called
    ``destroy_process_group()`` is its last owner, and torch 2.13 joins gloo's threads in the replica's end with the
    interpreter's lock held, while one of them may be waiting for that lock, for ever.
    Broken if: a group that a replica holds is held by nobody else.
    Guarded by: test_a_script_that_destroys_its_group_under_a_replica_ends.
    """
    groups = dist.distributed_c10d._world.pg_map if dist.is_available() else {}  # noqa: SLF001 - there is no public list
    for group in groups:
        _held.setdefault(id(group), group)


def collectives_by_groups() -> tuple[int, int]:
    """How many collectives this process has begun: in groups of all ranks, and in all others. For any thread.

    (-1, 0) outside of any group.
    """
    if not dist.is_available() or not dist.is_initialized():
        return -1, 0
    in_all = in_others = 0
    with contextlib.suppress(ValueError, RuntimeError):  # the main thread has just left them
        world_size = dist.get_world_size()
        for group in list(dist.distributed_c10d._world.pg_map):  # noqa: SLF001 - as above
            try:
                count: Callable[[], int] = group._get_sequence_number_for_group  # type: ignore[attr-defined] # noqa: SLF001 - nor count, and no stub
                begun = count()
            except RuntimeError:  # of a backend that does not count
                continue
            if group.size() == world_size:
                in_all += begun
            else:
                in_others += begun
    return in_all, in_others
