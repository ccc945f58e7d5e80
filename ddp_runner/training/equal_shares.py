"""Whether all ranks run equally many micro-batches, as layers that wait for each other in forward need it."""

from __future__ import annotations

from ddp_runner.collective.sync_batchnorm import OPTION
from ddp_runner.core.batch_sizes import micro_batch
from ddp_runner.core.faults import BadInputError
from ddp_runner.core.settings import Settings
from ddp_runner.data.order import micro_batch_count, share_size


def refuse_unequal_shares(settings: Settings, global_batch: int, *, world_size: int) -> None:
    """Raise BadInputError where ranks that may be left would run unequally many micro-batches."""
    least = settings.recovery.min_ranks or world_size
    size = micro_batch(settings.data)
    for ranks in range(world_size, min(least, world_size) - 1, -1):
        refuse_unequal(global_batch, world_size=ranks, micro_batch_size=size)


def refuse_unequal(global_batch: int, *, world_size: int, micro_batch_size: int) -> None:
    """The same for this very number of ranks and size of a micro-batch."""
    shares = [
        share_size(global_batch, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    counts = [micro_batch_count(share, micro_batch_size) for share in shares]
    if len(set(counts)) == 1:
        return
    raise BadInputError(
        OPTION,
        "true",
        f"needs equally many micro-batches on all ranks, and of {global_batch} samples {world_size} ranks"
        f" run {', '.join(map(str, counts))} of {micro_batch_size}: take a global batch that"
        f" {world_size} divides, or recovery.min_ranks=0",
    )
