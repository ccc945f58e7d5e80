"""The coordinator's side of all links: takes nodes in, hears them, and finds who is silent."""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from ddp_runner.core.gpu_reading import Watched
from ddp_runner.core.launch_plan import LaunchPlan
from ddp_runner.features.machines.ballot_file import BallotFile
from ddp_runner.features.machines.node_link import LinkLostError, NodeLink
from ddp_runner.features.machines.parent.admission import (
    LossCount,
    Meeting,
    number_is_taken,
    other_code,
    place_for,
    why_not,
)
from ddp_runner.features.machines.parent.remote_node import SPARE, RemoteNode, machine_of
from ddp_runner.features.machines.rules.majority import Record
from ddp_runner.features.machines.rules.node_messages import (
    FROM_FOLLOWER,
    Answer,
    Beat,
    Elected,
    EndWanted,
    Folders,
    FromRank,
    Hello,
    Look,
    NodeMessage,
    OverNoted,
    Parked,
    Question,
    RankGone,
    RankStarted,
    Refused,
    Said,
    SaveWanted,
    StopWanted,
    Welcome,
)
from ddp_runner.kernel.rules.election import EMPTY_STEP
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.system.clock import Clock
from ddp_runner.kernel.wire import packets as wire
from ddp_runner.kernel.wire.events import OfFault, RunEnds
from ddp_runner.kernel.wire.messages import Leaving, Message, decode
from ddp_runner.kernel.wire.packets import WireError
from ddp_runner.observe.view import NodeView

if TYPE_CHECKING:
    from ddp_runner.features.machines.parent.machines import Machines

GREETING_TIME_S = 10.0  # for whoever connects to prove what it is
LAST_WORDS_S = 2.0  # for nodes to hear that the run has ended
# Connections of machines that have not said who they are, in all and of one address. With one more, the
# oldest is dropped, of that address if it has so many.
STRANGERS_MAX = 64
STRANGERS_OF_ADDRESS_MAX = 32
# What accept(2) fails with where no descriptor is left. Who knocks stays in the queue, so that the door would be
# ready again at once, for ever: it is looked at again after that time.
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
SHUT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stranger:
    since_s: float
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSaid:
    """A rank of another node has sent this."""

    message: Message
    rank: int


NodeNews = RankStarted | RankGone | Said | StopWanted | SaveWanted | EndWanted | Folders


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSaid:
    """Another node has sent this."""

    node: RemoteNode
    message: NodeNews


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined:
    """Another node is there. ``keeps_parked``: as in its Welcome. ``was_spare``: it has waited for this place.

    ``inexact_reasons``: of the run that its ranks were in. ``other_code``: what it runs that is not as here, in words; empty for the same code. ``waits_for``: of a
    spare, as in its Welcome.
    """

    node: RemoteNode
    keeps_parked: bool
    inexact_reasons: tuple[str, ...] = ()
    was_spare: bool = False
    other_code: str = ""
    waits_for: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGone:
    """Another node is not there any more; ``why`` in words."""

    node: RemoteNode
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRefused:
    """A machine named ``host`` can have no part in the run; ``why`` in words."""

    host: str
    why: str


