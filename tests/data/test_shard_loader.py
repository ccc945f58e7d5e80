"""A stream in shards: the same samples whoever reads them, also after a worker died, hung, or a rank was replaced."""

from __future__ import annotations

import os
import random
import signal

import pytest

from ddp_runner.data.shards import LaneMark, ShardPositions, Stand
from ddp_runner.data.workers.shard_reader import LaneEmptyError
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.faults import FaultError, FaultKind
from tests.data.failing import Once, hang
from tests.data.sharded import (
    LENGTHS,
    Damaged,
    Numbers,
    Ranks,
    make,
    quarantine,
    ranks,
    taken,
)

EVERYTHING = {(shard, n) for shard, length in enumerate(LENGTHS) for n in range(length)}
STEPS = 30
FOREVER_S = 100.0


class Drawn(Numbers):
    """A number is drawn where a shard is begun, as an order is; nothing for an item."""

    deterministic = True

    def read(self, shard, position):
        at, drawn = position or (0, random.random())
        for number in range(at, self.lengths[shard]):
            yield (shard, number, drawn), (number + 1, drawn)


def take_all(loader):
    return [taken(loader, step) for step in range(STEPS)]


def fault_free(rank=0, world_size=1, **given):
    return take_all(make(Numbers(LENGTHS), rank=rank, world_size=world_size, **given))


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_steps_have_the_same_samples_with_any_number_of_workers(workers):
    """And the same random numbers; as many workers read as divide the lanes."""
    loader = make(Numbers(LENGTHS), num_workers=workers)
    try:
        assert take_all(loader) == fault_free()
        assert len(loader.worker_pids) == {1: 1, 2: 2, 3: 2, 8: 8}[workers]
    finally:
        loader.close()


def test_ranks_read_other_items_and_together_all_of_them():
    found = []
    for rank in range(2):
        loader = make(Numbers(LENGTHS), rank=rank, world_size=2)
        found.append({item[:2] for step in range(60) for item in taken(loader, step)})
    assert not found[0] & found[1]
    assert found[0] | found[1] == EVERYTHING


@pytest.mark.parametrize("workers", [0, 2])
def test_draws_of_a_shards_beginning_follow_from_seed_and_epoch(workers):
    """Also where no generator is seeded for items, and whatever was drawn before."""
    loader = make(Drawn(LENGTHS), num_workers=workers)
    try:
        random.seed(workers)
        steps = take_all(loader)
    finally:
        loader.close()
    items = [item for step in steps for item in step]
    drawn = {(shard, value) for shard, _, value in items}
    assert len(drawn) > len(LENGTHS)  # another one each epoch
    assert steps == take_all(make(Drawn(LENGTHS)))
    assert [taken(make(Drawn(LENGTHS)), 13)] == steps[13:14]


@pytest.mark.parametrize("ends_at_once", [False, True])
def test_a_stage_reads_as_a_run_that_begins_where_it_does(ends_at_once):
    """Whichever step of the whole run that is, also where a replacement goes on amid it."""
    how = {"batch": 1, "steps_per_epoch": 5, "ends_at_once": ends_at_once}
    expected = take_all(make(Numbers(LENGTHS), **how))
    positions = ShardPositions()
    loader = make(Numbers(LENGTHS), first_step=13, positions=positions, **how)
    Ranks(1).do(lambda rank, one: loader.agree(one, step=13))
    assert [taken(loader, 13 + step) for step in range(20)] == expected[:20]
    Ranks(1).do(lambda rank, one: loader.gather(one, step=33))
    again = make(Numbers(LENGTHS), first_step=13, positions=positions, **how)
    assert [taken(again, 13 + step) for step in range(22, STEPS)] == expected[22:]


