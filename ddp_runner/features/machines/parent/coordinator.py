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
from ddp_runner.features.machines.parent.machines import LEAVES, Machines
from ddp_runner.features.machines.parent.other_nodes import NodeJoined, Place
from ddp_runner.features.machines.parent.remote_node import OtherMachines, RemoteNode
from ddp_runner.features.machines.rules.majority import Record
from ddp_runner.features.machines.rules.node_messages import Beat, Parked
from ddp_runner.features.machines.rules.nodes import ReturnFacts, keeps_memory, loads_own
from ddp_runner.features.machines.rules.succession import GoingOn
from ddp_runner.kernel.parent.rank_handle import RankHandle
from ddp_runner.kernel.parent.run_context import RunContext
from ddp_runner.kernel.parent.run_facts import Ending
from ddp_runner.kernel.parent.signal_box import SignalBox
from ddp_runner.kernel.parent.supervisor import Parts, Supervisor
from ddp_runner.kernel.processes.node import Node
from ddp_runner.kernel.rules.election import EMPTY_STEP
from ddp_runner.kernel.rules.errors import BadInputError
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
from ddp_runner.kernel.system.folder_owner import FolderOwner, Owner
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.kernel.wire.events import RankFormed
from ddp_runner.kernel.wire.messages import Ready
from ddp_runner.supervisor.reporting.recorder import Recorder
from ddp_runner.system.run_directories import RunDirectories

