"""SafeDataLoader: this rank's micro-batches of any step, exactly; a broken worker is one clear fault.

Owns the position in the sample order and the life of the workers. Never repairs: after a fault no
worker is left, and the next ``take`` starts new ones at exactly the step that it names.
"""

from __future__ import annotations

import logging
import os
import signal
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch.utils.data import default_collate

from ddp_runner.core.faults import Fault, FaultError, FaultKind
from ddp_runner.data import limits
from ddp_runner.data.order import SampleOrder, micro_batches, share, share_size
from ddp_runner.data.pool import BatchLateError, PoolError, PoolSettings, WorkerPool
from ddp_runner.data.source import BatchKey, SampleFailed, SampleSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from typing_extensions import Self

_GRACE_S = 1.0  # for a worker inside the user's code, which may be writing a file
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one forward takes: the dataset's samples at ``indices``, collated."""

    indices: tuple[int, ...]
    batch: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class _Delivered:
    """The last step's batches, and torch's count of in-place changes to each of their tensors."""

    step: int
    batches: list[MicroBatch]
    versions: tuple[int, ...] | None  # None: something in there cannot be told to be unchanged

    @classmethod
    def of(cls, step: int, batches: list[MicroBatch]) -> _Delivered:
        return cls(step=step, batches=batches, versions=_versions(batches))

    def is_intact(self, step: int) -> bool:
        """Whether these are ``step``'s batches as they were delivered."""
        # INVARIANT same-bytes: a step that is redone sees the very samples of its first try.
        # Broken if: a task changes its batch in place and gets it again.
        # Guarded by: test_a_batch_changed_in_place_is_loaded_anew.
        known = step == self.step and self.versions is not None
        return known and self.versions == _versions(self.batches)


def _versions(batches: list[MicroBatch]) -> tuple[int, ...] | None:
    found: list[int] = []
    pending = [batch.batch for batch in batches]
    while pending:
        value = pending.pop()
        if isinstance(value, torch.Tensor):
            found.append(value._version)  # noqa: SLF001 - what autograd itself goes by
        elif isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, (list, tuple)):
            pending += value
        elif not isinstance(value, (int, float, complex, str, bytes, bool, type(None))):
            return None
    return tuple(found)


