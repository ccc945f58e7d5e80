"""SafeDataLoader: this rank's micro-batches of any step, exactly, whatever happens to its workers.

Owns the position in the sample order, the life of the workers, and their repair: broken ones are
replaced here, inside ``take``, from exactly the batch that is due.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from ddp_runner.core.faults import FaultError
from ddp_runner.core.phases import Phase
from ddp_runner.data.attributes import CountedReads
from ddp_runner.data.loader_faults import (
    KillCounter,
    LoaderKills,
    LoadingRepaired,
    NoKills,
    fault_of_failure,
    fault_of_samples,
    fault_of_worker,
    refuse_dataset,
)
from ddp_runner.data.loader_repair import DataRepair, Trouble
from ddp_runner.data.order import SampleOrder, micro_batch_count, micro_batches
from ddp_runner.data.quarantine import Quarantine
from ddp_runner.data.source import Ahead, MicroBatch, NotCopiedError, copied
from ddp_runner.data.workers import system_limits
from ddp_runner.data.workers.count import WorkersAsked, cores_here, worker_count, worker_notes
from ddp_runner.data.workers.fetch import BatchKey, SampleFailed, SampleReader
from ddp_runner.data.workers.memory_files import collate_batch
from ddp_runner.data.workers.pool import PoolSettings, WorkerPool
from ddp_runner.data.workers.timeouts import FilesUsedUpError, PoolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import TracebackType

    from typing_extensions import Self


__all__ = ["MicroBatch", "SafeDataLoader"]

SEVERAL = -1  # samples at once, of which nobody knows at which the dataset is
_LOOK_S = 1.0  # for a sample that is only looked at
_GRACE_S = 1.0  # for a worker inside the user's code, which may be writing a file


class _BatchFailedError(Exception):
    """A batch came whose samples, or the collating of them, raised."""

    def __init__(self, key: BatchKey, failed: SampleFailed) -> None:
        super().__init__(failed.error)
        self.key = key
        self.failed = failed


def _ignore(_what: object) -> None:
    """Nobody asked."""


def _ignore_wait() -> None:
    """Nobody asked."""


class SafeDataLoader:
    """Serves ``take(step)`` for a map-style dataset, loading ahead in worker processes.

    Per sample, python's, numpy's and torch's CPU generator are seeded from ``(seed, epoch,
    index)``, unless the dataset has ``deterministic = True``: augmentation does not depend on
    workers, retries or the world size. Without workers the samples are loaded inside ``take``;
    the caller's generators are given back as they were, and ``timeout_s`` does not apply.

    ``on_sample`` gets which sample is loaded in this process, SEVERAL for a batch at once, and None after it. ``suspect`` is
    the one that a process before was loading so when it ended: a worker tries it first.

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
        num_workers: WorkersAsked,
        local_world_size: int = 1,
        prefetch_factor: int = 2,
        pin_memory: bool = False,
        timeout_s: float = 60.0,
        start_step: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        on_workers: Callable[[tuple[int, ...]], None] = _ignore,
        on_repaired: Callable[[LoadingRepaired], None] = _ignore,
        on_wait: Callable[[], None] = _ignore_wait,
        log: Callable[[str], None] = _ignore,
        quarantine: Quarantine | None = None,
        kills: KillCounter | None = None,
        phase: Phase = Phase.DATA,
        on_sample: Callable[[int | None], None] = _ignore,
        suspect: int | None = None,
        worker_init: Callable[[int], None] | None = None,
    ) -> None:
        collate = collate_fn or collate_batch
        self._source = SampleReader(dataset, seed=seed, collate=collate, worker_init=worker_init)
        self._order = order
        self._rank = rank
        self._world_size = world_size
        self.total_steps = total_steps
        self._phase = phase  # that faults are reported with
        self._micro_batch_size = micro_batch_size
        self.prefetch_factor = prefetch_factor
        self._pin_memory = pin_memory and system_limits.can_pin()
        self._timeout_s = timeout_s
        self._on_workers = on_workers
        self._on_repaired = on_repaired
        self._on_wait = on_wait
        self._on_sample = on_sample
        self._suspect = suspect
        self._log = log
        self._kills = LoaderKills(kills or NoKills())
        if quarantine is None:
            quarantine = Quarantine(seed=seed, dataset_size=order.dataset_size, bad_max=0)
        self.quarantine = quarantine
        self._repair = DataRepair(
            self._source,
            quarantine=self.quarantine,
            timeout_s=timeout_s,
            on_wait=on_wait,
            kills=self._kills,
        )
        cores = cores_here()
        self.workers = worker_count(num_workers, local_world_size=local_world_size, cores=cores)
        self._workers_asked = self.workers
        self._pool: WorkerPool | None = None
        self._closed = False
        self._step = 0
        self._ahead = Ahead()
        self._given: dict[int, tuple[BatchKey, ...]] = {}  # what the last two steps were given
        self._looks: tuple[BatchKey, ...] = ()  # what workers load before any batch
        self._on_look: Callable[[dict[int, Any]], None] = _ignore
        self.waited_s = 0.0
        self._reads = CountedReads(dataset)
        self.counted: tuple[str, ...] = ()  # what loads count up in the dataset, once that is known
        self.notes = _notes(num_workers, local_world_size=local_world_size, cores=cores)
        self.seek(start_step)

    def take(self, step: int) -> list[MicroBatch]:
        """The rank's micro-batches of ``step``, in order; [] if its share is empty.

        Blocks until they are loaded, ``waited_s`` in all. The caller may do with them what it
        likes: a step that is taken again, as a repair does, is loaded again. For the last step
        workers of its own do that, and the others stay ahead; any other but the next restarts
        them there.
        A worker that dies or hangs is replaced meanwhile, a bad sample as the quarantine allows;
        ``on_repaired`` hears of it. Raises ``FaultError`` with no worker left: BAD_SAMPLE, or
        OUT_OF_MEMORY where the rank itself cannot load for want of it;
        ValueError outside the run or once closed.
        """
        started_s = time.monotonic()
        if self._closed:
            raise ValueError("take() on a closed loader")
        if step >= self.total_steps:
            raise ValueError(f"step={step}: the last one is {self.total_steps - 1}")
        # INVARIANT given-once: what a step was given is given to nobody else; a step that is redone
        # gets the same samples, loaded again. Broken if: a batch is kept here after it was given out.
        # Guarded by: test_a_step_taken_again_is_as_it_was_at_first.
        batches = self._ahead.take(step)
        if batches is None:
            self._kills.look_sometimes(started_s)
            batches = self._take_again(step) or self._take_new(step)
        self.waited_s = time.monotonic() - started_s
        return batches

    def take_copy(self, step: int) -> list[MicroBatch]:
        """What the next ``take(step)`` gives, for a use before it; raises as that."""
        batches = self.take(step)
        try:
            copies = copied(batches)
        except NotCopiedError:
            return batches  # the next one loads again
        self._ahead.keep(step, batches)
        return copies

    def take_ahead(self, step: int, change: Callable[[Any], Any]) -> None:
        """Get ``step``, the next one, ready for ``take``, each batch as ``change`` makes it.

        Only where all its batches have arrived already: nothing is waited for. Raises as ``take``.
        """
        if step != self._step or step >= self.total_steps or self._pool is None:
            return
        if self._pool.arrived < self._batches_due():
            return
        batches = self._take_new(step)
        changed = [replace(batch, batch=change(batch.batch)) for batch in batches]
        self._ahead.keep(step, changed)

    def look_at(self, indices: Iterable[int], seen: Callable[[dict[int, Any]], None]) -> None:
        """Have the next workers hash these samples of the first epoch before they load a batch.

        ``seen`` gets what came of each; what it raises leaves ``take``. Costs no process; without
        workers nothing happens.
        """
        self._end_pool(grace_s=_GRACE_S)
        self._looks = tuple(BatchKey(epoch=0, indices=(one,), hashed=True) for one in indices)
        self._on_look = seen

    def gives_again(self, step: int) -> bool:
        """Whether ``take`` has ``step``, a former one, at no more than a restart of the workers."""
        return 0 <= step < self.total_steps

    def seek(self, step: int) -> None:
        """Make ``step`` the next one, exactly. ValueError outside the run, whose end is allowed."""
        if not 0 <= step <= self.total_steps:
            raise ValueError(f"step={step}: 0 to {self.total_steps}, the end of the run")
        if step != self._step:
            self._forget_given()
            self._end_pool(grace_s=_GRACE_S)
        self._step = step

    def assign(self, *, rank: int, world_size: int, micro_batch_size: int) -> None:
        """Load this share, cut so, from the next ``take`` on; nothing happens if it is the same."""
        asked = (rank, world_size, micro_batch_size)
        if asked == (self._rank, self._world_size, self._micro_batch_size):
            return
        self._end_pool(grace_s=_GRACE_S)
        self._forget_given()
        self._rank, self._world_size, self._micro_batch_size = asked

    def use_order(self, version: int) -> None:
        """Take the samples in this version of the order from the next ``take`` on."""
        if version == self._order.version:
            return
        self._end_pool(grace_s=_GRACE_S)
        self._forget_given()
        self._order = replace(self._order, version=version)

    def use_shares(self, shares: tuple[int, ...]) -> None:
        """Share a step's samples out in this proportion from the next ``take`` on; none: equally.

        A number for each rank; :meth:`assign` says how many there are, before the next ``take``.
        """
        if shares == self._order.shares:
            return
        self._end_pool(grace_s=_GRACE_S)
        self._forget_given()
        self._order = replace(self._order, shares=shares)

    @property
    def shares(self) -> tuple[int, ...]:
        """Of the ranks of the generation; none: equal ones."""
        return self._order.shares

    def shrink_prefetch(self) -> None:
        """Load half as far ahead from the next ``take`` on, to save memory; at 1 batch, no less."""
        if self.workers == 0 or self.prefetch_factor == 1:
            return
        self.prefetch_factor //= 2
        self._end_pool(grace_s=_GRACE_S)

    @property
    def share_samples(self) -> int:
        """How many samples of a global batch this rank loads."""
        order = self._order
        _, count = order.span_of(order.first_step, rank=self._rank, world_size=self._world_size)
        return count

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """The process ids of the running workers, by worker number."""
        return self._pool.pids if self._pool is not None else ()

    def close(self) -> None:
        """End the workers, within about a second. May be called again."""
        self._closed = True
        self.pause()

    def pause(self) -> None:
        """End the workers, within about a second; the next ``take`` starts others."""
        self._forget_given()
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

    def _forget_given(self) -> None:
        self._ahead.drop()
        self._given = {}

    def _keys(self, first_step: int) -> Iterator[BatchKey]:
        """The micro-batches of this rank from ``first_step`` to the end of the run."""
        last_epoch = -1
        for step in range(first_step, self.total_steps):
            epoch, _ = self._order.position(step)
            if epoch != last_epoch:
                self.quarantine.refresh()
                last_epoch = epoch
            mine = self._order.share_of(step, rank=self._rank, world_size=self._world_size)
            for piece in micro_batches(mine, self._micro_batch_size):
                indices = tuple(self.quarantine.stand_in(index) for index in piece.tolist())
                yield BatchKey(epoch=epoch, indices=indices)

    def _take_new(self, step: int) -> list[MicroBatch]:
        if step != self._step:
            self.seek(step)
        self._ahead.drop()
        try:
            batches = self._take_with_repairs()
        except BaseException:
            # Whatever it was, a signal handler's exception included: a batch may be half read.
            self._end_pool(grace_s=0.0)
            raise
        self._step = step + 1
        epoch, _ = self._order.position(step)
        before = {step - 1: self._given[step - 1]} if step - 1 in self._given else {}
        keys = tuple(BatchKey(epoch=epoch, indices=batch.indices) for batch in batches)
        self._given = {**before, step: keys}
        return batches

    def _take_again(self, step: int) -> list[MicroBatch] | None:
        """A last step's, while the workers stay ahead; None where they are to be restarted."""
        given = self._given.get(step)
        if not given or self._pool is None:
            return None
        workers = min(self.workers, len(given))
        return load_again(
            self._source,
            given,
            settings=replace(self._pool_settings(), workers=workers, prefetch_factor=1),
            timeout_s=self._timeout_s,
            on_wait=self._on_wait,
            kills=self._kills,
        )

    def _take_with_repairs(self) -> list[MicroBatch]:
        """The step's batches; what breaks is repaired until they are all there."""
        wanted = self._repair.workers_to_use(
            step=self._step, workers=self.workers, asked=self._workers_asked
        )
        if wanted != self.workers:
            self._end_pool(grace_s=_GRACE_S)
            self._log(f"loading with {wanted} workers again, instead of {self.workers}")
            self.workers = wanted
        self._examine_suspect()
        while True:
            try:
                batches = self._take_once()
            except PoolError as error:
                trouble = self._trouble_of(error)
            except _BatchFailedError as error:
                trouble = self._trouble_of_batch(error.key, error.failed)
            else:
                for repaired in self._repair.delivered(batches):
                    self._on_repaired(repaired)
                return batches
            self._end_pool(grace_s=0.0)
            self.workers = self._repair.repair(trouble, workers=self.workers)

    def _examine_suspect(self) -> None:
        """A sample that hung, or broke, the process before this one would do so again."""
        suspect, self._suspect = self._suspect, None
        if suspect is None or self.workers > 0:
            return  # workers have their own way to find it
        epoch, _ = self._order.position(self._step)
        fault = fault_of_samples(
            (suspect,),
            "no process survives it",
            detail="",
            rank=self._rank,
            step=self._step,
            epoch=epoch,
            phase=self._phase.label,
        )
        key = BatchKey(epoch=epoch, indices=(suspect,))
        self._repair.examine(Trouble(fault=fault, why="no process survives it", key=key))

    def _trouble_of(self, error: PoolError) -> Trouble:
        pool = self._pool
        fault = fault_of_worker(
            error,
            pool,
            kills=self._kills,
            rank=self._rank,
            step=self._step,
            phase=self._phase,
            log=self._log,
        )
        suspect = pool.suspect(error.worker) if pool is not None and error.worker >= 0 else None
        key, sample = suspect or (None, None)
        why = f"no worker survives it: {fault.cause}"
        used_up = isinstance(error, FilesUsedUpError)
        return Trouble(fault=fault, why=why, key=key, suspect=sample, files_used_up=used_up)

    def _trouble_of_batch(self, key: BatchKey, failed: SampleFailed) -> Trouble:
        fault = fault_of_failure(
            failed, rank=self._rank, step=self._step, epoch=key.epoch, phase=self._phase
        )
        if failed.for_memory:
            # Fewer workers need less of it; in the rank itself, smaller micro-batches do.
            if self.workers == 0:
                raise FaultError(fault)
            return Trouble(fault=fault, why=failed.error)
        suspect = failed.indices[0] if len(failed.indices) == 1 else None
        return Trouble(fault=fault, why=failed.error, key=key, suspect=suspect, raised=True)

    def _take_once(self) -> list[MicroBatch]:
        count = self._batches_due()
        if self.workers == 0 or count == 0:
            keys = self._keys(self._step)
            due = [next(keys) for _ in range(count)]
            loaded = [self._checked(key, self._load_here(key)) for key in due]
            self.counted = self._reads.names
            return loaded
        if self._pool is None:
            self._start_pool()
        if self._looks:
            self._take_looks()
        assert self._pool is not None
        received = [
            self._pool.next(timeout_s=self._timeout_s, on_wait=self._on_wait) for _ in range(count)
        ]
        self.counted = self._pool.counted or self.counted
        return [self._checked(key, batch) for key, batch in received]

    def _batches_due(self) -> int:
        _, size = self._order.span_of(self._step, rank=self._rank, world_size=self._world_size)
        return micro_batch_count(size, self._micro_batch_size)

    def _load_here(self, key: BatchKey) -> Any:
        def on_sample(index: int) -> None:
            self._on_sample(index)
            self._on_wait()

        if self._source.gives_many:
            self._on_sample(SEVERAL)
        try:
            return self._source.load_here(key, on_sample=on_sample)
        finally:
            self._on_sample(None)
            self._reads.note_load()

    def _take_looks(self) -> None:
        """What workers have seen before their first batch. What breaks one there is for later."""
        assert self._pool is not None
        pool, wanted, found = self._pool, self._looks, {}
        self._looks = ()
        try:
            for key in wanted:
                _, found[key.indices[0]] = pool.next(timeout_s=_LOOK_S, on_wait=self._on_wait)
        except PoolError as error:
            if error.worker >= 0:
                self._kills.has_killed(pool, error.worker)
            self._end_pool(grace_s=0.0)
            self._start_pool()
        for sample in found.values():
            if isinstance(sample, SampleFailed):
                refuse_dataset(sample)
        self._on_look(found)

    def _start_pool(self) -> None:
        keys = chain(self._looks, self._keys(self._step))
        self._pool = WorkerPool(self._source, keys, settings=self._pool_settings())
        self._on_workers(self._pool.pids)

    def _pool_settings(self) -> PoolSettings:
        return PoolSettings(
            rank=self._rank,
            workers=self.workers,
            prefetch_factor=self.prefetch_factor,
            pin_memory=self._pin_memory,
            by_value=self._repair.by_value,
        )

    def _end_pool(self, *, grace_s: float) -> None:
        pool, self._pool = self._pool, None
        if pool is None:
            return
        pool.end(grace_s=grace_s)
        self._on_workers(())

    def _checked(self, key: BatchKey, batch: Any) -> MicroBatch:
        if isinstance(batch, SampleFailed):
            refuse_dataset(batch)
            raise _BatchFailedError(key, batch)
        return MicroBatch(indices=key.indices, batch=batch)


def _notes(num_workers: WorkersAsked, *, local_world_size: int, cores: int) -> tuple[str, ...]:
    before, after = system_limits.raise_open_file_limit()
    notes = worker_notes(num_workers, local_world_size=local_world_size, cores=cores)
    if after != before:
        notes += (f"open-file limit raised from {before} to {after}",)
    return notes


# Loads a step's batches a second time, beside the workers that are ahead of it. Never repairs.


def load_again(
    source: SampleReader,
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
