"""Keeps each rank's state on one other machine too, in the memory of a rank there.

So it outlives the rank's machine. With one machine nothing is sent, at no cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddp_runner.kernel.group.transfer import receive_state, send_state
from ddp_runner.kernel.group.waits import waiting_for_peers

if TYPE_CHECKING:
    from torch import Tensor

    from ddp_runner.kernel.group.group import Group
    from ddp_runner.kernel.wire.board import Slot

_GUEST = "guest"


@dataclass(frozen=True, slots=True)
class Guest:
    """Holds the state of a rank of another machine. ``flags``: as of its place there (``rank_memory``)."""

    flags: int
    content: Tensor


@dataclass(frozen=True, slots=True)
class Seat:
    """Says where a rank of the group is: its number in the launch, and its machine."""

    rank: int
    machine: int


def partner_of(seats: Sequence[Seat], number: int) -> int | None:
    """Return the number in the group of the rank that keeps the state of rank ``number``; None without one.

    Each machine's ranks use those of the next machine, the last one's use the first one's.
    """
    machines = sorted({one.machine for one in seats})
    if len(machines) < 2 or machines[0] < 0:
        return None
    own = seats[number].machine
    following = machines[(machines.index(own) + 1) % len(machines)]
    there = [n for n, one in enumerate(seats) if one.machine == following]
    here = [n for n, one in enumerate(seats) if one.machine == own]
    return there[here.index(number) % len(there)]


class Elsewhere:
    """Sends this rank's state to its partner at each step, and keeps that of the ranks whose partner it is."""

    def __init__(self) -> None:
        self._guests: dict[int, dict[int, Guest]] = {}  # by rank in the launch, then by step
        self._wire: tuple[Group, Slot] | None = None
        self._seats: Sequence[Seat] = ()
        self._partner: int | None = None
        self._sources: list[int] = []
        self._begins = False

    @property
    def is_paired(self) -> bool:
        """True if another machine keeps this rank's state."""
        return self._wire is not None

    def pair(self, group: Group, slot: Slot, seats: Sequence[Seat]) -> None:
        """Use the ranks of this generation; ``seats``: all of them, by their numbers in the group."""
        self.leave()
        self._partner = partner_of(seats, group.rank)
        if self._partner is None:
            return
        self._wire, self._seats = (group, slot), seats
        numbers = range(len(seats))
        self._sources = [one for one in numbers if partner_of(seats, one) == group.rank]
        machines = sorted({one.machine for one in seats})
        # Every second one receives first, so that not all wait for one another.
        self._begins = machines.index(seats[group.rank].machine) % 2 == 0

    def leave(self) -> None:
        """Send nothing any more: the generation has ended. What other ranks have sent stays."""
        self._wire, self._partner, self._sources = None, None, []

    def send(self, step: int, guest: Guest | None) -> None:
        """Send this rank's state of ``step``, and receive that of others. None: it is too large, and stays here.

        Every rank must call it. Raises what the group raises.
        """
        if self._wire is None or self._partner is None:
            return
        group, slot = self._wire
        mine = {_GUEST: None if guest is None else [guest.flags, guest.content]}
        with waiting_for_peers(slot):
            if self._begins:
                send_state(group, mine, to=[self._partner])
            for source in self._sources:
                self._take(self._seats[source].rank, step, receive_state(group, source=source))
            if not self._begins:
                send_state(group, mine, to=[self._partner])
        # Of ranks that have another partner now: another branch of the run may have the same step.
        here = {self._seats[source].rank for source in self._sources}
        self._guests = {rank: held for rank, held in self._guests.items() if rank in here}

    def _take(self, rank: int, step: int, received: dict[str, Any]) -> None:
        given = received[_GUEST]
        # The step before stays as long as the ranks may have to begin from there.
        kept = {one: guest for one, guest in self._guests.get(rank, {}).items() if one == step - 1}
        if given is not None:
            kept[step] = Guest(int(given[0]), given[1])
        self._guests[rank] = kept

    def held(self) -> list[tuple[int, int]]:
        """Return the ranks whose state is here, each with its steps."""
        return [(rank, step) for rank, steps in sorted(self._guests.items()) for step in steps]

    def hand_over(self, group: Group, rank: int, step: int, *, to: int) -> None:
        """Send the state of ``rank`` to its new process, which is ``to`` in the group."""
        guest = self._guests[rank][step]
        send_state(group, {_GUEST: [guest.flags, guest.content]}, to=[to])

    @staticmethod
    def receive_own(group: Group, *, source: int) -> Guest:
        """Receive what ``source`` hands over. Raises what the group raises."""
        flags, content = receive_state(group, source=source)[_GUEST]
        return Guest(int(flags), content)
