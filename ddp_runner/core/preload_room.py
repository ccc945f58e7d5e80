"""Whether the samples that are preloaded fit into memory. Values only."""

from __future__ import annotations

from collections.abc import Sequence

PROBES = 32  # samples by whose size that of all is estimated
SHARE_MAX = 0.9  # of what is available: training needs some as well


def probes(samples: int) -> tuple[int, ...]:
    """The samples to look at first, spread over all of them."""
    count = min(PROBES, samples)
    return tuple(number * (samples - 1) // max(1, count - 1) for number in range(count))


def estimated_bytes(sizes: Sequence[int], *, samples: int) -> int:
    """What ``samples`` need, of which some have these ``sizes``."""
    return -(-sum(sizes) * samples // len(sizes)) if sizes else 0


def fits(needed_bytes: int, *, available_bytes: int) -> bool:
    """Whether so much may be taken of what is available before the first sample is read."""
    return needed_bytes <= SHARE_MAX * available_bytes


def may_go_on(available_bytes: int, *, first_available_bytes: int) -> bool:
    """Whether there is still enough beside what was taken: samples may be larger than estimated."""
    return available_bytes >= (1 - SHARE_MAX) * first_available_bytes / 2