NodeEvent = RankSaid | NodeSaid | NodeJoined | NodeGone | NodeRefused


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of the coordinator: node ``number``, which is this machine, and its listening socket.

    ``address``: the address that its store is bound to; ``store_host``: its name for other machines; empty: the
    endpoint's. ``votes``: this machine's, as the follower that it was has them.
    """

    meeting: Meeting
    number: int
    listening: socket.socket
    address: str
    store_host: str = ""
    votes: BallotFile | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """How other machines come in: whom the run takes, where they knock, and where ranks meet, in which ``term``.

    ``number``: of this machine; ``logs_number``: of its log folder.
    """

    meeting: Meeting
    listening: socket.socket
    store: tuple[str, int]
    term: str
    number: int = 0
    logs_number: int = 0


class Coordinates(Protocol):
    """Who decides about other machines: :class:`~.coordinator.CoordinatorSupervisor`."""

    machines: Machines

    def beat(self, number: int) -> Beat:
        """Return how the run stands, as the answer to look ``number``."""

    def keeps(self, parked: Parked, node: RemoteNode, record: Record | None) -> bool:
        """Return whether what the ranks of a node that comes back have in memory is still of use. ``record``: of its Hello."""

    def note_end(self) -> None:
        """The machines are about to hear that the run has ended. Called once more when all that it has asked have answered."""


class OtherNodes:
    """Owned by the supervisor's loop.

    The door's socket and the links are registered for reading, with this object and the link as data.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        door: Door,
        *,
        nodes: Sequence[RemoteNode],
        selector: selectors.BaseSelector,
        coordinator: Coordinates,
        clock: Clock,
    ) -> None:
        self._plan = plan
        self._coordinator = coordinator
        self._machines = coordinator.machines
        self._meeting = door.meeting
        self._store = door.store
        self._term = door.term
        self._number, self._logs_number = door.number, door.logs_number
        self.nodes = tuple(nodes)
        self._listening = door.listening
        self._selector = selector
        self._clock = clock
        self.spares: list[RemoteNode] = []  # in the order in which they came
        self._losses = LossCount()
        self._is_announced = False
        self._heard_last: RemoteNode | None = None  # most often the next frame is of the same
        self._strangers: dict[NodeLink, _Stranger] = {}  # in the order in which they came
        self._watched: dict[int, Watched] = {}  # that nobody has asked for yet
        self._shut_until_s = 0.0  # the door, which is open while this is 0
        self._listening.setblocking(False)
        self._open()

    def _open(self) -> None:
        self._selector.register(self._listening, selectors.EVENT_READ, (self, None))

    @property
    def _is_shut(self) -> bool:
        """True if nobody can be taken in for a moment: this process has no descriptor left."""
        return self._shut_until_s > 0

    @property
    def has_successor(self) -> bool:
        """True if another coordinator now controls the machines."""
        return self._machines.has_successor

    def read(self, link: NodeLink | None) -> Iterator[NodeEvent]:
        """The door, or a link, is ready."""
        if link is None:
            self._accept()
            return
        try:
            if link in self._strangers or self._of(link) is not None:
                link.flush()
                for content in link.receive():
                    message = wire.decode(content, FROM_FOLLOWER)
                    node = self._of(link)
                    if node is not None:
                        yield from self._heard(node, message)
                    elif link in self._strangers:
                        yield from self._meet(link, message)
        except (LinkLostError, WireError) as error:
            if link in self._strangers:
                self._drop(link)
            elif (node := self._of(link)) is not None:
                yield self.lose(node, str(error))
        if self._of(link) is not None or link in self._strangers:
            self._want_to_write(link)

    def _of(self, link: NodeLink) -> RemoteNode | None:
        if self._heard_last is None or self._heard_last.link is not link:
            there = (*self.nodes, *self.spares)
            self._heard_last = next((one for one in there if one.link is link), None)
        return self._heard_last

    def look(self, now_s: float) -> Iterator[NodeEvent]:
        """Yield the loss of each node that is silent for too long, and drop connections that prove nothing."""
        if self._is_shut and now_s >= self._shut_until_s:
            self._shut_until_s = 0.0
            self._open()
        for node in (*self.nodes, *self.spares):
            if node.link is None:
                continue
            self._want_to_write(node.link)
            if node.broken:  # such as a queue that it does not read
                yield self.lose(node, node.broken)
            elif now_s > node.heard_at_s + self._meeting.silent_s:
                silent_s = now_s - node.heard_at_s
                yield self.lose(node, f"nothing was heard of it for {silent_s:.1f} s")
        for link, stranger in list(self._strangers.items()):
            if now_s > stranger.since_s + GREETING_TIME_S:
                self._drop(link)
        yield from self._fill()

    def views(self) -> tuple[NodeView, ...]:
        """Return for people each node's presence, distance and number of losses."""
        now_s = self._clock.monotonic()
        return tuple(
            NodeView(
                number=node.number,
                host=node.host,
                is_there=node.is_there,
                round_trip_s=node.round_trip_s if node.is_there else None,
                losses=self._losses.total(node.machine),
                left_out_s=round(max(0.0, node.left_out_until_s - now_s), 1),
            )
            for node in (*self.nodes, *self.spares)
        )

    def watched(self) -> tuple[tuple[int, Watched], ...]:
        """Return the usage that machines have reported since the last call, by their numbers."""
        found, self._watched = tuple(self._watched.items()), {}
        return found

    def forgive(self, now_s: float) -> None:
        """Hold nothing against anybody that happened while this process did not run itself."""
        for node in (*self.nodes, *self.spares):
            node.heard_at_s = max(node.heard_at_s, now_s)

    def lose(self, node: RemoteNode, why: str) -> NodeGone:
        """Let go of a node."""
        if node.link is not None:
            self._selector.unregister(node.link)
            if not node.is_leaving:
                self._losses.lost(node.machine, self._clock.monotonic())
                node.left_out_until_s = self._losses.left_out_until_s(node.machine)
        node.is_lost()
        if node in self.spares:
            self.spares.remove(node)
        return NodeGone(node=node, why=why)

    def announce_end(self, ends: RunEnds, *, but_parked: bool = False) -> None:
        """Say how the run has ended; once. ``but_parked``: not to those who wait with a memory of it."""
        # INVARIANT memory-outlasts-a-start: a coordinator that fails before it has formed a world ends no
        # ranks that others have kept. Broken if: they hear that the run has ended.
        # Guarded by: test_a_coordinator_that_cannot_start_leaves_others_their_memory.
        if self._is_announced:
            return
        self._is_announced = True
        if not self._machines.has_successor:
            self._coordinator.note_end()
            self._await_notes()
        for node in (*self.nodes, *self.spares):
            # INVARIANT superseded-orders-nobody: a coordinator whose folder another one has taken ends no machine: each
            # looks for the new one, with its memory. Broken if: they hear that the run has ended.
            # Guarded by: test_a_superseded_coordinator_leaves_the_others_to_the_new_one.
            if self._machines.has_successor:
                if node.link is not None:
                    node.link.say_no_more()
            elif not (but_parked and node.keeps_memory):
                node.order(ends)

    def _await_notes(self) -> None:
        """Wait for those that are to note the end, for a short while; then have them hear of each other."""
        asked = {
            node.link: node for node in self.nodes if node.link is not None and node.is_to_note_end
        }
        for link, message in _heard_last(list(asked), until=lambda: not asked):
            if isinstance(message, OverNoted):
                asked.pop(link).has_noted_end = True
        if any(node.has_noted_end for node in self.nodes):
            self._coordinator.note_end()

    def end(self, ends: RunEnds) -> None:
        """Say how the run has ended, as far as that goes at once, and hang up."""
        links = [one.link for one in (*self.nodes, *self.spares) if one.link is not None]
        self.announce_end(ends)
        for link in links:
            link.say_no_more()
        list(_heard_last(links))  # until they have heard it and hang up
        for node in (*self.nodes, *self.spares):
            if node.link is not None:
                self.lose(node, "the run has ended")
        for link in list(self._strangers):
            self._drop(link)
        if not self._is_shut:
            self._selector.unregister(self._listening)
        self._listening.close()

    def _heard(self, node: RemoteNode, message: NodeMessage) -> Iterator[NodeEvent]:
        node.heard_at_s = self._clock.monotonic()
        match message:
            case Look():
                node.take(message)
                node.order(self._coordinator.beat(message.number))
            case FromRank(rank=rank, process=process, packet=packet):
                if node.is_of_now(rank, process):
                    said = decode(packet)
                    yield RankSaid(message=_by_our_clock(said, node.behind_ns), rank=rank)
            case RankGone(rank=rank, process=process):
                if node.is_of_now(rank, process):
                    behind_ns = self._clock.monotonic_ns() - message.now_ns
                    node.mirror(rank, message.cells, behind_ns=behind_ns)
                    node.processes[rank].is_gone()
                    node.rank_ended(killed_for_memory=message.killed_for_memory)
                    yield NodeSaid(node=node, message=message)
            case RankStarted(rank=rank, process=process, pid=pid):
                if node.is_of_now(rank, process):
                    node.processes[rank].pid = pid
                    yield NodeSaid(node=node, message=message)
            case Watched():
                self._watched[node.number] = message
            case Said() | StopWanted() | SaveWanted() | EndWanted() | Folders():
                yield NodeSaid(node=node, message=message)
            case _:
                raise WireError(f"unexpected {type(message).__name__}")

    def _accept(self) -> None:
        try:
            connection, (address, *_) = self._listening.accept()
        except OSError as error:  # it has gone again
            if error.errno in _NO_DESCRIPTOR:
                self._selector.unregister(self._listening)
                self._shut_until_s = self._clock.monotonic() + SHUT_S
            return
        self._make_room_for(address)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = NodeLink(connection, token=self._meeting.token, listens=True)
        self._strangers[link] = _Stranger(since_s=self._clock.monotonic(), address=address)
        self._selector.register(link, selectors.EVENT_READ, (self, link))
        try:
            link.flush()
        except LinkLostError:
            self._drop(link)

    def _make_room_for(self, address: str) -> None:
        """Drop the oldest stranger where there are too many; one that knows the token goes last."""
        everyone = list(self._strangers)
        here = [link for link in everyone if self._strangers[link].address == address]
        if len(here) >= STRANGERS_OF_ADDRESS_MAX:
            self._drop(min(here, key=lambda link: link.is_proved))
        elif len(everyone) >= STRANGERS_MAX:
            self._drop(min(everyone, key=lambda link: link.is_proved))

    def _drop(self, link: NodeLink) -> None:
        del self._strangers[link]
        self._selector.unregister(link)
        link.close()

    def _meet(self, link: NodeLink, message: NodeMessage) -> Iterator[NodeEvent]:
        """Take in who has said who it is, or refuse."""
        if isinstance(message, Question):
            link.send(wire.encode(self._answer()))
            self._drop(link)
            return
        if isinstance(message, Elected):
            self._machines.quorum.hear_elected(message)
            self._drop(link)
            return
        if not isinstance(message, Hello):
            raise WireError("it did not say who it is")
        for one in (*self.nodes, *self.spares):
            if one.is_there and one.supervisor == message.supervisor:
                yield self.lose(one, "it has connected again")
        refused = why_not(message, self._meeting)
        node = None if refused else place_for(message, self.nodes)
        if node is None and message.node_rank is not None and not message.was_there:
            refused = refused or number_is_taken(message)
        if refused is not None or self._machines.quorum.ballot_for(message) is None:
            yield from self._turn_away(link, refused, host=message.host)
            return
        del self._strangers[link]
        left_out = node is not None and self._left_out(message, node)
        if node is None or left_out:
            spare = RemoteNode(SPARE, ranks=(), slots={}, clock=self._clock)
            spare.joined(link, message)
            spare.left_out_until_s = self._losses.left_out_until_s(spare.machine)
            self.spares.append(spare)
            waits_for = left_out or "all nodes are there, until one is lost"
            if node is None and message.node_rank is not None:
                waits_for = f"another machine is node {message.node_rank}, until that is lost"
            self._welcome(spare, waits_for=waits_for)
            yield NodeJoined(node=spare, keeps_parked=False, waits_for=waits_for)
        else:
            yield self._take_in(node, link, message)

    def _turn_away(
        self, link: NodeLink, refused: Refused | None, *, host: str
    ) -> Iterator[NodeRefused]:
        """Hang up on a machine that has no place here now. ``refused``: why it never has one."""
        if refused is not None:
            link.send(wire.encode(refused))
            if refused.name != "--node-rank":  # which may be tried again and again
                why = str(BadInputError(refused.name, refused.value, refused.expected))
                yield NodeRefused(host=host, why=why)
        self._drop(link)

    def _left_out(self, hello: Hello, node: RemoteNode) -> str:
        """Why this machine is not to be ``node`` now, in words: it is lost all the time, and others are enough."""
        machine = machine_of(hello)
        left_s = self._losses.left_out_until_s(machine) - self._clock.monotonic()
        there = 1 + sum(one.is_there for one in self.nodes if one is not node)
        if left_s <= 0 or there < self._meeting.options.least:
            return ""
        times = self._losses.total(machine)
        return f"it was lost {times} times, and the run does without it for {left_s:.0f} s"

    def _take_in(self, node: RemoteNode, link: NodeLink, hello: Hello) -> NodeJoined:
        keeps_parked, keeps_copied = (
            kept is not None and self._coordinator.keeps(kept, node, hello.record)
            for kept in (hello.parked, hello.copied)
        )
        kept = hello.parked or hello.copied
        node.joined(link, hello)
        node.keeps_parked = keeps_parked
        node.copied_step = hello.copied_step if keeps_copied else EMPTY_STEP
        self._welcome(node, keeps_parked=keeps_parked, keeps_copied=keeps_copied)
        return NodeJoined(
            node=node,
            keeps_parked=keeps_parked,
            inexact_reasons=() if kept is None else tuple(kept.inexact_reasons),
            other_code=other_code(hello, self._meeting),
        )

    def _welcome(
        self,
        node: RemoteNode,
        *,
        keeps_parked: bool = False,
        keeps_copied: bool = False,
        waits_for: str = "",
    ) -> None:
        host, port = self._store
        run = self._plan.settings.run
        node.order(
            Welcome(
                node=node.number,
                first_rank=node.ranks[0] if node.ranks else 0,
                world_size=self._plan.world_size,
                store_host=host,
                store_port=port,
                term=self._term,
                silent_s=self._meeting.silent_s,
                keeps_parked=keeps_parked,
                keeps_copied=keeps_copied,
                settings=dict(self._meeting.shared),
                waits_for=waits_for,
                coordinator=self._number,
                logs_number=self._logs_number,
                host=socket.gethostname(),
                log_dir=str(Path(run.log_dir).absolute()),
                checkpoint_dir=str(Path(run.checkpoint_dir).absolute()),
                ballot=(node.hello and self._machines.quorum.ballot_for(node.hello)) or 0,
            )
        )

    def _fill(self) -> Iterator[NodeEvent]:
        """Give places that are free to those that wait for one."""
        for node in self.nodes:
            waiting = [] if node.is_there else [one for one in self.spares if self._fits(one, node)]
            if not waiting:
                continue
            spare = self._losses.best(waiting, self._clock.monotonic())
            link, hello = spare.link, spare.hello
            assert link is not None
            assert hello is not None
            hello = replace(
                hello, parked=None, copied=None
            )  # which it gave up when it became a spare
            self.spares.remove(spare)
            spare.link = None
            yield replace(self._take_in(node, link, hello), was_spare=True)

    def _fits(self, spare: RemoteNode, node: RemoteNode) -> bool:
        """Return whether a waiting machine may take this place now."""
        hello = spare.hello
        assert hello is not None
        return hello.node_rank in (None, node.number) and not self._left_out(hello, node)

    def _answer(self) -> Answer:
        mine, run = self._meeting, self._plan.settings.run
        return Answer(
            run_id=mine.options.run_id,
            there=1 + sum(node.is_there for node in self.nodes),
            most=mine.options.most,
            ranks=mine.ranks,
            versions=dict(mine.versions),
            term=self._term,
            checkpoint_dir=run.checkpoint_dir,
            log_dir=run.log_dir,
        )

    def _want_to_write(self, link: NodeLink) -> None:
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.wants_to_write else 0)
        self._selector.modify(link, mask, (self, link))


def _by_our_clock(message: Message, behind_ns: int) -> Message:
    """``message`` with the time of its fault, or of its end, as the clock of this machine had it."""
    if isinstance(message, Leaving):
        return replace(message, at_ns=message.at_ns + behind_ns)
    if isinstance(message, OfFault) and message.fault.at_ns:
        fault = replace(message.fault, at_ns=message.fault.at_ns + behind_ns)
        return replace(message, fault=fault)
    return message


def _heard_last(
    links: Sequence[NodeLink], *, until: Callable[[], bool] = lambda: False
) -> Iterator[tuple[NodeLink, NodeMessage]]:
    """Yield what still comes, for a short while, or until all have hung up."""
    give_up_s = time.monotonic() + LAST_WORDS_S
    with selectors.DefaultSelector() as left:
        for link in links:
            left.register(link, selectors.EVENT_READ)
        while left.get_map() and time.monotonic() < give_up_s and not until():
            for key, _ in left.select(LAST_WORDS_S / 10):
                link = cast("NodeLink", key.fileobj)
                try:
                    for content in link.receive():
                        yield link, wire.decode(content, FROM_FOLLOWER)
                except (LinkLostError, WireError):
                    left.unregister(link)
