"""A coordinator's part where a majority decides: it forms with one only, and says to others who coordinates.

:class:`MajorityKeeper` keeps the votes; :class:`Quorum` is the door to it, of a training and of a script.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ddp_runner.core.launch_plan import LaunchPlan
from ddp_runner.features.machines.ballot_file import BallotFile, unreadable
from ddp_runner.features.machines.letters import Letters
from ddp_runner.features.machines.parent.other_nodes import Place
from ddp_runner.features.machines.parent.remote_node import RemoteNode
from ddp_runner.features.machines.rules.majority import (
    Ballot,
    Peer,
    Record,
    confirmed,
    ended,
    forming,
    has_majority,
    is_newest,
    is_over,
    known_by_all,
    may_form,
    newest,
    others_of,
    why_no_vote_holds,
)
from ddp_runner.features.machines.rules.node_messages import (
    Elected,
    Generation,
    Hello,
    RunOver,
    Vote,
)
from ddp_runner.kernel.parent.world import World
from ddp_runner.kernel.rules.lifecycle import IN_WORLD
from ddp_runner.kernel.system.clock import Clock
from ddp_runner.kernel.wire.packets import by_name

SAYS_EVERY_S = 1.0  # to machines that are not there, who coordinates
# For a coordinator that was elected meanwhile to say so, before one that others have left takes them back.
DOUBTS_S = 5.0
KEPT_EVERY_S = 1.0  # from a write of the votes that failed to the next one
_KINDS = by_name(Elected | Vote)


class MajorityKeeper:
    """Owned by whoever coordinates in ``term``; ``at``: where it listens, ``number``: of its machine."""

    def __init__(
        self,
        plan: LaunchPlan,
        *,
        term: str,
        token: bytes,
        at: tuple[str, int],
        number: int,
        clock: Clock,
        votes: BallotFile | None = None,
    ) -> None:
        """``votes``: this machine's, if its follower has read them; they are not read again."""
        assert plan.nodes is not None
        self._options = plan.nodes
        self._file = votes or BallotFile(Path(plan.settings.run.checkpoint_dir))
        self._is_new = plan.settings.run.resume != "auto"  # what was before does not matter
        self._term, self._at, self._number = term, at, number
        self._clock = clock
        self._letters = Letters(token, _KINDS)
        try:
            own = self._file.read()
        except OSError as error:
            raise unreadable(self._file, error) from error
        self._ballot = own.promised + 1
        self._run = "" if self._is_new else own.run  # that goes on here; empty: none is known yet
        self._has_formed = self._is_elected = False
        self._newer_at: tuple[str, int] | None = None
        self._said_s = 0.0
        self._doubts_since_s = 0.0  # whether another one was elected; 0: it does not
        options = plan.nodes
        is_moved = options.moving_fd is not None
        self.may_decide = not is_moved and not why_no_vote_holds(
            least=options.least, most=options.most
        )

    @property
    def path(self) -> Path:
        """The file of this machine's record."""
        return self._file.path

    @property
    def ballot(self) -> Ballot:
        """The coordinator's."""
        return (self._ballot, self._term)

    def was_elected(self, number: int) -> None:
        """Take the number of the ballot in which this machine was elected."""
        self._ballot, self._is_elected = number, True

    def yields_to(self, elected: Elected) -> bool:
        """Return whether that coordinator is the newer one, or this one has nothing that could be lost."""
        has_right = self._has_formed or self._is_elected
        self._newer_at = None if has_right else (elected.host, elected.port)
        return not has_right or (elected.ballot, elected.term) > self.ballot

    def gives_way(self) -> bool:
        """Have this machine follow the newer coordinator, where it has formed nothing itself; return whether it does."""
        self._file.yields_to = self._newer_at
        return self._newer_at is not None

    def ballot_for(self, hello: Hello, there: Sequence[RemoteNode] = ()) -> int | None:
        """Return the number for a machine that has come, which follows no older coordinator than the one it has voted for.

        None: it is to come again, as the one that it has voted for may coordinate. ``there``: the machines that follow this
        one; where they are a majority with it, nobody else does.
        """
        if not self.may_decide:
            return 0
        record = hello.record
        if record is not None and record.has_promised > self.ballot:
            now_s = self._clock.monotonic()
            self._doubts_since_s = self._doubts_since_s or now_s
            has_right = (self._has_formed or self._is_elected) and not self._is_of_before(record)
            names = {one.machine for one in self._records(there)}
            is_doubtful = has_right and not has_majority(self._file.read(), names)
            if is_doubtful and now_s < self._doubts_since_s + DOUBTS_S:
                return None
            self._ballot, self._doubts_since_s = record.promised + 1, 0.0
        return self._ballot

    def is_behind(self, record: Record | None) -> bool:
        """Return whether others have trained without this machine, as a machine that has come says."""
        if record is None or not self.may_decide or self._is_of_before(record):
            return False
        return self._has_formed and record.formed > self._file.read().formed

    def _is_of_before(self, record: Record) -> bool:
        """Return whether a machine has its record from another run than the one that goes on here, which does not matter.

        Others that have trained without this machine are a majority of its generation, so that they are of its run.
        """
        goes_on = self._is_new or self._has_formed or self._is_elected
        return goes_on and record.run not in ("", self._run)

    def has_newest(self, record: Record, there: Sequence[RemoteNode]) -> bool:
        """Return whether no step that anybody here knows of was made without the memory of a machine that comes."""
        return is_newest(record, record.formed, newest([*self._records(there), record]))

    def decides(self, there: Sequence[RemoteNode]) -> bool:
        """Return True if a majority decides: each machine has a folder of its own, or it has been so before.

        Not where any two have one folder, or a copy of one.
        """
        if not self.may_decide or any(node.shares_checkpoints for node in there):
            return False
        records = self._records(there)
        if len({one.machine for one in records}) < len(records):
            return False
        return bool(self._file.read().members) or len(records) == 1 + len(there)

    def missing(self, there: Sequence[RemoteNode]) -> list[int]:
        """Return the numbers of the machines of which some must come before anybody trains; none: it may be formed."""
        if self._is_new and not self._has_formed:
            return []
        records = self._records(there)
        if may_form(records):
            return []
        known, names = newest(records), {one.machine for one in records}
        peers = (*known.members, *known.before)
        return sorted({one.number for one in peers if one.machine not in names})

    def forms(self, generation: int, there: Sequence[RemoteNode]) -> None:
        """Tell all machines, and the file here, who has the next generation. Raises OSError."""
        records = self._records(there)
        own = records[0]
        host, port = self._at
        members = [Peer(machine=own.machine, number=self._number, host=host, port=port)]
        for node in there:
            if node.hello is not None and node.hello.record is not None:
                hello, record = node.hello, node.hello.record
                members.append(
                    Peer(
                        machine=record.machine,
                        number=node.number,
                        host=hello.at_host,
                        port=hello.at_port,
                    )
                )
        known = newest(records)
        begins = self._is_new and not self._has_formed
        run = (not begins and known.run) or self._term
        asked = forming(
            own,
            ballot=self.ballot,
            generation=generation,
            members=members,
            before=() if begins or is_over(records) else known_by_all(known),
            run=run,
        )
        self._file.write(asked)
        self._run = run
        order = Generation(
            ballot=self._ballot,
            generation=generation,
            members=asked.members,
            before=asked.before,
            run=run,
        )
        for node in there:
            takes_part = node.hello is not None and node.hello.record is not None
            node.order(order if takes_part else replace(order, members=(), before=()))

    def forms_without(self, there: Sequence[RemoteNode]) -> None:
        """Tell all machines that no majority decides about the next generation, where one has decided before."""
        if self.may_decide and (own := self._file.read()).members:
            order = Generation(
                ballot=self._ballot, generation=own.generation, members=(), before=()
            )
            for node in there:
                node.order(order)

    def ends(self, there: Sequence[RemoteNode]) -> None:
        """Have the next launch wait for no machine of this one: write down that the run has ended, and ask all to do so.

        Called once more when they have answered: then each hears of all that know it.
        """
        own = self._file.read()
        if not (self._has_formed and own.term == self._term and own.members):
            return
        names = {peer.machine for peer in own.members}
        members = [node for node in there if _name_of(node) in names]
        noted = {_name_of(node) for node in members if node.has_noted_end}
        try:
            asked = ended(own, {own.machine, *noted})
            self._file.write(asked)
        except OSError:  # the record as it was asks for more
            return
        order = RunOver(ballot=own.ballot, generation=own.generation, machines=asked.over)
        for node in members:
            node.order(order)
            node.is_to_note_end = True

    def trains(self) -> None:
        """All ranks are in the generation."""
        own, self._has_formed = self._file.read(), True
        if own.before and own.term == self._term:
            self._file.write(confirmed(own))

    def say_who_leads(self, now_s: float, there: Sequence[RemoteNode]) -> None:
        """Say to the machines that are not there who coordinates, now and then."""
        list(self._letters.turn())
        if now_s < self._said_s + SAYS_EVERY_S or not (self._has_formed or self._is_elected):
            return
        self._said_s = now_s
        names = {one.machine for one in self._records(there)}
        away = [peer for peer in others_of(self._file.read()) if peer.machine not in names]
        host, port = self._at
        if away:
            elected = Elected(ballot=self._ballot, term=self._term, host=host, port=port)
            self._letters.send(
                [peer for peer in away if (peer.host, peer.port) != self._at], elected
            )

    def close(self) -> None:
        """Hang up."""
        self._letters.close()

    def _records(self, there: Sequence[RemoteNode]) -> list[Record]:
        """Return the record of this machine, and of each other one that is there."""
        hellos = (node.hello for node in there)
        others = [one.record for one in hellos if one is not None and one.record is not None]
        new = [Record(machine=one.machine) if self._is_of_before(one) else one for one in others]
        return [self._file.read(), *new]