def worker_count(*, num_workers: int, local_world_size: int, cores: int) -> int:
    """``num_workers`` cut to this rank's part of the cores; one is left where any was asked for.

    That one still keeps the user's loading code, and its crashes, out of the rank.
    """
    return min(num_workers, max(cores // local_world_size, 1))


class SafeDataLoader:
    """Serves ``take(step)`` for a map-style dataset, loading ahead in worker processes.

    Per sample, python's, numpy's and torch's CPU generator are seeded from ``(seed, epoch,
    index)``, unless the dataset has ``deterministic = True``: augmentation does not depend on
    workers, retries or the world size. Without workers the samples are loaded inside ``take``;
    the caller's generators are given back as they were, and ``timeout_s`` does not apply.

    All ranks take the same steps, but there is no communication. Call from the rank's main
    thread: the kernel ties the workers to the thread that forks them.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        order: SampleOrder,
        rank: int,
        world_size: int,
        total_steps: int,
        micro_batch_size: int,
        seed: int,
        num_workers: int,
        local_world_size: int = 1,
        prefetch_factor: int = 2,
        pin_memory: bool = False,
        timeout_s: float = 60.0,
        start_step: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        on_workers: Callable[[tuple[int, ...]], None] | None = None,
    ) -> None:
        self._source = SampleSource(dataset, seed=seed, collate=collate_fn or default_collate)
        self._order = order
        self._rank = rank
        self._world_size = world_size
        self._total_steps = total_steps
        self._micro_batch_size = micro_batch_size
        self.prefetch_factor = prefetch_factor
        self._pin_memory = pin_memory and limits.can_pin()
        self._timeout_s = timeout_s
        self._on_workers = on_workers
        cores = _cores()
        self.workers = worker_count(
            num_workers=num_workers, local_world_size=local_world_size, cores=cores
        )
        share_now = share_size(order.global_batch_size, rank=rank, world_size=world_size)
        self._batches_per_step = -(-share_now // micro_batch_size)
        self._pool: WorkerPool | None = None
        self._closed = False
        self._measured = False
        self._step = 0
        self._delivered: _Delivered | None = None
        self.waited_s = 0.0
        self.notes = _notes(
            num_workers, workers=self.workers, cores=cores, local_world_size=local_world_size
        )
        self.seek(start_step)

    def take(self, step: int) -> list[MicroBatch]:
        """The rank's micro-batches of ``step``, in order; [] if its share is empty.

        Blocks until they are loaded, ``waited_s`` in all. The last step may be taken again at no
        cost, which is what a repair does; any other but the next restarts the workers there.
        Raises :class:`FaultError` (LOADER_WORKER_DIED, LOADER_TIMEOUT, BAD_SAMPLE), with no worker
        left; ValueError outside the run or once closed.
        """
        started_s = time.monotonic()
        if self._closed:
            raise ValueError("take() on a closed loader")
        if step >= self._total_steps:
            raise ValueError(f"step={step}: the last one is {self._total_steps - 1}")
        if self._delivered is not None and self._delivered.is_intact(step):
            self.waited_s = 0.0
            return self._delivered.batches
        self._delivered = None
        if step != self._step:
            self.seek(step)
        try:
            if self.workers > 0 and self._batches_per_step > 0:
                batches = self._take_from_pool()
            else:
                batches = self._take_here()
        except BaseException:
            # Whatever it was, a signal handler's exception included: a batch may be half read.
            self._end_pool(grace_s=0.0)
            raise
        self._step = step + 1
        self._delivered = _Delivered.of(step, batches)
        self.waited_s = time.monotonic() - started_s
        return batches

    def seek(self, step: int) -> None:
        """Make ``step`` the next one, exactly. ValueError outside the run, whose end is allowed."""
        if not 0 <= step <= self._total_steps:
            raise ValueError(f"step={step}: 0 to {self._total_steps}, the end of the run")
        if step != self._step:
            self._delivered = None
            self._end_pool(grace_s=_GRACE_S)
        self._step = step

    def assign(self, *, rank: int, world_size: int, micro_batch_size: int) -> None:
        """Load this share, cut so, from the next ``take`` on; nothing happens if it is the same."""
        asked = (rank, world_size, micro_batch_size)
        if asked == (self._rank, self._world_size, self._micro_batch_size):
            return
        self._end_pool(grace_s=_GRACE_S)
        self._delivered = None
        self._rank, self._world_size, self._micro_batch_size = asked
        size = share_size(self._order.global_batch_size, rank=rank, world_size=world_size)
        self._batches_per_step = -(-size // self._micro_batch_size)

    def shrink_prefetch(self) -> None:
        """Load half as far ahead from the next ``take`` on, to save memory; at 1 batch, no less."""
        if self.workers == 0 or self.prefetch_factor == 1:
            return
        self.prefetch_factor //= 2
        self._end_pool(grace_s=_GRACE_S)

    @property
    def share_samples(self) -> int:
        """How many samples of a global batch this rank loads."""
        total = self._order.global_batch_size
        return share_size(total, rank=self._rank, world_size=self._world_size)

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """The process ids of the running workers, by worker number."""
        return self._pool.pids if self._pool is not None else ()

    def close(self) -> None:
        """End the workers, within about a second. May be called again."""
        self._closed = True
        self._delivered = None
        self._end_pool(grace_s=_GRACE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _keys(self, first_step: int) -> Iterator[BatchKey]:
        """The micro-batches of this rank from ``first_step`` to the end of the run."""
        for step in range(first_step, self._total_steps):
            epoch, _ = self._order.position(step)
            mine = share(self._order.indices(step), rank=self._rank, world_size=self._world_size)
            for piece in micro_batches(mine, self._micro_batch_size):
                yield BatchKey(epoch=epoch, indices=tuple(piece.tolist()))

    def _take_here(self) -> list[MicroBatch]:
        keys = self._keys(self._step)
        return [
            self._checked(key, self._source.load_here(key))
            for key in (next(keys) for _ in range(self._batches_per_step))
        ]

    def _take_from_pool(self) -> list[MicroBatch]:
        try:
            if self._pool is None:
                self._start_pool()
            assert self._pool is not None
            received = [
                self._pool.next(timeout_s=self._timeout_s) for _ in range(self._batches_per_step)
            ]
            return [self._checked(key, batch) for key, batch in received]
        except PoolError as error:
            raise FaultError(self._fault_of(error)) from error

    def _start_pool(self) -> None:
        self._pool = WorkerPool(
            self._source,
            self._keys(self._step),
            settings=PoolSettings(
                rank=self._rank,
                workers=self.workers,
                prefetch_factor=self.prefetch_factor,
                pin_memory=self._pin_memory,
            ),
        )
        if self._on_workers is not None:
            self._on_workers(self._pool.pids)

    def _end_pool(self, *, grace_s: float) -> None:
        pool, self._pool = self._pool, None
        if pool is None:
            return
        pool.end(grace_s=grace_s)
        if self._on_workers is not None:
            self._on_workers(())

    def _checked(self, key: BatchKey, batch: Any) -> MicroBatch:
        if isinstance(batch, SampleFailed):
            raise FaultError(self._fault_of_sample(key, batch))
        if not self._measured:
            self._measured = True
            self._check_room(limits.batch_bytes(batch))
        return MicroBatch(indices=key.indices, batch=batch)

    def _check_room(self, batch_bytes: int) -> None:
        # Measured on the first batch that arrives: loading one in the rank beforehand would open
        # the dataset's files there, and forked workers would share their offsets.
        warning = limits.check_shared_memory(
            workers=self.workers, prefetch_factor=self.prefetch_factor, batch_bytes=batch_bytes
        )
        if warning is not None:
            self.notes = (*self.notes, warning)
            _log.warning(warning)

    def _fault_of_sample(self, key: BatchKey, failed: SampleFailed) -> Fault:
        which = ", ".join(str(index) for index in failed.indices)
        noun = "sample" if len(failed.indices) == 1 else "one of the samples"
        return Fault(
            kind=FaultKind.BAD_SAMPLE,
            rank=self._rank,
            step=self._step,
            phase="data",
            cause=f"{noun} {which} (epoch {key.epoch}) could not be loaded: {failed.error}",
            detail=failed.traceback,
            at_ns=time.monotonic_ns(),
        )

    def _fault_of(self, error: PoolError) -> Fault:
        late = isinstance(error, BatchLateError)
        cause = str(error)
        if self._pool is not None and error.worker >= 0:
            cause = _report(self._pool, error.worker)
            if late:
                cause = f"no batch within {self._timeout_s:g} s: {cause}"
        return Fault(
            kind=FaultKind.LOADER_TIMEOUT if late else FaultKind.LOADER_WORKER_DIED,
            rank=self._rank,
            step=self._step,
            phase="data",
            cause=cause,
            detail=traceback.format_exc(),
            at_ns=time.monotonic_ns(),
        )


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _notes(num_workers: int, *, workers: int, cores: int, local_world_size: int) -> tuple[str, ...]:
    before, after = limits.raise_open_file_limit()
    notes = []
    if workers != num_workers:
        notes.append(
            f"{workers} loader workers per rank instead of {num_workers}: "
            f"{cores} cores for {local_world_size} ranks"
        )
    if after != before:
        notes.append(f"open-file limit raised from {before} to {after}")
    return tuple(notes)


def _report(pool: WorkerPool, worker: int) -> str:
    """One line about a worker: number, pid, state, memory, how it ended, what it was loading."""
    process = pool.process(worker)
    state = _state(process.pid, process.exitcode)
    return f"loader worker {worker} (pid {process.pid}) {state}; {pool.activity(worker)}"


def _state(pid: int | None, exitcode: int | None) -> str:
    if exitcode is None:
        try:
            facts = psutil.Process(pid)
            return f"is {facts.status()}, {limits.in_mb(facts.memory_info().rss)} resident"
        except psutil.NoSuchProcess:
            return "has ended, status unknown"
    if exitcode >= 0:
        return f"exited with code {exitcode}"
    name = signal.Signals(-exitcode).name
    hints = {
        signal.SIGKILL: " (by somebody, or by the kernel for want of memory)",
        signal.SIGBUS: f" ({limits.SHARED_MEMORY} full, or a mapped file was cut short)",
    }
    return f"was killed by {name}{hints.get(signal.Signals(-exitcode), '')}"
