"""Loader: this rank's micro-batches of any step of a source, exactly, whatever happens to its workers.

Owns the workers, their repair and what was loaded ahead: broken workers are replaced here, inside
``take``, from exactly what is due. What a step has, and where the data stands, the source says.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from ddp_runner.data.loader_faults import (
    KillCounter,
    LoaderKills,
    LoadingRepaired,
    NoKills,
    fault_of_worker,
    refuse_dataset,
)
from ddp_runner.data.loader_repair import Trouble
from ddp_runner.data.source import Ahead, Cut, MicroBatch, NotCopiedError, Source, copied
from ddp_runner.data.workers import system_limits
from ddp_runner.data.workers.count import WorkersAsked, worker_count, worker_notes
from ddp_runner.data.workers.fetch import Key, Reader, SampleFailed
from ddp_runner.data.workers.pool import PoolSettings, WorkerPool
from ddp_runner.data.workers.timeouts import (
    BatchLateError,
    FilesUsedUpError,
    PoolError,
    WorkerDiedError,
)
from ddp_runner.kernel.system.threads import cores_here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from typing_extensions import Self

    from ddp_runner.data.shard_agreement import Exchanging

__all__ = ["Loader", "MicroBatch"]

_LOOK_S = 1.0  # for a sample that is only looked at
_GRACE_S = 1.0  # for a worker inside the user's code, which may be writing a file


def _ignore(_what: object) -> None:
    """Do nothing: the default callback."""


def _ignore_wait() -> None:
    """Do nothing: the default callback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How worker processes load: so many batches ahead each, into pinned memory or not, and how long one may take."""

    prefetch_factor: int = 2
    pin_memory: bool = False
    timeout_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadObserver:
    """Whoever a loader loads for: hears of what it does, and counts the kernel's kills.

    ``on_sample`` gets which sample is read in this process, SEVERAL for a batch at once, and None after it.
    """

    on_workers: Callable[[tuple[int, ...]], None] = _ignore
    on_repaired: Callable[[LoadingRepaired], None] = _ignore
    on_wait: Callable[[], None] = _ignore_wait
    on_sample: Callable[[int | None], None] = _ignore
    log: Callable[[str], None] = _ignore
    kills: KillCounter | None = None


_NOBODY, _AS_USUAL = LoadObserver(), LoadOptions()


class Loader:
    """Serves ``take(step)`` from a source, which worker processes read ahead.

    Without workers the source is read inside ``take``; the caller's generators are given back as they were, and
    the time-out does not apply.

    All ranks take the same steps, but only :meth:`agree`, :meth:`go_back` and :meth:`gather` communicate. Call
    from the rank's main thread: the kernel ties the workers to the thread that forks them.
    """

    def __init__(
        self,
        source: Source[Any],
        *,
        total_steps: int,
        num_workers: WorkersAsked,
        local_world_size: int = 1,
        options: LoadOptions = _AS_USUAL,
        observer: LoadObserver = _NOBODY,
    ) -> None:
        self._source = source
        self.total_steps = total_steps
        self.prefetch_factor = options.prefetch_factor
        self._pin_memory = options.pin_memory and system_limits.can_pin()
        self._timeout_s = options.timeout_s
        self._on_workers = observer.on_workers
        self._on_repaired = observer.on_repaired
        self._on_wait = observer.on_wait
        self._on_sample = observer.on_sample
        self._log = observer.log
        self._kills = LoaderKills(observer.kills or NoKills())
        self._repair = source.repair_with(
            timeout_s=options.timeout_s, on_wait=observer.on_wait, kills=self._kills
        )
        asked = num_workers if source.suits(1) else 0
        cores = cores_here()
        self._asked = worker_count(asked, local_world_size=local_world_size, cores=cores)
        self.workers = source.suits(self._asked)
        self.loads_here = not self.workers  # this process has loaded samples, or a repair may have
        self._pool: WorkerPool | None = None
        self._closed = False
        self._ahead = Ahead()
        self._looks: tuple[Key, ...] = ()  # what workers load before any batch
        self._on_look: Callable[[dict[int, Any]], None] = _ignore
        self.waited_s = 0.0
        self.counted: tuple[str, ...] = ()  # what loads count up in the dataset, once that is known
        self.notes = (
            *_notes(asked, local_world_size=local_world_size, cores=cores),
            *source.notes,
        )

    def take(self, step: int) -> list[MicroBatch]:
        """The rank's micro-batches of ``step``, in order; [] if its share is empty.

        Blocks until they are loaded, ``waited_s`` in all. The caller may do with them what it
        likes: a step that is taken again, as a repair does, is loaded again. Any step but the next
        restarts the workers there, unless the source can give it meanwhile.
        A worker that dies or hangs is replaced meanwhile, and data that cannot be read as the source
        allows; ``on_repaired`` hears of it. Raises ``FaultError`` where nothing helps: BAD_SAMPLE, or
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
            batches = self._source.given_again(step, self._load_beside)
        if batches is None:
            batches = self._take_new(step)
        self.waited_s = time.monotonic() - started_s
        return batches

    def take_copy(self, step: int) -> list[MicroBatch]:
        """Return the batches of the next ``take(step)`` for an earlier use; raises like ``take``."""
        batches = self.take(step)
        try:
            copies = copied(batches)
        except NotCopiedError:
            return batches  # the next one loads again
        self._ahead.keep(step, batches)
        return copies

    @property
    def runs_ahead(self) -> bool:
        """True if :meth:`take_ahead` may do anything."""
        return self._source.runs_ahead

    def take_ahead(self, step: int, change: Callable[[Any], Any]) -> None:
        """Get ``step``, the next one, ready for ``take``, each batch as ``change`` makes it.

        Only where all its batches have arrived already: nothing is waited for. Raises as ``take``.
        """
        source = self._source
        if not source.runs_ahead or step != source.step or step >= self.total_steps:
            return
        if self._pool is None or self._pool.arrived < source.due(step):
            return
        batches = self._take_new(step)
        changed = [replace(batch, batch=change(batch.batch)) for batch in batches]
        self._ahead.keep(step, changed)

    def look_at(self, keys: Sequence[Key], seen: Callable[[dict[int, Any]], None]) -> None:
        """Have the next workers load ``keys`` of one sample each before they load a batch.

        ``seen`` gets what came of each, by index; what it raises leaves ``take``. Costs no process; without
        workers nothing happens.
        """
        self._end_pool(grace_s=_GRACE_S)
        self._looks = tuple(keys)
        self._on_look = seen

    def gives_again(self, step: int) -> bool:
        """Return True if ``take`` can return the earlier ``step`` at no more than a restart of the workers."""
        return 0 <= step < self.total_steps and self._source.gives_again(step)

    def seek(self, step: int) -> None:
        """Make ``step`` the next one, exactly. ValueError outside the run, whose end is allowed."""
        if not 0 <= step <= self.total_steps:
            raise ValueError(f"step={step}: 0 to {self.total_steps}, the end of the run")
        if step != self._source.step:
            self._stop()
            self._source.go_to(step)

    def assign(self, *, rank: int, world_size: int, micro_batch_size: int) -> None:
        """Load this share, cut so, from the next ``take`` on; nothing happens if it is the same."""
        cut = self._source.cut
        asked = (rank, world_size, micro_batch_size)
        if asked != (*cut.ranks, cut.micro_batch_size):
            rank, world_size, micro_batch_size = asked
            self._use(
                replace(cut, rank=rank, world_size=world_size, micro_batch_size=micro_batch_size)
            )

    def use_order(self, version: int) -> None:
        """Take the samples in this version of the order from the next ``take`` on."""
        cut = self._source.cut
        order = cut.order.in_version(version)
        if order is not cut.order:
            self._use(replace(cut, order=order))

    def use_shares(self, shares: tuple[int, ...]) -> None:
        """Share a step's samples out in this proportion from the next ``take`` on; none: equally.

        A number for each rank; :meth:`assign` says how many there are, before the next ``take``.
        """
        cut = self._source.cut
        if shares != cut.order.shares:
            self._use(replace(cut, order=replace(cut.order, shares=shares)))

    @property
    def shares(self) -> tuple[int, ...]:
        """The shares of the generation's ranks; empty if they are equal."""
        return self._source.cut.order.shares

    def shrink_prefetch(self) -> None:
        """Load half as far ahead from the next ``take`` on, to save memory; at 1 batch, no less."""
        if self.workers == 0 or self.prefetch_factor == 1:
            return
        self.prefetch_factor //= 2
        self._end_pool(grace_s=_GRACE_S)

    @property
    def share_samples(self) -> int:
        """The number of samples of a global batch that this rank loads."""
        return self._source.cut.samples

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """The process ids of the running workers, by worker number."""
        return self._pool.pids if self._pool is not None else ()

    def agree(self, group: Exchanging, *, step: int) -> None:
        """Agree with the other ranks of a generation on who reads what, before its first step, ``step``.

        Every rank calls it. Raises BadInputError if the data does not suit the ranks.
        """
        if self._source.agree(group, step=step):
            self._stop()

    def go_back(self, group: Exchanging, *, step: int) -> None:
        """Use the positions of the state at ``step`` after a roll-back; every rank calls it, like :meth:`agree`."""
        if self._source.go_back(group, step=step):
            self._stop()

    def gathers(self, step: int) -> bool:
        """Return True if all ranks must :meth:`gather` before ``step``; the same on all ranks."""
        return self._source.gathers(step)

    def gather(self, group: Exchanging, *, step: int) -> None:
        """Have every rank know how far all are before ``step``; every rank calls it at the same boundary."""
        self._source.gather(group, step=step)

    def place(self) -> tuple[int, int, str] | None:
        """Epoch, items, and a hash of the newest, where all ranks are to stand at the same place; else None."""
        return self._source.place()

    def slow_line(self, data_wait_share: float) -> str:
        """Return a line, once, about a high share of time spent waiting for data; empty if there is none."""
        return self._source.slow_line(data_wait_share)

    def close(self) -> None:
        """End the workers, within about a second. May be called again."""
        self._closed = True
        self.pause()

    def pause(self) -> None:
        """End the workers, within about a second; the next ``take`` starts others."""
        self._stop()
        self._source.lose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _use(self, cut: Cut) -> None:
        self._stop()
        self._source.use(cut)

    def _stop(self) -> None:
        """Keep nothing that was loaded ahead."""
        self._end_pool(grace_s=_GRACE_S)
        self._ahead.drop()

    def _take_new(self, step: int) -> list[MicroBatch]:
        self.seek(step)
        self._ahead.drop()
        try:
            return self._take_with_repairs(step)
        except BaseException:
            # Whatever it was, a signal handler's exception included: a batch may be half read.
            self._break_off()
            raise

    def _break_off(self) -> None:
        self._end_pool(grace_s=0.0)
        self._source.lose()

    def _take_with_repairs(self, step: int) -> list[MicroBatch]:
        """The step's batches; what breaks is repaired until they are all there."""
        source = self._source
        self._use_workers(step)
        suspected = source.suspected(step)
        # Workers have their own way to find it.
        self._repair.begin(None if self.workers else suspected)
        while (read := self._read_or_repair(step)) is None:
            pass
        left_out = source.left_out(read)
        batches = source.taken(step, read)
        last = batches[-1].indices if batches else ()
        for repaired in (*self._repair.delivered(last), *left_out):
            self.loads_here = True
            self._on_repaired(repaired)
        return batches

    def _use_workers(self, step: int) -> None:
        planned = self._repair.workers_to_use(step=step, workers=self.workers, asked=self._asked)
        wanted = self._source.suits(planned)
        if wanted == self.workers:
            return
        self._end_pool(grace_s=_GRACE_S)
        if wanted > self.workers:
            self._log(f"loading with {wanted} workers again, instead of {self.workers}")
        self.workers = wanted

    def _read_or_repair(self, step: int) -> list[tuple[Key, Any]] | None:
        """Return the data of a step, or None once the cause of a failed read is repaired."""
        try:
            read = self._read(step)
        except PoolError as error:
            trouble = self._trouble_of(error, step)
        else:
            found = next((one for one in read if isinstance(one[1], SampleFailed)), None)
            if found is None:
                return read
            trouble = self._trouble_of_data(*found, step)
        self._break_off()
        workers = self._repair.repair(trouble, workers=self.workers)
        self.workers = self._source.suits(workers)
        return None

    def _trouble_of(self, error: PoolError, step: int) -> Trouble:
        pool = self._pool
        fault = fault_of_worker(
            error,
            pool,
            kills=self._kills,
            rank=self._source.cut.rank,
            step=step,
            phase=self._source.phase,
            log=self._log,
        )
        suspect = pool.suspect(error.worker) if pool is not None and error.worker >= 0 else None
        key, sample = suspect or (None, None)
        return Trouble(
            fault=fault,
            why=f"no worker survives it: {fault.cause}",
            key=key,
            suspect=sample,
            by_reading=isinstance(error, (WorkerDiedError, BatchLateError)),
            files_used_up=isinstance(error, FilesUsedUpError),
        )

    def _trouble_of_data(self, key: Key, failed: SampleFailed, step: int) -> Trouble:
        refuse_dataset(failed)
        fault = self._source.fault_of(failed, key=key, step=step)
        if failed.for_memory:
            return Trouble(fault=fault, why=failed.error, for_memory=True)
        suspect = failed.indices[0] if len(failed.indices) == 1 else None
        return Trouble(fault=fault, why=failed.error, key=key, suspect=suspect, raised=True)

    def _read(self, step: int) -> list[tuple[Key, Any]]:
        """Return the data of a step; reading in this process ends with the first key that fails."""
        source = self._source
        count = source.due(step)
        if self.workers == 0 or count == 0:
            return self._read_here(step)
        if self._pool is None:
            self._start_pool()
        if self._looks:
            self._take_looks()
        assert self._pool is not None
        timeout_s = self._timeout_s * source.patience(step)
        read = [self._pool.next(timeout_s=timeout_s, on_wait=self._on_wait) for _ in range(count)]
        self.counted = self._pool.counted or self.counted
        return read

    def _read_here(self, step: int) -> list[tuple[Key, Any]]:
        source = self._source
        read = []
        for key in source.keys((step,)):
            try:
                found = source.read(key, on_sample=self._begin_sample)
            finally:
                self._on_sample(None)
            read.append((key, found))
            if isinstance(found, SampleFailed):
                break
        self.counted = source.counted
        return read

    def _begin_sample(self, index: int) -> None:
        self.loads_here = True
        self._on_sample(index)
        self._on_wait()

    def _take_looks(self) -> None:
        """Take the samples that workers read before their first batch. Errors there are left for the batches."""
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
        source = self._source
        due: Iterator[Key] = source.keys(range(source.step, self.total_steps))
        keys = chain(self._looks, due)
        self._pool = WorkerPool(source.reader(), keys, settings=self._pool_settings())
        self._on_workers(self._pool.pids)

    def _pool_settings(self) -> PoolSettings:
        return PoolSettings(
            rank=self._source.cut.rank,
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

    def _load_beside(self, keys: tuple[Key, ...]) -> list[tuple[Key, Any]] | None:
        """Load ``keys`` in separate workers; None if the pool has to be restarted there instead."""
        if self._pool is None:
            return None
        workers = min(self.workers, len(keys))
        return load_again(
            self._source.reader(),
            keys,
            settings=replace(self._pool_settings(), workers=workers, prefetch_factor=1),
            timeout_s=self._timeout_s,
            on_wait=self._on_wait,
            kills=self._kills,
        )


def _notes(num_workers: WorkersAsked, *, local_world_size: int, cores: int) -> tuple[str, ...]:
    before, after = system_limits.raise_open_file_limit()
    notes = worker_notes(num_workers, local_world_size=local_world_size, cores=cores)
    if after != before:
        notes += (f"open-file limit raised from {before} to {after}",)
    return notes


# Loads a step's batches a second time, beside the workers that are ahead of it. Never repairs.


def load_again(
    reader: Reader[Any],
    keys: tuple[Key, ...],
    *,
    settings: PoolSettings,
    timeout_s: float,
    on_wait: Callable[[], None],
    kills: LoaderKills,
) -> list[tuple[Key, Any]] | None:
    """Load ``keys`` in temporary workers.

    Returns None after any trouble: the ordinary load that follows will find it and name it.
    """
    try:
        pool = WorkerPool(reader, iter(keys), settings=settings)
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
    return None if any(isinstance(one, SampleFailed) for _, one in received) else received