class Quorum:
    """Says to whoever coordinates what a majority of the machines allows; without a keeper everything is allowed.

    ``elected_at``: where another machine coordinates, which a majority has voted for. ``waits``: why nobody may train now;
    ``gives_up``: the last line of a run that has waited too long for that.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        others: Sequence[RemoteNode],
        world: World,
        *,
        say: Callable[[str], None],
        clock: Clock,
    ) -> None:
        """``say``: shows a warning."""
        assert plan.nodes is not None
        self.keeper: MajorityKeeper | None = None
        self.elected_at = self.waits = self.gives_up = ""
        self.wait_s = plan.settings.recovery.node_patience_s + plan.nodes.join_timeout_s
        self._plan = plan
        self._folder = "checkpoint folder" if plan.opaque is None else "log folder"
        self._others, self._world = tuple(others), world
        self._say, self._clock = say, clock
        self._since_s = self._kept_again_s = 0.0

    def open(self, place: Place, *, term: str) -> MajorityKeeper:
        """Have a majority decide who coordinates, where it can. ``place``: this machine's; the caller closes the keeper."""
        options = place.meeting.options
        self.keeper = MajorityKeeper(
            self._plan,
            term=term,
            token=place.meeting.token,
            at=(options.local_name or options.host, options.port),
            number=place.number,
            clock=self._clock,
            votes=place.votes,
        )
        return self.keeper

    @property
    def members(self) -> list[RemoteNode]:
        """The other machines that are there, with ranks that take part in the next generation."""
        return [
            node
            for node in self._others
            if node.is_there
            and any(self._world.ranks[rank].membership in IN_WORLD for rank in node.processes)
        ]

    @property
    def decides(self) -> bool:
        """Return True if a majority decides about the next generation."""
        return self.keeper is not None and self.keeper.decides(self.members)

    def was_elected(self, ballot: int) -> None:
        """Take the number of the ballot in which this machine was elected; 0: no majority has voted."""
        if self.keeper is not None and ballot:
            self.keeper.was_elected(ballot)

    def ballot_for(self, hello: Hello) -> int | None:
        """Return the number of the ballot for a machine that comes; None has it look for a newer coordinator."""
        if self.keeper is None:
            return 0
        if self.keeper.is_behind(hello.record):
            self.elected_at = "another machine"
            return None
        there = [node for node in self._others if node.is_there and node.hello is not hello]
        return self.keeper.ballot_for(hello, there)

    def note_end(self) -> None:
        """Have the machines that are there note that the run has ended, before they hear so."""
        if self.keeper is not None:
            self.keeper.ends([node for node in self._others if node.is_there])

    def hear_elected(self, elected: Elected) -> None:
        """A majority has voted for another machine."""
        if self.keeper is not None and self.keeper.yields_to(elected):
            self.elected_at = f"{elected.host}:{elected.port}"

    def why_not_leader(self, *, is_stopping: bool) -> str:
        """Return in words that another machine was elected in this one's place; empty where none was."""
        if not self.elected_at:
            return ""
        follows = not is_stopping and self.keeper is not None and self.keeper.gives_way()
        what = "follows it" if follows else "ends"
        return f"a majority has elected another coordinator, at {self.elected_at}: this one {what}"

    def say_who_leads(self, now_s: float) -> None:
        """Say to the machines that are not there who coordinates, now and then."""
        if self.keeper is not None:
            self.keeper.say_who_leads(now_s, [node for node in self._others if node.is_there])

    def trains(self) -> None:
        """All ranks are in the generation."""
        if self.keeper is not None:
            with contextlib.suppress(OSError):  # the record as it was asks for more
                self.keeper.trains()

    def may_form(self, generation: int) -> bool:
        """Return whether the machines that are there may form it, and have each of them write down who has it."""
        keeper, there = self.keeper, self.members
        if keeper is None or not keeper.decides(there):
            self.waits = ""
            if keeper is not None:
                keeper.forms_without(there)
            return True
        if not self.has_majority():
            return False
        if (now_s := self._clock.monotonic()) < self._kept_again_s:
            return False
        try:
            keeper.forms(generation, there)
        except OSError as error:
            self._kept_again_s = now_s + KEPT_EVERY_S
            reason = error.strerror or str(error)
            self._wait(f"nobody trains while {keeper.path} cannot be written: {reason}")
            return False
        self.waits = self.gives_up = ""
        return True

    def has_majority(self) -> bool:
        """Return whether enough machines of the newest generation are there; say whom the run waits for."""
        keeper, there = self.keeper, self.members
        if keeper is None or not keeper.decides(there):
            return True
        missing = keeper.missing(there)
        if not missing:
            return True
        names = ", ".join(f"node {number}" for number in missing)
        self._wait(
            f"the machines of the newest process group have no majority: waiting for {names}",
            last=f"the machines of the newest process group have no majority without {names}: if these"
            f" are permanently lost, remove {keeper.path.name} in the {self._folder} on each machine that is left,"
            " to resume from the newest checkpoint",
        )
        return False

    def _wait(self, line: str, *, last: str = "") -> None:
        """Say why nobody trains now. ``last``: the last line of a run that waits too long, if that is another one."""
        now_s = self._clock.monotonic()
        if not self.waits:
            self._since_s = now_s
        self.gives_up = (last or line) if now_s > self._since_s + self.wait_s else ""
        if line != self.waits and not self.gives_up:
            self.waits = line
            self._say(line)


def _name_of(node: RemoteNode) -> str:
    record = None if node.hello is None else node.hello.record
    return "" if record is None else record.machine
