"""Assigns the shards of a stream to ranks, and tracks the position of each. Values only; reads nothing.

A rank has *lanes*: each lane has its own shards, which it reads one after the other, in another order each
epoch. A rank's whole share of a step comes from one lane, and the lanes take turns. So the items of a step
depend on seed, ranks and shards, and never on how many workers read the lanes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from numbers import Integral
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch.utils.data import Dataset

from ddp_runner.data.permutation import KeyedPermutation
from ddp_runner.kernel.rules.errors import BadInputError

_LANES = (24, 12, 8, 6, 4, 3, 2, 1)  # numbers with many divisors: so many workers suit them
_UNEVEN = 3  # times as large as another may a lane be without a word
_LANE_SALT = 2**20  # keeps the orders of lanes apart


class ShardedStream(Protocol):
    """A dataset that is cut into shards, so that each rank, and each of its workers, reads its own.

    ``read`` yields items, each with the position behind it, from which a later ``read`` resumes: None, a number, a
    text, or lists and dicts (with texts as keys) of such. A tuple may come back as a list. An item that is an
    exception stands for one that cannot be read, and ``data.on_bad_sample`` decides about it; after
    an exception that ``read`` raises, reading begins again at the same position, twice, and then the run ends.
    Python's, numpy's and torch's CPU generator are seeded when ``read`` is called, equally in each epoch, and for
    each item; if the dataset has ``deterministic = True``, only when ``read`` is called. A ``read`` that is a generator
    function starts with its first item, under that item's seed: a draw for a whole shard, such as an order of rows,
    must be in the position, or be made before it returns a generator. ``read`` opens its files in a loader worker.

    Optional attributes: ``lengths``, the number of items of each shard (an epoch then has a
    length, and ``data.stream_end=drop`` is possible); ``names``, the names of the shards for people; and ``sizes``, the
    size of each shard, by any measure, to warn of uneven shards.
    """

    @property
    def shards(self) -> int:
        """The number of shards: at least one for each rank, and better many times as many."""
        ...

    def read(self, shard: int, position: Any) -> Iterator[tuple[Any, Any]]:
        """Yield ``(item, position behind it)`` of ``shard`` from ``position`` on; None: from its beginning."""
        ...


def is_sharded(dataset: object) -> bool:
    """Return True if a dataset is cut into shards. One whose items have indices may have such attributes, too."""
    by_index = getattr(type(dataset), "__getitem__", None)
    # Torch's own, also of iterable ones, only raises.
    if by_index not in (None, Dataset.__getitem__) or hasattr(dataset, "__getitems__"):
        return False
    is_cut = isinstance(getattr(dataset, "shards", None), Integral)
    return is_cut and callable(getattr(dataset, "read", None))


class LaneMark(NamedTuple):
    """The position of a lane: its epoch, the place in that epoch's order, and the items drawn of the shard there.

    ``position`` is the reader's own, None at the beginning; ``drawn`` counts the shard's items. ``owed``: the number of
    items to draw and drop before the next one that counts; ``later``: the same for later epochs, as pairs of an
    epoch and a number.
    """

    epoch: int = 0
    place: int = 0
    position: Any = None
    drawn: int = 0
    owed: int = 0
    later: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of_record(cls, record: Sequence[Any]) -> LaneMark:
        """Return the mark of a list; older lists have no ``later``."""
        mark = cls(*record)
        return mark._replace(later=tuple((epoch, items) for epoch, items in mark.later))

    @property
    def owed_in_all(self) -> int:
        """The number of items to draw before the next one that counts."""
        return self.owed + sum(items for _, items in self.later)

    def owing(self, items: int, *, epoch: int) -> LaneMark:
        """Return the mark after ``items`` more, taken by a step meant to be in ``epoch``; -1: in the lane's own."""
        # INVARIANT epoch-by-epoch: what is owed is drawn in the epochs in which it was taken: where a lane has
        # ended before its epoch did, it is in the next one already, and does not begin that once more.
        # Broken if: what is owed of an epoch that is over is left out.
        # Guarded by: test_a_replacement_finds_lanes_that_ended_early_where_they_were.
        if self.later and epoch <= self.later[-1][0]:
            *before, (last, more) = self.later
            return self._replace(later=(*before, (last, more + items)))
        if epoch > self.epoch:
            return self._replace(later=(*self.later, (epoch, items)))
        return self._replace(owed=self.owed + items)


class Turn(NamedTuple):
    """The lane that a step reads, and the epoch in which that is meant to be; -1: the lane's own."""

    lane: int
    epoch: int = -1


