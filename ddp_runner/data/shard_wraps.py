"""Streams made of another stream of shards: shuffled, or with a function over its items."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain, islice
from typing import Any

import numpy as np

from ddp_runner.data.host_generators import generators_kept, seed_host
from ddp_runner.data.permutation import KeyedPermutation, mix64
from ddp_runner.data.shards import ShardedStream


class _Over:
    """As many shards as ``stream`` has, of the same names."""

    def __init__(self, stream: ShardedStream) -> None:
        self._stream = stream
        self.deterministic = bool(getattr(stream, "deterministic", False))

    @property
    def shards(self) -> int:
        """How many there are."""
        return self._stream.shards

    def __getattr__(self, name: str) -> Any:
        # Only where the stream has them; lengths may have to be counted, so not before they are asked for.
        if name in ("lengths", "names", "sizes"):
            return getattr(self._stream, name)
        raise AttributeError(name)


class Shuffled(_Over):
    """A stream of shards, shuffled within blocks of ``size`` items of a shard, in another order each epoch.

    A position is where a block begins, and how many of its items are out: the block is read again from there, so
    that nothing of it has to be stored. A rank holds a block for each of its lanes, 24 at most. Random
    changes of items belong around it: ``Mapped(Shuffled(...), change)``.
    """

    def __init__(self, stream: ShardedStream, *, size: int) -> None:
        """Raises ValueError for a ``size`` below 1."""
        super().__init__(stream)
        if size < 1:
            raise ValueError(f"size={size}: at least 1")
        self._size = size

    def read(self, shard: int, position: Any) -> Iterator[tuple[Any, Any]]:
        """Yield each item, and the position behind it."""
        # Where a shard is opened, Python's generator is seeded by the run, its epoch and the shard.
        begin, number, out, seed = position or (None, 0, 0, random.getrandbits(48))
        source: Iterator[tuple[Any, Any]] | None = None
        while True:
            block, end = [], begin
            is_opened = source is None
            if source is None:
                with _seeded(seed):
                    source = iter(self._stream.read(shard, begin))
            with self._drawing(seed, number, is_opened=is_opened):
                for item, behind in islice(source, self._size):
                    block.append(item)
                    end = behind
            if not block:
                return
            order = KeyedPermutation(seed=seed, epoch=number, size=len(block))
            places = order.at(np.arange(len(block))).tolist()
            for count, place in enumerate(places[out:], start=out + 1):
                yield block[place], (begin, number, count, seed)
            begin, number, out = end, number + 1, 0

    def _drawing(self, seed: int, number: int, *, is_opened: bool) -> AbstractContextManager[None]:
        """What a stream draws while it gives a block follows from the block, which may be read once more.

        What one that is deterministic draws is of the shard, and is drawn with the first block after it was opened.
        """
        if self.deterministic:
            return _seeded(seed) if is_opened else nullcontext()
        return _seeded(seed + number)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with generators_kept():
        seed_host(mix64(seed))
        yield


class Mapped(_Over):
    """``function`` of each item of a stream of shards, called in the loader's workers.

    It may draw random numbers: Python's, numpy's and torch's CPU generator are seeded for each item. What
    it raises makes the item one that cannot be read (``data.on_bad_sample``).
    """

    def __init__(
        self,
        stream: ShardedStream,
        function: Callable[[Any], Any],
        *,
        deterministic: bool = False,
    ) -> None:
        """``deterministic``: the function draws nothing, so that nothing is seeded for it, which takes time."""
        super().__init__(stream)
        self._function = function
        self.deterministic = self.deterministic and deterministic

    def read(self, shard: int, position: Any) -> Iterator[tuple[Any, Any]]:
        """Yield what is made of each item, and the position behind it."""
        # At once: what is drawn here is of the shard.
        items = iter(self._stream.read(shard, position))
        if getattr(self._stream, "deterministic", False) and not self.deterministic:
            # Nor is what it draws with its first item, which the seed of that item would decide.
            items = chain(list(islice(items, 1)), items)
        return ((self._made_of(item), behind) for item, behind in items)

    def _made_of(self, item: Any) -> Any:
        if isinstance(item, Exception):
            return item
        try:
            return self._function(item)
        except Exception as error:  # noqa: BLE001 - the loader-fetch boundary: becomes a value
            return error