# If a run without a generation is asked to stop: the time for ranks with a state to get ready, and the time for other machines to
# find a coordinator that has just taken over.
MEMORY_READY_S, FOUND_S = 30.0, 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A coordinator's place that this machine has taken: the folder with its lock and term, and where it listens.

    ``before``: what the folder said of the coordinator that was lost; ``without``: the machines that it says now have not the
    newest memory; ``lost``: the number of that coordinator's machine. ``ballot``: the number of the one in which a majority has
    voted for this machine; 0: none has voted.
    """

    owner: FolderOwner
    before: Owner
    without: tuple[int, ...]
    directories: RunDirectories
    listening: socket.socket
    address: str
    lost: int
    ballot: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Heir:
    """All that the new coordinator has from the follower that it was.

    ``kept``: what each rank that waits here with its memory has reported last; ``generation``: its newest. ``lost_host``: the
    name of the lost coordinator's machine.
    ``inexact_reasons`` and, of a script, ``restarts``: of the run, as the coordinator before has said last.
    """

    plan: LaunchPlan
    place: Place
    taken: Taken
    node: Node
    kept: Mapping[int, Ready]
    generation: int
    run_id: str
    restarts: int
    inexact_reasons: tuple[str, ...]
    stop: StopReason | None  # that was requested of this machine meanwhile
    signals: SignalBox
    selector: selectors.BaseSelector
    lost_host: str = ""


class CoordinatorSupervisor(Supervisor):
    """Driven as :class:`Supervisor` is, and by what comes from other nodes."""

    def __init__(
        self,
        run: RunContext,
        parts: Parts,
        *,
        plan: LaunchPlan,
        recorder: Recorder,
        machines: OtherMachines,
    ) -> None:
        super().__init__(run, parts)
        self.machines = Machines(self, machines, plan=plan, clock=self._clock)
        self._record = recorder
        self._settings = plan.settings
        self._owner = machines.owner
        self._owner_before = self._owner.read()
        # The coordinator before this one, whose place it has taken, until this one has formed a generation.
        self._after = ""
        self._is_heir = False
        self._began_s = self._clock.monotonic()
        self.run_end.saves_unformed = self._saves_unformed
        self._going_on = GoingOn()
        self._leaves: set[int] = set()  # machines that the run is about to continue without
        self._without: tuple[int, ...] = ()  # as it stands in the folder
        self._formed_in = 0  # the newest generation of which a rank has said that it has formed
        self._has_parked = False  # whether ranks of others came with a memory
        self._has_heirs = plan.nodes is not None and plan.nodes.moving_fd is None
        self._others = machines.nodes
        self._quorum = self.machines.quorum

    def beat(self, number: int) -> Beat:
        """Return the state of the run, for a node."""
        return Beat(
            number=number,
            generation=self.facts.generation,
            committed_step=self.facts.committed_step,
            is_fault_free=self._is_fault_free,
            inexact_reasons=list(self.facts.inexact_reasons),
        )

    def note_end(self) -> None:
        """Have the machines that are there note that the run has ended, unless a memory may be all that is left of a step."""
        if self.ending is None:
            return
        # A complete run may have its last file on another machine.
        if self.ending.status is RunStatus.COMPLETED or self.run_end.is_saved:
            self._quorum.note_end()

    def keeps(self, parked: Parked, node: RemoteNode, record: Record | None) -> bool:
        """Return whether the state in memory on a returning node still belongs to this run."""
        majority = self._quorum.keeper
        is_open = majority is not None and not self.facts.ever_formed
        if record is None and is_open and self._quorum.decides:
            return False  # nothing says how new it is
        if majority is not None and record is not None and is_open and record.members:
            # A member whose ranks did not form its newest generation has the memory of the one before.
            same = parked.term != record.term or parked.generation <= record.generation
            may_resume = self._is_heir or self._settings.run.resume == "auto"
            return same and may_resume and majority.has_newest(record, self._quorum.members)
        before = self._owner_before
        newest = Catalog(Path(self._settings.run.checkpoint_dir)).newest()
        term = parked.term
        if before is not None and term not in (before.term, before.after):
            term = before.term
        may_resume = not self.facts.ever_formed and self._settings.run.resume == "auto"
        return keeps_memory(
            ReturnFacts(
                term=parked.term,
                is_same_node=parked.node == node.number,
                is_same_run=newest is None or newest.run_id == parked.run_id,
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
        self._quorum.was_elected(heir.taken.ballot)
        self._is_heir = True
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
        # The leases here have run out, also for ranks that are started again.
        for rank in self.node.processes:
            self.world.ranks[rank].slot.set(Cell.LEASE_NS, 0)
        for rank, ready in heir.kept.items():
            handle = self.world.ranks[rank]
            handle.begin(now_s=now_s, loads=False)
            handle.pid = self.node.processes[rank].pid
            handle.member.advance(MembershipEvent.REPLACED)
            self.node.moved.add(rank)
            self.on_message(ready, rank)
        self.recorder.say(
            f"the coordinator was lost: node {heir.place.number} ({self.node.host}) has taken its place",
            level="WARNING",
        )
        if heir.stop is not None:
            self.ask_stop(heir.stop)

    def _on_formed(self, formed: RankFormed) -> None:
        self._formed_in = max(self._formed_in, formed.generation)
        super()._on_formed(formed)
        if self.machine.state is RunState.RUNNING:
            self._quorum.trains()
            for node in self._others:
                if all(one.state is RankState.TRAINING for one in self.machines.ranks_of(node)):
                    self.machines.missing.trains(node)

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
            self._quorum.say_who_leads(now_s)
        super().advance()

    def _may_form(self, generation: int) -> bool:
        return self._quorum.may_form(generation) or self._wait_to_form()

    def _wait_to_form(self) -> bool:
        """Return False: nobody may train now. The run ends after a while, or as it is asked to."""
        if (stop := self._stop) is not None:
            line = f"{stop.value}: {self._quorum.waits}"
            self.run_end.begin(Ending.of(STATUS_OF_REASON[stop], line))
        elif self._quorum.gives_up and self.ending is None:
            self.run_end.begin(Ending.of(RunStatus.PREEMPTED, self._quorum.gives_up))
        return False

    def _begin(self) -> bool:
        if not self._quorum.has_majority():
            return self._wait_to_form()
        if not super()._begin():
            return False
        try:
            self._without = self._who_is_without()
            self.machines.take_folder(without=self._without)
            self._going_on.noted(self._without, self._clock.monotonic())
            self._after = ""
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
        line = self.machines.why_not_leader(
            now_s, is_superseded=self._is_superseded, is_stopping=self._stop is not None
        )
        if line:
            self.run_end.at_once(Ending.of(RunStatus.PREEMPTED, line))
        elif line is not None and self._has_folder:
            self._note_who_is_without()

    def _is_superseded(self) -> bool:
        """Return whether another coordinator has the folder: also before this one, which waits for machines, has taken it."""
        if self._has_folder:
            return self._owner.is_other()
        before, found = self._owner_before, self._owner.read()
        return found is not None and (before is None or found.term != before.term)

    @property
    def _may_have_heir(self) -> bool:
        """Return True if another machine shares the checkpoint folder and may take this one's place."""
        ready = (handle.ready for handle in self.world.present)
        if self._quorum.decides:
            return False  # who takes its place has a majority, which this one forms with too
        if not self._has_heirs or any(one is not None and one.ends_in_silence for one in ready):
            return False
        return self._is_heir or any(node.shares_checkpoints for node in self._others)

    @property
    def _has_folder(self) -> bool:
        """Return True if the checkpoint folder holds this coordinator's term."""
        return self.recorder.may_write or self._is_heir

    def _who_is_without(self) -> tuple[int, ...]:
        """Nodes that have not done all the steps, or will not do the next one."""
        self._leaves -= {node.number for node in self._others if node.is_there}
        return tuple(
            node.number
            for node in self._others
            if node.number in self._leaves
            or any(one.membership not in IN_WORLD for one in self.machines.ranks_of(node))
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
        has_trained = self.facts.ever_formed or self._is_heir
        verdict = self.machines.missing.look(now_s, has_trained=has_trained)
        if self._stop is not None and (self.facts.ever_formed or self._is_memory_ready(now_s)):
            self._stop_without_missing(self._stop)
        elif verdict.gives_up:
            self.run_end.begin(Ending.of(RunStatus.PREEMPTED, verdict.gives_up))
        else:
            for node in verdict.without:
                self._go_on_without(node, now_s)

    def _is_memory_ready(self, now_s: float) -> bool:
        """Return True if all ranks with a state are ready to save it, or have had the time for that."""
        if not self._has_parked or (self._is_heir and now_s < self._began_s + FOUND_S):
            return False
        asked_s = self._stop_by_s - self.run.settings.stop_timeout_s
        ranks = [
            rank
            for node in self._others
            if node.is_there and node.keeps_memory
            for rank in node.ranks
        ]
        if self._is_heir:
            ranks += self.node.ranks
        are_ready = all(self.world.ranks[rank].state is RankState.READY for rank in ranks)
        return are_ready or now_s >= asked_s + MEMORY_READY_S

    def _saves_unformed(self, ending: Ending) -> bool:
        """Return True if ranks hold a state that no file has and may write it, before this coordinator's first generation."""
        # INVARIANT memory-is-saved: a run that ends while it waits for machines saves the newest state that its present
        # ranks hold in memory. Broken if: it ends with that state only in memory.
        # Guarded by: test_a_coordinator_that_nobody_joins_saves_what_others_have_kept.
        is_asked = self._stop is not None or ending.status is RunStatus.PREEMPTED
        if not (self._has_parked and (self._is_heir or is_asked)) or self._is_superseded():
            return False
        ready = [one.ready for one in self.world.present if one.ready is not None]
        if self.recorder.may_write or not ready:
            return bool(ready)
        try:
            self._opening.claim(ready)
            if self._opening.record(ready):
                return False  # it was complete
            before = self._owner_before
            if before is not None and not self._is_heir:
                # No generation has formed: the memory of other machines is still the newest.
                number = self.node.ranks[0] // self.node.ranks_per_node
                without = tuple(sorted({*before.without, number}))
                self._owner.take(without=without, after=before.after or before.term)
            elif not self._is_heir:
                self._owner.take()
        except (BadInputError, OSError) as error:
            self.recorder.say(
                f"the state in the ranks' memory cannot be saved: {error}", level="WARNING"
            )
            return False
        return True

    def _stop_without_missing(self, stop: StopReason) -> None:
        """Nobody waits for a node where the run is to end: who is there saves what was committed."""
        for node in self._others:
            is_missed = not (node.is_there or self.machines.has_done_all(node))
            if is_missed and self.machines.has_members(node):
                line = f"{stop.value}, without node {node.number}, which is lost"
                self.run_end.begin(Ending.of(STATUS_OF_REASON[stop], line))
                return

    def _go_on_without(self, node: RemoteNode, now_s: float) -> None:
        ranks = self.machines.ranks_of(node)
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

    def node_joined(self, joined: NodeJoined) -> None:
        """Take a machine in, with the memory of its ranks or without."""
        if joined.node.keeps_memory:
            self._take_over(joined.inexact_reasons)
        self._note_other_code(joined.other_code)
        if not joined.keeps_parked:
            self._look_at_checkpoints_of(joined.node)

    def _take_over(self, inexact_reasons: Sequence[str]) -> None:
        """Ranks come with their memory, or a copy of it is left: the run goes on, and is what it was."""
        self._has_parked = True
        self.facts.took_over = True
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
        if self.facts.ever_formed:
            return
        ours, what = Catalog(Path(settings.checkpoint_dir)).newest(), ""
        held = max(one.progress.committed_step for one in self.world.present)
        if node.newest is not None and loads_own(node.newest, ours, resume=settings.resume):
            held, newer = max(held, node.newest.step), node.newest.step > held
            what = f"checkpoint, of step {node.newest.step}" if newer else ""
        if node.copied_step > max(held, EMPTY_STEP if ours is None else ours.step):
            what = f"copy of the state in memory, of step {node.copied_step}"
        if what:
            self._repair.loaders_elsewhere.add(first)
            self.recorder.say(f"node {node.number} has a newer {what}: it loads it")

    def let_go(self, node: RemoteNode) -> bool:
        """Let a machine leave that was asked to, unless all are to stop; its link ends next."""
        if self._stop is not None:
            return False
        node.order(Ending.of(RunStatus.PREEMPTED, LEAVES).event)
        node.is_leaving = True
        return True

    def rank_not_started(self, handle: RankHandle) -> None:
        """Have a process started that did not come."""
        self._repair.schedule_respawn(handle)

    def _is_behind(self, node: RemoteNode) -> bool:
        """Return whether a program of the user's has trained there, and goes on behind its loop."""
        states = [handle.state for handle in self.machines.ranks_of(node)]
        has_done_all = self.machines.has_done_all(node)
        return self._goes_on_behind and has_done_all and RankState.FINISHED in states

    def node_lost(self, node: RemoteNode, why: str) -> None:
        """All ranks of a node are gone with it, as far as anybody here can know."""
        self.machines.missing.lost(node, self._clock.monotonic())
        if not (node.is_leaving or self.run_end.is_known or self.machines.has_done_all(node)):
            lost = self._record.findings.machines_lost
            lost[node.machine] = lost.get(node.machine, 0) + 1
        if self._is_behind(node) and not node.is_leaving and self._stop is None:
            self.run_end.failed_behind(f"{node.name} is lost: {why}")
            self._waits_no_longer()
        for handle in self.machines.ranks_of(node):
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
                    rank=handle.rank,
                    step=handle.slot.get(Cell.STEP),
                    phase=handle.slot.read().phase.label,
                    cause=f"{node.name} is lost: {why}",
                    at_ns=self._clock.monotonic_ns(),
                    origin=Origin.OUTSIDE,
                )
                self._report(fault)
                self._repair.note_end(handle, fault)
            handle.released()
