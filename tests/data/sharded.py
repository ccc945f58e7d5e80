"""Streams of numbered items for the tests of shards, and the ranks of a generation in one process."""

from __future__ import annotations

import random
import threading

from ddp_runner.data.quarantine import Quarantine
from ddp_runner.data.shard_source import ShardSource
from ddp_runner.data.shards import ShardPositions
from ddp_runner.data.source import Cut
from ddp_runner.data.stream import StreamOrder
from tests.data.mapped import loader_of

LENGTHS = (9, 4, 7, 1, 12, 5, 8, 3, 6)


class Numbers:
    """Item ``n`` of shard ``s`` is ``(s, n)``, beside a random number that the item's seed decides."""

    def __init__(self, lengths):
        self.lengths = list(lengths)

    @property
    def shards(self):
        return len(self.lengths)

    def read(self, shard, position):
        for number in range(position or 0, self.lengths[shard]):
            yield (shard, number, random.random()), number + 1


class Damaged(Numbers):
    """Two items come as exceptions."""

    BAD = ((4, 2), (4, 3), (8, 0))

    def read(self, shard, position):
        for item, behind in super().read(shard, position):
            yield (ValueError("damaged") if item[:2] in self.BAD else item), behind


class Ranks:
    """``exchange`` for ranks that are threads here; each thread has one of ``groups``."""

    def __init__(self, world_size):
        self._barrier = threading.Barrier(world_size, timeout=20.0)
        self._values = {}
        self.groups = [_Group(self, rank) for rank in range(world_size)]

    def exchange(self, rank, name, value):
        self._values[name, rank] = value
        self._barrier.wait()
        found = [self._values[name, other] for other in range(len(self.groups))]
        self._barrier.wait()
        return found

    def do(self, call):
        """``call(rank, group)`` on all ranks at once; what each returned."""
        returned, raised = {}, []

        def run(rank):
            try:
                returned[rank] = call(rank, self.groups[rank])
            except BaseException as error:  # noqa: BLE001 - raised again below
                raised.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(self.groups))]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        for error in raised:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        assert not raised
        return [returned[rank] for rank in range(len(threads))]


class _Group:
    def __init__(self, ranks, rank):
        self._ranks, self._rank = ranks, rank

    def exchange(self, name, value):
        return self._ranks.exchange(self._rank, name, value)


def order_of(batch, *, steps_per_epoch=1000, first_step=0):
    return StreamOrder(
        seed=7,
        dataset_size=steps_per_epoch * batch,
        global_batch_size=batch,
        shuffle=False,
        is_sharded=True,
        first_step=first_step,
    )


def make(
    dataset,
    *,
    rank=0,
    world_size=1,
    batch=4,
    positions=None,
    steps_per_epoch=1000,
    first_step=0,
    **given,
):
    """A loader of ``batch`` items a step over all ranks, which hands items on as they are."""
    cut = Cut(
        order=order_of(batch, steps_per_epoch=steps_per_epoch, first_step=first_step),
        rank=rank,
        world_size=world_size,
        micro_batch_size=given.pop("micro_batch_size", 2),
    )
    own = ("ends_at_once", "collate_fn", "on_other", "quarantine")
    how = {"collate_fn": list, **{name: given.pop(name) for name in own if name in given}}
    positions = ShardPositions() if positions is None else positions
    source = ShardSource(dataset, cut, positions=positions, **how)
    return loader_of(source, total_steps=10**6, **{"num_workers": 0, **given})


def taken(loader, step):
    """The items of a step, of all micro-batches."""
    return [tuple(item) for one in loader.take(step) for item in one.batch]


def ranks(count, *, lengths=LENGTHS, **given):
    """Loaders of all ranks of a generation, and what they exchange with."""
    positions = [ShardPositions() for _ in range(count)]
    loaders = [
        make(Numbers(lengths), rank=rank, world_size=count, positions=positions[rank], **given)
        for rank in range(count)
    ]
    return loaders, Ranks(count), positions


def quarantine(bad_max):
    return Quarantine(seed=1, dataset_size=1000, bad_max=bad_max)
