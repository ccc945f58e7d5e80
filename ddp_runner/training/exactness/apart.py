"""A process group for one process that computes a rank's share beside the run: it has no peers.

User code finds the rank and the world size of the rank whose share it is; who wants anything of the
others is refused, and remembered, because what it would compute from then on is not what a rank would.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

_BACKEND = "apart"


class NeedsOthersError(RuntimeError):
    """Raised by a call that needs the other ranks."""


def _refused(what: str) -> Any:
    """A method for ``what``; torch's own C++ calls it by the name that it has in the class."""

    def collective(self: GroupApart, *_arguments: Any, **_options: Any) -> NoReturn:
        self.asked = self.asked or what
        self.on_asked(what)
        raise NeedsOthersError(f"{what} needs the other ranks, which are not here")

    return collective


class GroupApart(dist.ProcessGroup):
    """``asked``: the first collective that was called; empty if none was. ``on_asked`` is called with each."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)  # type: ignore[call-arg] # not in torch's stub
        self.asked = ""
        self.on_asked: Callable[[str], object] = lambda _: None

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name for torch's logs."""
        return _BACKEND

    # Without them torch would look for a backend, of which there is none: nobody would have noted it.
    _allgather_base = _refused("allgather_base")
    allgather = _refused("allgather")
    allgather_coalesced = _refused("allgather_coalesced")
    allgather_into_tensor_coalesced = _refused("allgather_into_tensor_coalesced")
    allreduce = _refused("allreduce")
    allreduce_coalesced = _refused("allreduce_coalesced")
    alltoall = _refused("alltoall")
    alltoall_base = _refused("alltoall_base")
    barrier = _refused("barrier")
    broadcast = _refused("broadcast")
    gather = _refused("gather")
    monitored_barrier = _refused("monitored_barrier")
    recv = _refused("recv")
    recv_anysource = _refused("recv_anysource")
    reduce = _refused("reduce")
    _reduce_scatter_base = _refused("reduce_scatter_base")
    reduce_scatter = _refused("reduce_scatter")
    reduce_scatter_tensor_coalesced = _refused("reduce_scatter_tensor_coalesced")
    scatter = _refused("scatter")
    send = _refused("send")
    split_group = _refused("split_group")


def stand_apart(*, rank: int, world_size: int, backend: str) -> GroupApart:
    """Make such a group this process's default one, under the name of ``backend``."""
    group = GroupApart(rank, world_size)
    dist.Backend.register_backend(_BACKEND, lambda *_: group, devices=["cpu", "cuda"])
    dist.init_process_group(_BACKEND, store=HashStore(), rank=rank, world_size=world_size)
    with contextlib.suppress(AttributeError, KeyError):  # it is then called by its own name
        known = dist.distributed_c10d._world.pg_map  # noqa: SLF001 - nothing else names a group's backend
        known[group] = (dist.Backend(backend), known[group][1])
    return group
