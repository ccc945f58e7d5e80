"""Determines the length of an iterable dataset in steps, and the part of its order that is a run's state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import IterableDataset

from ddp_runner.core import batch_sizes
from ddp_runner.core.run_stages import steps_before
from ddp_runner.core.settings import Settings
from ddp_runner.data.by_number import gives_by_number
from ddp_runner.data.order import SampleOrder
from ddp_runner.data.shards import Deal, ShardPositions, is_sharded, steps_of_epoch
from ddp_runner.data.stream import StreamOrder, StreamPosition
from ddp_runner.data.workers.count import AUTO
from ddp_runner.kernel.rules.errors import BadInputError


def is_stream(dataset: Any) -> bool:
    """Return True if the dataset gives items one after the other, and none by its number."""
    return (
        isinstance(dataset, IterableDataset)
        or is_sharded(dataset)
        or (hasattr(dataset, "__iter__") and not gives_by_number(dataset))
    )


def position_in(order: StreamOrder) -> StreamPosition | ShardPositions:
    """Return a run's position at the beginning of its stream."""
    return ShardPositions() if order.is_sharded else StreamPosition()


def named_data(order: SampleOrder, dataset: Any) -> str:
    """Return the kind and size of the data, which a resume compares if data has no fingerprint."""
    if not isinstance(order, StreamOrder):
        return f"{order.dataset_size} samples"
    return f"a stream of {dataset.shards} shards" if order.is_sharded else "a stream"


def too_little(
    settings: Settings, *, size: int, global_batch: int, world_size: int
) -> BadInputError:
    """The error of data that has not a single step."""
    data = settings.data
    if data.global_batch_size:
        expected = f"is more than the data has, {size} samples: take a smaller one or more data"
        return BadInputError("data.global_batch_size", data.global_batch_size, expected)
    times = f"times {data.accumulation} accumulated " if data.accumulation > 1 else ""
    times += f"times {world_size} rank{'s' * (world_size != 1)}"
    if data.accumulation_total:
        times = f"times accumulation_total={data.accumulation_total}"
    return BadInputError(
        "--batch-size",
        data.batch_size,
        f"{times} needs {global_batch} samples a step, the data has {size}; "
        "take a smaller batch, fewer ranks or more data",
    )


def stream_order(
    settings: Settings, dataset: Any, global_batch: int, world_size: int
) -> StreamOrder:
    """The order of an iterable dataset, as long as it says it is, or as the run."""
    data, run = settings.data, settings.run
    cut_up = is_sharded(dataset)
    # Counting may mean to read everything: only where an epoch's end matters.
    asks = data.stream_end == "drop" or not run.max_steps
    lengths = getattr(dataset, "lengths", None) if cut_up and asks else None
    if data.stream_end == "drop" and lengths is None:
        raise BadInputError(
            "data.stream_end",
            data.stream_end,
            "needs training data with shards and lengths, such as JsonLines; wrap needs none",
        )
    key = "num_workers" if data.workers_total is None else "workers_total"
    if (asked := getattr(data, key)) not in (AUTO, 0) and not cut_up:
        raise BadInputError(
            f"data.{key}",
            asked,
            "must be 0 with an iterable dataset: its items are loaded in the rank itself; one that says"
            " how it is cut (shards and read, such as JsonLines) has workers",
        )
    size = run.max_steps * global_batch
    if cut_up:
        _refuse_too_few_shards(settings, dataset, world_size)
    if lengths is not None:
        size = _items_of_epoch(settings, lengths, global_batch, world_size)
    elif hasattr(dataset, "__len__"):
        size = len(dataset)
    elif not size:
        raise BadInputError(
            "--max-steps", 0, "must say how long to train: the training data has no length"
        )
    if size < global_batch:
        raise too_little(settings, size=size, global_batch=global_batch, world_size=world_size)
    return StreamOrder(
        seed=run.seed,
        dataset_size=size,
        global_batch_size=global_batch,
        shares=batch_sizes.shares_of(data),
        shuffle=False,
        first_step=steps_before(settings.stage),
        is_sharded=cut_up,
    )


def _refuse_too_few_shards(settings: Settings, dataset: Any, world_size: int) -> None:
    try:
        Deal.of(seed=settings.run.seed, shards=dataset.shards, world_size=world_size)
    except ValueError as error:
        raise BadInputError("--task", settings.run.task, str(error)) from error


def _items_of_epoch(
    settings: Settings, lengths: Sequence[int], global_batch: int, world_size: int
) -> int:
    """All items of the shards; or, where they end at once, those until the first lane ends, in whole steps."""
    if settings.data.stream_end == "wrap":
        return sum(lengths)
    deal = Deal.of(seed=settings.run.seed, shards=len(lengths), world_size=world_size)
    shares = batch_sizes.cut(
        global_batch, batch_sizes.shares_of(settings.data) or (1,) * world_size
    )
    steps = steps_of_epoch(lengths, deal=deal, shares=shares)
    if steps == 0:
        raise BadInputError(
            "data.stream_end",
            "drop",
            f"leaves an epoch without a step: {deal.lanes * world_size} lanes share the shards, and the"
            " smallest has fewer items than one step takes; take wrap, or shards of more even length",
        )
    return steps * global_batch
