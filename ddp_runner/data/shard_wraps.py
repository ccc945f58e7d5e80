"""Streams made of another stream of shards: shuffled, or with a function over its items."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ddp_runner.data.permutation import KeyedPermutation
from ddp_runner.data.shards import ShardedStream


class _Over:
    """As many shards as ``stream`` has, of the same names."""

    def __init__(self, stream: ShardedStream) -> None:
        self._stream = stream

    @property
    def shards(self) -> int:
        """How many there are."""
        return self._stream.shards

    def __getattr__(self, name: str) -> Any:
        # Only where the stream has them; lengths may have to be counted, so not before they are asked for.
        if name in ("lengths", "names"):
            return getattr(self._stream, name)
        raise AttributeError(name)


class Shuffled(_Over):
    """A stream of shards, shuffled within blocks of ``size`` items of a shard, in another order each epoch.

    A position is where a block begins, and how many of its items are out: the block is read again from there, so
    that nothing of it has to be stored. A rank holds a block for each of its lanes, 24 at most. Random
    changes of items belong around it: ``Mapped(Shuffled(...), change)``.
    """

    deterministic = False  # an epoch's order is drawn when a shard is begun

    def __init__(self, stream: ShardedStream, *, size: int) -> None:
        """Raises ValueError for a ``size`` below 1."""
        super().__init__(stream)
        if size < 1:
            raise ValueError(f"size={size}: at least 1")
        self._size = size

    def read(self, shard: int, position: Any) -> Iterator[tuple[Any, Any]]:
        """Yield each item, and the position behind it."""
        # Where a shard begins, Python's generator is seeded by the run, its epoch and the shard.
        begin, number, out, seed = position or (None, 0, 0, random.getrandbits(48))
        while True:
            block, end = [], begin
            for item, behind in self._stream.read(shard, begin):
                block.append(item)
                end = behind
                if len(block) == self._size:
                    break
            if not block:
                return
            order = KeyedPermutation(seed=seed, epoch=number, size=len(block))
            places = order.at(np.arange(len(block))).tolist()
            for count, place in enumerate(places[out:], start=out + 1):
                yield block[place], (begin, number, count, seed)
            begin, number, out = end, number + 1, 0


class Mapped(_Over):
    """``function`` of each item of a stream of shards, called in the loader's workers.

    It may draw random numbers: Python's, numpy's and torch's CPU generator are seeded for each item. What
    it raises makes the item one that cannot be read (``data.on_bad_sample``).
    """

    deterministic = False

    def __init__(self, stream: ShardedStream, function: Callable[[Any], Any]) -> None:
        super().__init__(stream)
        self._function = function

    def read(self, shard: int, position: Any) -> Iterator[tuple[Any, Any]]:
        """Yield what is made of each item, and the position behind it."""
        for item, behind in self._stream.read(shard, position):
            yield self._made_of(item), behind

    def _made_of(self, item: Any) -> Any:
        if isinstance(item, Exception):
            return item
        try:
            return self._function(item)
        except Exception as error:  # noqa: BLE001 - the loader-fetch boundary: becomes a value
            return error
