"""Loads a step's batches a second time, beside the workers that are ahead of it. Never repairs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_runner.data.last_batch import MicroBatch
from ddp_runner.data.workers.fetch import BatchKey, SampleFailed, SampleSource
from ddp_runner.data.workers.pool import PoolSettings, WorkerPool
from ddp_runner.data.workers.timeouts import PoolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddp_runner.data.loader_faults import LoaderKills


def load_again(
    source: SampleSource,
    keys: tuple[BatchKey, ...],
    *,
    settings: PoolSettings,
    timeout_s: float,
    on_wait: Callable[[], None],
    kills: LoaderKills,
) -> list[MicroBatch] | None:
    """The batches of ``keys``, from workers that are ended then.

    None for any trouble: whoever loads them in the ordinary way will find and name it.
    """
    try:
        pool = WorkerPool(source, iter(keys), settings=settings)
    except PoolError:
        return None
    try:
        received = [pool.next(timeout_s=timeout_s, on_wait=on_wait) for _ in keys]
    except PoolError:
        for worker in range(len(pool.pids)):
            kills.has_killed(pool, worker)  # claimed: none of them is the end of a rank
        return None
    finally:
        pool.end(grace_s=0.0)  # idle, or broken
    if any(isinstance(batch, SampleFailed) for _, batch in received):
        return None
    return [MicroBatch(indices=key.indices, batch=batch) for key, batch in received]
