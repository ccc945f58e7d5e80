"""Finds the ranks that differ from the majority, by replica hashes or by counts of collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddp_runner.kernel.rules.faults import Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A comparison of the ranks. ``odd`` ranks differ from a majority; without ``has_majority`` no rank can be trusted."""

    odd: tuple[int, ...]
    has_majority: bool


def compare_replicas(hashes: Sequence[str]) -> Comparison:
    """More than half of the ranks agreeing is a majority. Equal replicas are the usual case."""
    value, count = Counter(hashes).most_common(1)[0]
    if count * 2 <= len(hashes):
        return Comparison(odd=tuple(range(len(hashes))), has_majority=False)
    odd = tuple(rank for rank, found in enumerate(hashes) if found != value)
    return Comparison(odd=odd, has_majority=True)


def disagreement(begun: Mapping[int, int]) -> str:
    """Describe the ranks whose count of collectives differs from the majority's; "" if all agree.

    Ranks that wait for each other endlessly have usually entered different collectives.
    """
    ranks = sorted(rank for rank, count in begun.items() if count >= 0)
    compared = compare_replicas([str(begun[rank]) for rank in ranks]) if ranks else None
    if compared is None or not compared.odd:
        return ""
    counts = ", ".join(f"rank {ranks[i]} {begun[ranks[i]]}" for i in compared.odd)
    usual = {begun[rank] for i, rank in enumerate(ranks) if i not in compared.odd}
    rest = f", every other {usual.pop()}" if usual else ""
    return f"{counts}{rest}"


def where_each_was(places: Mapping[int, str]) -> str:
    """Group the ranks by their place, such as ``rank 1 in loss, task.py:31; ranks 0,2 in backward``."""
    ranks_at: dict[str, list[int]] = {}
    for rank in sorted(rank for rank, place in places.items() if place):
        ranks_at.setdefault(places[rank], []).append(rank)
    if len(ranks_at) == 1:
        return f"all {next(iter(ranks_at))}"
    return "; ".join(
        f"rank{'s' * (len(ranks) > 1)} {','.join(map(str, ranks))} {place}"
        for place, ranks in ranks_at.items()
    )


def inexact_by(fault: Fault) -> str:
    """Why a run is not exact any more: what the odd replica computed went into everybody's steps."""
    if not fault.may_retry:
        return f"the ranks' states differed by step {fault.step}, and none is known to be right"
    return f"rank {fault.rank}'s replica had diverged by step {fault.step}"


def first_difference(mine: Sequence[str], usual: Sequence[str], names: Sequence[str]) -> str:
    """The name of the first tensor whose hash differs; the lists are in one order."""
    pairs = zip(mine, usual, names, strict=False)
    return next((name for own, other, name in pairs if own != other), "nothing that is hashed")


def unlike_option(found: Sequence[Mapping[str, str]]) -> str:
    """Describe the first option of an optimizer that is not the same for all ranks; "" if there is none.

    ``found``: of each rank, the values by name.
    """
    for name, first in found[0].items():
        rank = next((rank for rank, one in enumerate(found) if one.get(name) != first), None)
        if rank is not None:
            other = found[rank].get(name)
            values = f"{name} is {first} on rank 0 and {other} on rank {rank}"
            return f"{values}: set it from values that all ranks share, such as a mean over ranks"
    return ""
