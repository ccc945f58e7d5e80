"""Shards are dealt to ranks and lanes, each to one; positions are kilobytes; other ranks get what is left."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

from ddp_runner.data.order import share_size
from ddp_runner.data.shards import (
    Deal,
    LaneMark,
    Part,
    ShardPositions,
    Stand,
    Turn,
    as_text,
    from_text,
    is_sharded,
    steps_of_epoch,
)
from ddp_runner.data.stream import StreamPosition
from ddp_runner.data.workers.shard_reader import ShardReader, ShareKey
from ddp_runner.kernel.rules.errors import BadInputError
from tests.data.sharded import Numbers

WORLDS = st.integers(1, 5)
few = settings(max_examples=25, deadline=None)


def lanes_of(deal):
    return [
        deal.lane(rank, number) for rank in range(deal.world_size) for number in range(deal.lanes)
    ]


@few
@given(world_size=WORLDS, more=st.integers(0, 80), seed=st.integers(0, 2**32))
def test_each_shard_belongs_to_one_lane_of_one_rank(world_size, more, seed):
    """And no lane is without any."""
    shards = world_size + more
    deal = Deal.of(seed=seed, shards=shards, world_size=world_size)
    owned = [lane.own for lane in lanes_of(deal)]
    assert all(owned)
    assert sorted(shard for own in owned for shard in own) == list(range(shards))


@few
@given(world_size=WORLDS, more=st.integers(0, 60), epoch=st.integers(0, 5))
def test_an_epoch_of_a_lane_has_each_of_its_shards_once(world_size, more, epoch):
    deal = Deal.of(seed=3, shards=world_size + more, world_size=world_size)
    for lane in lanes_of(deal):
        assert sorted(part.shard for part in lane.parts(epoch)) == sorted(lane.own)


def test_epochs_have_other_orders():
    lane = Deal.of(seed=3, shards=40, world_size=1).lane(0, 0)
    assert len(lane.own) > 1
    orders = {tuple(part.shard for part in lane.parts(epoch)) for epoch in range(8)}
    assert len(orders) == math.factorial(len(lane.own))


def test_fewer_shards_than_ranks_are_refused():
    with pytest.raises(ValueError, match="4 ranks need at least 4 shards, the stream has 3"):
        Deal.of(seed=1, shards=3, world_size=4)


class ByIndex(Dataset):
    """Has parts on disk, and reads them."""

    def __init__(self, shards):
        self.shards = shards

    def __getitem__(self, index):
        return index

    def read(self, path):
        return path


class CutStream(IterableDataset):
    """As torch has it."""

    shards = 3

    def read(self, shard, position):
        yield shard, position

    def __iter__(self):
        return self.read(0, None)


class PartsStream(IterableDataset):
    """Its parts are no number."""

    shards = ("a.bin", "b.bin")

    def read(self, path):
        yield path

    def __iter__(self):
        return iter(self.shards)


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (Numbers([3, 4]), True),
        (CutStream(), True),
        (ByIndex(3), False),
        (ByIndex(["a.bin", "b.bin"]), False),
        (PartsStream(), False),
        (range(3), False),
    ],
    ids=["cut", "of torch", "by index", "parts by index", "parts", "range"],
)
def test_only_a_stream_that_says_how_many_shards_it_has_is_cut(dataset, expected):
    """A dataset whose items have indices may read shards of its own."""
    assert is_sharded(dataset) is expected


def read(deal, lengths, *, rank, steps, items, first=0, marks=None, epoch=-1):
    """What ``rank`` reads in ``steps``, and its marks behind it."""
    marks = list(marks or [LaneMark()] * deal.lanes)
    lanes = [deal.lane(rank, number) for number in range(deal.lanes)]
    source = ShardReader(Numbers(lengths), lanes=lanes, marks=tuple(marks), collate=list)
    found = []
    for step in range(first, first + steps):
        lane = step % deal.lanes
        share = source.load(ShareKey(step, lane, tuple(range(items)), (items,), epoch))
        marks[lane] = share.mark
        found.append([item[:2] for item in share.batches[0]])
    return found, marks


LENGTHS = st.lists(st.integers(1, 9), min_size=6, max_size=20)


@few
@given(lengths=LENGTHS, before=st.integers(1, 3), after=st.integers(1, 3), taken=st.integers(0, 30))
def test_other_ranks_read_exactly_what_is_left(lengths, before, after, taken):
    """Of an epoch in which everybody has read some, the new ranks read each item that nobody has read, once."""
    old = Deal.of(seed=5, shards=len(lengths), world_size=before)
    fewest = min(sum(lengths[shard] for shard in lane.own) for lane in lanes_of(old))
    steps = min(taken, fewest * old.lanes)
    seen, marks = [], []
    for rank in range(before):
        found, stand = read(old, lengths, rank=rank, steps=steps, items=1)
        seen += [item for items in found for item in items]
        marks.append(tuple(stand))
    stand = Stand(step=steps, deal=old, marks=tuple(marks)).dealt_again(
        step=steps, world_size=after
    )
    assert stand.step == steps
    for rank in range(after):
        for number in range(stand.deal.lanes):
            lane = stand.deal.lane(rank, number)
            for part in lane.parts(0) if stand.deal.first[lane.number] else ():
                left = Numbers(lengths).read(part.shard, part.position)
                seen += [item[:2] for item, _ in left]
    everything = [(shard, n) for shard, length in enumerate(lengths) for n in range(length)]
    assert sorted(seen) == everything


@few
@given(lengths=LENGTHS, said=st.integers(0, 20), later=st.integers(0, 20))
def test_marks_at_a_later_step_are_those_of_who_has_read_on(lengths, said, later):
    """A replacement that draws and drops what it owes gives the items that its predecessor would have."""
    deal = Deal.of(seed=5, shards=len(lengths), world_size=1)
    _, marks = read(deal, lengths, rank=0, steps=said, items=2)
    stand = Stand(step=said, deal=deal, marks=(tuple(marks),))
    owing = stand.marks_at(said + later, rank=0, items=2, turn=lambda step: Turn(step % deal.lanes))
    whole, _ = read(deal, lengths, rank=0, steps=said + later + 6, items=2)
    again, _ = read(deal, lengths, rank=0, first=said + later, steps=6, items=2, marks=owing)
    assert again == whole[said + later :]


def test_what_is_owed_belongs_to_the_epochs_of_its_steps():
    deal = Deal.of(seed=5, shards=2, world_size=1)
    stand = Stand.at_begin(deal)
    turn = lambda step: Turn(step % 2, step // 6)  # noqa: E731
    assert stand.marks_at(5, rank=0, items=3, turn=turn) == [LaneMark(owed=9), LaneMark(owed=6)]
    assert stand.marks_at(9, rank=0, items=3, turn=turn) == [
        LaneMark(owed=9, later=((1, 6),)),
        LaneMark(owed=9, later=((1, 3),)),
    ]
    marks = stand.marks_at(14, rank=0, items=3, turn=turn)
    assert marks[0] == LaneMark(owed=9, later=((1, 9), (2, 3)))
    assert marks[0].owed_in_all == 21
    assert from_text(as_text(marks)) == tuple(marks)


def test_marks_of_older_checkpoints_are_read():
    """They owe nothing of later epochs, and their deals do not say how long an epoch is."""
    stand = Stand.at_begin(Deal.of(seed=1, shards=2, world_size=1), step=4)
    record = stand.to_record()
    record["marks"] = [[[2, 1, 17, 3, 5], [2, 0, None, 0, 0]]]
    for name in ("begun_step", "begun_epoch", "epoch_steps"):
        del record["deal"][name]
    known = Stand.from_record(record)
    assert known.marks == ((LaneMark(2, 1, 17, 3, 5), LaneMark(2)),)
    assert known.deal == stand.deal


@few
@given(
    lengths=LENGTHS,
    world_size=st.integers(1, 3),
    batch=st.integers(3, 8),
)
def test_an_epoch_that_ends_at_once_is_the_longest_possible(lengths, world_size, batch):
    """In that many steps nobody reads an item twice; in one more somebody would have to."""
    deal = Deal.of(seed=5, shards=len(lengths), world_size=world_size)
    shares = [share_size(batch, rank=rank, world_size=world_size) for rank in range(world_size)]
    steps = steps_of_epoch(lengths, deal=deal, shares=shares)

    def repeats(count):
        for rank, items in enumerate(shares):
            found, _ = read(deal, lengths, rank=rank, steps=count, items=items, epoch=0)
            flat = [item for some in found for item in some]
            if len(set(flat)) < len(flat):
                return True
        return False

    assert not repeats(steps)
    assert repeats(steps + 1)


def test_a_stand_is_the_same_after_json_and_in_kilobytes():
    """Of 256 shards, each position a place in a file: what a checkpoint and a replacement get."""
    deal = Deal.of(seed=1, shards=256, world_size=8)
    marks = tuple(
        tuple(LaneMark(epoch=1, place=1, position=10**11, drawn=10**6) for _ in range(deal.lanes))
        for _ in range(8)
    )
    stand = Stand(step=100, deal=deal, marks=marks, every=20)
    text = json.dumps(stand.to_record())
    assert len(text) < 10_000
    assert Stand.from_record(json.loads(text)) == stand
    again = stand.dealt_again(step=120, world_size=5)
    text = json.dumps(again.to_record())
    assert len(text) < 20_000
    assert Stand.from_record(json.loads(text)) == again
    assert isinstance(again.deal.first[0][0], Part)


def test_positions_are_part_of_a_state_once_known():
    positions = ShardPositions()
    assert positions.to_record(3) == {}
    positions.stand = Stand.at_begin(Deal.of(seed=1, shards=2, world_size=1))
    other = ShardPositions()
    other.restore(positions.to_record(3))
    assert other.stand == positions.stand
    other.restore({})
    assert other.stand is None


def test_a_state_of_the_other_kind_of_stream_is_refused():
    positions = ShardPositions(Stand.at_begin(Deal.of(seed=1, shards=2, world_size=1)))
    with pytest.raises(ValueError, match="a stream that was cut into shards"):
        StreamPosition().restore(positions.to_record(0))
    with pytest.raises(ValueError, match="a stream that was not cut into shards"):
        positions.restore({"step": 1, "epoch": 0, "items": 3})


@pytest.mark.parametrize("position", [None, 3, 2.5, "there", [1, [2, "x"]], {"a": {"b": None}}])
def test_plain_positions_are_sent_as_they_are(position):
    mark = LaneMark(position=position, drawn=3)
    assert from_text(as_text([mark])) == (mark,)


@pytest.mark.parametrize("position", [{1, 2}, {1: 2}, math.nan, [math.inf], b"there", object()])
def test_a_position_that_would_not_come_back_is_refused(position):
    """A dict with numbers as keys would come back with texts as keys."""
    with pytest.raises(BadInputError, match="a position in its stream is"):
        as_text([LaneMark(position=position)])