class Part(NamedTuple):
    """The unread part of a shard: all from ``position`` on; ``drawn`` items come before it."""

    shard: int
    position: Any = None
    drawn: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """The shards of one lane. ``first``: what it reads in ``first_epoch`` instead, where others dealt before."""

    number: int  # over all ranks
    seed: int
    own: tuple[int, ...]
    first: tuple[Part, ...] = ()
    first_epoch: int = -1

    def parts(self, epoch: int) -> tuple[Part, ...]:
        """Return the parts in the order in which they are read in ``epoch``."""
        if epoch == self.first_epoch and self.first:
            return self.first
        size = len(self.own)
        key = self.number * _LANE_SALT + epoch + 1
        order = KeyedPermutation(seed=self.seed, epoch=key, size=size).at(np.arange(size))
        return tuple(Part(self.own[index]) for index in order.tolist())

    def left(self, mark: LaneMark) -> list[Part]:
        """Return the parts of the mark's epoch that are still unread."""
        parts = list(self.parts(mark.epoch)[mark.place :])
        if parts and mark.drawn:
            parts[0] = Part(parts[0].shard, mark.position, mark.drawn)
        return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """The assignment of shards to lanes, for a number of ranks. ``first``: see :class:`Lane`, by lane number.

    If epochs end for all lanes at one step, they have ``epoch_steps`` steps, and ``begun_epoch`` begins at
    ``begun_step``; 0 steps: they do not end together, or a version without these fields made the assignment.
    """

    seed: int
    shards: int
    world_size: int
    lanes: int  # of a rank
    first: tuple[tuple[Part, ...], ...] = ()
    first_epoch: int = -1
    begun_step: int = 0
    begun_epoch: int = 0
    epoch_steps: int = 0

    @classmethod
    def of(cls, *, seed: int, shards: int, world_size: int) -> Deal:
        """Return the assignment for a new run. Raises ValueError if a rank would have no shard."""
        if shards < world_size:
            raise ValueError(
                f"{world_size} ranks need at least {world_size} shards, the stream has {shards}:"
                " cut it into more files, or take fewer ranks"
            )
        fewest = shards // world_size
        lanes = next(count for count in _LANES if count <= fewest)
        return cls(seed=seed, shards=int(shards), world_size=world_size, lanes=lanes)

    def position(self, step: int) -> tuple[int, int]:
        """``(epoch, step within the epoch)`` of ``step``, where epochs have ``epoch_steps``."""
        epoch, within = divmod(step - self.begun_step, self.epoch_steps)
        return self.begun_epoch + epoch, within

    def lane(self, rank: int, number: int) -> Lane:
        """Lane ``number`` of ``rank``."""
        mixed = _mixed(self.seed, self.shards)
        over_all = rank * self.lanes + number
        own = mixed[rank :: self.world_size][number :: self.lanes]
        return Lane(
            number=over_all,
            seed=self.seed,
            own=own,
            first=self.first[over_all] if self.first else (),
            first_epoch=self.first_epoch,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stand:
    """The positions of all lanes of all ranks before ``step``: ``marks`` by rank, then by lane.

    ``every``: the number of steps after which all ranks exchange positions again.
    """

    step: int
    deal: Deal
    marks: tuple[tuple[LaneMark, ...], ...]
    every: int = 1

    @classmethod
    def at_begin(cls, deal: Deal, *, step: int = 0) -> Stand:
        """Return the positions before the first step, of the run or of its stage."""
        return cls(step=step, deal=deal, marks=_all_at(LaneMark(), deal))

    def marks_at(
        self, step: int, *, rank: int, items: int, turn: Callable[[int], Turn]
    ) -> list[LaneMark]:
        """Return the lanes' positions of ``rank`` before a later ``step``; each step in between took ``items``."""
        marks = list(self.marks[rank])
        for between in range(self.step, step):
            lane, epoch = turn(between)
            marks[lane] = marks[lane].owing(items, epoch=epoch)
        return marks

    def begun_again(self, *, step: int, world_size: int, steps_of: Callable[[Deal], int]) -> Stand:
        """Return all shards, dealt to another number of ranks, which begin a new epoch at ``step``.

        Where epochs end for all at one step, after ``steps_of`` the new deal.
        """
        old = self.deal
        epoch = 1 + max(mark.epoch for marks in self.marks for mark in marks)
        if old.epoch_steps:
            epoch = max(epoch, 1 + old.position(step)[0])
        new = Deal.of(seed=old.seed, shards=old.shards, world_size=world_size)
        deal = replace(new, begun_step=step, begun_epoch=epoch, epoch_steps=steps_of(new))
        return Stand(step=step, deal=deal, marks=_all_at(LaneMark(epoch=epoch), deal))

    def dealt_again(self, *, step: int, world_size: int) -> Stand:
        """Return the unread parts of all shards, dealt to another number of ranks, before ``step``.

        Items that the lanes still owe count as unread: they are read again.
        """
        old = self.deal
        epoch = max(mark.epoch for marks in self.marks for mark in marks)
        left = [
            part
            for rank, marks in enumerate(self.marks)
            for number, mark in enumerate(marks)
            for part in old.lane(rank, number).left(mark)
        ]
        new = Deal.of(seed=old.seed, shards=old.shards, world_size=world_size)
        first = tuple(
            tuple(left[rank::world_size][number :: new.lanes])
            for rank in range(world_size)
            for number in range(new.lanes)
        )
        deal = replace(new, first=first, first_epoch=epoch)
        return Stand(step=step, deal=deal, marks=_all_at(LaneMark(epoch=epoch), deal))

    def to_record(self) -> dict[str, Any]:
        """Plain values, for a checkpoint and the wire."""
        return {
            "step": self.step,
            "every": self.every,
            "deal": {
                **_fields(self.deal),
                "first": [list(map(list, one)) for one in self.deal.first],
            },
            "marks": [[_listed(mark) for mark in marks] for marks in self.marks],
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Stand:
        """The other way round. Raises ValueError for the record of a stream without shards."""
        if "deal" not in record:
            raise ValueError("the run was trained on a stream that was not cut into shards")
        known = record["deal"]
        first = tuple(tuple(Part(*part) for part in one) for one in known["first"])
        marks = tuple(tuple(map(LaneMark.of_record, marks)) for marks in record["marks"])
        deal = Deal(**{**known, "first": first})
        return cls(step=int(record["step"]), deal=deal, marks=marks, every=int(record["every"]))


@dataclass(slots=True)
class ShardPositions:
    """Part of a run's state: how far all ranks were when they last said so."""

    stand: Stand | None = None

    def to_record(self, step: int) -> dict[str, Any]:
        """Empty before anybody has read."""
        del step  # who goes on from a later one draws again what comes between
        return {} if self.stand is None else self.stand.to_record()

    def restore(self, record: Mapping[str, Any]) -> None:
        """Take over a record."""
        self.stand = Stand.from_record(record) if record else None


def as_text(marks: Sequence[LaneMark]) -> str:
    """Return the marks as sent. Raises BadInputError for a position that JSON would change."""
    for mark in marks:
        _check_plain(mark.position)
    return json.dumps([_listed(mark) for mark in marks], allow_nan=False)


def from_text(text: str) -> tuple[LaneMark, ...]:
    """The other way round."""
    return tuple(map(LaneMark.of_record, json.loads(text)))


def _check_plain(value: Any) -> None:
    kind = type(value)
    if kind in (list, tuple):
        for one in value:
            _check_plain(one)
    elif kind is dict and all(type(key) is str for key in value):
        for one in value.values():
            _check_plain(one)
    elif kind not in (type(None), bool, int, float, str) or (
        kind is float and not math.isfinite(value)
    ):
        raise BadInputError(
            "--task",
            "",
            f"a position in its stream is {value!r}: it may be None, numbers, texts, and lists and dicts"
            " (with texts as keys) of such",
        )


def steps_of_epoch(lengths: Sequence[int], *, deal: Deal, shares: Sequence[int]) -> int:
    """Steps until the first lane cannot fill its rank's share (``shares``, items by rank) any more.

    The lanes of each rank take turns from its first one on, as they do where an epoch ends at once.
    """
    least = 2**62
    for rank, share in enumerate(shares):
        for number in range(deal.lanes if share else 0):
            items = sum(lengths[shard] for shard in deal.lane(rank, number).own)
            least = min(least, items // share * deal.lanes + number)
    return least


def uneven_note(dataset: Any, deal: Deal) -> str:
    """Return a warning if items of some shards come far more often than others; empty if not."""
    sizes = getattr(dataset, "sizes", ())
    if len(sizes) != deal.shards:
        return ""
    lanes = [
        deal.lane(rank, number) for rank in range(deal.world_size) for number in range(deal.lanes)
    ]
    least, most = (
        pick(lanes, key=lambda lane: sum(sizes[shard] for shard in lane.own)) for pick in (min, max)
    )
    few, many = (sum(sizes[shard] for shard in lane.own) for lane in (least, most))
    if many < _UNEVEN * max(few, 1):
        return ""
    names = getattr(dataset, "names", None) or [f"shard {shard}" for shard in range(deal.shards)]
    return (
        f"the shards are uneven: items of {names[least.own[0]]} come about {many / max(few, 1):.0f} times as often as those of"
        f" {names[most.own[0]]}; cut them into more, and more even ones"
    )


def _all_at(mark: LaneMark, deal: Deal) -> tuple[tuple[LaneMark, ...], ...]:
    return ((mark,) * deal.lanes,) * deal.world_size


def _listed(mark: LaneMark) -> list[Any]:
    """Return the mark as a list, without ``later`` if that is empty, as in most marks."""
    return list(mark if mark.later else mark[:-1])


@lru_cache(maxsize=4)
def _mixed(seed: int, size: int) -> tuple[int, ...]:
    """Return all shards in an order that depends on the seed."""
    order = KeyedPermutation(seed=seed, epoch=0, size=size).at(np.arange(size))
    return tuple(order.tolist())


def _fields(deal: Deal) -> dict[str, Any]:
    return {each.name: getattr(deal, each.name) for each in fields(deal)}
