"""A follower's part where a majority decides: it votes, asks for votes, and keeps what it has promised."""

from __future__ import annotations

import random
import socket
from pathlib import Path

from ddp_runner.core.launch_plan import LaunchPlan
from ddp_runner.features.machines.ballot_file import BallotFile
from ddp_runner.features.machines.letters import Letters
from ddp_runner.features.machines.node_link import LinkLostError
from ddp_runner.features.machines.parent.follower import Follower
from ddp_runner.features.machines.rules.majority import (
    NEVER,
    Ballot,
    Record,
    confirmed,
    ended,
    forming,
    has_majority,
    is_over,
    may_obey,
    may_vote,
    others_of,
    promising,
    why_no_vote_holds,
)
from ddp_runner.features.machines.rules.node_messages import (
    Elected,
    Generation,
    RunOver,
    Vote,
    VoteWanted,
)
from ddp_runner.kernel.system.clock import Clock
from ddp_runner.kernel.system.folder_owner import new_term
from ddp_runner.kernel.wire.packets import by_name

# From the loss of a coordinator to a machine's own ballot, and from one to the next: so that seldom two stand at once. A
# machine that is dialling one that is gone answers within the latter.
STANDS_S, VOTES_S = (0.2, 1.0), 2.5
_KINDS = by_name(VoteWanted | Elected | Vote)


class NotFormedError(LinkLostError):
    """Raised where ranks here may not be in the generation that is ordered: nothing behind it concerns them."""


