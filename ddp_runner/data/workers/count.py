"""Computes the number of loader workers of a rank: as asked for, or its part of the cores. Starts none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ddp_runner.core.settings import DataSettings

AUTO: Literal["auto"] = "auto"
AUTO_MAX = 2
_ONLY = "more only help if data waits for disks or networks"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersTotal:
    """A number of workers for all ranks of a machine, as one rank asks for it: the first ranks get the remainder."""

    total: int
    local_rank: int


WorkersAsked = int | Literal["auto"] | WorkersTotal


def asked_workers(data: DataSettings, *, local_rank: int) -> WorkersAsked:
    """Return the workers that the settings ask for, as seen by one rank of a machine."""
    if data.workers_total is None:
        return data.num_workers
    return WorkersTotal(total=data.workers_total, local_rank=local_rank)


def may_have_workers(data: DataSettings) -> bool:
    """Return True if any rank has a worker: a peer may then wait for it."""
    return bool(data.num_workers if data.workers_total is None else data.workers_total)


def worker_count(asked: WorkersAsked, *, local_world_size: int, cores: int) -> int:
    """``asked``, whatever the cores are: data that waits for disks or networks needs none of them.

    ``auto``: :data:`AUTO_MAX`, or the rank's part of the cores where that is less, but one: that
    still keeps the user's loading code, and its crashes, out of the rank.
    """
    if isinstance(asked, WorkersTotal):
        each, more = divmod(asked.total, local_world_size)
        return each + (asked.local_rank < more)
    if asked == AUTO:
        return min(AUTO_MAX, max(cores // local_world_size, 1))
    return asked


def worker_notes(asked: WorkersAsked, *, local_world_size: int, cores: int) -> tuple[str, ...]:
    """Return notes on that count: that it was reduced, or that it exceeds the cores."""
    count = worker_count(asked, local_world_size=local_world_size, cores=cores)
    ranks = "1 rank" if local_world_size == 1 else f"{local_world_size} ranks"
    has = f"{cores} core{'' if cores == 1 else 's'} for {ranks}"
    if isinstance(asked, WorkersTotal):
        return _notes_on_total(asked.total, ranks=local_world_size, cores=cores, has=has)
    workers = f"{count} loader worker{'' if count == 1 else 's'} per rank"
    if asked == AUTO:
        return (f"{workers} (num_workers=auto): {has}",) if count < AUTO_MAX else ()
    if count > max(cores // local_world_size, 1):
        auto = worker_count(AUTO, local_world_size=local_world_size, cores=cores)
        return (f"{workers}, {has}: {_ONLY}; num_workers=auto is {auto} here",)
    return ()


def _notes_on_total(total: int, *, ranks: int, cores: int, has: str) -> tuple[str, ...]:
    if total > max(cores, ranks):
        auto = worker_count(AUTO, local_world_size=ranks, cores=cores)
        workers = f"{total} loader workers (workers_total)"
        return (f"{workers}, {has}: {_ONLY}; num_workers=auto is {auto} for each here",)
    if 0 < total < ranks:
        left = ranks - total
        who = "the last one loads its" if left == 1 else f"the last {left} load their"
        return (f"workers_total={total} for {ranks} ranks: {who} own data",)
    return ()