def test_a_step_that_is_taken_again_has_the_samples_that_it_had():
    loader = make(Numbers(LENGTHS))
    expected = fault_free()
    for step in (0, 1, 2, 2, 3, 3, 4):
        assert taken(loader, step) == expected[step]
    copies = [tuple(item) for one in loader.take_copy(5) for item in one.batch]
    assert copies == taken(loader, 5) == expected[5]
    assert loader.gives_again(5)
    assert not loader.gives_again(4)


@pytest.mark.parametrize("which", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_worker_that_is_lost_is_replaced_from_what_was_delivered(which):
    reported = []
    loader = make(Numbers(LENGTHS), num_workers=2, timeout_s=1.0, on_repaired=reported.append)
    try:
        found = []
        for step in range(STEPS):
            if step == 7:
                os.kill(loader.worker_pids[1], which)
            found.append(taken(loader, step))
        assert found == fault_free()
        kinds = {signal.SIGKILL: "LOADER_WORKER_DIED", signal.SIGSTOP: "LOADER_TIMEOUT"}
        (repaired,) = reported
        assert repaired.fault.kind.name == kinds[which]
        assert (repaired.action, repaired.inexact_reason) == ("2 loader workers restarted", "")
    finally:
        loader.close()


class Breaking(Numbers, Once):
    """Item 2 of shard 4 does something to who reads it: to the first one, or to any worker."""

    def __init__(self, what, *, always=False):
        Numbers.__init__(self, LENGTHS)
        Once.__init__(self)
        self._what, self._always, self._rank_pid = what, always, os.getpid()

    def read(self, shard, position):
        for item, behind in super().read(shard, position):
            if item[:2] == (4, 2) and (self._always or not self.has_happened()):
                self._first[0] = 1
                assert os.getpid() != self._rank_pid, "no rank reads what ends a worker"
                self._what()
            yield item, behind


def test_a_worker_that_hangs_in_an_item_is_replaced(hangs_are_shown):
    """Its time is up; the next one reads on, and the log has its stack."""
    reported, lines = [], []
    how = {"timeout_s": FOREVER_S, "on_repaired": reported.append, "log": lines.append}
    loader = make(Breaking(hang), num_workers=2, **how)
    try:
        assert take_all(loader) == fault_free()
        assert [one.fault.kind for one in reported] == [FaultKind.LOADER_TIMEOUT]
        assert any("stack of loader worker" in line and "in hang" in line for line in lines)
    finally:
        loader.close()


def test_an_item_that_kills_every_worker_does_not_kill_the_rank():
    """As often as that was tried."""
    loader = make(
        Breaking(lambda: os.kill(os.getpid(), signal.SIGSEGV), always=True), num_workers=2
    )
    with pytest.raises(FaultError) as raised:
        take_all(loader)
    assert raised.value.fault.kind is FaultKind.LOADER_WORKER_DIED
    assert "was killed by SIGSEGV" in raised.value.fault.cause
    assert loader.worker_pids == ()


class Flaky(Numbers):
    """Raises while shard 4 is read, so often."""

    def __init__(self, times):
        super().__init__(LENGTHS)
        self.names = [f"file {shard}" for shard in range(len(LENGTHS))]
        self.times = times

    def read(self, shard, position):
        for item, behind in super().read(shard, position):
            if item[:2] == (4, 2) and self.times:
                self.times -= 1
                raise OSError("out of reach")
            yield item, behind


def test_a_read_that_raises_is_tried_again_where_it_was():
    reported = []
    loader = make(Flaky(2), on_repaired=reported.append)
    assert take_all(loader) == fault_free()
    assert [one.action for one in reported] == ["read again"] * 2


def test_a_read_that_raises_again_and_again_ends_the_run():
    """By name, and with what is to be looked at."""
    loader = make(Flaky(3))
    with pytest.raises(FaultError) as raised:
        take_all(loader)
    assert raised.value.fault.kind is FaultKind.BAD_SAMPLE
    assert raised.value.fault.cause.startswith(
        "an item of the stream could not be loaded: item 2 of shard 4 (file 4): OSError: out of reach ("
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_items_that_cannot_be_read_are_left_out_and_reported_once(workers):
    """Over more than an epoch, in which they come again; the next item takes the place."""
    reported, known = [], quarantine(3)
    loader = make(
        Damaged(LENGTHS), num_workers=workers, on_repaired=reported.append, quarantine=known
    )
    try:
        found = [item[:2] for step in range(STEPS) for item in taken(loader, step)]
    finally:
        loader.close()
    assert set(found) == EVERYTHING - set(Damaged.BAD)
    assert len(found) == 4 * STEPS > len(EVERYTHING) * 2
    assert {one.fault.cause.partition(" (")[0] for one in reported} == {
        f"an item of the stream could not be loaded: item {number} of shard {shard}: ValueError: damaged"
        for shard, number in Damaged.BAD
    }
    assert len(reported) == 3
    assert {one.inexact_reason for one in reported} == {
        "bad samples were replaced: see quarantine.jsonl"
    }
    assert len(known) == 3


def test_reading_again_what_was_left_out_counts_as_before():
    """A replacement draws what it owes: what cannot be read is none of that."""
    first = make(Damaged(LENGTHS), quarantine=quarantine(3))
    expected = [taken(first, step) for step in range(STEPS)]
    again = make(Damaged(LENGTHS), quarantine=quarantine(3))
    assert [taken(again, step) for step in range(11, STEPS)] == expected[11:]


@pytest.mark.parametrize(("bad_max", "why"), [(0, "substitute would"), (2, "max_bad_samples=2")])
def test_more_items_than_may_be_left_out_end_the_run(bad_max, why):
    loader = make(Damaged(LENGTHS), quarantine=quarantine(bad_max))
    with pytest.raises(FaultError) as raised:
        take_all(loader)
    fault = raised.value.fault
    assert fault.kind is FaultKind.BAD_SAMPLE
    assert "ValueError: damaged" in fault.cause
    assert why in fault.cause


def test_a_stream_without_items_is_an_error():
    """It is said which shards these are."""
    loader = make(Numbers([3, 0, 3]))
    with pytest.raises(FaultError, match="no item in 1: leave empty shards out") as raised:
        take_all(loader)
    assert LaneEmptyError.__name__ in raised.value.fault.cause
    loader = make(Numbers([0, 0, 0]))
    with pytest.raises(FaultError, match="leave empty shards out") as raised:
        loader.take(0)
    assert LaneEmptyError.__name__ in raised.value.fault.cause


def test_shards_of_unequal_length_end_an_epoch_at_one_step():
    """Each epoch of each lane begins with a shard's first item, and no item comes twice in it."""
    for workers in (0, 2):
        loader = make(
            Numbers(LENGTHS), batch=1, steps_per_epoch=5, ends_at_once=True, num_workers=workers
        )
        try:
            found = [taken(loader, step)[0][:2] for step in range(20)]
        finally:
            loader.close()
        epochs = [found[first : first + 5] for first in range(0, 20, 5)]
        for epoch in epochs:
            assert len(set(epoch)) == 5
            assert [n for _, n in epoch] == [0] * 5  # of 8 lanes
    again = make(Numbers(LENGTHS), batch=1, steps_per_epoch=5, ends_at_once=True)
    assert [taken(again, step)[0][:2] for step in range(13, 20)] == found[13:]


def test_all_know_how_far_each_one_is():
    """In the middle of shards; whoever goes on from there has the samples of those who went on."""
    loaders, group, positions = ranks(2)
    group.do(lambda rank, one: loaders[rank].agree(one, step=0))
    expected = [fault_free(rank, 2) for rank in range(2)]
    for step in range(11):
        for loader in loaders:
            loader.take(step)
    group.do(lambda rank, one: loaders[rank].gather(one, step=11))
    assert positions[0].stand == positions[1].stand
    assert positions[0].stand.step == 11
    record = positions[0].to_record(11)
    for rank in range(2):
        restored = ShardPositions()
        restored.restore(record)
        other = make(Numbers(LENGTHS), rank=rank, world_size=2, positions=restored)
        later = ShardPositions()
        later.restore(record)
        replaced = make(Numbers(LENGTHS), rank=rank, world_size=2, positions=later)
        assert [taken(other, step) for step in range(11, 20)] == expected[rank][11:20]
        assert [taken(replaced, step) for step in range(14, 20)] == expected[rank][14:20]


def test_where_a_step_failed_all_say_where_they_were_before_it():
    """One has taken the step, the other, just replaced, has not: what is saved is of before it."""
    loaders, group, positions = ranks(2)
    group.do(lambda rank, one: loaders[rank].agree(one, step=0))
    for step in range(6):
        loaders[0].take(step)
    replaced = ShardPositions()
    replaced.restore(positions[0].to_record(5))
    loaders[1] = make(Numbers(LENGTHS), rank=1, world_size=2, positions=replaced)
    group.do(lambda rank, one: loaders[rank].agree(one, step=5))
    assert positions[0].stand == replaced.stand
    for rank in range(2):
        again = make(Numbers(LENGTHS), rank=rank, world_size=2, positions=positions[0])
        assert taken(again, 5) == taken(loaders[rank], 5) == fault_free(rank, 2)[5]


def test_ranks_say_so_at_steps_by_the_time_of_the_first(monkeypatch):
    now_s = 0.0
    monkeypatch.setattr("ddp_runner.data.shard_agreement.time.monotonic", lambda: now_s)
    loaders, group, positions = ranks(2)
    group.do(lambda rank, one: loaders[rank].agree(one, step=0))
    assert not loaders[0].gathers(0)
    assert loaders[0].gathers(1)
    now_s = 0.25
    group.do(lambda rank, one: loaders[rank].gather(one, step=1))
    assert [positions[rank].stand.every for rank in range(2)] == [8, 8]
    assert [loaders[0].gathers(step) for step in (1, 8, 9)] == [False, False, True]


class Alike:
    """All ranks say what this one says."""

    def __init__(self, count):
        self._count = count

    def exchange(self, name, value):
        return [value] * self._count


@pytest.mark.parametrize(("count", "every"), [(2, 8), (32, 8), (128, 32)])
def test_many_ranks_say_so_more_rarely(monkeypatch, count, every):
    """What they say is read from one store by each of them."""
    now_s = 0.0
    monkeypatch.setattr("ddp_runner.data.shard_agreement.time.monotonic", lambda: now_s)
    positions = ShardPositions()
    loader = make(Numbers([3] * count), world_size=count, positions=positions, batch=count)
    loader.agree(Alike(count), step=0)
    now_s = 1.0
    loader.take(0)
    for step in range(1, 4):
        loader.take(step)
    loader.gather(Alike(count), step=4)
    assert positions.stand.every == every


def test_other_ranks_have_the_shards_dealt_again_and_say_so():
    reported = []
    loaders, group, positions = ranks(3, batch=3, lengths=[8] * 9)
    group.do(lambda rank, one: loaders[rank].agree(one, step=0))
    seen = [item for loader in loaders for step in range(3) for item in taken(loader, step)]
    group.do(lambda rank, one: loaders[rank].gather(one, step=3))
    for loader in loaders[:2]:
        loader._source._on_other = reported.append
        loader.assign(rank=loaders.index(loader), world_size=2, micro_batch_size=2)
    fewer = Ranks(2)
    fewer.do(lambda rank, one: loaders[rank].agree(one, step=3))
    assert positions[0].stand.deal == positions[1].stand.deal
    assert reported == [
        "from step 3 on the stream's shards are dealt to 2 ranks, and were to 3: samples come in another order"
    ]
    more = [item for loader in loaders[:2] for step in range(3, 11) for item in taken(loader, step)]
    assert not {item[:2] for item in seen} & {item[:2] for item in more}


def test_ranks_that_last_heard_of_others_at_different_steps_deal_alike():
    """A rank dies while all say where they are: one survivor has heard of all, the other has not."""
    loaders, group, positions = ranks(3, batch=3)
    group.do(lambda rank, one: loaders[rank].agree(one, step=0))
    for loader in loaders:
        for step in range(3):
            loader.take(step)
    before = positions[0].stand
    group.do(lambda rank, one: loaders[rank].gather(one, step=3))
    positions[0].stand = before
    for rank, loader in enumerate(loaders[:2]):
        loader.assign(rank=rank, world_size=2, micro_batch_size=2)
    Ranks(2).do(lambda rank, one: loaders[rank].agree(one, step=3))
    assert positions[0].stand == positions[1].stand
    assert positions[0].stand.deal.first  # of what was left at step 3
    assert sum(len(part) for part in positions[0].stand.deal.first) < len(LENGTHS) + 1
    drawn = sum(part.drawn for parts in positions[0].stand.deal.first for part in parts)
    finished = {part.shard for parts in positions[0].stand.deal.first for part in parts}
    whole = sum(length for shard, length in enumerate(LENGTHS) if shard not in finished)
    assert drawn + whole == 9


def test_other_shards_than_before_are_refused():
    _, _, positions = ranks(1)
    positions[0].stand = Stand.at_begin(make(Numbers(LENGTHS))._source._deal)
    loader = make(Numbers(LENGTHS[1:]), positions=positions[0])
    with pytest.raises(BadInputError, match="its stream has 8 shards, and had 9 before"):
        Ranks(1).do(lambda rank, one: loader.agree(one, step=0))


def test_too_few_shards_are_refused():
    with pytest.raises(BadInputError, match="3 ranks need at least 3 shards, the stream has 2"):
        make(Numbers([4, 4]), world_size=3)


def test_shards_that_are_uneven_are_named():
    """A lane reads its own over and over while another reads its own once; not where an epoch ends at once."""
    uneven, even = Numbers([10] * 3), Numbers([10] * 3)
    uneven.sizes, even.sizes = [100, 2000, 90], [100, 250, 90]
    uneven.names = ["a.txt", "b.txt", "c.txt"]
    (note,) = make(uneven).notes
    assert note == (
        "the shards are uneven: items of c.txt come about 22 times as often as those of b.txt;"
        " cut them into more, and more even ones"
    )
    assert make(even).notes == make(Numbers([1, 100])).notes == ()
    assert make(uneven, ends_at_once=True).notes == ()


def test_a_position_that_cannot_be_kept_is_refused():
    class Odd(Numbers):
        def read(self, shard, position):
            for item, behind in super().read(shard, position):
                yield item, {behind}

    loader = make(Odd(LENGTHS))
    loader.take(0)
    with pytest.raises(BadInputError, match=r"a position in its stream is \{4\}"):
        Ranks(1).do(lambda rank, one: loader.gather(one, step=1))


def test_marks_are_not_shared_with_the_state():
    """What was said stays as it was while the loader reads on."""
    loader = make(Numbers(LENGTHS), positions=(positions := ShardPositions()))
    Ranks(1).do(lambda rank, one: loader.agree(one, step=0))
    loader.take(0)
    assert positions.stand.marks[0][0] == LaneMark()


def test_a_smaller_micro_batch_and_fewer_ahead_change_no_sample():
    loader = make(Numbers(LENGTHS), num_workers=2)
    try:
        found = []
        for step in range(STEPS):
            if step == 5:
                loader.shrink_prefetch()
            if step == 9:
                loader.assign(rank=0, world_size=1, micro_batch_size=1)
            found.append(taken(loader, step))
        assert found == fault_free()
        assert (loader.prefetch_factor, loader.share_samples) == (1, 4)
    finally:
        loader.close()


def test_ranks_with_no_share_of_a_step_read_nothing():
    loader = make(Numbers(LENGTHS), rank=2, world_size=3, batch=2)
    assert loader.take(0) == []
