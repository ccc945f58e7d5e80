"""Finds the ranks of a script that hang, where a limit was asked for, and has them say where first. Ends nobody."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ddp_runner.kernel.parent.rank_handle import RankHandle
from ddp_runner.kernel.parent.world import World
from ddp_runner.kernel.processes.rank_process import place_in
from ddp_runner.kernel.rules.divergence import disagreement
from ddp_runner.kernel.rules.faults import Fault, FaultKind
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.kernel.wire.messages import CollectivesBegun

ANSWER_TIME_S = 3.0  # for ranks to say how many collectives they have begun, and where they are
FORCED_TIME_S = 1.0  # for one that does not answer to be made to


class ScriptHangs:
    """Watches one attempt. Driven by ``ScriptAgent``, once a tick while no fault is known."""

    def __init__(self, timeout_s: float, *, world: World) -> None:
        self._timeout_s = timeout_s
        self._world = world
        self._silence = Silence()
        self._newest: dict[int, CollectivesBegun] = {}  # of each rank
        self._count_at_s = 0.0  # when ranks are asked how many they have begun
        # Where they hang: when all were asked, who has answered since, and when the rest was made to.
        self._asked_s: float | None = None
        self._answers: dict[int, CollectivesBegun] = {}
        self._forced_s: float | None = None

    def note(self, message: CollectivesBegun) -> None:
        """A rank has answered."""
        self._newest[message.rank] = message
        if self._asked_s is not None:
            self._answers[message.rank] = message

    def look(self, now_s: float) -> Fault | None:
        """Whom the others wait for, once nothing has come of any rank for too long and all have said where."""
        alive = [handle for handle in self._world.ranks if handle.is_alive and handle.has_formed]
        if not alive:
            return None
        if self._asked_s is None:
            silent_s = self._silence.observe([self._signs(handle) for handle in alive], now_s)
            if silent_s > self._timeout_s:
                self._asked_s = now_s
                self._world.ask_stacks()
            elif now_s >= self._count_at_s:
                self._count_at_s = now_s + asked_every_s(self._timeout_s)
                self._world.count_collectives()
            return None
        missing = [handle for handle in alive if handle.rank not in self._answers]
        if missing and self._forced_s is None:
            if now_s >= self._asked_s + ANSWER_TIME_S:
                self._forced_s = now_s
                self._world.force_stacks([handle.rank for handle in missing])
            return None
        if self._forced_s is not None and now_s < self._forced_s + FORCED_TIME_S:
            return None
        if now_s < self._asked_s + ANSWER_TIME_S and not all(map(self._is_place_known, alive)):
            return None
        return self._verdict(alive, now_s)

    def _is_place_known(self, handle: RankHandle) -> bool:
        """Return whether it is known where a rank is, as far as it has said so: of another machine it comes later."""
        return self._world.is_here(handle) or bool(self._world.stack_of(handle))

    def _signs(self, handle: RankHandle) -> SignsOfLife:
        answer = self._newest.get(handle.rank)
        return SignsOfLife(
            rank=handle.rank,
            steps=handle.slot.get(Cell.COMMITTED_STEP),
            heartbeats=handle.slot.get(Cell.SCRIPT_HEARTBEATS),
            log_bytes=self._world.log_bytes(handle),
            collectives=0 if answer is None else answer.count,
            in_others=0 if answer is None else answer.in_others,
        )

    def _verdict(self, alive: list[RankHandle], now_s: float) -> Fault:
        begun: Mapping[int, int] = {
            rank: answer.count for rank, answer in self._answers.items() if answer.count >= 0
        }
        # One outside of any group has answered all the same.
        answered = {rank: begun.get(rank, 0) for rank in self._answers}
        rank = who_holds_up([handle.rank for handle in alive], answered)
        stacks = {handle.rank: self._world.stack_of(handle) for handle in alive}
        places = {each: place_in(stack) for each, stack in stacks.items()}
        # Both sides: whoever hangs, and the first of those that wait.
        shown = sorted(stacks, key=lambda each: (each != rank, each))[:2]
        return Fault(
            kind=FaultKind.RANK_HUNG if rank >= 0 else FaultKind.COLLECTIVE_STUCK,
            rank=rank,
            step=max(handle.slot.get(Cell.COMMITTED_STEP) for handle in alive),
            cause=hang_in_words(rank, timeout_s=self._timeout_s, places=places, begun=answered),
            detail="\n".join(f"rank {each}:\n{stacks[each]}" for each in shown if stacks[each]),
            at_ns=int(now_s * 1e9),
        )


# When the ranks of a script hang, and which of them holds the others up. Values in, values out.

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
