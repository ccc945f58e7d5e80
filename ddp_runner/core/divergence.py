"""Whose replica is the odd one out, told from one hash a rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ddp_runner.core.faults import Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """``odd`` ranks differ from a majority; ``has_majority`` is False where nobody can be believed."""

    odd: tuple[int, ...]
    has_majority: bool


def compare_replicas(hashes: Sequence[str]) -> Comparison:
    """More than half of the ranks agreeing is a majority. Equal replicas are the usual case."""
    value, count = Counter(hashes).most_common(1)[0]
    if count * 2 <= len(hashes):
        return Comparison(odd=tuple(range(len(hashes))), has_majority=False)
    odd = tuple(rank for rank, found in enumerate(hashes) if found != value)
    return Comparison(odd=odd, has_majority=True)


def inexact_by(fault: Fault) -> str:
    """Why a run is not exact any more: what the odd replica computed went into everybody's steps."""
    return f"rank {fault.rank}'s replica had diverged by step {fault.step}"


def first_difference(mine: Sequence[str], usual: Sequence[str], names: Sequence[str]) -> str:
    """The name of the first tensor whose hash differs; the lists are in one order."""
    pairs = zip(mine, usual, names, strict=False)
    return next((name for own, other, name in pairs if own != other), "nothing that is hashed")
