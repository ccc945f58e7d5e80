"""A stream that says how it is cut, as a loader's source: each rank reads shards of its own, by workers.

How far the others are it knows from when all last said so, which is every few seconds and at each save;
whoever goes on from there draws again, and drops, what came between.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import default_collate

from ddp_runner.data.loader_faults import (
    SAMPLES_REPLACED,
    LoadingRepaired,
    fault_of_failure,
    fault_of_samples,
)
from ddp_runner.data.loader_repair import ShareRepair
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
from ddp_runner.data.source import Cut, MicroBatch, Source, micro_batches_of
from ddp_runner.data.unshared import Unshared
from ddp_runner.data.workers.memory_files import collate_batch
from ddp_runner.data.workers.shard_reader import ShardReader, Share, ShareKey
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.faults import Fault, FaultError
from ddp_runner.values.generators import generators_kept

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ddp_runner.data.loader_faults import LoaderKills
    from ddp_runner.data.workers.fetch import SampleFailed


class _Given(NamedTuple):
    """The record of a step that was served: its lane's position before, and a hash of its last item."""

    step: int
    mark: LaneMark
    newest: str


class ShardSource(Source[ShareKey]):
    """Serves a dataset with ``shards`` and ``read`` (:class:`ShardedStream`); a key is this rank's share of a step.

    Workers read a rank's lanes, as many as divide their number; without workers the rank itself does. What breaks
    is read again from what was delivered. ``ends_at_once``: an epoch ends in all lanes at the same step; otherwise
    each lane begins again when it has read its shards. Items that come as exceptions go to ``quarantine``, and
    the next ones take their places, if that may have any.
    """

    def __init__(
        self,
        dataset: Any,
        cut: Cut,
        *,
        positions: ShardPositions,
        ends_at_once: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        on_other: Callable[[str], None] = lambda _text: None,
        quarantine: Quarantine | None = None,
    ) -> None:
        """``positions``: part of the run's state. ``on_other`` hears of items that are not those of before."""
        super().__init__(cut)
        self._dataset = dataset
        self._positions = positions
        self._ends_at_once = ends_at_once
        self._collate = collate_fn
        self._on_other = on_other
        none = Quarantine(seed=0, dataset_size=0, bad_max=0)
        self._quarantine = none if quarantine is None else quarantine
        self._here: ShardReader | None = None  # reads in the rank itself
        self._marks: list[LaneMark] = []  # before ``step``
        self._given: _Given | None = None
        self._has_warned = False
        self._agreement = ShardAgreement(positions)
        deal = self._deal  # refuses too few shards
        note = "" if ends_at_once else uneven_note(dataset, deal)
        self.notes = (note,) if note else ()

    @property
    def _deal(self) -> Deal:
        if self._positions.stand is not None:
            return self._positions.stand.deal
        order = self.cut.order
        try:
            deal = Deal.of(
                seed=order.seed, shards=self._dataset.shards, world_size=self.cut.world_size
            )
        except ValueError as error:
            raise BadInputError("--task", "", str(error)) from error
        if not self._ends_at_once:
            return deal
        return replace(deal, begun_step=order.first_step, epoch_steps=order.steps_per_epoch)

    def suits(self, workers: int) -> int:
        """The most workers that divide the lanes: each then has lanes of its own."""
        lanes = self._deal.lanes
        return next((count for count in range(min(workers, lanes), 0, -1) if lanes % count == 0), 0)

    def due(self, step: int) -> int:
        """Return 1: a step has one share, which may be empty."""
        del step
        return 1

    def keys(self, steps: Iterable[int]) -> Iterator[ShareKey]:
        """The share of this rank in each, from the lane whose turn it is."""
        for step in steps:
            indices, sizes = self.cut.numbers(step)
            lane, epoch = self._turn(step)
            yield ShareKey(step, lane, indices, sizes, epoch)

    def reader(self) -> ShardReader:
        """Return a reader that begins at the lanes' current positions."""
        return self._reader(self._collate or collate_batch)

    def read(self, key: ShareKey, *, on_sample: Callable[[int], None]) -> Share | SampleFailed:
        """The share, by a reader that stays with its lanes."""
        self._here = self._here or self._reader(Unshared(self._collate or default_collate))
        with generators_kept():
            return self._here.load(key, on_sample=on_sample)

    def patience(self, step: int) -> float:
        """Return a factor of the time-out that grows with the items to be skipped first."""
        owed = self._marks[self._turn(step).lane].owed_in_all
        return 1 + owed / max(1, self.cut.samples)

    def go_to(self, step: int) -> None:
        """Move to ``step``, the last one or one that follows from the last exchange of positions."""
        self._marks, self.step = self._marks_at(step), step
        self._here = None
        if self._given is not None and self._given.step != step:
            self._given = None

    def taken(self, step: int, read: Sequence[tuple[ShareKey, Any]]) -> list[MicroBatch]:
        """See :meth:`Source.taken`."""
        key: ShareKey
        share: Share
        ((key, share),) = read
        if self._given is not None and self._given.step == step:
            before = self._given.newest
            if before and share.newest and before != share.newest:
                self._warn("a shard gave other items when it was read again from its position")
        self._given = _Given(step, self._marks[key.lane], share.newest)
        self._marks[key.lane] = LaneMark(*share.mark)
        self.step = step + 1
        return micro_batches_of(key.indices, key.sizes, share.batches)

    def gives_again(self, step: int) -> bool:
        """The last one."""
        return self._given is not None and self._given.step == step

    def use(self, cut: Cut) -> None:
        """See :meth:`Source.use`. Positions of other lanes come from the last exchange."""
        if cut.ranks != self.cut.ranks:
            self._forget()
        self._here = None
        self.cut = cut

    def lose(self) -> None:
        """See :meth:`Source.lose`."""
        self._here = None

    def fault_of(self, failed: SampleFailed, *, key: ShareKey, step: int) -> Fault:
        """See :meth:`Source.fault_of`."""
        del key
        epoch, _ = self.cut.order.position(step)
        fault = fault_of_failure(failed, rank=self.cut.rank, step=step, epoch=epoch)
        return fault if failed.for_memory else replace(fault, cause=_cause(failed.error))

    def repair_with(
        self, *, timeout_s: float, on_wait: Callable[[], None], kills: LoaderKills
    ) -> ShareRepair:
        """See :meth:`Source.repair_with`."""
        del timeout_s, on_wait
        return ShareRepair(kills)

    def left_out(self, read: Sequence[tuple[ShareKey, Any]]) -> list[LoadingRepaired]:
        """Record the items of a share that could not be read, so that they stay left out."""
        ((key, share),) = read
        step, rank = key.step, self.cut.rank
        epoch, _ = self.cut.order.position(step)
        news = []
        for number, reason in share.left_out:
            fault = fault_of_samples(
                (number,), reason, detail="", rank=rank, step=step, epoch=epoch
            )
            fault = replace(fault, cause=_cause(reason))
            try:
                is_new = self._quarantine.leave_out(number, reason=reason, step=step, rank=rank)
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

    def agree(self, group: Exchanging, *, step: int) -> bool:
        """Deal the shards to the ranks, and say who is where.

        Raises BadInputError where there are too few shards, or others than before.
        """
        world_size = self.cut.world_size
        ranks = self._agreement.deal_alike(
            group,
            rank=self.cut.rank,
            world_size=world_size,
            step=step,
            steps_of=self._steps_of if self._ends_at_once else None,
        )
        if ranks != world_size:
            self._forget()
            if self.cut.rank == 0:
                self._on_other(
                    f"from step {step} on the stream's shards are dealt to {world_size} ranks, and were"
                    f" to {ranks}: samples come in another order"
                )
        if self._deal.shards != self._dataset.shards:
            raise BadInputError(
                "--task",
                "",
                f"its stream has {self._dataset.shards} shards, and had {self._deal.shards} before",
            )
        self._agreement.say(group, self._marks_at(step), deal=self._deal, step=step)
        return ranks != world_size

    def go_back(self, group: Exchanging, *, step: int) -> bool:
        """The positions are those of the state that the ranks have gone back to."""
        self._forget()
        self.agree(group, step=step)
        return True

    def gathers(self, step: int) -> bool:
        """Return True if positions must be exchanged before ``step``, which is every few seconds."""
        return self._agreement.is_due(step)

    def gather(self, group: Exchanging, *, step: int) -> None:
        """See :meth:`Source.gather`."""
        if not self._agreement.is_said(step):
            self._agreement.say(group, self._marks_at(step), deal=self._deal, step=step)

    def _forget(self) -> None:
        """Forget the current positions: for the next step they come from the last exchange."""
        self._here = None
        self.step, self._given = -1, None

    def _marks_at(self, step: int) -> list[LaneMark]:
        """Return the positions of the lanes before ``step``, without moving them."""
        given = self._given
        if step == self.step:
            return self._marks
        if given is not None and step == given.step and self.step == step + 1:
            marks = list(self._marks)
            marks[self._turn(step).lane] = given.mark
            return marks
        begin = self.cut.order.first_step
        stand = self._positions.stand or Stand.at_begin(self._deal, step=begin)
        if stand.step > step or stand.deal.world_size != self.cut.world_size:
            raise AssertionError(
                f"step {step}: the positions are of {stand.step}, or not dealt yet"
            )
        return stand.marks_at(step, rank=self.cut.rank, items=self.cut.samples, turn=self._turn)

    def _turn(self, step: int) -> Turn:
        if not self._ends_at_once:
            return Turn((step - self.cut.order.first_step) % self._deal.lanes)
        deal = self._deal
        epoch, within = (deal if deal.epoch_steps else self.cut.order).position(step)
        return Turn(within % deal.lanes, epoch)

    def _steps_of(self, deal: Deal) -> int:
        """Return the steps of an epoch of ``deal``; at least one turn of each lane. Short lanes begin another epoch."""
        size, order = deal.world_size, self.cut.order
        shares = [order.span_of(0, rank=rank, world_size=size)[1] for rank in range(size)]
        return steps_of_epoch(self._dataset.lengths, deal=deal, shares=shares) or deal.lanes

    def _reader(self, collate: Callable[[list[Any]], Any]) -> ShardReader:
        deal = self._deal
        return ShardReader(
            self._dataset,
            lanes=[deal.lane(self.cut.rank, number) for number in range(deal.lanes)],
            marks=tuple(self._marks),
            collate=collate,
            left_out_max=self._quarantine.bad_max,
        )

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._on_other(text)


def _cause(why: str) -> str:
    return f"an item of the stream could not be loaded: {why}"
