"""Streams of others as shards: what has a state of its own, and Hugging Face's iterable datasets. Imports neither."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
import torch

from ddp_runner.data.host_generators import generators_kept, seed_host
from ddp_runner.data.stream_state import from_plain, to_plain

_EVERY = 32
_END = object()
_BYTES, _TENSOR = "ddp_runner:bytes", "ddp_runner:tensor"
_TUPLE, _PAIRS = "ddp_runner:tuple", "ddp_runner:pairs"


class StatefulShards:
    """``make(shard)`` for each shard: an iterable that has ``state_dict`` and ``load_state_dict``.

    Such as torchdata's ``StatefulDataLoader`` (with ``num_workers=0``: the run has workers of its own), its ``nodes.Loader``,
    or an iterable dataset with a state. It is made where it is read, in a loader worker. A position is its
    state after some of its items, of which one in ``every`` has a new one, how many were read since then, and the
    seed under which it is made and begun: what it draws there, such as an order, it draws again.
    """

    def __init__(self, make: Callable[[int], Any], *, shards: int, every: int = _EVERY) -> None:
        """Raises ValueError where ``shards`` or ``every`` is below 1."""
        if shards < 1 or every < 1:
            raise ValueError(f"shards={shards}, every={every}: at least 1")
        self.shards = shards
        self._make = make
        self._every = every

    def read(self, shard: int, position: Any) -> Iterator[tuple[Any, Any]]:
        """Yield each item, and the position behind it. Raises BadInputError for a state that cannot be kept."""
        state, since, *seeds = position or (None, 0)
        with generators_kept():
            # INVARIANT opened-alike: a shard is made, and read up to where it was, under one seed however often.
            # Broken if: it draws under the seed of the item that is due, which is another one each time.
            # Guarded by: test_what_a_shard_draws_at_its_beginning_it_draws_again.
            seed = seeds[0] if seeds else random.getrandbits(48)  # older positions have none
            seed_host(seed)
            source, items = self._begun(shard, state, since)
        while True:
            # Of where another item follows: given the state of its end, many begin again.
            newest = _to_json(to_plain(source.state_dict())) if since == self._every else None
            item = next(items, _END)
            if item is _END:
                return
            if newest is not None:
                state, since = newest, 0
            since += 1
            yield item, (state, since, seed)

    def _begun(self, shard: int, state: Any, since: int) -> tuple[Any, Iterator[Any]]:
        """What is made of ``shard``, ``since`` items behind ``state``, and its further items."""
        source = self._make(shard)
        if state is not None:
            source.load_state_dict(from_plain(_from_json(state)))
        items = iter(source)
        for _ in range(since):
            next(items, None)
        # What is drawn for all items many draw with the first one.
        first = islice(items, 0 if since else 1)
        return source, chain(list(first), items)


class HuggingFaceShards(StatefulShards):
    """A ``datasets.IterableDataset``, cut as its own ``num_shards`` says: ``load_dataset(..., streaming=True)``.

    Its ``shuffle`` with a buffer is refused, since its state has nothing of the buffer; take
    ``Shuffled(HuggingFaceShards(dataset), size=...)``.
    """

    def __init__(self, dataset: Any, *, every: int = _EVERY) -> None:
        """Raises TypeError for another dataset, ValueError for one that is shuffled."""
        shards = getattr(dataset, "num_shards", None)
        if shards is None or not hasattr(dataset, "shard") or not hasattr(dataset, "state_dict"):
            raise TypeError(
                f"{type(dataset).__qualname__} has no num_shards, shard() and state_dict(), as datasets.IterableDataset"
                " has from datasets 3 on"
            )
        if _has_buffer(dataset):
            raise ValueError(
                "the dataset has a shuffle buffer, which is not in its state: leave out its shuffle(), and take"
                " Shuffled(HuggingFaceShards(dataset), size=...)"
            )
        super().__init__(
            lambda shard: dataset.shard(num_shards=shards, index=shard), shards=shards, every=every
        )


def _has_buffer(dataset: Any) -> bool:
    """Whether a shuffle is anywhere in what ``dataset`` is made of, also of several that are interleaved."""
    parts = [getattr(dataset, "_ex_iterable", None)]
    while parts:
        part = parts.pop()
        if hasattr(part, "buffer_size"):
            return True
        if part is not None:
            parts += [getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())]
    return False


def _to_json(value: Any) -> Any:  # noqa: PLR0911 - one return a type
    """A plain value (:mod:`stream_state`) as one that JSON has."""
    kind = type(value)
    if kind is torch.Tensor:
        file = io.BytesIO()
        np.lib.format.write_array(file, value.cpu().numpy(), allow_pickle=False)
        return {_TENSOR: base64.b85encode(file.getvalue()).decode()}
    if kind is bytes:
        return {_BYTES: base64.b85encode(value).decode()}
    if kind is tuple:
        return {_TUPLE: [_to_json(one) for one in value]}
    if kind is list:
        return [_to_json(one) for one in value]
    if kind is dict:
        if all(type(key) is str for key in value):
            return {key: _to_json(one) for key, one in value.items()}
        return {_PAIRS: [[_to_json(key), _to_json(one)] for key, one in value.items()]}
    return value


def _from_json(value: Any) -> Any:  # noqa: PLR0911 - one return a type
    kind = type(value)
    if kind is list:
        return [_from_json(one) for one in value]
    if kind is not dict:
        return value
    if len(value) == 1:
        ((tag, content),) = value.items()
        if tag == _TENSOR:
            file = io.BytesIO(base64.b85decode(content))
            return torch.from_numpy(np.lib.format.read_array(file, allow_pickle=False))
        if tag == _BYTES:
            return base64.b85decode(content)
        if tag == _TUPLE:
            return tuple(_from_json(one) for one in content)
        if tag == _PAIRS:
            return {_from_json(key): _from_json(one) for key, one in content}
    return {key: _from_json(one) for key, one in value.items()}