class Voting:
    """Owned by the follower's loop, which turns it. ``leader_at``: where a newer coordinator listens, as it has said."""

    def __init__(self, plan: LaunchPlan, *, token: bytes, clock: Clock) -> None:
        assert plan.nodes is not None
        self._options = plan.nodes
        self.file = BallotFile(Path(plan.settings.run.checkpoint_dir))
        self._clock = clock
        self._letters = Letters(token, _KINDS)
        self.door: socket.socket | None = None
        self.leader_at: tuple[str, int] | None = None
        self._generation: Generation | None = None  # that ranks here were asked to form
        self._is_confirmed = True
        self._is_kept = True  # the last order of a generation was written down
        self._heard = 0  # the greatest number of a ballot that it was asked to vote in
        self._ballot = NEVER  # its own, for which it collects votes
        self._votes: set[str] = set()
        self._stands_at_s: float | None = None

    @property
    def may_decide(self) -> bool:
        """Return True if a majority can decide in this run."""
        return self._options.moving_fd is None and not self.why_none

    @property
    def why_none(self) -> str:
        """Return in words why no majority can decide among so many machines; empty if one can."""
        return why_no_vote_holds(least=self._options.least, most=self._options.most)

    @property
    def holds(self) -> bool:
        """Return True if this machine is one of a generation whose majority decides."""
        return self._generation is not None

    @property
    def peers(self) -> list[tuple[str, int]]:
        """Return the addresses of machines known before a restart: one of them may coordinate by now."""
        record = None if self.holds else self._known
        if record is None or is_over([record]):
            return []
        return [(one.host, one.port) for one in others_of(record) if one.host]

    @property
    def record(self) -> Record | None:
        """Return what this machine reports to a coordinator; None if no majority decides, or it takes no part."""
        record = self._known
        if record is None or not self.file.may_be_written:
            return None
        if not self._is_kept:
            try:
                self.file.write(record)
            except OSError:
                return None
            self._is_kept = True
        return record

    @property
    def _known(self) -> Record | None:
        """The record here; None where no majority decides, or nobody can read it."""
        try:
            return self.file.read() if self.may_decide else None
        except OSError:
            return None

    @property
    def at(self) -> tuple[str, int]:
        """The address where this machine hears of votes."""
        if self.door is None:
            return ("", 0)
        host, port, *_ = self.door.getsockname()
        return (host, port)

    def open(self, door: socket.socket) -> None:
        """Hear of votes there."""
        self.door = door
        self._letters.open(door)

    def may_obey(self, ballot: Ballot) -> bool:
        """Return whether this machine may still follow that coordinator."""
        record = self._known
        return record is None or may_obey(record, ballot)

    def asked_to_form(self, order: Generation, term: str) -> None:
        """Keep who has the generation, before a rank hears of it. Raises NotFormedError where it may not be formed.

        One that names no machines is formed without a vote of this one.
        """
        ballot = (order.ballot, term)
        if not self.may_obey(ballot):
            raise NotFormedError("this machine has voted for another coordinator since")
        if not order.members:
            self._generation = None
            return
        try:
            asked = forming(
                self.file.read(),
                ballot=ballot,
                generation=order.generation,
                members=order.members,
                before=order.before,
                run=order.run,
            )
            self.file.write(asked)
        except OSError as error:
            self._is_kept = False
            reason = f"the votes of this machine cannot be kept, so it takes no part: {error}"
            raise NotFormedError(reason) from error
        self._generation, self._is_confirmed = order, False

    def notes_end(self, order: Generation | RunOver, term: str) -> bool:
        """Keep what is ordered; return whether that is the end of this machine's run, and on the disk.

        Raises NotFormedError as :meth:`asked_to_form` does.
        """
        if isinstance(order, Generation):
            self.asked_to_form(order, term)
            return False
        record = self._known
        if record is None or record.formed != (order.ballot, term, order.generation):
            return False
        try:
            self.file.write(ended(record, {*order.machines, record.machine}))
        except OSError:  # the record as it was asks for more
            return False
        self._generation = None
        return True

    def _trains(self) -> None:
        """A rank here trains in that generation: all of its machines know it."""
        if not self._is_confirmed:
            self._is_confirmed = True
            try:
                self.file.write(confirmed(self.file.read()))
            except OSError:  # the record as it was asks for more
                return

    def turn_in_run(self, follower: Follower) -> None:
        """Hear what has come while a coordinator is there, and note once ranks here train."""
        self.turn(obeys=True)
        if self._generation is not None and follower.trains_in(self._generation.generation):
            self._trains()

    def turn(self, *, obeys: bool) -> None:
        """Hear what has come. ``obeys``: a coordinator is there, so that no other one is wanted."""
        for link, message in self._letters.turn():
            if isinstance(message, VoteWanted):
                vote = self._vote(message, obeys=obeys)
                if vote is not None:
                    self._letters.answer(link, vote)
            elif isinstance(message, Vote):
                if (message.ballot, message.term) == self._ballot:
                    self._votes.add(message.machine)
            else:  # one of an older ballot takes a newer number, or says that it is behind
                self.leader_at = (message.host, message.port)
                self._letters.drop(link)

    def _vote(self, wanted: VoteWanted, *, obeys: bool) -> Vote | None:
        self._heard = max(self._heard, wanted.ballot)
        if obeys or not self.holds:
            return None
        record, ballot = self.file.read(), (wanted.ballot, wanted.term)
        if not may_vote(record, ballot, (wanted.formed, wanted.formed_term, wanted.generation)):
            return None
        try:
            self.file.write(promising(record, ballot))
        except OSError:
            return None
        self._ballot, self._stands_at_s = NEVER, self._clock.monotonic() + VOTES_S
        return Vote(machine=record.machine, ballot=wanted.ballot, term=wanted.term)

    def found(self) -> None:
        """A coordinator is there."""
        self._ballot, self._votes, self._stands_at_s = NEVER, set(), None
        self._letters.drop_all()

    def stand(self) -> Ballot | None:
        """Ask the others for their votes when it is time. Return the ballot in which this machine was elected.

        It has a memory of its newest generation, or of the one before, which is as new: the newest has made no step then.
        """
        if not self.holds:
            return None
        record = self.file.read()
        stands = self._ballot != NEVER and record.has_promised == self._ballot
        if stands and has_majority(record, self._votes):
            return self._ballot
        now_s = self._clock.monotonic()
        if self._stands_at_s is None:
            self._stands_at_s = now_s + random.uniform(*STANDS_S)  # noqa: S311 - no secret
        if now_s >= self._stands_at_s:
            self._stands_at_s = now_s + VOTES_S + random.uniform(*STANDS_S)  # noqa: S311 - no secret
            self._ask(record)
        return None

    def _ask(self, record: Record) -> None:
        ballot = (max(record.promised, self._heard) + 1, new_term())
        try:
            self.file.write(promising(record, ballot))
        except OSError:
            return
        self._ballot, self._votes = ballot, {record.machine}
        wanted = VoteWanted(
            ballot=ballot[0],
            term=ballot[1],
            formed=record.ballot,
            formed_term=record.term,
            generation=record.generation,
        )
        self._letters.send(others_of(record), wanted)

    def give_door(self) -> socket.socket:
        """Hand the door over, to be the coordinator's."""
        assert self.door is not None
        self._letters.drop_all()
        self._letters.leave_door()
        return self.door

    def close_door(self) -> None:
        """Hear of no votes any more."""
        self._letters.leave_door()
        if self.door is not None:
            self.door.close()
        self.door = None

    def close(self) -> None:
        """Hang up, and close the door if it is still here."""
        self._letters.close()
