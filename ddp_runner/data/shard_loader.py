"""ShardLoader: this rank's micro-batches of a stream that says how it is cut, read by workers.

Each rank reads shards of its own. How far the others are it knows from when all last said so, which is every
few seconds and at each save; whoever goes on from there draws again, and drops, what came between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, cast

from torch.utils.data import default_collate

from ddp_runner.core.errors import BadInputError
from ddp_runner.core.faults import FaultError
from ddp_runner.core.loader_recovery import LoaderHistory, plan_loader_repair, workers_to_use
from ddp_runner.data.last_batch import Ahead, MicroBatch, NotCopiedError, copied
from ddp_runner.data.loader_faults import (
    SAMPLES_REPLACED,
    KillCounter,
    LoaderKills,
    LoadingRepaired,
    NoKills,
    fault_of_failure,
    fault_of_samples,
    fault_of_worker,
    refuse_dataset,
)
from ddp_runner.data.order import micro_batches
from ddp_runner.data.quarantine import Quarantine, QuarantineFullError
from ddp_runner.data.shard_agreement import Exchanging, ShardAgreement
from ddp_runner.data.shards import (
    Deal,
    LaneMark,
    ShardPositions,
    Stand,
    Turn,
    steps_of_epoch,
    uneven_note,
)
from ddp_runner.data.stream import StreamOrder
from ddp_runner.data.unshared import Unshared
from ddp_runner.data.workers.count import WorkersAsked, cores_here, worker_count
from ddp_runner.data.workers.fetch import SampleFailed, SampleSource
from ddp_runner.data.workers.memory_files import collate_batch
from ddp_runner.data.workers.pool import PoolSettings, WorkerPool
from ddp_runner.data.workers.shard_source import ShardSource, Share, ShareKey
from ddp_runner.data.workers.timeouts import (
    BatchLateError,
    FilesUsedUpError,
    PoolError,
    WorkerDiedError,
)
from ddp_runner.values.generators import generators_kept

_GRACE_S = 1.0  # for a worker inside the user's code
_FAULTS_IN_A_ROW_MAX = 8  # without a batch between them
_TRIES_MAX = 3  # of a share that raises


class _Given(NamedTuple):
    """What a step was given: where its lane stood before, and a hash of its last item."""

    step: int
    mark: LaneMark
    newest: str


class ShardLoader:
    """Serves ``take(step)`` for a dataset with ``shards`` and ``read`` (:class:`ShardedStream`).

    Workers read a rank's lanes, as many as divide their number; without workers the rank itself does. A
    worker that dies or hangs is replaced inside ``take`` from what was delivered, and ``on_repaired`` hears of
    it. ``ends_at_once``: an epoch ends in all lanes at the same step; otherwise each lane begins
    again when it has read its shards. Items that come as exceptions go to ``quarantine``, and
    the next ones take their places, if that may have any.
    Call from the rank's main thread, as :class:`SafeDataLoader`.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        order: StreamOrder,
        positions: ShardPositions,
        rank: int,
        world_size: int,
        total_steps: int,
        micro_batch_size: int,
        num_workers: WorkersAsked,
        ends_at_once: bool = False,
        local_world_size: int = 1,
        prefetch_factor: int = 2,
        pin_memory: bool = False,
        timeout_s: float = 60.0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        on_wait: Callable[[], None] = lambda: None,
        on_sample: Callable[[int | None], None] = lambda _number: None,
        on_workers: Callable[[tuple[int, ...]], None] = lambda _pids: None,
        on_repaired: Callable[[LoadingRepaired], None] = lambda _repaired: None,
        on_other: Callable[[str], None] = lambda _text: None,
        log: Callable[[str], None] = lambda _text: None,
        kills: KillCounter | None = None,
        quarantine: Quarantine | None = None,
    ) -> None:
        """``positions``: part of the run's state. ``on_other`` hears of items that are not those of before."""
        self._dataset = dataset
        self._order = order
        self._positions = positions
        self._rank = rank
        self._world_size = world_size
        self.total_steps = total_steps
        self._micro_batch_size = micro_batch_size
        self._ends_at_once = ends_at_once
        self.prefetch_factor = prefetch_factor
        self._pin_memory = pin_memory
        self._timeout_s = timeout_s
        self._collate = collate_fn
        self._on_wait = on_wait
        self._on_sample = on_sample
        self._on_workers = on_workers
        self._on_repaired = on_repaired
        self._on_other = on_other
        self._log = log
        self._kills = LoaderKills(kills or NoKills())
        none = Quarantine(seed=0, dataset_size=0, bad_max=0)
        self._quarantine = none if quarantine is None else quarantine
        cores = cores_here()
        self._asked = worker_count(num_workers, local_world_size=local_world_size, cores=cores)
        self.workers = self._asked
        self._by_value = False
        self._pool: WorkerPool | None = None
        self._here: ShardSource | None = None  # reads in the rank itself
        self._step = -1  # the next one; -1: it is to be looked up
        self._marks: list[LaneMark] = []  # before it
        self._given: _Given | None = None
        self._has_warned = False
        self._history = LoaderHistory(last_step=0)
        self._ahead = Ahead()
        self._agreement = ShardAgreement(positions)
        self.waited_s = 0.0
        deal = self._deal  # refuses too few shards
        note = "" if ends_at_once else uneven_note(dataset, deal)
        self.notes = (note,) if note else ()

    @property
    def _deal(self) -> Deal:
        if self._positions.stand is not None:
            return self._positions.stand.deal
        order = self._order
        try:
            deal = Deal.of(
                seed=order.seed, shards=self._dataset.shards, world_size=self._world_size
            )
        except ValueError as error:
            raise BadInputError("--task", "", str(error)) from error
        if not self._ends_at_once:
            return deal
        return replace(deal, begun_step=order.first_step, epoch_steps=order.steps_per_epoch)

    def take(self, step: int) -> list[MicroBatch]:
        """The rank's micro-batches of ``step``, in order; [] if its share is empty.

        A step that is taken again is read again, from where its lane stood. Raises FaultError: BAD_SAMPLE for
        what the dataset raises, OUT_OF_MEMORY, or the fault of workers that break again and again.
        """
        began_s = time.monotonic()
        batches = self._ahead.take(step)
        if batches is None:
            self._ahead.drop()
            self._kills.look_sometimes(began_s)
            self._go_to(step)
            try:
                batches = self._take_with_repairs()
            except BaseException:
                self._stop_reading(grace_s=0.0)
                raise
        self.waited_s = time.monotonic() - began_s
        return batches

    def take_copy(self, step: int) -> list[MicroBatch]:
        """What the next ``take(step)`` gives, for a use before it; raises as that."""
        batches = self.take(step)
        try:
            copies = copied(batches)
        except NotCopiedError:
            return batches  # the next one reads again
        self._ahead.keep(step, batches)
        return copies

    def agree(self, group: Exchanging, *, step: int) -> None:
        """Before the first step of a generation, ``step``: deal the shards to its ranks, and say who is where.

        Every rank calls it. Raises BadInputError where there are too few shards, or others than before.
        """
        ranks = self._agreement.deal_alike(
            group,
            rank=self._rank,
            world_size=self._world_size,
            step=step,
            steps_of=self._steps_of if self._ends_at_once else None,
        )
        if ranks != self._world_size:
            self._forget()
            if self._rank == 0:
                self._on_other(
                    f"from step {step} on the stream's shards are dealt to {self._world_size} ranks, and were"
                    f" to {ranks}: samples come in another order"
                )
        if self._deal.shards != self._dataset.shards:
            raise BadInputError(
                "--task",
                "",
                f"its stream has {self._dataset.shards} shards, and had {self._deal.shards} before",
            )
        self._agreement.say(group, self._marks_at(step), deal=self._deal, step=step)

    def go_back(self, group: Exchanging, *, step: int) -> None:
        """After a roll-back to ``step``, on every rank: go by the positions of that state. As :meth:`agree`."""
        self._forget()
        self.agree(group, step=step)

    def gather(self, group: Exchanging, *, step: int) -> None:
        """Have every rank know how far all are before ``step``; every rank calls it at the same boundary."""
        if not self._agreement.is_said(step):
            self._agreement.say(group, self._marks_at(step), deal=self._deal, step=step)

    def gathers(self, step: int) -> bool:
        """Whether all are to :meth:`gather` before ``step``, which is so every few seconds; the same on all ranks."""
        return self._agreement.is_due(step)

    def gives_again(self, step: int) -> bool:
        """Whether ``take`` has ``step``, the last one, at no more than a restart of the workers."""
        return self._given is not None and self._given.step == step

    def assign(self, *, rank: int, world_size: int, micro_batch_size: int) -> None:
        """Take this share, cut so, from the next ``take`` on."""
        asked = (rank, world_size, micro_batch_size)
        if asked == (self._rank, self._world_size, self._micro_batch_size):
            return
        if (rank, world_size) != (self._rank, self._world_size):
            self._forget()
        self._stop_reading(grace_s=_GRACE_S)
        self._ahead.drop()
        self._rank, self._world_size, self._micro_batch_size = asked

    def use_order(self, version: int) -> None:
        """Nothing: the shards say what comes next."""

    def use_shares(self, shares: tuple[int, ...]) -> None:
        """As :meth:`SafeDataLoader.use_shares`."""
        if shares != self._order.shares:
            self._stop_reading(grace_s=_GRACE_S)
            self._ahead.drop()
            self._order = replace(self._order, shares=shares)

    @property
    def shares(self) -> tuple[int, ...]:
        """Of the ranks of the generation; none: equal ones."""
        return self._order.shares

    @property
    def share_samples(self) -> int:
        """How many samples of a global batch this rank reads."""
        _, count = self._order.span_of(0, rank=self._rank, world_size=self._world_size)
        return count

    def shrink_prefetch(self) -> None:
        """Load half as far ahead from the next ``take`` on, to save memory; at 1 batch, no less."""
        if self.workers and self.prefetch_factor > 1:
            self.prefetch_factor //= 2
            self._stop_reading(grace_s=_GRACE_S)

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """The process ids of the running workers, by worker number."""
        return self._pool.pids if self._pool is not None else ()

    def close(self) -> None:
        """End the workers, within about a second. May be called again."""
        self._ahead.drop()
        self._stop_reading(grace_s=_GRACE_S)

    def _forget(self) -> None:
        """Where the lanes are by now: the next step is looked up in what all have said."""
        self.close()
        self._step, self._given = -1, None

    def _go_to(self, step: int) -> None:
        """Stand before ``step``: it is the next one, the last one, or one that follows from what all said."""
        if step != self._step:
            self._stop_reading(grace_s=_GRACE_S)
            self._marks, self._step = self._marks_at(step), step
            if self._given is not None and self._given.step != step:
                self._given = None

    def _marks_at(self, step: int) -> list[LaneMark]:
        """Where the lanes are before ``step``, without going there."""
        given = self._given
        if step == self._step:
            return self._marks
        if given is not None and step == given.step and self._step == step + 1:
            marks = list(self._marks)
            marks[self._turn(step).lane] = given.mark
            return marks
        begin = self._order.first_step
        stand = self._positions.stand or Stand.at_begin(self._deal, step=begin)
        if stand.step > step or stand.deal.world_size != self._world_size:
            raise AssertionError(
                f"step {step}: the positions are of {stand.step}, or not dealt yet"
            )
        return stand.marks_at(step, rank=self._rank, items=self.share_samples, turn=self._turn)

    def _turn(self, step: int) -> Turn:
        if not self._ends_at_once:
            return Turn((step - self._order.first_step) % self._deal.lanes)
        deal = self._deal
        epoch, within = (deal if deal.epoch_steps else self._order).position(step)
        return Turn(within % deal.lanes, epoch)

    def _steps_of(self, deal: Deal) -> int:
        """How long an epoch of ``deal`` is. At least each lane's turn: who is short goes on with its next epoch."""
        size, order = deal.world_size, self._order
        shares = [order.span_of(0, rank=rank, world_size=size)[1] for rank in range(size)]
        return steps_of_epoch(self._dataset.lengths, deal=deal, shares=shares) or deal.lanes

    def _indices(self, step: int) -> list[int]:
        share = self._order.share_of(step, rank=self._rank, world_size=self._world_size)
        return cast("list[int]", share.tolist())

    def _key(self, step: int) -> ShareKey:
        share = self._order.share_of(step, rank=self._rank, world_size=self._world_size)
        sizes = tuple(len(piece) for piece in micro_batches(share, self._micro_batch_size))
        lane, epoch = self._turn(step)
        return ShareKey(step, lane, tuple(share.tolist()), sizes, epoch)

    def _keys(self) -> Iterator[ShareKey]:
        for step in range(self._step, self.total_steps):
            yield self._key(step)

    def _take_with_repairs(self) -> list[MicroBatch]:
        repaired: list[tuple[float, LoadingRepaired]] = []
        self.workers = self._wanted_workers()
        while True:
            try:
                share = self._take_once()
            except PoolError as error:
                repaired.append((time.monotonic(), self._after(error, tries=len(repaired))))
                continue
            if isinstance(share, SampleFailed):
                refuse_dataset(share)
                repaired.append((time.monotonic(), self._after_failure(share, tries=len(repaired))))
                continue
            break
        left_out = self._left_out(share)
        for noticed_s, one in repaired:
            seconds = time.monotonic() - noticed_s
            kills = self._kills.take_unreported()
            self._on_repaired(replace(one, seconds=seconds, kernel_kills=kills))
        for one in left_out:
            self._on_repaired(one)
        return self._delivered(share)

    def _after_failure(self, found: SampleFailed, *, tries: int) -> LoadingRepaired:
        """A share raised: it is read again, as its storage may have been out of reach. Raises FaultError."""
        epoch, _ = self._order.position(self._step)
        fault = fault_of_failure(found, rank=self._rank, step=self._step, epoch=epoch)
        if not found.for_memory:
            fault = replace(fault, cause=_cause(found.error))
        if found.for_memory or tries + 1 >= _TRIES_MAX:
            raise FaultError(fault)
        self._stop_reading(grace_s=0.0)
        return LoadingRepaired(fault=fault, action="read again", seconds=0.0)

    def _left_out(self, share: Share) -> list[LoadingRepaired]:
        """What of a share could not be read: noted for good. Raises FaultError where that is too much."""
        news = []
        for number, reason in share.left_out:
            epoch, _ = self._order.position(self._step)
            fault = fault_of_samples(
                (number,), reason, detail="", rank=self._rank, step=self._step, epoch=epoch
            )
            fault = replace(fault, cause=_cause(reason))
            try:
                is_new = self._quarantine.leave_out(
                    number, reason=reason, step=self._step, rank=self._rank
                )
            except QuarantineFullError as full:
                raise FaultError(replace(fault, cause=f"{fault.cause} ({full})")) from full
            if is_new:
                action = "the next item takes its place"
                news.append(
                    LoadingRepaired(
                        fault=fault, action=action, seconds=0.0, inexact_reason=SAMPLES_REPLACED
                    )
                )
        return news

    def _wanted_workers(self) -> int:
        asked = workers_to_use(
            self._history, step=self._step, workers=self.workers, asked=self._asked
        )
        wanted = _suiting(asked, self._deal.lanes)
        if wanted != self.workers and self._pool is not None:
            self._stop_reading(grace_s=_GRACE_S)
        return wanted

    def _after(self, error: PoolError, *, tries: int) -> LoadingRepaired:
        """Workers broke: with how many to go on from what was delivered. Raises FaultError at the end."""
        fault = fault_of_worker(
            error,
            self._pool,
            kills=self._kills,
            rank=self._rank,
            step=self._step,
            log=self._log,
        )
        self._stop_reading(grace_s=0.0)
        if tries >= _FAULTS_IN_A_ROW_MAX:
            raise FaultError(fault) from error
        self._history = self._history.after_fault(self._step)
        if isinstance(error, FilesUsedUpError) and not self._by_value:
            self._by_value = True
            action = "from here on batches are copied through a pipe, which needs no open files"
            return LoadingRepaired(fault=fault, action=action, seconds=0.0)
        plan = plan_loader_repair(self._history, workers=self.workers)
        if plan.workers == 0 and isinstance(error, (WorkerDiedError, BatchLateError)):
            # What ends a worker, or keeps it, would do so to the rank.
            self.workers = 1
            return LoadingRepaired(fault=fault, action="1 loader worker restarted", seconds=0.0)
        self.workers = _suiting(plan.workers, self._deal.lanes)
        return LoadingRepaired(fault=fault, action=plan.action, seconds=0.0)

    def _begin_sample(self, number: int) -> None:
        self._on_sample(number)
        self._on_wait()

    def _take_once(self) -> Share | SampleFailed:
        key = self._key(self._step)
        if self.workers == 0:
            self._here = self._here or self._source(Unshared(self._collate or default_collate))
            try:
                with generators_kept():
                    return self._here.load(key, on_sample=self._begin_sample)
            finally:
                self._on_sample(None)
        if self._pool is None:
            self._start_pool()
        assert self._pool is not None
        owed = self._marks[key.lane].owed_in_all  # to be drawn first, which takes its time
        timeout_s = self._timeout_s * (1 + owed / max(1, len(key.indices)))
        _, found = self._pool.next(timeout_s=timeout_s, on_wait=self._on_wait)
        return cast("Share | SampleFailed", found)

    def _delivered(self, share: Share) -> list[MicroBatch]:
        step, lane = self._step, self._turn(self._step).lane
        if self._given is not None and self._given.step == step:
            before = self._given.newest
            if before and share.newest and before != share.newest:
                self._warn("a shard gave other items when it was read again from its position")
        self._given = _Given(step, self._marks[lane], share.newest)
        self._marks[lane] = LaneMark(*share.mark)
        self._step = step + 1
        numbers = iter(self._indices(step))
        sizes = self._key(step).sizes
        return [
            MicroBatch(indices=tuple(next(numbers) for _ in range(size)), batch=batch)
            for size, batch in zip(sizes, share.batches, strict=True)
        ]

    def _source(self, collate: Callable[[list[Any]], Any]) -> ShardSource:
        deal = self._deal
        return ShardSource(
            self._dataset,
            lanes=[deal.lane(self._rank, number) for number in range(deal.lanes)],
            marks=tuple(self._marks),
            collate=collate,
            left_out_max=self._quarantine.bad_max,
        )

    def _start_pool(self) -> None:
        source = cast("SampleSource", self._source(self._collate or collate_batch))
        settings = PoolSettings(
            rank=self._rank,
            workers=self.workers,
            prefetch_factor=self.prefetch_factor,
            pin_memory=self._pin_memory,
            by_value=self._by_value,
        )
        self._pool = WorkerPool(source, cast("Iterator[Any]", self._keys()), settings=settings)
        self._on_workers(self._pool.pids)

    def _stop_reading(self, *, grace_s: float) -> None:
        pool, self._pool, self._here = self._pool, None, None
        if pool is not None:
            pool.end(grace_s=grace_s)
            self._on_workers(())

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._on_other(text)


def _suiting(workers: int, lanes: int) -> int:
    """The most workers, at most so many, that divide the lanes: each then has lanes of its own."""
    return next((count for count in range(min(workers, lanes), 0, -1) if lanes % count == 0), 0)


def _cause(why: str) -> str:
    return f"an item of the stream could not be loaded: {why}"
