"""The supervisor on another machine: runs its ranks' processes and obeys the coordinator.

Its only decision is to park its ranks when it is cut off. It looks after zygote, helpers and their
replacements itself, as on any machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ddp_runner.checkpoint.slot_header import clear_slots, step_in_memory
from ddp_runner.core.launch_plan import LaunchPlan
from ddp_runner.features.machines.rules.node_messages import (
    LOOK_EVERY_S,
    AskRank,
    Beat,
    EndRank,
    FenceRank,
    ForgetAsked,
    FromRank,
    Look,
    NodeMessage,
    Parked,
    RankGone,
    RankLook,
    RankStarted,
    Said,
    SignalRank,
    StartRank,
    ToRank,
    shortened_stack,
)
from ddp_runner.features.machines.rules.succession import Kept
from ddp_runner.kernel.parent.node_keeper import NodeKeeper
from ddp_runner.kernel.parent.ports import Turn
from ddp_runner.kernel.parent.rank_handle import RankHandle
from ddp_runner.kernel.parent.run_facts import RunFacts
from ddp_runner.kernel.parent.world import World
from ddp_runner.kernel.processes.children import Ended
from ddp_runner.kernel.processes.helper_process import RankEnded
from ddp_runner.kernel.processes.node import Node
from ddp_runner.kernel.processes.rank_process import WhatItWrote
from ddp_runner.kernel.processes.rank_start import RankStart
from ddp_runner.kernel.recovery.zygote_keeper import NoZygote
from ddp_runner.kernel.rules.election import EMPTY_STEP
from ddp_runner.kernel.rules.faults import Fault
from ddp_runner.kernel.rules.lifecycle import MembershipEvent, RankEvent, RankState
from ddp_runner.kernel.rules.secrets import hidden_texts, without_secrets
from ddp_runner.kernel.system.clock import LeaseClock
from ddp_runner.kernel.system.folder_owner import FolderOwner
from ddp_runner.kernel.system.run_files import open_to_append
from ddp_runner.kernel.wire import events
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.kernel.wire.events import RankFormed, RepairedInPlace
from ddp_runner.kernel.wire.messages import (
    Abort,
    AbortHeard,
    Finished,
    Form,
    LoaderWorkers,
    Message,
    Ready,
    SaveAlone,
    decode,
    encode,
)
from ddp_runner.kernel.wire.packets import WireError, by_name, name_of
from ddp_runner.observe.console import LogTail, Shown, hidden_levels
from ddp_runner.supervisor import around
from ddp_runner.system.followed_run import FollowedRun

NOTHING_WROTE = WhatItWrote(last="", when_asked="", before_log="")
LOOK_SOON_S = 0.1  # from one look to the next, while the run is not free of faults
LEAVE_TIME_S = 30.0  # for a rank to leave its generation, once its node is cut off
ZYGOTE_AGAIN_S = 60.0  # from a zygote that was the last allowed to another try, while ranks live
NOBODY = -1
# All else that ranks and their coordinator say to each other is passed on unread.
_REPORTS_READ = by_name(
    Ready | AbortHeard | RankFormed | Finished | LoaderWorkers | RepairedInPlace
)
_ORDERS_READ = by_name(Form | Abort | SaveAlone)
_KEPT_WORDS = 5_000  # characters of what a process said last; up to twelve bytes each in a frame


Report = Callable[[NodeMessage], None]

_LEASES_WITHOUT_RANKS = 2.25  # in which an answer may come


class Herald:
    """Replaces the recorder: shows lines here and sends them to the coordinator."""

    def __init__(
        self,
        facts: RunFacts,
        report: Report,
        show: Callable[[str, str], None],
        *,
        of_rank: Callable[[int, bytes], None],
    ) -> None:
        """``of_rank`` sends the coordinator a report about a rank, as if that rank had sent it."""
        self.facts = facts
        self._report = report
        self._show = show
        self._of_rank = of_rank

    def record(self, event: events.Event, *, cause: int | None = None) -> int:
        """Report the result of a drill; no other event of a helper process concerns the coordinator."""
        del cause
        if isinstance(event, (events.Drill, events.DrillSkipped, events.Diagnosed)):
            self._of_rank(event.rank, encode(event))
        return -1

    def say(self, text: str, *, level: str = "INFO") -> None:
        """A line for people."""
        self._show(text, level)
        self._report(Said(text=text, level=level))

    def imported(self, now_s: float) -> None:
        """The zygote is ready; the coordinator sees that by what can be forked."""


class Reporter:
    """Replaces the repair: collects the ranks without a process, which the coordinator decides about."""

    def __init__(self) -> None:
        self.never_came: list[RankHandle] = []

    def schedule_respawn(self, handle: RankHandle) -> None:
        """No process came of what was asked for, or the one that did is about to be ended."""
        if not handle.is_alive:
            self.never_came.append(handle)


class Follower:
    """Driven by its loop: messages, ended processes, ticks. ``report`` sends to the coordinator.

    ``lease_s``: how long a look that the coordinator has heard lets the ranks here publish.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        node: Node,
        *,
        lease_s: float,
        report: Report,
        show: Callable[[str, str], None],
        clock: LeaseClock,
    ) -> None:
        self.lease_s = lease_s
        self.restarts = 0  # of a script's ranks, as a coordinator has last reported
        self._keeps_nothing = plan.opaque is not None  # a script's ranks have no state for others
        self._node, self._report, self._clock = node, report, clock
        self._log_dir = Path(plan.settings.run.log_dir)
        self._copies = node.shared.descriptors("memory_slots")
        # The coordinator may not know the secrets of this machine's environment.
        self._hidden = hidden_texts(plan.settings.task, os.environ)
        self._checkpoint_dir = Path(plan.settings.run.checkpoint_dir)
        self._world = world = World(node)
        for handle in world.ranks:
            if handle.rank not in node.processes:
                handle.member.advance(MembershipEvent.DROPPED)
        self._facts = RunFacts()
        self._herald = herald = Herald(self._facts, report, show, of_rank=self._from_rank)
        self._reporter = reporter = Reporter()
        self._beside = around.observers(
            around.OfMachine(plan=plan, node=node, world=world, recorder=herald, repair=reporter)
        )
        self._heard = {
            kind.__name__: heard for one in self._beside for kind, heard in one.hears().items()
        }
        self._keeper = NodeKeeper(
            plan.settings.recovery,
            around.policies(self._beside),
            node=node,
            world=world,
            recorder=herald,
            repair=reporter,
            clock=clock,
        )
        # Which of each rank's this one is, as the coordinator counts them; NOBODY: none that it asked for.
        self._process = dict.fromkeys(node.processes, NOBODY)
        self._parked: set[int] = set()  # ranks that wait, with their memory, for a coordinator
        self._moved: set[int] = set()  # of those, who is still to be shown where the store is
        self._leaving: set[int] = set()  # taken back, and still in the generation that was cut off
        self._generation = 0  # the newest that ranks here were asked to form
        self._run_id = self._term = ""  # of that
        self._is_fault_free, self._looks = False, 0
        # Looks that no beat has answered, and when they were sent.
        self._looked_ns: dict[int, int] = {}
        # From when the newest look was sent that the coordinator has heard; as those above, by the clock that goes on
        # while this machine is suspended.
        self._lease_from_ns = clock.boottime_ns()
        self._looked_at_s = self._round_trip_s = self._parked_since_s = 0.0
        self.followed: FollowedRun | None = None  # to be noted where it is not on this machine
        self._tail: LogTail | None = None
        self._hidden_levels = hidden_levels(plan.settings)
        # Why no zygote is here that could start a rank, and when that is tried again.
        self._no_zygote, self._again_at_s = "", 0.0

    @property
    def failed(self) -> str:
        """Why this machine can have no ranks any more; empty while one lives that has a state."""
        # INVARIANT living-ranks-stay: a machine with a state in memory does not end because it can start no
        # rank. Broken if: its supervisor ends, and the only state of the newest step with it.
        # Guarded by: test_a_machine_with_living_ranks_outlasts_its_zygotes.
        lives = any(handle.is_alive and handle.has_state for handle in self.handles)
        return "" if lives else self._no_zygote

    @property
    def handles(self) -> list[RankHandle]:
        """The ranks of this machine."""
        return self._world.present

    def on_node_message(self, message: NodeMessage) -> None:  # noqa: C901 - one row a message
        """The coordinator wants something done."""
        now_s = self._clock.monotonic()
        match message:
            case Beat():
                self._renew_lease(message.number)
                self._facts.generation = message.generation
                self._facts.committed_step = message.committed_step
                self._facts.inexact_reasons[:] = message.inexact_reasons
                self._is_fault_free = message.is_fault_free
                self.restarts = message.restarts
            case StartRank(rank=rank, process=process, start=start):
                self._start(self._world.ranks[rank], RankStart(**start), process, now_s)
            case ToRank(rank=rank, packet=packet):
                self._pass_on(self._world.ranks[rank], packet)
            case EndRank(rank=rank):
                if self._world.ranks[rank].is_alive:
                    self._world.kill_rank(self._world.ranks[rank], now_s)
            case FenceRank(rank=rank, is_fenced=is_fenced):
                self._node.fence(rank, is_fenced=is_fenced)
            case SignalRank(rank=rank, number=number):
                self._node.signal_rank(rank, number)
            case AskRank(rank=rank, by_force=by_force):
                self._node.processes[rank].mark_asked()
                if by_force:
                    self._node.slot(rank).set(Cell.FENCED, 1)
                    self._node.force_stacks(rank)
            case ForgetAsked(rank=rank):
                self._node.processes[rank].forget_asked()
            case _:
                raise WireError(f"unexpected {type(message).__name__}")

    @property
    def unanswered_s(self) -> float:
        """How long the coordinator has heard nothing of this machine, as far as it has said."""
        return (self._clock.boottime_ns() - self._lease_from_ns) / 1e9

    @property
    def answered_within_s(self) -> float:
        """The seconds after which a coordinator that does not answer is lost: the lease, and longer without ranks.

        No lease is at stake then: after a pause the coordinator, which may be at its end, has time to answer.
        """
        has_ranks = any(handle.is_alive for handle in self.handles)
        return self.lease_s if has_ranks else _LEASES_WITHOUT_RANKS * self.lease_s

    def _renew_lease(self, number: int) -> None:
        """The coordinator has heard look ``number``, and takes this machine for there from then on."""
        sent_ns = self._looked_ns.get(number)
        if sent_ns is None:
            return
        self._lease_from_ns = sent_ns
        self._round_trip_s = round((self._clock.boottime_ns() - sent_ns) / 1e9, 4)
        self._looked_ns = {look: at for look, at in self._looked_ns.items() if look > number}
        for handle in self.handles:
            handle.slot.set(Cell.LEASE_NS, sent_ns + int(self.lease_s * 1e9))

    def welcomed(self, *, keeps_parked: bool, keeps_copied: bool) -> None:
        """A coordinator is there, to which no look has been sent. ``keeps_parked`` and ``keeps_copied``: as in a Welcome."""
        self._looked_ns.clear()
        self._lease_from_ns = self._clock.boottime_ns()
        self._process = dict.fromkeys(self._process, NOBODY)
        if not keeps_parked:
            self.end_ranks()
        # INVARIANT copies-have-a-term: a copy in the memory of a machine that was cut off is taken only where nobody went
        # on without it. Broken if: it stays when the coordinator has refused it, and all ranks are lost then.
        # Guarded by: test_a_copy_in_memory_is_offered_and_cleared_where_refused.
        if not keeps_copied:
            clear_slots(self._copies)

    def _start(self, handle: RankHandle, start: RankStart, process: int, now_s: float) -> None:
        if handle.rank in self._parked and handle.is_alive:
            self._take_back(handle, process)
            return
        if handle.is_alive:  # one of before, whose end is no news to the coordinator
            old, self._process[handle.rank] = self._process[handle.rank], process
            self._gone(handle.rank)
            self._process[handle.rank] = old
            return
        self._process[handle.rank] = process
        if not self._world.spawn_rank(handle, start, now_s=now_s):
            self._gone(handle.rank)
            return
        handle.member.advance(MembershipEvent.REPLACED)
        if handle.was_spare:
            self._started(handle)

    def _take_back(self, handle: RankHandle, process: int) -> None:
        """A coordinator counts on a parked rank; one that still leaves its generation is ready soon."""
        self._parked.discard(handle.rank)
        self._process[handle.rank] = process
        self._moved.add(handle.rank)
        self._started(handle)
        if handle.state is RankState.READY and handle.ready is not None:
            self._from_rank(handle.rank, self._as_ready(handle.rank, handle.ready))
        else:
            # INVARIANT past-is-not-news: what a rank says of a generation that was cut off is no news to whoever takes it
            # back. Broken if: that it has lost its peers there comes in as a fault of the run that goes on.
            # Guarded by: test_what_a_rank_taken_back_says_of_before_is_not_passed_on.
            self._leaving.add(handle.rank)

    def _started(self, handle: RankHandle) -> None:
        assert handle.pid is not None
        started = RankStarted(
            rank=handle.rank,
            process=self._process[handle.rank],
            pid=handle.pid,
            was_spare=handle.was_spare,
        )
        self._report(started)

    def _pass_on(self, handle: RankHandle, packet: bytes) -> None:
        message = decode(packet) if name_of(packet) in _ORDERS_READ else None
        if isinstance(message, Form):
            with contextlib.suppress(OSError):  # what a rank says then stays in memory
                self._log_dir.mkdir(parents=True, exist_ok=True)
            self._follow_logs()
            if self.followed is not None and not self._node.shares_logs:
                self.followed.note_in(self._log_dir)
            handle.has_log = True
            if not self._node.shares_checkpoints:
                self._take_own_folder()
            self._generation, self._run_id = message.generation, message.run_id
            self._term = self._node.term
            if handle.state is RankState.READY:  # it may have ended since
                handle.machine.advance(RankEvent.FORM_SENT)
            if handle.rank in self._moved:
                self._moved.discard(handle.rank)
                packet = encode(self._node.with_store(message))
        elif isinstance(message, Abort):
            handle.machine.advance(RankEvent.ABORT_SENT)
        elif isinstance(message, SaveAlone):
            if not self._node.shares_checkpoints:
                self._take_own_folder()
            packet = encode(replace(message, term=self._node.term))
        self._node.pass_on(handle.rank, packet)

    def _follow_logs(self) -> None:
        if self._tail is None:
            self._tail = LogTail(
                self._log_dir,
                ranks=self._node.ranks,
                shows=Shown(hidden=self._hidden_levels, seal=self._node.log_seal, ranks=()),
            )

    def show_warnings(self, *, is_last: bool = False) -> None:
        """Say what ranks here warn of, on both consoles: the coordinator does not know the seal of their logs."""
        if self._tail is None:
            return
        for line in self._tail.drain() if is_last else self._tail.poll():
            self._herald.say(without_secrets(line.text, self._hidden), level=line.level)
        if is_last:
            self._tail.close()
            self._tail = None

    def _take_own_folder(self) -> None:
        """A checkpoint folder of this machine alone, where an earlier coordinator may have left its name."""
        owner = FolderOwner(self._checkpoint_dir, self._node.term)
        if owner.is_other():
            with contextlib.suppress(OSError):  # whoever saves there says so
                owner.take()

    def on_packet(self, packet: bytes, rank: int | None) -> None:
        """A process of this machine has something to say; ``rank`` None: one that is no rank.

        What ranks say is the coordinator's to act on; it is read here only where this machine must know it, too.
        """
        if rank is None:
            known = {handle.rank for handle in self.handles if handle.pid is not None}
            ended = self._keeper.on_message(decode(packet), self._herald)
            for handle in self.handles:
                if handle.pid is not None and handle.rank not in known:
                    self._started(handle)
            if ended is not None:
                self.on_ended(ended)
            return
        if name_of(packet) in _REPORTS_READ:
            message = decode(packet)
            self._note(self._world.ranks[rank], message)
            if isinstance(message, Ready):
                self._leaving.discard(rank)
                packet = self._as_ready(rank, message)
        self._from_rank(rank, packet)
        if (heard := self._heard.get(name_of(packet))) is not None:
            heard(decode(packet), self._world.ranks[rank])

    def _note(self, handle: RankHandle, message: Message) -> None:
        match message:
            case Ready():
                handle.ready = message
                handle.machine.advance(RankEvent.GOT_READY)
            case AbortHeard(generation=self._generation):
                handle.machine.advance(RankEvent.ABORT_HEARD)
            case RankFormed():
                handle.has_formed = True
                handle.machine.advance(RankEvent.GOT_FORMED)
            case Finished():
                handle.machine.advance(RankEvent.GOT_FINISHED)
            case LoaderWorkers(pids=pids):
                handle.loader_pids = pids
            case RepairedInPlace(kernel_kills=kernel_kills):
                for _ in range(kernel_kills):  # a loader worker's, not a rank's
                    self._node.claim_kernel_kill(self._clock.monotonic())
            case _:
                pass

    def _as_ready(self, rank: int, ready: Ready) -> bytes:
        """Return the message for the coordinator; a rank that was parked gets this run's id."""
        return encode(replace(ready, run_id=self._run_id) if rank in self._moved else ready)

    def _from_rank(self, rank: int, packet: bytes) -> None:
        # Who waits or leaves is to the coordinator none of this run's as yet.
        if rank not in self._parked and rank not in self._leaving:
            self._report(FromRank(rank=rank, process=self._process[rank], packet=packet))

    def on_ended(self, ended: Ended) -> None:
        """A child process was reaped. What it still had to say is heard first."""
        for packet, rank in self._node.last_packets(ended.pid):
            self.on_packet(packet, rank)
        departure = self._node.departed(ended)
        if isinstance(departure, RankEnded):
            handle = self._world.ranks[departure.rank]
            by_memory = (
                ended.signal_number == signal.SIGKILL
                and handle.state is not RankState.KILLING
                and self._node.claim_kernel_kill(
                    self._clock.monotonic(), before_it=self._larger_ones_killed(handle)
                )
            )
            handle.machine.advance(RankEvent.EXITED)
            handle.released()
            self._gone(departure.rank, ended, departure.wrote, by_memory=by_memory)
            if not handle.has_log:
                self._keep_words(departure.rank, departure.wrote.before_log)
        elif departure is not None:
            match self._keeper.ended(departure):
                case NoZygote(reason=reason):
                    self._no_zygote = reason
                    self._again_at_s = self._clock.monotonic() + ZYGOTE_AGAIN_S
                    if not self.failed:
                        again = f"ranks here live on, and it is tried again in {ZYGOTE_AGAIN_S:g} s"
                        self._herald.say(f"{reason}; {again}", level="WARNING")
                case Fault() | None:  # a store, which a coordinator alone has
                    pass

    def _larger_ones_killed(self, handle: RankHandle) -> int:
        """Count the larger ranks here that somebody else has killed as well: the kernel begins with the largest."""
        return sum(
            one.rss_bytes > handle.rss_bytes
            and one.state is not RankState.KILLING
            and self._node.is_killed(one.rank)
            for one in self.handles
        )

    def advance(self) -> None:
        """Whatever time asks for. Called after every event and every tick."""
        now_s = self._clock.monotonic()
        self.show_warnings()
        self._node.kernel_kills.look_sometimes(now_s)
        self._look_at_zygote(now_s)
        if self._node.ranks:  # else this is a spare machine, which touches no device
            for observer in self._beside:
                turn = Turn(now_s=now_s, is_fault_free=self._is_fault_free)
                observer.look_after_repair(turn)
        for handle in self._reporter.never_came:
            self._gone(handle.rank)
        self._reporter.never_came.clear()
        wait_s = LOOK_EVERY_S if self._is_fault_free else LOOK_SOON_S
        if now_s >= self._looked_at_s + wait_s:
            self.look(now_s)

    def _look_at_zygote(self, now_s: float) -> None:
        if self._no_zygote and now_s >= self._again_at_s and not self.failed:
            self._no_zygote = ""
            self._node.start_zygote()
        self._keeper.look(now_s)

    def look(self, now_s: float) -> None:
        """Say how everything stands here."""
        self._looked_at_s = now_s
        self._looks += 1
        self._looked_ns[self._looks] = self._clock.boottime_ns()
        self._report(
            Look(
                number=self._looks,
                now_ns=self._clock.monotonic_ns(),
                can_fork=self._node.can_fork,
                round_trip_s=self._round_trip_s,
                has_spare=self._node.has_spare,
                ranks={str(handle.rank): self._look_at(handle, now_s) for handle in self.handles},
            )
        )

    def _look_at(self, handle: RankHandle, now_s: float) -> RankLook:
        rank, process = handle.rank, self._node.processes[handle.rank]
        stack = process.stack_when_asked() if process.has_answered(now_s) else None
        stack = stack and shortened_stack(stack, ranks=len(self._node.ranks))
        handle.rss_bytes = self._node.resident_bytes(rank) or handle.rss_bytes
        return RankLook(
            cells=handle.slot.cells(),
            pid=process.pid,
            stopped_s=self._node.stopped_s(rank, now_s) if process.pid else 0.0,
            is_killed=self._node.is_killed(rank),
            resident_bytes=handle.rss_bytes,
            written_bytes=process.written_bytes,
            stack=stack,
        )

    @property
    def parked(self) -> Parked | None:
        """The report to a coordinator about ranks that wait here; None if there are none."""
        if not self._parked:
            return None
        return self.of_before()

    @property
    def copied_step(self) -> int:
        """The step of the newest copy of the state in the memory of this machine; EMPTY_STEP if there is none."""
        return step_in_memory(self._copies) if self._term else EMPTY_STEP

    @property
    def copied(self) -> Parked | None:
        """The report to a coordinator about that copy; None if there is none."""
        return None if self.copied_step == EMPTY_STEP else self.of_before()

    def of_before(self) -> Parked:
        """Return where the ranks here were in their newest generation."""
        ranks = self._node.ranks
        return Parked(
            node=ranks[0] // len(ranks),
            term=self._term,
            generation=self._generation,
            run_id=self._run_id,
            inexact_reasons=list(self._facts.inexact_reasons),
        )

    @property
    def formed_in(self) -> str:
        """The term in which ranks here were last asked to form; empty if they never were."""
        return self._term

    @property
    def kept(self) -> Kept | None:
        """Return the facts about waiting ranks here that decide who coordinates; None if there are none.

        These are ranks with their memory; for a script, which restarts anywhere, the place of ranks that have ended.
        """
        living = [handle for handle in self.handles if handle.is_alive]
        if self._keeps_nothing and self._term and self.handles:
            before = self.of_before()
            return Kept(number=before.node, term=before.term, have_left=not living)
        parked = self.parked
        if parked is None:
            return None
        have_left = all(one.rank in self._parked and one.state is RankState.READY for one in living)
        return Kept(number=parked.node, term=parked.term, have_left=have_left)

    def hand_over(self) -> dict[int, Ready]:
        """Let another one decide on the ranks here: return the newest report of each that waits, by rank."""
        self.show_warnings(is_last=True)
        return {
            handle.rank: replace(handle.ready, run_id=self._run_id)
            for handle in self.handles
            if handle.rank in self._parked and handle.ready is not None
        }

    def cut_off(self) -> None:
        """The coordinator is not there: ranks leave their generation, keep their memory and wait."""
        # INVARIANT cut-off-parks: ranks of a node that is cut off commit and publish nothing. Broken
        # if: one is still in a generation, or may publish, when another may have taken its place.
        # Guarded by: test_ranks_of_a_node_that_is_cut_off_train_and_publish_nothing.
        now_s = self._clock.monotonic()
        for handle in self.handles:
            handle.slot.set(Cell.LEASE_NS, self._clock.boottime_ns())
            if self._may_park(handle):
                self._parked.add(handle.rank)
            elif handle.is_alive:
                self._end(handle, now_s)
        self._world.abort(self._generation, now_s)
        self._parked_since_s = now_s
        self._is_fault_free = False
        self._facts.generation = 0

    def trains_in(self, generation: int) -> bool:
        """Return whether all machines of a generation know it, as far as this one can tell."""
        if not self._keeps_nothing:  # ranks that train have met all others
            return any(one.state is RankState.TRAINING for one in self.handles)
        # INVARIANT script-known-by-all: a machine assumes that all know a script's generation only once the coordinator has
        # heard all its ranks. Broken if: it is enough that they were asked, of which one machine may not have heard.
        # Guarded by: test_a_scripts_generation_is_known_once_the_coordinator_says_so.
        return self._is_fault_free and self._facts.generation == generation

    @property
    def loses_memory(self) -> bool:
        """Whether ranks here never wait for a coordinator: an abort does not end their collectives."""
        ready = (handle.ready for handle in self._world.ranks)
        return any(one is not None and one.ends_in_silence for one in ready)

    @staticmethod
    def _may_park(handle: RankHandle) -> bool:
        """Return whether a rank has a state to keep, and leaves its generation when asked.

        If an abort does not end a collective, only the coordinator knows when all ranks have heard of it.
        """
        kept = (RankState.READY, RankState.FORMING, RankState.TRAINING, RankState.ABORTING)
        ready = handle.ready
        leaves = ready is not None and not ready.ends_in_silence
        return handle.state in kept and leaves and handle.has_state

    def look_at_parked(self, now_s: float) -> None:
        """End those who have not left their generation in time. Called while there is no coordinator."""
        self._look_at_zygote(now_s)
        if now_s > self._parked_since_s + LEAVE_TIME_S:
            for handle in self.handles:
                if handle.is_alive and handle.state is not RankState.READY:
                    self._end(handle, now_s)

    def end_ranks(self) -> None:
        """Nothing of what is left here is of use to anybody."""
        for handle in self.handles:
            if handle.is_alive:
                self._end(handle, self._clock.monotonic())

    def tidies_up(self) -> None:
        """Remove what works beside this machine's ranks has left on disk; every process has ended."""
        for observer in self._beside:
            observer.tidies_up()

    def _end(self, handle: RankHandle, now_s: float) -> None:
        self._parked.discard(handle.rank)
        handle.slot.set(Cell.FENCED, 1)
        self._world.kill_rank(handle, now_s)

    def _gone(
        self,
        rank: int,
        ended: Ended | None = None,
        wrote: WhatItWrote = NOTHING_WROTE,
        *,
        by_memory: bool = False,
    ) -> None:
        wrote = wrote.without(self._hidden)
        now_ns = self._clock.monotonic_ns()
        self._parked.discard(rank)
        self._leaving.discard(rank)
        self._world.ranks[rank].member.advance(MembershipEvent.TO_REPLACE)
        self._report(
            RankGone(
                rank=rank,
                process=self._process[rank],
                exit_code=None if ended is None else ended.exit_code,
                signal_number=None if ended is None else ended.signal_number,
                age_s=0.0 if ended is None else max(0.0, (now_ns - ended.at_ns) / 1e9),
                killed_for_memory=by_memory,
                last=wrote.last[-_KEPT_WORDS:],
                when_asked=wrote.when_asked[-_KEPT_WORDS:],
                before_log=wrote.before_log[-_KEPT_WORDS:],
                now_ns=now_ns,
                cells=self._node.slot(rank).cells(),
            )
        )

    def _keep_words(self, rank: int, text: str) -> None:
        """Append a rank's output from before it had a log to that log."""
        if text and self._log_dir.is_dir():
            with (
                contextlib.suppress(OSError),
                os.fdopen(open_to_append(self._log_dir / f"rank_{rank}.log"), "ab") as log,
            ):
                log.write(f"{text}\n".encode(errors="replace"))
