"""The supervisor of a run on several machines: adds to the usual one the handling of nodes."""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_runner.checkpoint.catalog import Catalog
from ddp_runner.core.launch_plan import LaunchPlan
from ddp_runner.core.machines.node_messages import (
    Beat,
    EndWanted,
    Folders,
    Parked,
    RankGone,
    RankStarted,
    Said,
    SaveWanted,
    StopWanted,
)
from ddp_runner.core.machines.node_options import NodeOptions
from ddp_runner.core.machines.nodes import (
    NodesFacts,
    NodesPlan,
    ReturnFacts,
    keeps_memory,
    loads_own,
    what_about_missing,
)
from ddp_runner.core.machines.succession import GoingOn
from ddp_runner.kernel.parent.run_context import RunContext
from ddp_runner.kernel.parent.run_facts import Ending
from ddp_runner.kernel.parent.signal_box import SignalBox
from ddp_runner.kernel.parent.supervisor import Parts, Supervisor
from ddp_runner.kernel.parent.world import World
from ddp_runner.kernel.processes.children import Ended
from ddp_runner.kernel.processes.node import Node
from ddp_runner.kernel.processes.rank_process import WhatItWrote
from ddp_runner.kernel.rules.exits import STATUS_OF_REASON, RunStatus, StopReason
from ddp_runner.kernel.rules.faults import Fault, FaultKind, Origin
from ddp_runner.kernel.rules.lifecycle import (
    IN_WORLD,
    Membership,
    MembershipEvent,
    RankEvent,
    RankState,
    RunState,
)
from ddp_runner.kernel.rules.stopping import StopSignal
from ddp_runner.kernel.system.clock import Clock
from ddp_runner.kernel.system.folder_owner import FolderOwner, Owner
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.kernel.wire.events import RankFormed
from ddp_runner.kernel.wire.messages import Ready
from ddp_runner.supervisor.nodes.other_nodes import (
    NodeEvent,
    NodeGone,
    NodeJoined,
    NodeNews,
    NodeSaid,
    OtherNodes,
    Place,
    RankSaid,
)
from ddp_runner.supervisor.nodes.remote_node import SPARE, RemoteNode
from ddp_runner.supervisor.reporting.recorder import Recorder
from ddp_runner.system.folder_probe import FolderProbe
from ddp_runner.system.node_link import NodeLink
from ddp_runner.system.run_directories import RunDirectories

OWNER_EVERY_S = 0.5
LEAVES = "this node leaves; the others go on"
PAUSE_S = (
    1.0  # between two turns: this process did not run, and other machines are not blamed for it
)


