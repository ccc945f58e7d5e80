"""Refuses unequal numbers of micro-batches per rank for layers that wait for each other in forward."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_runner.core.batch_sizes import SHARES, cut, micro_batch, shares_of
from ddp_runner.core.settings import Settings
from ddp_runner.data.order import micro_batch_count
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.training.components.sync_batchnorm import OPTION


def refuse_unequal_shares(settings: Settings, global_batch: int, *, world_size: int) -> None:
    """Raise BadInputError where ranks that may be left would run unequally many micro-batches."""
    shares, size = shares_of(settings.data), micro_batch(settings.data)
    least = settings.recovery.min_ranks or world_size
    if shares and least < world_size:
        expected = f"must be 0 with {OPTION} and {SHARES}: who is left may not have shares that fit"
        raise BadInputError("recovery.min_ranks", least, expected)
    for ranks in range(world_size, min(least, world_size) - 1, -1):
        refuse_unequal(global_batch, world_size=ranks, micro_batch_size=size, shares=shares)


def refuse_unequal(
    global_batch: int, *, world_size: int, micro_batch_size: int, shares: Sequence[int]
) -> None:
    """The same for this very number of ranks and size of a micro-batch. ``shares``: none are equal ones."""
    samples = cut(global_batch, shares or (1,) * world_size)
    counts = [micro_batch_count(share, micro_batch_size) for share in samples]
    if len(set(counts)) == 1:
        return
    cure = f"take a global batch that {world_size} divides, or recovery.min_ranks=0"
    if shares:
        cure = (
            f"take one for each, by batch_size={max(samples)} global_batch_size={global_batch},"
            f" or leave out {SHARES}"
        )
    raise BadInputError(
        OPTION,
        "true",
        f"needs equally many micro-batches on all ranks, and of {global_batch} samples {world_size} ranks"
        f" run {', '.join(map(str, counts))} of {micro_batch_size}: {cure}",
    )
