"""Computes how many samples a step has, and how many of them run through the model at once. Values only."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_runner.core.settings import DataSettings
from ddp_runner.kernel.rules.errors import BadInputError

SHARES = "data.shares"


_ALIKE = 1.15  # ranks whose own times differ by less are equally fast
_EVEN = (
    1.1  # shares are good enough where the slowest rank takes so many times as long as the fastest
)
_GAIN = 0.95  # what is proposed makes the slowest rank's part of a step shorter than this
_LARGEST_SHARE = 8


def shares_of(data: DataSettings) -> tuple[int, ...]:
    """The shares that are given; none where they are equal, as with auto before anything is known."""
    return () if data.shares == "auto" else data.shares


def proposed_shares(own_step_s: Sequence[float], *, total: int) -> tuple[int, ...]:
    """Small numbers by which ranks need about equally long, from a rank's own seconds a step with equal shares.

    Empty where equal shares do about as well. No rank is left without one of ``total`` samples.
    """
    fastest, slowest = min(own_step_s), max(own_step_s)
    if fastest <= 0 or slowest < _ALIKE * fastest:
        return ()
    equal = (1,) * len(own_step_s)
    # A sample's time, of each rank: it had equally many.
    best, best_s = equal, _step_s(own_step_s, cut(total, equal))[1] * _GAIN
    for most in range(2, _LARGEST_SHARE + 1):
        shares = tuple(max(1, round(most * fastest / seconds)) for seconds in own_step_s)
        counts = cut(total, shares)
        least_s, most_s = _step_s(own_step_s, counts)
        if most_s < best_s and 0 not in counts:
            best, best_s = shares, most_s
            if most_s <= _EVEN * least_s:
                break
    return () if best == equal else best


def _step_s(per_sample: Sequence[float], counts: Sequence[int]) -> tuple[float, float]:
    """Return the shortest and the longest time of a rank for this number of samples."""
    times = [each * count for each, count in zip(per_sample, counts, strict=True)]
    return min(times), max(times)


def global_batch(data: DataSettings, *, world_size: int) -> int:
    """Samples of a step over all ranks. ``world_size``: of them, or of all their devices."""
    return data.global_batch_size or data.batch_size * accumulated(data, world_size=world_size)


def accumulated(data: DataSettings, *, world_size: int) -> int:
    """Batches of a step over all ranks."""
    return data.accumulation_total or data.accumulation * world_size


def micro_batch(data: DataSettings, *, devices: int = 1) -> int:
    """Most samples of one forward pass, on all ``devices`` of a rank together."""
    return (data.micro_batch_size or data.batch_size) * devices


def evaluation_batch(data: DataSettings) -> int:
    """Samples that a rank evaluates at once."""
    return data.evaluation_batch_size or data.batch_size


def cut(total: int, shares: Sequence[int]) -> tuple[int, ...]:
    """Return how many of ``total`` samples each rank gets, in proportion to ``shares``.

    The remainder goes to the ranks with the largest fractions; equal fractions favour the lower rank.
    """
    whole = sum(shares)
    counts = [total * share // whole for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda rank: -(total * shares[rank] % whole))
    for rank in by_remainder[: total - sum(counts)]:
        counts[rank] += 1
    return tuple(counts)


def refuse_wrong_parts(data: DataSettings, *, ranks: int, devices: int) -> None:
    """Raise BadInputError if the ranks, with their devices in all, cannot divide a step as requested."""
    refuse_wrong_shares(data, world_size=ranks)
    refuse_uneven_accumulation(data, ranks=ranks, devices=devices)


def refuse_wrong_shares(data: DataSettings, *, world_size: int) -> None:
    """Raise BadInputError if ``data.shares`` does not fit the number of ranks, or leaves one without a sample."""
    shares = shares_of(data)
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


def refuse_uneven_accumulation(data: DataSettings, *, ranks: int, devices: int) -> None:
    """Raise BadInputError if ``data.accumulation_total`` gives the ranks unequal parts unasked.

    ``devices``: of all ranks, each of which has its batches.
    """
    total = data.accumulation_total
    if shares_of(data) or total % devices == 0:
        return
    below = total - total % devices
    near = f"{below} or {below + devices}" if below else f"{devices}"
    of = f"{ranks} ranks" if devices == ranks else f"{devices} devices"
    whole = f"global_batch_size={data.batch_size * total} keeps this batch on any number"
    expected = f"must be a multiple of the {of}: take {near}; or {whole}"
    raise BadInputError("data.accumulation_total", total, expected)
