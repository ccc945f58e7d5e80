"""Every source gives each sample once, in the same order, through kills, repeated steps, replacements and resumes."""

from __future__ import annotations

import io
import os
import random
import signal

import pytest
import torch

from ddp_runner.data.loader import Loader
from ddp_runner.data.order import SampleOrder
from ddp_runner.data.shard_source import ShardSource
from ddp_runner.data.shards import ShardPositions
from ddp_runner.data.source import Cut
from ddp_runner.data.stream import StreamOrder, StreamPosition, StreamSource
from ddp_runner.features.preload.memory import PreloadedDataset, SampleMemory
from ddp_runner.features.preload.reading import Reading
from tests.data.mapped import map_source
from tests.data.sharded import Numbers, Ranks

SAMPLES, BATCH = 24, 4
EPOCH = SAMPLES // BATCH
STEPS = 2 * EPOCH
SHARDS = 12


class Rows:
    """Sample ``n`` is ``(n, a random number that its seed decides)``."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return (index, random.random())


class Fixed(Rows):
    deterministic = True

    def __getitem__(self, index):
        return (index, index / 7)


class Items:
    """The same as a stream, in an order of the epoch's."""

    def __init__(self):
        self._epoch = self._next = 0

    def set_epoch(self, epoch):
        self._epoch, self._next = epoch, 0

    def __iter__(self):
        order = random.Random(self._epoch).sample(range(SAMPLES), SAMPLES)
        while self._next < SAMPLES:
            self._next += 1
            yield (order[self._next - 1], random.random())


class Stateful(Items):
    def state_dict(self):
        return {"next": self._next}

    def load_state_dict(self, state):
        self._next = state["next"]


class Kind:
    """One kind of source. ``is_same_in_any_world``: also another number of ranks gives the same steps.

    ``is_complete``: what a change of the world leaves of an epoch is given after it.
    """

    workers = 0
    is_same_in_any_world = True
    is_complete = True

    def position(self):
        """Part of a rank's state; None where the step says everything."""
        return

    def loader(self, rank, world_size, position):
        order = self.order()
        cut = Cut(order=order, rank=rank, world_size=world_size, micro_batch_size=2)
        return Loader(self.source(cut, position), total_steps=10**6, num_workers=self.workers)


class Map(Kind):
    def __init__(self, workers, dataset=None):
        self.workers = workers
        self._dataset = Rows() if dataset is None else dataset

    def order(self):
        return SampleOrder(seed=3, dataset_size=SAMPLES, global_batch_size=BATCH)

    def source(self, cut, position):
        del position
        return map_source(self._dataset, cut, seed=5, collate_fn=list)


def preloaded(workers):
    memory = SampleMemory(os.memfd_create("samples"), samples=SAMPLES)
    Reading(
        Fixed(),
        memory,
        room=lambda: 10**12,
        on_sample=lambda _index: None,
        on_progress=lambda _done: None,
    ).read()
    return Map(workers, PreloadedDataset(memory))


class Whole(Kind):
    def __init__(self, dataset):
        self._dataset = dataset
        self.position = StreamPosition

    def order(self):
        return StreamOrder(seed=3, dataset_size=SAMPLES, global_batch_size=BATCH, shuffle=False)

    def source(self, cut, position):
        return StreamSource(
            self._dataset(), cut, position=position, log=lambda _: None, collate_fn=list
        )


