"""What a stream draws for a whole shard is the same from whatever item of it somebody reads on."""

from __future__ import annotations

import random

import pytest

from ddp_runner.data.shards import ShardPositions
from tests.data.sharded import Numbers, Ranks, make, taken

LENGTHS = (9, 4, 7, 12, 5, 8)
STEPS = 24


class Reordered(Numbers):
    """The rows of a shard in an order that is drawn where it is opened, and nothing for an item."""

    deterministic = True

    def read(self, shard, position):
        order = random.sample(range(self.lengths[shard]), self.lengths[shard])
        for place in range(position or 0, len(order)):
            yield (shard, order[place]), place + 1


class AtOnce(Numbers):
    """Such an order, drawn where ``read`` is called, and a number for each item."""

    def read(self, shard, position):
        order = random.sample(range(self.lengths[shard]), self.lengths[shard])
        places = range(position or 0, len(order))
        return (((shard, order[place], random.random()), place + 1) for place in places)


@pytest.mark.parametrize(
    "stream",
    [
        Reordered(LENGTHS),
        AtOnce(LENGTHS),
    ],
    ids=[
        "plain", "at once",
    ],
)  # fmt: skip
def test_who_reads_on_amid_a_shard_finds_its_order(stream):
    whole = make(stream)
    expected = [taken(whole, step) for step in range(STEPS)]
    for said in range(1, 17, 3):
        positions = ShardPositions()
        first = make(stream, positions=positions)
        for step in range(said):
            first.take(step)
        Ranks(1).do(lambda rank, one, at=said, loader=first: loader.gather(one, step=at))
        again = make(stream, positions=positions)
        assert [taken(again, step) for step in range(said, STEPS)] == expected[said:]
