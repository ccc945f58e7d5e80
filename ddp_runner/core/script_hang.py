"""When the ranks of a script hang, and which of them holds the others up. Values in, values out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ddp_runner.core.divergence import disagreement

ASKED_PER_TIMEOUT = (
    4  # how often a rank is asked for its collectives, which it does not show by itself
)
ASKED_EVERY_MIN_S = 0.5
OTHERS_SHOWN_MAX = 2  # lines at which others wait for the one that hangs


@dataclass(frozen=True, slots=True, kw_only=True)
class SignsOfLife:
    """What a rank shows of itself; each grows with what the script does.

    ``collectives``: begun in groups of all ranks, and ``in_others`` in smaller ones, by its newest answer.
    """

    rank: int
    steps: int
    heartbeats: int
    log_bytes: int
    collectives: int
    in_others: int


class Silence:
    """How long no rank has shown any sign, from the start of an attempt on."""

    def __init__(self) -> None:
        self._signs: tuple[SignsOfLife, ...] = ()
        self._since_s = 0.0

    def observe(self, signs: Sequence[SignsOfLife], now_s: float) -> float:
        """For how long these ranks have been as they are now."""
        seen = tuple(signs)
        if seen != self._signs:
            self._signs, self._since_s = seen, now_s
        return now_s - self._since_s


def asked_every_s(timeout_s: float) -> float:
    """How often ranks are asked, where so much time without a sign is a hang."""
    return max(ASKED_EVERY_MIN_S, timeout_s / ASKED_PER_TIMEOUT)


def who_holds_up(ranks: Collection[int], begun: Mapping[int, int]) -> int:
    """The rank that the others wait for: one that answers nothing, else who has begun fewest collectives.

    ``begun``: collectives of each rank that has answered. -1 where all are alike.
    """
    silent = sorted(set(ranks) - set(begun))
    if silent and (begun or len(silent) == 1):
        return silent[0]
    fewest = min(begun.values(), default=0)
    behind = [rank for rank in sorted(begun) if begun[rank] == fewest]
    return behind[0] if behind and (len(behind) < len(begun) or len(begun) == 1) else -1


def hang_in_words(
    rank: int, *, timeout_s: float, places: Mapping[int, str], begun: Mapping[int, int]
) -> str:
    """One line: who, for how long, where, where the others wait, and the collectives of each where they differ.

    ``places``: the user's line of each rank that has said so.
    """
    who = f"rank {rank} hung" if rank >= 0 else "all ranks hung"
    first = rank if rank >= 0 else min(places, default=-1)
    where = f" {places[first]}" if places.get(first) else ""
    said = {places.get(first, "") if rank < 0 else "", ""}
    for other, place in sorted(places.items()):
        if other != first and place not in said and len(said) <= OTHERS_SHOWN_MAX:
            said.add(place)
            where += f"; rank {other} waits {place}"
    counts = disagreement(begun)
    apart = f"; collectives begun: {counts}" if counts else ""
    unanswered = "; it did not answer" if rank >= 0 and rank not in begun else ""
    return (
        f"{who}{where}: no step, collective, line or heartbeat of any rank for {timeout_s:g} s"
        f"{apart}{unanswered}"
    )