def missing_nodes(others: Sequence[RemoteNode], options: NodeOptions, world: World) -> str:
    """Return in words which machines the run cannot begin without; empty: none."""
    there = 1 + sum(node.is_there for node in others)
    missing = any(
        world.ranks[rank].membership in IN_WORLD
        for node in others
        if not node.is_there
        for rank in node.processes
    )
    where = f"{options.host}:{options.port}"
    return f"waiting for nodes at {where}, {there} of {options.most}" if missing else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A coordinator's place that this machine has taken: the folder with its lock and term, and where it listens.

    ``before``: what the folder said of the coordinator that was lost; ``without``: the machines that it says now have not the
    newest memory.
    """

    owner: FolderOwner
    before: Owner
    without: tuple[int, ...]
    directories: RunDirectories
    listening: socket.socket
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Heir:
    """All that the new coordinator has from the follower that it was.

    ``kept``: what each rank that waits here with its memory has reported last; ``generation``: its newest.
    ``inexact_reasons``: of the run, as the coordinator before has said last.
    """

    plan: LaunchPlan
    place: Place
    taken: Taken
    node: Node
    kept: Mapping[int, Ready]
    generation: int
    inexact_reasons: tuple[str, ...]
    signals: SignalBox
    selector: selectors.BaseSelector


class CoordinatorSupervisor(Supervisor):
    """Driven as :class:`Supervisor` is, and by what comes from other nodes."""

    def __init__(
        self,
        run: RunContext,
        parts: Parts,
        *,
        plan: LaunchPlan,
        recorder: Recorder,
        others: Sequence[RemoteNode],
        owner: FolderOwner,
        probes: Sequence[FolderProbe] = (),
    ) -> None:
        super().__init__(run, parts)
        self._record = recorder
        self._settings = plan.settings
        self._probes = tuple(probes)
        self._owner = owner
        self._owner_before = owner.read()
        # The coordinator before this one, whose place it has taken, until this one has formed a generation.
        self._after = ""
        self._is_heir = False
        self._may_have_heir = False  # another machine has this folder
        self._going_on = GoingOn()
        self._leaves: set[int] = set()  # machines that the run is about to continue without
        self._looked_at_owner_s = 0.0
        self._without: tuple[int, ...] = ()  # as it stands in the folder
        self._formed_in = 0  # the newest generation of which a rank has said that it has formed
        self._has_parked = False  # whether ranks of others came with a memory
        assert plan.nodes is not None
        self._others = tuple(others)
        self._options = plan.nodes
        self._spares = 0  # machines that wait for a place
        self._enough_since_s: float | None = None
        self._begun_s = self._clock.monotonic()
        # Node -> its first loss since it last trained: one that is lost while it starts gets no new patience.
        self._lost_since_s: dict[int, float] = {}

    def beat(self, number: int) -> Beat:
        """Return the state of the run, for a node."""
        return Beat(
            number=number,
            generation=self.facts.generation,
            committed_step=self.facts.committed_step,
            is_fault_free=self._is_fault_free,
            inexact_reasons=list(self.facts.inexact_reasons),
        )

    def keeps(self, parked: Parked, node: RemoteNode) -> bool:
        """Return whether the state in memory on a returning node still belongs to this run."""
        before, term = self._owner_before, parked.term
        if before is not None and term not in (before.term, before.after):
            term = before.term
        may_resume = not self.facts.ever_formed and self._settings.run.resume == "auto"
        return keeps_memory(
            ReturnFacts(
                term=parked.term,
                is_same_node=parked.node == node.number,
                are_members=all(self.world.ranks[r].membership in IN_WORLD for r in node.ranks),
                ours=self._owner.term,
                generation=parked.generation,
                formed_in=self._formed_in,
                may_resume=may_resume,
                before=None if before is None else (term, before.without),
                number=node.number,
            )
        )

    def succeed(self, heir: Heir) -> None:
        """Take the place of a coordinator that was lost, with the ranks of this machine that have kept their memory."""
        self._is_heir = self._may_have_heir = True
        self._after, self._owner_before = heir.taken.before.term, heir.taken.before
        if heir.taken.before.after:
            self._after = heir.taken.before.after
        now_s = self._clock.monotonic()
        self._without = heir.taken.without
        self._leaves.update(self._without)
        self._going_on.noted(self._without, now_s)
        self.facts.generation = heir.generation
        self._take_over(heir.inexact_reasons)
        done_ns = [self.world.ranks[rank].slot.get(Cell.PRODUCTIVE_NS) for rank in heir.kept]
        self._record.accounting.count_from(max(done_ns, default=0))
        for rank, ready in heir.kept.items():
            handle = self.world.ranks[rank]
            handle.begin(now_s=now_s, loads=False)
            handle.slot.set(Cell.LEASE_NS, 0)
            handle.pid = self.node.processes[rank].pid
            handle.member.advance(MembershipEvent.REPLACED)
            self.node.moved.add(rank)
            self.on_message(ready, rank)
        self.recorder.say(
            f"the coordinator was lost: node {heir.place.number} ({self.node.host}) has taken its place",
            level="WARNING",
        )

    def _on_formed(self, formed: RankFormed) -> None:
        self._formed_in = max(self._formed_in, formed.generation)
        super()._on_formed(formed)
        if self.machine.state is RunState.RUNNING:
            for node in self._others:
                if all(self.world.ranks[one].state is RankState.TRAINING for one in node.ranks):
                    self._lost_since_s.pop(node.number, None)

    def ask_stop(self, reason: StopReason, *, by: StopSignal = StopSignal.OTHER) -> None:
        """Ask for a stop as :meth:`Supervisor.ask_stop` does, after saving the state that other nodes' ranks have kept."""
        if self._has_parked and not self.facts.ever_formed and self.ending is None:
            self._signals.heard(by, self._clock.monotonic())
            self._begin_stop(reason)
        else:
            super().ask_stop(reason, by=by)

    def advance(self) -> None:
        """Do what :meth:`Supervisor.advance` does, and what missing nodes require."""
        if self.ending is None and not self.run_end.is_known:
            now_s = self._clock.monotonic()
            self._look_at_missing(now_s)
            self._look_at_owner(now_s)
        super().advance()

    def _begin(self) -> bool:
        if not super()._begin():
            return False
        try:
            self._without = self._who_is_without()
            self._owner.take(without=self._without)
            self._after = ""
            for probe in self._probes:
                probe.remove_others()
        except OSError as error:
            reason = error.strerror or str(error)
            self.run_end.bad_input(f"{self._owner.folder} cannot be written to: {reason}")
            return False
        return True

    def _look_at_owner(self, now_s: float) -> None:
        """End where another coordinator has taken the checkpoints: this half has nothing to say any more."""
        # INVARIANT one-owner: of two coordinators that know nothing of each other the newer one goes on.
        # Broken if: the older one publishes a file, or trains on for long.
        # Guarded by: test_a_coordinator_whose_folder_was_taken_ends.
        if now_s < self._looked_at_owner_s + OWNER_EVERY_S:
            return
        self._looked_at_owner_s = now_s
        if not self._is_superseded():
            if self._has_folder:
                self._note_who_is_without()
        else:
            line = f"another coordinator has taken {self._owner.folder}: this one ends"
            self.run_end.at_once(Ending.of(RunStatus.PREEMPTED, line))

    def _is_superseded(self) -> bool:
        """Return whether another coordinator has the folder: also before this one, which waits for machines, has taken it."""
        if self._has_folder:
            return self._owner.is_other()
        before, found = self._owner_before, self._owner.read()
        return found is not None and (before is None or found.term != before.term)

    @property
    def _has_folder(self) -> bool:
        """Whether the folder of the checkpoints has this coordinator's term."""
        return self.recorder.may_write or self._is_heir

    def _who_is_without(self) -> tuple[int, ...]:
        """Nodes that have not done all the steps, or will not do the next one."""
        self._leaves -= {node.number for node in self._others if node.is_there}
        return tuple(
            node.number
            for node in self._others
            if node.number in self._leaves
            or any(self.world.ranks[rank].membership not in IN_WORLD for rank in node.processes)
        )

    def _note_who_is_without(self) -> None:
        """Note the missing nodes in the checkpoint folder, for a coordinator that comes after this one."""
        without = self._who_is_without()
        if without != self._without:
            with contextlib.suppress(OSError):  # a full disk: tried again soon
                self._owner.take(without=without, after=self._after)
                self._without = without
                self._going_on.noted(without, self._clock.monotonic())

    def _look_at_missing(self, now_s: float) -> None:
        there = 1 + sum(node.is_there or self._has_done_all(node) for node in self._others)
        if there < self._options.least:
            self._enough_since_s = None
        elif self._enough_since_s is None:
            self._enough_since_s = now_s
        if self._stop is not None and self.facts.ever_formed:
            self._stop_without_missing(self._stop)
            return
        plans = {
            node: self._about(node, there=there, now_s=now_s)
            for node in self._others
            if not (node.is_there or self._has_done_all(node))
        }
        if plans and all(plan is NodesPlan.GIVE_UP for plan in plans.values()):
            line = (
                f"{there} of at least {self._options.least} nodes are there, and no other has come"
            )
            self.run_end.begin(Ending.of(RunStatus.PREEMPTED, line))
            return
        for node, plan in plans.items():
            is_left_out = node.is_leaving or now_s < node.left_out_until_s
            if plan is NodesPlan.GO_ON or (is_left_out and there >= self._options.least):
                self._go_on_without(node, now_s)

    def _about(self, node: RemoteNode, *, there: int, now_s: float) -> NodesPlan:
        """Return the plan for a missing node."""
        return what_about_missing(
            NodesFacts(
                there=there,
                least=self._options.least,
                most=self._options.most,
                has_trained=self.facts.ever_formed or self._is_heir,
                missing_s=now_s - self._lost_since_s.get(node.number, self._begun_s),
                enough_s=0.0 if self._enough_since_s is None else now_s - self._enough_since_s,
            ),
            patience_s=self._settings.recovery.node_patience_s,
            last_call_s=self._options.last_call_s,
            join_timeout_s=self._options.join_timeout_s,
        )

    def _stop_without_missing(self, stop: StopReason) -> None:
        """Nobody waits for a node where the run is to end: who is there saves what was committed."""
        for node in self._others:
            members = any(self.world.ranks[rank].membership in IN_WORLD for rank in node.processes)
            if members and not node.is_there and not self._has_done_all(node):
                line = f"{stop.value}, without node {node.number}, which is lost"
                self.run_end.begin(Ending.of(STATUS_OF_REASON[stop], line))
                return

    def _has_done_all(self, node: RemoteNode) -> bool:
        """Return whether all ranks of the node have finished, so that it may leave without being missed."""
        return all(self.world.ranks[rank].has_finished for rank in node.processes)

    def _go_on_without(self, node: RemoteNode, now_s: float) -> None:
        ranks = [self.world.ranks[rank] for rank in node.processes]
        missing = [handle for handle in ranks if handle.membership in IN_WORLD]
        if node.is_there or not missing or not self._may_go_on_without(node, now_s):
            return
        self.recorder.say(
            f"going on without node {node.number}, until it is there", level="WARNING"
        )
        self._repair.returning.drop_of_lost_node(missing, now_s)
        if self.recorder.may_write and not self._owner.is_other():
            self._note_who_is_without()

    def _may_go_on_without(self, node: RemoteNode, now_s: float) -> bool:
        """Return whether no machine that this one does not hear can take its place with an older memory."""
        if not (self._may_have_heir and self._has_folder):
            return True
        self._leaves.add(node.number)
        found = self._owner.read()
        if found is not None and found.term == self._owner.term:
            self._note_who_is_without()
        return self._going_on.may(node.number, now_s, owner=found, ours=self._owner.term)

    def on_node_event(self, event: NodeEvent) -> None:
        """Something has come from another node, or of it."""
        if self.ending is not None:
            return
        match event:
            case RankSaid(message=message, rank=rank):
                self.on_message(message, rank)
            case NodeJoined(node=node, waits_for=waits_for) if node.number == SPARE:
                self._spares += 1
                self.recorder.say(f"{node.name} is there, and waits: {waits_for}")
            case NodeGone(node=node, why=why) if node.number == SPARE:
                self._spares -= 1
                self.recorder.say(f"{node.name} is lost: {why}")
            case NodeJoined(node=node, keeps_parked=keeps_parked, was_spare=was_spare) as joined:
                self._spares -= was_spare
                if keeps_parked:
                    self._take_over(joined.inexact_reasons)
                self._note_other_code(joined.other_code)
                if not keeps_parked:
                    self._look_at_checkpoints_of(node)
                there = sum(one.is_there for one in self._others) + 1
                kept = "; its ranks have kept their memory" if keeps_parked else ""
                self.recorder.say(f"{node.name} is there: {there} of {len(self._others) + 1}{kept}")
            case NodeGone(node=node, why=why):
                self._lose(node, why)
            case NodeSaid(node=node, message=message) if node.ranks:
                self._on_node_message(node, message)

    def _take_over(self, inexact_reasons: Sequence[str]) -> None:
        """Ranks come with their memory: the run goes on, and is what it was."""
        self._has_parked = True
        self._record.took_over = True
        reasons = self.facts.inexact_reasons
        reasons[:] = dict.fromkeys([*inexact_reasons, *reasons])

    def _note_other_code(self, line: str) -> None:
        """Have the run not be exact, by --allow-different-code."""
        if line and line not in self.facts.inexact_reasons:
            self.facts.inexact_reasons.append(line)
            self.recorder.say(f"different code: {line}", level="WARNING")

    def _look_at_checkpoints_of(self, node: RemoteNode) -> None:
        """Have the newest state of all loaded, also where it is on another machine alone."""
        settings, first = self._settings.run, node.ranks[0]
        self._repair.loaders_elsewhere.discard(first)
        if self.facts.ever_formed or node.newest is None:
            return
        ours = Catalog(Path(settings.checkpoint_dir)).newest()
        if loads_own(node.newest, ours, resume=settings.resume):
            self._repair.loaders_elsewhere.add(first)
            self.recorder.say(
                f"node {node.number} has a newer checkpoint, of step {node.newest.step}: it loads it"
            )

    def _on_node_message(self, node: RemoteNode, message: NodeNews) -> None:
        match message:
            case Folders():
                node.shares_logs = message.shares_logs
                self._may_have_heir |= message.shares_checkpoints
                own = [
                    name
                    for name, is_shared in (
                        ("checkpoints", message.shares_checkpoints),
                        ("logs", message.shares_logs),
                    )
                    if not is_shared
                ]
                if own:
                    self.recorder.say(f"{node.name} has {' and '.join(own)} of its own")
            case SaveWanted():
                self.ask_save()
            case EndWanted():
                line = f"SIGQUIT on {node.name}: ended at once"
                self.run_end.at_once(Ending.of(RunStatus.FAILED, line))
            case RankStarted(rank=rank, pid=pid, was_spare=was_spare):
                self.world.ranks[rank].pid = pid
                self.world.ranks[rank].was_spare = was_spare
            case RankGone(rank=rank):
                self._rank_gone(node, message)
            case Said(text=text, level=level):
                self.recorder.say(f"node {node.number}: {text}", level=level)
            case StopWanted(reason=reason, is_leaving=is_leaving):
                self.recorder.say(f"{node.name} was asked to stop")
                staying = [
                    one
                    for one in self._others
                    if one.is_there and one is not node and not one.is_leaving
                ]
                is_enough = 1 + len(staying) + self._spares >= self._options.least
                if is_leaving and is_enough and self._stop is None:
                    node.order(Ending.of(RunStatus.PREEMPTED, LEAVES).event)
                    node.is_leaving = True  # its link ends next
                else:
                    self.ask_stop(StopReason(reason))

    def _rank_gone(self, node: RemoteNode, gone: RankGone) -> None:
        handle = self.world.ranks[gone.rank]
        if not handle.is_alive:
            return
        if gone.exit_code is None and gone.signal_number is None:
            node.cannot_start()
            self.world.forget_start(handle)
            self._repair.schedule_respawn(handle)
            return
        ended = Ended(
            pid=handle.pid or 0,
            exit_code=gone.exit_code,
            signal_number=gone.signal_number,
            at_ns=self._clock.monotonic_ns() - int(gone.age_s * 1e9),
        )
        wrote = WhatItWrote(last=gone.last, when_asked=gone.when_asked, before_log=gone.before_log)
        self._on_rank_ended(handle, ended, wrote)

    def _lose(self, node: RemoteNode, why: str) -> None:
        """All ranks of a node are gone with it, as far as anybody here can know."""
        self.recorder.say(f"{node.name} is lost: {why}", level="WARNING")
        self._lost_since_s.setdefault(node.number, self._clock.monotonic())
        if not (node.is_leaving or self.run_end.is_known or self._has_done_all(node)):
            lost = self._record.findings.machines_lost
            lost[node.machine] = lost.get(node.machine, 0) + 1
        for rank in node.processes:
            handle = self.world.ranks[rank]
            if not handle.is_alive:
                continue
            was_expected = self._repair.expects_end_of(handle) or handle.has_finished
            handle.machine.advance(RankEvent.EXITED)
            if self.run_end.is_known:
                self.run_end.last_save.ended(handle)
            elif handle.membership is Membership.REJOINING:
                self._repair.returning.ended(handle)
            elif not was_expected:
                fault = Fault(
                    kind=FaultKind.NODE_LOST,
                    rank=rank,
                    step=handle.slot.get(Cell.STEP),
                    phase=handle.slot.read().phase.label,
                    cause=f"{node.name} is lost: {why}",
                    at_ns=self._clock.monotonic_ns(),
                    origin=Origin.OUTSIDE,
                )
                self._report(fault)
                self._repair.note_end(handle, fault)
            handle.released()


class NodeTraffic:
    """Brings what comes from other machines, or of them, to the coordinator. Driven by its loop."""

    def __init__(
        self, others: OtherNodes, supervisor: CoordinatorSupervisor, *, clock: Clock
    ) -> None:
        self.source = others
        self._supervisor = supervisor
        self._turned_at_s = clock.monotonic()

    def hear(self, link: object) -> None:
        """Read from the door for other machines (None), or the link to one of them, which is ready."""
        assert link is None or isinstance(link, NodeLink)
        for event in self.source.read(link):
            self._supervisor.on_node_event(event)

    def look(self, now_s: float) -> None:
        """Find who is silent for too long."""
        if now_s > self._turned_at_s + PAUSE_S:
            self.source.forgive(now_s)
        self._turned_at_s = now_s
        for event in self.source.look(now_s):
            self._supervisor.on_node_event(event)