class Shards(Kind):
    position = ShardPositions
    is_same_in_any_world = False

    def __init__(self, workers, *, ends_at_once):
        self.workers, self._ends_at_once = workers, ends_at_once
        self.is_complete = not ends_at_once

    def order(self):
        return StreamOrder(
            seed=3, dataset_size=SAMPLES, global_batch_size=BATCH, shuffle=False, is_sharded=True
        )

    def source(self, cut, position):
        return ShardSource(
            Numbers([SAMPLES // SHARDS] * SHARDS),
            cut,
            positions=position,
            ends_at_once=self._ends_at_once,
            collate_fn=list,
        )


KINDS = {
    "map": lambda: Map(0),
    "map, workers": lambda: Map(2),
    "preloaded": lambda: preloaded(0),
    "preloaded, workers": lambda: preloaded(2),
    "whole stream": lambda: Whole(Items),
    "whole stream with a state": lambda: Whole(Stateful),
    "shards": lambda: Shards(0, ends_at_once=False),
    "shards, workers": lambda: Shards(2, ends_at_once=False),
    "shards that end at once": lambda: Shards(2, ends_at_once=True),
}


class World:
    """The ranks of one generation, which begins at ``step`` with what a checkpoint has; None: at the beginning."""

    def __init__(self, kind, world_size, *, step=0, record=None):
        self._kind, self._ranks = kind, Ranks(world_size)
        self._positions = [self._restored(record) for _ in range(world_size)]
        self.loaders = [
            kind.loader(rank, world_size, position) for rank, position in enumerate(self._positions)
        ]
        self.agree(step)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for loader in self.loaders:
            loader.close()

    def _restored(self, record):
        position = self._kind.position()
        if position is not None and record is not None:
            position.restore(record)
        return position

    def agree(self, step):
        self._ranks.do(lambda rank, group: self.loaders[rank].agree(group, step=step))

    def take(self, step):
        """What all ranks are given, by rank."""
        return [
            tuple(tuple(item) for batch in loader.take(step) for item in batch.batch)
            for loader in self.loaders
        ]

    def saved(self, step):
        """What a checkpoint of ``step`` has, once it was written and read."""
        self._ranks.do(lambda rank, group: self.loaders[rank].gather(group, step=step))
        if self._positions[0] is None:
            return None
        file = io.BytesIO()
        torch.save(self._positions[0].to_record(step), file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def replace(self, rank, step, record):
        """Another process becomes ``rank``, with the state of a peer."""
        self.loaders[rank].close()
        self._positions[rank] = self._restored(record)
        self.loaders[rank] = self._kind.loader(rank, len(self.loaders), self._positions[rank])
        self.agree(step)


def joined(given):
    return [item for of_rank in given for item in of_rank]


# One test process has all tests of a kind, and what is undisturbed of it.
@pytest.fixture(
    params=[pytest.param(one, marks=pytest.mark.xdist_group(one)) for one in KINDS], scope="module"
)
def kind(request):
    return KINDS[request.param]()


@pytest.fixture(scope="module")
def undisturbed(kind):
    """What two ranks are given, step by step."""
    with World(kind, 2) as world:
        return [world.take(step) for step in range(STEPS)]


def test_each_sample_is_given_once_in_an_epoch(kind, undisturbed):
    """Over all ranks; also by its random number another one in the next epoch, where it draws any."""
    for first in (0, EPOCH):
        given = [item for step in undisturbed[first : first + EPOCH] for item in joined(step)]
        assert len({item[:-1] for item in given}) == len(given) == SAMPLES
    assert all(len(of_rank) == BATCH // 2 for step in undisturbed for of_rank in step)


def test_killed_workers_change_no_step(kind, undisturbed):
    with World(kind, 2) as world:
        for step, expected in enumerate(undisturbed):
            if step % 4 == 1:
                for pid in world.loaders[step % 2].worker_pids:
                    os.kill(pid, signal.SIGKILL)
            assert world.take(step) == expected


def test_a_step_that_is_done_again_gets_what_it_had(kind, undisturbed):
    """Once or twice, also by a copy before, and the steps behind it follow."""
    with World(kind, 2) as world:
        for step, expected in enumerate(undisturbed):
            if step % 3 == 0:
                copies = [loader.take_copy(step) for loader in world.loaders]
                assert [[tuple(i) for b in one for i in b.batch] for one in copies] == [
                    list(one) for one in expected
                ]
            for _ in range(1 + step % 3):
                assert world.take(step) == expected


@pytest.mark.parametrize("at", [1, EPOCH])
def test_a_replaced_rank_continues_where_its_peer_stands(kind, undisturbed, at):
    """Also where the step before it was given to all and committed by nobody."""
    with World(kind, 2) as world:
        for step in range(at):
            world.take(step)
        record = world.saved(at)
        world.take(at)
        world.replace(1, at, record)
        assert [world.take(step) for step in range(at, STEPS)] == undisturbed[at:]


@pytest.mark.parametrize(("world_size", "at"), [(1, 1), (2, EPOCH + 3), (3, 1), (3, EPOCH + 3)])
def test_a_resume_continues_at_any_world_size(kind, undisturbed, at, world_size):
    """With the same steps, or, of a stream in shards, with what was not given yet."""
    with World(kind, 2) as world:
        for step in range(at):
            world.take(step)
        record = world.saved(at)
    steps = 3 * EPOCH
    with World(kind, world_size, step=at, record=record) as world:
        given = [world.take(step) for step in range(at, steps)]
    if world_size == 2:
        assert given[: STEPS - at] == undisturbed[at:]
    elif kind.is_same_in_any_world:
        assert list(map(joined, given))[: STEPS - at] == list(map(joined, undisturbed))[at:]
    if kind.is_same_in_any_world:
        return
    items = [item for step in (*undisturbed[:at], *given) for item in joined(step)]
    assert len(set(items)) == len(items), "by their random numbers, which each epoch has of its own"
    if kind.is_complete:
        first_epoch = [item for step in undisturbed[:EPOCH] for item in joined(step)]
        assert set(first_epoch) <= set(items)
