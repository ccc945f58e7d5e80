"""The loop of a machine that is not the coordinator's: finds it, obeys it, and ends with its exit code."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from ddp_runner.checkpoint.catalog import Catalog
from ddp_runner.config.identity import digest, with_shared
from ddp_runner.core.launch_plan import LaunchPlan
from ddp_runner.features.machines.folder_probe import is_shared
from ddp_runner.features.machines.letters import read_endpoint
from ddp_runner.features.machines.node_link import LinkLostError, NodeLink, UnprovedError
from ddp_runner.features.machines.parent.admission import Meeting
from ddp_runner.features.machines.parent.coordinator import Heir
from ddp_runner.features.machines.parent.follower import Follower
from ddp_runner.features.machines.parent.successor import Succession, listen
from ddp_runner.features.machines.parent.voting import NotFormedError, Voting
from ddp_runner.features.machines.rules.node_messages import (
    FROM_COORDINATOR,
    EndWanted,
    Folders,
    Generation,
    Hello,
    NodeMessage,
    OverNoted,
    Refused,
    RunOver,
    Said,
    SaveWanted,
    StopWanted,
    Welcome,
)
from ddp_runner.kernel.parent.signal_box import INSISTENT, SAVE_SIGNAL, STOP_SIGNALS, SignalBox
from ddp_runner.kernel.processes.children import end_descendants
from ddp_runner.kernel.processes.node import Node
from ddp_runner.kernel.processes.operating_system import Linux
from ddp_runner.kernel.processes.resources import StorePlace
from ddp_runner.kernel.rules.election import EMPTY_STEP
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.exits import ExitCode, StopReason
from ddp_runner.kernel.rules.stopping import StopSignal, StopSignals
from ddp_runner.kernel.system import parent_death
from ddp_runner.kernel.system.clock import SYSTEM_CLOCK, LeaseClock
from ddp_runner.kernel.system.folder_owner import FolderOwner, new_term
from ddp_runner.kernel.wire import packets as wire
from ddp_runner.kernel.wire.events import RunEnds
from ddp_runner.kernel.wire.packets import WireError
from ddp_runner.observe.display import Display, make_display
from ddp_runner.supervisor.node_plans import node_plan
from ddp_runner.supervisor.reporting.run_watch import RunWatch
from ddp_runner.system.followed_run import FollowedRun

TICK_S = 0.1
DIAL_S = 1.0  # for one attempt to connect, and for the wait to the next
WELCOME_TIME_S = 10.0
# How long a machine that is asked to stop tries to take the coordinator's place: a lost one's lock is free by then.
SAVES_FIRST_S = 10.0
END_TIME_S = 60.0  # for ranks that were killed
# By a coordinator with another token: it may be that of a run that ends just then, but not so often.
REFUSALS_MAX = 3
# Of the time after which a silent machine is lost: its ranks are ended before anybody takes their place.
LEASE_SHARE = 0.8
_OLDER = "this machine has voted for a newer coordinator"


@dataclass(slots=True, kw_only=True)
class _Stop:
    reason: StopReason | None = None
    signals: StopSignals = field(default_factory=StopSignals)
    asked_s: float = 0.0  # when
    is_at_once: bool = False  # nothing is to be saved any more

    @property
    def is_asked(self) -> bool:
        """True if this machine is asked to stop, in any way."""
        return self.is_at_once or self.reason is not None


def follow(plan: LaunchPlan, meeting: Meeting, *, lead: Callable[[Heir], int] | None = None) -> int:
    """Take part in a run until it ends, and return its exit code.

    ``lead``: coordinates the run from here on, once its coordinator is lost and this machine has taken that place, which it
    never does without.
    Raises BadInputError where the coordinator refuses this machine; no rank was started then.
    """
    parent_death.adopt_orphans()
    parent_death.set_process_name("ddp:follower")
    signals = SignalBox()
    display = make_display(
        "plain" if plan.settings.log.display != "none" else "none",
        stream=sys.stdout,
        settings=plan.settings,
    )
    display.start()
    with signals.installed(), selectors.DefaultSelector() as selector:
        loop = _FollowerLoop(
            plan, meeting, signals=signals, selector=selector, display=display, clock=SYSTEM_CLOCK
        )
        if lead is not None:
            if plan.settings.recovery.elect_coordinator:
                loop.voting = Voting(plan, token=meeting.token, clock=SYSTEM_CLOCK)
            loop.succession = Succession(plan, voting=loop.voting, clock=SYSTEM_CLOCK)
        try:
            code = loop.run()
            if loop.heir is not None and lead is not None:
                display.finish(None)
                code = lead(loop.heir)
        except BadInputError:
            raise
        except Exception:  # noqa: BLE001 - the boundary of this supervisor: its ranks end with it
            loop.failed(traceback.format_exc())
            code = int(ExitCode.FAILED)
        finally:
            end_descendants(timeout_s=10.0)
            loop.close()
            if loop.heir is None:
                # What was said last is on its way in a thread of the display's.
                display.finish(None)
    return code


class _FollowerLoop:
    def __init__(
        self,
        plan: LaunchPlan,
        meeting: Meeting,
        *,
        signals: SignalBox,
        selector: selectors.BaseSelector,
        display: Display,
        clock: LeaseClock,
    ) -> None:
        self._plan = plan
        self._meeting = meeting
        self._signals = signals
        self._selector = selector
        self._display = display
        self._clock = clock
        self._stop = _Stop()
        self._link: NodeLink | None = None
        self._welcome: Welcome | None = None
        self._node: Node | None = None
        self._store_at: StorePlace | None = None
        self._follower: Follower | None = None
        self._ends: RunEnds | None = None
        self._lost = ""  # why the link is of no more use
        self._name = new_term()
        self._said_own = ""  # which folders here are not the coordinator's
        # Asks for GPUs once there are ranks here, of which it then says what they use.
        self._watch: RunWatch | None = None
        self.succession: Succession | None = None  # None: this machine never coordinates
        self.voting: Voting | None = None  # None: no majority decides
        self._address = ""  # of this machine, as it leads to the coordinator
        self._met_at = ("", 0)  # where the coordinator was met
        self._looked = 0  # how often it has looked for a coordinator
        self._dialled = 0  # how often nobody answered, or somebody who was none
        self.heir: Heir | None = None  # what this machine coordinates with, from here on
        selector.register(signals, selectors.EVENT_READ, None)

    def run(self) -> int:
        """Meet the coordinator, again where it is lost, until it says that the run has ended."""
        wait_s = self._meeting.options.join_timeout_s
        while True:
            where = "{}:{}".format(*self._where())
            self._say(f"looking for the coordinator at {where}")
            if not self._meet(wait_s):
                break
            if self.heir is not None:
                return 0
            why = self._obey()
            if self._follower is not None and self._follower.failed:
                self._say(f"no ranks can be started here: {self._follower.failed}", level="ERROR")
                return int(ExitCode.FAILED)
            if self._ends is not None:
                return self._end_as_asked(self._ends)
            if self._is_in_a_hurry or self._stop.is_at_once or self._leaves_as_spare:
                break
            self._say(f"the coordinator is lost: {why}; {self._what_waits()}", level="WARNING")
            wait_s = self._plan.settings.recovery.coordinator_wait_s
        if self._stop.is_at_once:
            return int(ExitCode.FAILED)
        if self._stop.reason is StopReason.INTERRUPTED:
            return int(ExitCode.INTERRUPTED)
        if self._stop.reason is None:
            self._say(f"no coordinator answered at {where} within {wait_s:g} s", level="ERROR")
        return int(ExitCode.PREEMPTED)

    def failed(self, detail: str) -> None:
        """Say here and to the coordinator that this supervisor is at fault itself."""
        last = detail.strip().splitlines()[-1]
        self._say(f"{detail}a bug in the supervisor of this machine: {last}", level="ERROR")
        self._report(Said(text=f"a bug in its supervisor: {last}", level="ERROR"))

    def close(self) -> None:
        """Every process has ended."""
        if self._follower is not None and self.heir is None:
            self._follower.tidies_up()
        for part in (self._watch, self._link, self.voting, self._node):
            if part is not None:
                part.close()

    def _say(self, text: str, level: str = "INFO") -> None:
        self._display.line(text, level=level)

    def _what_waits(self) -> str:
        """Return what of the run this machine keeps for a coordinator, in words."""
        if self._follower is not None and self._follower.parked is not None:
            return "the ranks here wait for it, with their memory"
        step = EMPTY_STEP if self._follower is None else self._follower.copied_step
        copied = f", with a copy of the state of step {step}" if step > EMPTY_STEP else ""
        return f"this machine waits for it{copied}"

    def _meet(self, wait_s: float) -> bool:
        """Connect and be welcomed, or become the heir. False where nobody was there in time, or a stop was asked for."""
        give_up_s = self._clock.monotonic() + wait_s
        reason, refusals, refused_s = "", 0, 0.0
        while self.heir is None and self._may_look(give_up_s):
            link = self._dial()
            if link is not None:
                answer = self._greet(link)
                if isinstance(answer, Welcome) and self._may_obey(answer):
                    self._link, self._lost = link, ""
                    self._selector.register(link, selectors.EVENT_READ, (link, None))
                    self._welcomed(answer)
                    return True
                link.close()
                self._dialled += 1
                is_known = self._met_at == self._where()
                if not is_known and (
                    not isinstance(answer, Refused) or self._met_at in self._peers()
                ):
                    self._wait(DIAL_S)
                    continue
                if isinstance(answer, Refused):
                    refused_s = refused_s or self._clock.monotonic()
                    problem = BadInputError(answer.name, answer.value, answer.expected)
                    if not self._may_change(answer, refused_s):
                        raise problem
                    why = str(problem)
                else:
                    why = str(answer) if isinstance(answer, OSError | WireError) else _OLDER
                    refusals += isinstance(answer, UnprovedError) and self._welcome is None
                if refusals >= REFUSALS_MAX:
                    raise BadInputError(
                        "--rdzv-endpoint",
                        f"{self._meeting.options.host}:{self._meeting.options.port}",
                        "what answers there has another token, and was sent nothing: is the token the"
                        " same on all nodes?",
                    )
                if why != reason:
                    reason = why
                    self._say(f"what answers there is not ready: {why}", level="WARNING")
            self._wait(DIAL_S)
        return self.heir is not None

    def _may_obey(self, welcome: Welcome) -> bool:
        """Return whether this machine has voted for no newer coordinator."""
        return self.voting is None or self.voting.may_obey((welcome.ballot, welcome.term))

    def _may_look(self, give_up_s: float) -> bool:
        """Return whether to go on looking: until ``give_up_s``, or until a claim of this machine's own is settled."""
        in_time = self._clock.monotonic() < give_up_s or self._has_claimed
        return in_time and not self._is_to_end

    @property
    def _is_to_end(self) -> bool:
        """True if a stop was requested, and this machine cannot save the state of its ranks.

        It can save as the coordinator, whose place may be free.
        """
        stop, succession = self._stop, self.succession
        if not stop.is_asked or succession is None or self._is_in_a_hurry or stop.is_at_once:
            return stop.is_asked
        holds = self._follower is not None and self._follower.parked is not None
        in_time = self._clock.monotonic() < stop.asked_s + SAVES_FIRST_S
        return not (holds and succession.may_succeed and (in_time or succession.has_claimed))

    @property
    def _has_claimed(self) -> bool:
        """True while this machine waits for its own word in the folder to stand."""
        return self.succession is not None and self.succession.has_claimed

    def _may_change(self, refused: Refused, since_s: float) -> bool:
        """Return whether a refusal may be temporary: a link whose other end is lost may still hold the number."""
        if self._welcome is not None:
            return True
        silent_s = self._plan.settings.recovery.node_silent_s
        is_early = self._clock.monotonic() < since_s + silent_s + DIAL_S
        return is_early and refused.name == "--node-rank"

    def _where(self) -> tuple[str, int]:
        """The coordinator's address: it may have moved."""
        options = self._meeting.options
        return read_endpoint(options.moving_fd) or (options.host, options.port)

    def _places(self) -> list[tuple[str, int]]:
        """Where a coordinator may be: as the folder of the checkpoints says, or at the endpoint."""
        places = [self._where()]
        options = self._meeting.options
        if options.moving_fd is None:
            owner = FolderOwner(Path(self._plan.settings.run.checkpoint_dir), "").read()
            if owner is not None and owner.at is not None and owner.at not in places:
                places.insert(0, owner.at)
        if self._has_claimed:
            return []
        elected = None if self.voting is None else self.voting.leader_at
        if elected is not None and elected not in places:
            places.insert(0, elected)
        self._looked += 1
        if peers := self._peers():
            places.append(peers[self._looked % len(peers)])
        first = self._dialled % len(places)
        return [*places[first:], *places[:first]]

    def _peers(self) -> list[tuple[str, int]]:
        """Return the addresses of machines known before a restart: one of them may coordinate."""
        peers = [] if self.voting is None else self.voting.peers
        return [one for one in peers if one != self._where()]

    def _dial(self) -> NodeLink | None:
        try:
            found = (self._dial_at(place) for place in self._places())
            return next((link for link in found if link is not None), None)
        except TimeoutError:  # this machine votes before it dials the next one
            self._dialled += 1
            return None

    def _dial_at(self, place: tuple[str, int]) -> NodeLink | None:
        """Return the link to whoever listens there; None: nobody does. Raises TimeoutError where nothing answers."""
        try:
            connection = socket.create_connection(place, timeout=DIAL_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._met_at, self._address = place, connection.getsockname()[0]
            return NodeLink(connection, token=self._meeting.token, listens=False)
        except OSError as error:
            if self.voting is not None and self.voting.leader_at == place:
                self.voting.leader_at = None  # it says so again, if it is there
            if isinstance(error, TimeoutError):
                raise
            return None

    def _greet(self, link: NodeLink) -> Welcome | Refused | LinkLostError | WireError:
        """Say who this is, to a coordinator that has proved itself, and hear the answer, or why there is none."""
        mine, options = self._meeting, self._meeting.options
        newest = Catalog(Path(self._plan.settings.run.checkpoint_dir)).newest()
        at_host, at_port = self._hears_votes_at()
        hello = Hello(
            host=socket.gethostname(),
            supervisor=self._name,
            node_rank=options.node_rank,
            ranks=mine.ranks,
            run_id=options.run_id,
            meaning=dict(mine.meaning),
            versions=dict(mine.versions),
            code=dict(mine.code),
            asked=dict(mine.asked if self._welcome is None else self._welcome.settings),
            newest_step=EMPTY_STEP if newest is None else newest.step,
            newest_run_id="" if newest is None else newest.run_id,
            parked=None if self._follower is None else self._follower.parked,
            copied=None if self._follower is None else self._follower.copied,
            copied_step=EMPTY_STEP if self._follower is None else self._follower.copied_step,
            was_there=self._welcome is not None,
            record=None if self.voting is None else self.voting.record,
            at_host=at_host,
            at_port=at_port,
        )
        give_up_s = self._clock.monotonic() + WELCOME_TIME_S
        try:
            link.send(wire.encode(hello))
            while self._clock.monotonic() < give_up_s and not self._is_in_a_hurry:
                with selectors.DefaultSelector() as both:
                    both.register(link, selectors.EVENT_READ)
                    both.register(self._signals, selectors.EVENT_READ)
                    both.select(TICK_S)
                self._take_signals()
                if self._votes_meanwhile():
                    break
                for content in link.receive():
                    answer = wire.decode(content, FROM_COORDINATOR)
                    if isinstance(answer, (Welcome, Refused)):
                        return answer
        except (LinkLostError, WireError) as error:
            return error
        return LinkLostError(f"no answer within {WELCOME_TIME_S:g} s")

    def _votes_meanwhile(self) -> bool:
        """Vote while a coordinator that may hang is to answer. Return whether this machine was elected instead."""
        if self.voting is None or not self.voting.holds:
            return False
        self.voting.turn(obeys=False)
        return self._succeeds()

    def _hears_votes_at(self) -> tuple[str, int]:
        """Return the address where this machine hears of votes; an empty one where it hears of none."""
        voting, succession = self.voting, self.succession
        if voting is None or succession is None or not voting.may_decide:
            return ("", 0)
        if voting.door is None:
            with contextlib.suppress(OSError):
                address = self._meeting.options.local_addr or self._address
                voting.open(listen(address))  # the endpoint's port may be another run's here
        host, port = voting.at
        return (self._meeting.options.local_name or host if port else "", port)

    def _welcomed(self, welcome: Welcome) -> None:
        """Become the node that the coordinator says, or a spare one."""
        if self.voting is not None:
            self.voting.found()
        if self._welcome is None:
            settings = with_shared(self._plan.settings, welcome.settings)
            self._plan = replace(self._plan, settings=settings, settings_digest=digest(settings))
        self._welcome = welcome
        first = welcome.first_rank
        count = 0 if welcome.node < 0 else self._meeting.ranks
        ranks = range(first, first + count)
        if count:
            words = f"ranks {first} to {first + count - 1} of {welcome.world_size}"
            self._say(f"this is node {welcome.node}, with {words}")
        else:
            self._say(f"this machine waits: {welcome.waits_for}")
        if self._node is None or self._store_at is None:
            self._store_at = StorePlace(self._store_host(welcome), welcome.store_port)
            self._node = self._started_node(ranks, self._store_at)
        else:
            self._store_at.move(self._store_host(welcome), welcome.store_port)
        self._node.term, self._node.logs_number = welcome.term, welcome.logs_number
        self._look_at_folders(self._node, welcome)
        if self._follower is None or self._node.ranks != tuple(ranks):
            if self._follower is not None:
                self._end_ranks(self._follower)
            self._node.become(ranks)
            self._follower = Follower(
                self._plan,
                self._node,
                lease_s=welcome.silent_s * LEASE_SHARE,
                report=self._report,
                show=self._say,
                clock=self._clock,
            )
        self._follower.followed = FollowedRun(
            host=welcome.host, log_dir=welcome.log_dir, checkpoint_dir=welcome.checkpoint_dir
        )
        self._follower.welcomed(
            keeps_parked=welcome.keeps_parked, keeps_copied=welcome.keeps_copied
        )
        if count:
            self._watch_as(welcome.node)
        if self._stop.is_at_once:
            self._report(EndWanted())
        if self._stop.reason is not None:  # it came before there was anybody to hear of it
            self._report_stop(self._stop.reason)

    def _watch_as(self, number: int) -> None:
        """Look at the ranks here from now on; the process that asks for GPUs stays who it is."""
        before = self._watch
        if before is None:
            self._watch = RunWatch.of(self._plan, node=number, clock=self._clock, say=self._say)
        else:
            self._watch = RunWatch(self._plan, node=number, reader=before.reader, clock=self._clock)

    def _started_node(self, ranks: range, store_at: StorePlace) -> Node:
        node = Node(
            node_plan(self._plan),
            self._selector,
            system=Linux(),
            clock=self._clock,
            ranks=ranks,
            store=store_at,
        )
        node.start_zygote()
        with contextlib.suppress(OSError):  # a run can do without
            node.start_guardian()
        return node

    def _end_ranks(self, follower: Follower) -> None:
        """End the ranks here, which belong to another node's number and are no longer needed."""
        follower.end_ranks()
        give_up_s = self._clock.monotonic() + END_TIME_S
        while any(handle.is_alive for handle in follower.handles):
            if self._clock.monotonic() > give_up_s:
                raise LinkLostError(f"ranks here do not end within {END_TIME_S:g} s")
            self._look_at_processes()
            follower.look(self._clock.monotonic())  # this machine is there, as anybody can see
            if self._link is not None:
                self._link.flush()

    def _look_at_folders(self, node: Node, welcome: Welcome) -> None:
        run, term = self._plan.settings.run, welcome.term
        node.shares_checkpoints = is_shared(Path(run.checkpoint_dir), term)
        node.shares_logs = is_shared(Path(run.log_dir), term)
        self._report(
            Folders(shares_checkpoints=node.shares_checkpoints, shares_logs=node.shares_logs)
        )
        own = [
            f"a {what} ({mine})"
            for what, mine, is_both in (
                ("checkpoint folder", run.checkpoint_dir, node.shares_checkpoints),
                ("log folder", run.log_dir, node.shares_logs),
            )
            if not is_both
        ]
        line = f"this machine has {' and '.join(own)} of its own, not the coordinator's on {welcome.host}"
        if own and line != self._said_own:
            self._said_own = line
            self._say(line)

    def _store_host(self, welcome: Welcome) -> str:
        """Return the store's address as seen from here; the coordinator's own name for it may mean another host."""
        return welcome.store_host or self._met_at[0]

    def _obey(self) -> str:
        """Obey the coordinator until it is lost (returns the reason), or the run has ended (returns "")."""
        assert self._follower is not None
        try:
            while not (self._ends or self._is_in_a_hurry or self._leaves_as_spare):
                self._turn()
        except NotFormedError as error:
            return self._cut_off(str(error))
        except (LinkLostError, WireError) as error:
            with contextlib.suppress(LinkLostError, WireError):
                self._hear()  # it may have said that the run has ended
            return self._cut_off(str(error))
        return self._cut_off("") if self._ends is None else ""

    @property
    def _is_in_a_hurry(self) -> bool:
        """True if a stop was asked for twice, so that the follower ends at once."""
        return self._stop.signals.ends_at_once(self._clock.monotonic())

    @property
    def _leaves_as_spare(self) -> bool:
        """True if a stop was asked for, and this node has no ranks that it would affect."""
        return self._stop.reason is not None and self._node is not None and not self._node.ranks

    def _turn(self) -> None:
        assert self._node is not None
        assert self._follower is not None
        assert self._link is not None
        for key, _ in self._selector.select(TICK_S):
            if key.data is None:
                self._take_signals()
            elif key.data[0] is self._link:
                self._hear()
            elif (received := self._node.receive(*key.data)) is not None:
                self._follower.on_packet(*received)
        if self.voting is not None:
            self.voting.turn_in_run(self._follower)
        follower = self._follower  # by now: it may have another number
        self._reap(follower)
        follower.advance()
        if follower.formed_in == self._node.term and self._node.term:
            self._coordinator_has_formed(self._node, follower.formed_in)
        if follower.failed:
            self._report(Said(text=f"no ranks can be started: {follower.failed}", level="ERROR"))
            raise LinkLostError(follower.failed)
        if self._lost:
            raise LinkLostError(self._lost)
        self._link.flush()
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._link.wants_to_write else 0)
        self._selector.modify(self._link, mask, (self._link, None))
        if (since_s := follower.unanswered_s) > follower.answered_within_s:
            raise LinkLostError(f"it has not answered for {since_s:.1f} s")

    def _coordinator_has_formed(self, node: Node, term: str) -> None:
        """Say, once, whether this machine could take the coordinator's place."""
        if self.succession is None:
            return
        loses_memory = self._follower is not None and self._follower.loses_memory
        shares = node.shares_checkpoints
        if line := self.succession.formed(term, shares_folder=shares, loses_memory=loses_memory):
            self._say(line)

    def _reap(self, follower: Follower) -> None:
        """Reap ended processes here, and report what the living ones use."""
        assert self._node is not None
        for ended in self._node.reap():
            if self._watch is None or not self._watch.took(ended):
                follower.on_ended(ended)
        if self._watch is not None and self._watch.look(follower.handles):
            self._report(self._watch.watched())

    def _hear(self) -> None:
        assert self._link is not None
        assert self._follower is not None
        for content in self._link.receive():
            message = wire.decode(content, FROM_COORDINATOR)
            if isinstance(message, RunEnds):
                self._ends = message
            elif isinstance(message, Welcome):
                self._welcomed(message)
            elif isinstance(message, Generation | RunOver):
                term = "" if self._node is None else self._node.term
                if self.voting is not None and self.voting.notes_end(message, term):
                    self._report(OverNoted())
            else:
                self._follower.on_node_message(message)

    def _cut_off(self, why: str) -> str:
        """Park the ranks here, and hang up."""
        assert self._follower is not None
        link, self._link = self._link, None
        if link is not None:
            self._selector.unregister(link)
            link.close()
        self._follower.cut_off()
        return why

    def _look_at_processes(self) -> None:
        """Read and reap the processes here while there is no coordinator."""
        if self.voting is not None:
            self.voting.turn(obeys=self._link is not None)
        for key, _ in self._selector.select(TICK_S):
            if key.data is None:
                self._take_signals()
            elif (
                key.data[0] is not self._link
                and self._node is not None
                and self._follower is not None
                and (received := self._node.receive(*key.data)) is not None
            ):
                self._follower.on_packet(*received)
        if self._node is not None and self._follower is not None:
            self._reap(self._follower)
            self._follower.look_at_parked(self._clock.monotonic())

    def _report(self, message: NodeMessage) -> None:
        if self._link is None or self._lost:
            return
        try:
            self._link.send(wire.encode(message))
        except LinkLostError as lost:
            self._lost = str(lost)  # raised at the turn's end: it is in the midst of something

    def _take_signals(self) -> None:
        for number in self._signals.take():
            reason = STOP_SIGNALS.get(signal.Signals(number))
            if number == SAVE_SIGNAL:
                self._report(SaveWanted())
            elif number == signal.SIGQUIT and not self._stop.is_at_once:
                self._stop.is_at_once = True
                self._report(EndWanted())
            if reason is None:
                continue
            by = INSISTENT.get(signal.Signals(number), StopSignal.OTHER)
            self._stop.signals.heard(by, self._clock.monotonic())
            if self._stop.reason is None:
                self._stop.reason, self._stop.asked_s = reason, self._clock.monotonic()
                self._say(f"asked to stop ({reason.value}): the coordinator decides what is saved")
                self._report_stop(reason)

    def _report_stop(self, reason: StopReason) -> None:
        if not self._leaves_as_spare:
            is_leaving = reason is not StopReason.INTERRUPTED
            self._report(StopWanted(reason=reason.value, is_leaving=is_leaving))

    def _wait(self, seconds: float) -> None:
        give_up_s = self._clock.monotonic() + seconds
        while self._clock.monotonic() < give_up_s and not self._is_to_end:
            self._look_at_processes()
            if self._succeeds():
                return

    def _succeeds(self) -> bool:
        """Return whether this machine has taken the coordinator's place, which it does where it may."""
        if self.heir is not None:
            return True
        follower, welcome, node = self._follower, self._welcome, self._node
        if self.succession is None or follower is None or welcome is None or node is None:
            return False
        address = self._meeting.options.local_addr or self._address
        taken = self.succession.look(follower.kept, address, lost=welcome.coordinator)
        if taken is None:
            return False
        self._say("this machine coordinates from here on", level="WARNING")
        self._selector.unregister(self._signals)
        self.heir = self.succession.heir(
            self._plan,
            replace(self._meeting, shared=welcome.settings, silent_s=welcome.silent_s),
            node=node,
            follower=follower,
            stop=self._stop.reason,
            signals=self._signals,
            selector=self._selector,
        )
        self._node = None  # it is the new coordinator's to close
        return True

    def _end_as_asked(self, ends: RunEnds) -> int:
        if self._follower is not None:
            self._follower.show_warnings(is_last=True)
        self._say(ends.line or "the run has ended")
        return ends.exit_code
