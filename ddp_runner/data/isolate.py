"""Finds the samples that break loading, by loading parts of a batch on their own. Never replaces any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddp_runner.data.workers.fetch import BatchKey, SampleFailed, SampleSource
from ddp_runner.data.workers.pool import PoolSettings, WorkerPool
from ddp_runner.data.workers.timeouts import PoolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddp_runner.data.loader_faults import LoaderKills

Indices = tuple[int, ...]


def isolate(indices: Indices, *, suspect: int | None, fails: Callable[[Indices], bool]) -> Indices:
    """The smallest part of ``indices`` found that fails on its own; () if they all load now.

    ``suspect`` is the sample that was being loaded, tried first. More than one is returned only
    where no half fails without the other. At most 2 log2(len(indices)) + 2 tries.
    """
    if suspect is not None and fails((suspect,)):
        return (suspect,)
    if not fails(indices):
        return ()
    while len(indices) > 1:
        middle = len(indices) // 2
        halves = (indices[:middle], indices[middle:])
        failing = next((half for half in halves if fails(half)), None)
        if failing is None:
            return indices
        indices = failing
    return indices


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """How a worker of its own fared. ``sample``: the one that it was loading when it broke, if known."""

    failed: bool
    sample: int | None = None


def load_in_worker(
    source: SampleSource,
    key: BatchKey,
    *,
    rank: int,
    timeout_s: float,
    on_wait: Callable[[], None],
    kills: LoaderKills,
) -> Attempt:
    """Have a worker of its own load ``key``: it may raise, die or hang. Raises PoolError without one."""
    settings = PoolSettings(rank=rank, workers=1, prefetch_factor=1, pin_memory=False)
    pool = WorkerPool(source, iter([key]), settings=settings)
    try:
        _, batch = pool.next(timeout_s=timeout_s, on_wait=on_wait)
    except PoolError as error:
        if error.worker < 0:
            raise
        kills.has_killed(pool, 0)  # claimed, so that nobody takes it for the end of a rank
        _, sample = pool.suspect(0) or (None, None)
        return Attempt(failed=True, sample=sample)
    finally:
        pool.end(grace_s=0.0)
    return Attempt(failed=is_failed(batch))


def is_failed(loaded: Any) -> bool:
    """Whether loading has failed by the samples' own fault. Raises PoolError for want of memory."""
    if not isinstance(loaded, SampleFailed):
        return False
    if loaded.for_memory:
        raise PoolError(f"out of memory: {loaded.error}", worker=-1)
    return True
