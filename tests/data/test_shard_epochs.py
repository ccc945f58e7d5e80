"""Epochs that end in all lanes at one step: with other numbers of ranks, and where lanes are short of items."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from ddp_runner.data.shards import Deal, ShardPositions, steps_of_epoch
from tests.data.sharded import LENGTHS, Damaged, Numbers, Ranks, make, quarantine, ranks, taken

DROP = {"batch": 6, "ends_at_once": True}


def begin(count, lengths, **given):
    """Ranks that have agreed, with epochs as long as a launch would have them."""
    deal = Deal.of(seed=7, shards=len(lengths), world_size=count)
    steps = steps_of_epoch(lengths, deal=deal, shares=[6 // count] * count)
    loaders, group, positions = ranks(
        count, lengths=lengths, steps_per_epoch=steps, **DROP, **given
    )
    group.do(lambda rank, one: loaders[rank].agree(one, step=0))
    return loaders, group, positions


def counted(loaders, steps):
    """How often each item came."""
    return Counter(item[:2] for loader in loaders for step in steps for item in taken(loader, step))


def test_more_ranks_begin_a_new_epoch_far_into_a_run():
    """Far into a run as well: they begin a new epoch, and each of theirs is as long as their shards are."""
    lengths = [8] * 12
    loaders, group, _ = begin(2, lengths)
    far = loaders[0]._source.cut.order.steps_per_epoch * 300 + 4
    for loader in loaders:
        loader.take(far)
    group.do(lambda rank, one: loaders[rank].gather(one, step=far + 1))
    record = loaders[0]._source._positions.to_record(far + 1)
    more, wide, positions = ranks(3, lengths=lengths, steps_per_epoch=16, **DROP)
    for one in positions:
        one.restore(record)
    wide.do(lambda rank, one: more[rank].agree(one, step=far + 1))
    deal = positions[0].stand.deal
    assert (deal.begun_step, deal.epoch_steps, deal.first) == (far + 1, 16, ())
    for epoch in range(3):
        begun = far + 1 + epoch * 16
        times = counted(more, range(begun, begun + 16))
        assert times == dict.fromkeys([(s, n) for s in range(12) for n in range(8)], 1)


def test_fewer_ranks_begin_a_new_epoch_and_go_on():
    """Also where a lane had read all that it had. Over and over each item comes as often as any other."""
    lengths = [8] * 12
    loaders, group, positions = begin(3, lengths)
    for loader in loaders:
        for step in range(15):
            loader.take(step)
    group.do(lambda rank, one: loaders[rank].gather(one, step=15))
    for rank, loader in enumerate(loaders[:2]):
        loader.assign(rank=rank, world_size=2, micro_batch_size=2)
    Ranks(2).do(lambda rank, one: loaders[rank].agree(one, step=15))
    steps = positions[0].stand.deal.epoch_steps
    assert steps == 12  # 6 lanes of 2 shares of 3 items
    for epoch in range(3):
        first = 15 + epoch * steps
        times = counted(loaders[:2], range(first, first + steps))
        assert set(times.values()) == {1}
        assert len(times) == 6 * steps


def test_lanes_that_are_smaller_than_a_share_end_no_run():
    """After a rank was lost each of two ranks has lanes with 2 items, and needs 3."""
    lengths = [2] * 12
    loaders, group, positions = begin(3, lengths)
    group.do(lambda rank, one: loaders[rank].gather(one, step=0))
    for rank, loader in enumerate(loaders[:2]):
        loader.assign(rank=rank, world_size=2, micro_batch_size=3)
    Ranks(2).do(lambda rank, one: loaders[rank].agree(one, step=0))
    assert positions[0].stand.deal.epoch_steps == 6
    times = counted(loaders[:2], range(24))
    assert set(times) == {(s, n) for s in range(12) for n in range(2)}
    assert max(times.values()) - min(times.values()) <= 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_lane_that_ends_early_goes_on_with_its_next_epoch(workers):
    """And not once more with this one: no item comes twice before each other one of its lane."""
    loader = make(
        Damaged([5] * 8), batch=2, steps_per_epoch=24, ends_at_once=True,
        quarantine=quarantine(4), num_workers=workers,
    )  # fmt: skip
    try:
        found = [taken(loader, step) for step in range(24 * 3)]
    finally:
        loader.close()
    assert all(len({item[:2] for item in items}) == 2 for items in found)
    for shard in range(8):
        readable = {n for n in range(5) if (shard, n) not in Damaged.BAD}
        drawn = [n for items in found for where, n, _ in items if where == shard]
        for first in range(0, len(drawn) - len(readable), len(readable)):
            assert set(drawn[first : first + len(readable)]) == readable


@pytest.mark.parametrize("said", [0, 5, 20])
def test_a_replacement_finds_lanes_that_ended_early_where_they_were(said):
    """In the next epoch already, of which it does not begin again."""
    how = {"batch": 2, "steps_per_epoch": 24, "ends_at_once": True}
    first = make(Damaged([5] * 8), quarantine=quarantine(4), positions=ShardPositions(), **how)
    before = [taken(first, step) for step in range(said)]
    Ranks(1).do(lambda rank, one: first.agree(one, step=said))
    record = first._source._positions.to_record(said)
    expected = before + [taken(first, step) for step in range(said, 80)]
    for later in (23, 24, 25, 31, 47, 56, 70):
        positions = ShardPositions()
        positions.restore(json.loads(json.dumps(record)))
        again = make(Damaged([5] * 8), quarantine=quarantine(4), positions=positions, **how)
        assert [taken(again, step) for step in range(later, 80)] == expected[later:]


def test_a_checkpoint_without_lengths_of_epochs_goes_on():
    """One of before: its epochs are those of the order."""
    loader = make(Numbers(LENGTHS), batch=1, steps_per_epoch=5, ends_at_once=True)
    expected = [taken(loader, step) for step in range(20)]
    positions = ShardPositions()
    first = make(
        Numbers(LENGTHS), batch=1, steps_per_epoch=5, ends_at_once=True, positions=positions
    )
    for step in range(7):
        first.take(step)
    Ranks(1).do(lambda rank, one: first.gather(one, step=7))
    record = positions.to_record(7)
    for name in ("begun_step", "begun_epoch", "epoch_steps"):
        del record["deal"][name]
    positions.restore(record)
    again = make(
        Numbers(LENGTHS), batch=1, steps_per_epoch=5, ends_at_once=True, positions=positions
    )
    assert [taken(again, step) for step in range(7, 20)] == expected[7:]


@pytest.mark.parametrize("ends_at_once", [False, True])
@pytest.mark.parametrize("back", [3, 7])
def test_ranks_go_back_to_the_positions_of_an_older_deal(ends_at_once, back):
    """Also to the very step that was taken last: what they read since then was of another deal."""
    how = {"batch": 6, "steps_per_epoch": 16, "lengths": [8] * 12, "ends_at_once": ends_at_once}
    loaders, group, positions = ranks(3, **how)
    group.do(lambda rank, one: loaders[rank].agree(one, step=0))
    counted(loaders, range(back))
    group.do(lambda rank, one: loaders[rank].gather(one, step=back))
    record = positions[0].to_record(back)

    def on_two(call):
        Ranks(2).do(lambda rank, one: call(loaders[rank], one))

    for rank, loader in enumerate(loaders[:2]):
        loader.assign(rank=rank, world_size=2, micro_batch_size=3)
    on_two(lambda loader, one: loader.agree(one, step=back))
    expected = [[taken(loader, step) for step in range(back, back + 9)] for loader in loaders[:2]]
    for last in (back, back + 2):
        for loader in loaders[:2]:
            loader.take(last)
            loader._source._positions.restore(record)
        on_two(lambda loader, one: loader.go_back(one, step=back))
        again = [[taken(loader, step) for step in range(back, back + 9)] for loader in loaders[:2]]
        assert again == expected
