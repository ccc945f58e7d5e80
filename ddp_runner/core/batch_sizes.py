"""How many samples a step has, and how many are computed at once. Values only."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_runner.core.errors import BadInputError
from ddp_runner.core.settings import DataSettings

SHARES = "data.shares"


def global_batch(data: DataSettings, *, world_size: int) -> int:
    """Samples of a step over all ranks. ``world_size``: of them, or of all their devices."""
    return data.global_batch_size or data.batch_size * data.accumulation * world_size


def micro_batch(data: DataSettings, *, devices: int = 1) -> int:
    """Most samples of one forward pass, on all ``devices`` of a rank together."""
    return (data.micro_batch_size or data.batch_size) * devices


def evaluation_batch(data: DataSettings) -> int:
    """Samples that a rank evaluates at once."""
    return data.evaluation_batch_size or data.batch_size


def cut(total: int, shares: Sequence[int]) -> tuple[int, ...]:
    """How many of ``total`` samples fall to each rank, in proportion to ``shares``.

    What cannot be parted goes to those with the largest remainders, of equal ones to the first.
    """
    whole = sum(shares)
    counts = [total * share // whole for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda rank: -(total * shares[rank] % whole))
    for rank in by_remainder[: total - sum(counts)]:
        counts[rank] += 1
    return tuple(counts)


def refuse_wrong_shares(data: DataSettings, *, world_size: int) -> None:
    """Raise BadInputError where ``data.shares`` are not those of so many ranks, or leave one without a sample."""
    shares = data.shares
    if not shares:
        return
    shown = ",".join(map(str, shares))
    if len(shares) != world_size:
        ranks = "the only rank" if world_size == 1 else f"each of the {world_size} ranks"
        raise BadInputError(SHARES, shown, f"must be a number for {ranks}, and is {len(shares)}")
    total = global_batch(data, world_size=world_size)
    counts = cut(total, shares)
    if 0 in counts:
        raise BadInputError(
            SHARES,
            shown,
            f"leaves rank {counts.index(0)} without one of the {total} samples of a step: take a larger"
            " batch, or a larger share for it",
        )
