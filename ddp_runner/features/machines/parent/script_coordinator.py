"""Decides on a script that runs on several machines: who takes part in each start, and what follows when one is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_runner.features.machines.parent.machines import LEAVES, Machines, missing_nodes
from ddp_runner.features.machines.rules.node_messages import Beat, Parked
from ddp_runner.features.script.live_attempt import LiveAttempt
from ddp_runner.features.script.parent import ScriptAgent
from ddp_runner.features.script.rules import GRACE_AFTER_FAULT_S, Attempt
from ddp_runner.kernel.parent.run_facts import Ending
from ddp_runner.kernel.rules.exits import RunStatus
from ddp_runner.kernel.rules.faults import Fault, FaultKind, Origin
from ddp_runner.kernel.rules.lifecycle import (
    IN_WORLD,
    Membership,
    MembershipEvent,
    RankEvent,
    RankState,
    RunEvent,
    RunState,
)
from ddp_runner.kernel.wire import events
from ddp_runner.kernel.wire.board import Cell

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp_runner.core.launch_plan import LaunchPlan
    from ddp_runner.features.machines.parent.coordinator import Heir
    from ddp_runner.features.machines.parent.other_nodes import NodeJoined
    from ddp_runner.features.machines.parent.remote_node import OtherMachines, RemoteNode
    from ddp_runner.features.machines.rules.majority import Record
    from ddp_runner.features.script.rules import ScriptPlan
    from ddp_runner.kernel.parent.rank_handle import RankHandle
    from ddp_runner.kernel.processes.node import Node
    from ddp_runner.kernel.system.clock import Clock
    from ddp_runner.supervisor.reporting.outputs import Outputs
    from ddp_runner.system.run_directories import RunDirectories

_LEFT = Ending.of(RunStatus.PREEMPTED, f"{LEAVES}, from the script's own checkpoint")
_BACK = (MembershipEvent.TRIED_AGAIN, MembershipEvent.TAKEN_BACK, MembershipEvent.TO_REPLACE)


class ScriptCoordinator(ScriptAgent):
    """Driven as :class:`ScriptAgent` is, and by what comes from other machines.

    A script cannot take anybody in while it runs. So a machine takes part from one start of all ranks to the next.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        node: Node,
        *,
        script: ScriptPlan,
        outputs: Outputs,
        directories: RunDirectories,
        clock: Clock,
        machines: OtherMachines,
    ) -> None:
        super().__init__(
            plan,
            node,
            script=script,
            outputs=outputs,
            directories=directories,
            clock=clock,
            others=machines.nodes,
        )
        self.machines = Machines(self, machines, plan=plan, clock=clock, keeps_checkpoints=False)
        self._quorum = self.machines.quorum
        self._leaving: list[RemoteNode] = []  # as soon as all ranks have ended
        self._is_heir = False

    def succeed(self, heir: Heir) -> None:
        """Take the place of a lost coordinator: its attempt has ended, and counts as failed like those before it."""
        self._quorum.was_elected(heir.taken.ballot)
        self._is_heir = True
        self._run_id = heir.run_id or self._run_id
        self.facts.generation = heir.generation
        here = [self.world.ranks[rank] for rank in self.node.processes]
        for handle in here:  # the leases here have run out
            handle.slot.set(Cell.LEASE_NS, 0)
        self._has_saved = any(handle.slot.get(Cell.SCRIPT_SAVES) for handle in here)
        self.facts.committed_step = max(handle.slot.get(Cell.COMMITTED_STEP) for handle in here)
        now_s = self._clock.monotonic()
        lost = next(one for one in self.machines.nodes if one.number == heir.taken.lost)
        lost.host, lost.shares_logs = heir.lost_host, not heir.taken.ballot
        fault = self._fault_of_node(lost, f"the coordinator, {lost.name}, is lost")
        before = Attempt(fault=fault, exit_code=1, steps=self.facts.committed_step, at_s=now_s)
        # INVARIANT one-budget: a lost coordinator uses one restart of the run's budget, and its successor gets no new
        # budget. Broken if: a script that fails each time restarts without end, because its coordinators are lost as well.
        # Guarded by: test_a_script_has_one_budget_under_all_its_coordinators.
        self._failed = [before] * heir.restarts
        self._attempt = LiveAttempt(heir.restarts, now_s=now_s)
        self._report(fault)
        if heir.stop is not None:
            self.ask_stop(heir.stop)
        else:
            self._judge(now_s)
        if heir.taken.ballot:
            # INVARIANT one-script: an elected coordinator starts ranks only once an old one that is cut off has ended its own.
            # Broken if: ranks 0 of both save the script's checkpoint.
            # Guarded by: test_an_elected_coordinator_waits_until_the_old_ones_ranks_have_ended.
            ends_s = self.plan.settings.recovery.node_silent_s + GRACE_AFTER_FAULT_S
            self._again_at_s = max(self._again_at_s, now_s + ends_s)

    def advance(self) -> None:
        """Do what :meth:`ScriptAgent.advance` does, unless another machine coordinates by now."""
        if self.ending is None:
            now_s = self._clock.monotonic()
            self._quorum.say_who_leads(now_s)
            if line := self.machines.why_not_leader(
                now_s, is_superseded=self._is_superseded, is_stopping=self._stop is not None
            ):
                self._end(Ending.of(RunStatus.PREEMPTED, line))
        super().advance()

    def _is_superseded(self) -> bool:
        """Return whether another coordinator has the folder, which this one has taken."""
        return (self.recorder.may_write or self._is_heir) and self.machines.owner.is_other()

    def _waits_for(self) -> str:
        assert self.plan.nodes is not None
        return missing_nodes(self.machines.nodes, self.plan.nodes, self.world)

    def _may_begin(self, now_s: float) -> bool:
        """Return whether all machines are there that take part in this attempt; it may end the run for want of them."""
        has_trained = self.facts.ever_formed or self._is_heir
        verdict = self.machines.missing.look(now_s, has_trained=has_trained)
        self._choose_machines(without=verdict.without)
        if verdict.gives_up:
            self._end(Ending.of(RunStatus.PREEMPTED, verdict.gives_up))
            return False
        if any(node.is_there and node.is_leaving for node in self.machines.nodes):
            return False  # their links end next
        if not all(self.world.can_start(handle) for handle in self.world.present):
            return False
        return self._quorum.has_majority() or self._wait_for_majority()

    def _choose_machines(self, *, without: Sequence[RemoteNode]) -> None:
        """Have those take part in the next start that are there, or are waited for. Called while no rank runs."""
        for node in without:
            for handle in self.machines.ranks_of(node):
                if handle.membership in IN_WORLD:
                    handle.member.advance(MembershipEvent.DROPPED)
        for node in self.machines.nodes:
            for handle in self.machines.ranks_of(node):
                is_back = node.is_there and not node.is_leaving
                for event in _BACK if is_back and handle.membership is Membership.DROPPED else ():
                    handle.member.advance(event)

    def _may_form(self) -> bool:
        return self._quorum.may_form(self.facts.generation + 1) or self._wait_for_majority()

    def _wait_for_majority(self) -> bool:
        """Return False: nobody may train now, and the run ends after a while."""
        if self._quorum.gives_up:
            self._end(Ending.of(RunStatus.PREEMPTED, self._quorum.gives_up))
        return False

    def _on_formed(self, formed: events.RankFormed) -> None:
        super()._on_formed(formed)
        if self.machine.state is RunState.RUNNING:
            for node in self.machines.nodes:
                ranks = self.machines.ranks_of(node)
                if all(handle.membership in IN_WORLD for handle in ranks):
                    self.machines.missing.trains(node)
            self._quorum.trains()

    def _start_again(self, now_s: float, delay_s: float) -> None:
        super()._start_again(now_s, delay_s)
        self._let_them_go()

    def _claim(self) -> None:
        super()._claim()
        self.machines.take_folder()

    def _place_of(self, rank: int) -> str:
        if rank < 0:
            return ""
        return f"node {rank // self.plan.ranks_per_node} ({self.world.host_of(rank)})"

    def beat(self, number: int) -> Beat:
        """Return the state of the run, for a node."""
        trains = self.world.counts.are_all_present(RankState.TRAINING)
        return Beat(
            number=number,
            generation=self.facts.generation,
            committed_step=self.facts.committed_step,
            is_fault_free=trains and not self._attempt.is_ending,
            restarts=len(self._failed),
        )

    def keeps(self, parked: Parked, node: RemoteNode, record: Record | None) -> bool:
        """Return False: what a script has in memory is of no use to others."""
        del parked, node, record
        return False

    def note_end(self) -> None:
        """Have the machines that are there note that the run has ended, before they hear so."""
        self._quorum.note_end()

    def node_joined(self, joined: NodeJoined) -> None:
        """Take a machine in, for the next start of all ranks."""
        if joined.other_code:
            self.recorder.say(f"different code: {joined.other_code}", level="WARNING")

    def node_lost(self, node: RemoteNode, why: str) -> None:
        """Take note that a machine is lost, and with it the attempt."""
        self.machines.missing.lost(node, self._clock.monotonic())
        if node in self._leaving:
            self._leaving.remove(node)
        alive = [handle for handle in self.machines.ranks_of(node) if handle.is_alive]
        for handle in alive:
            handle.machine.advance(RankEvent.EXITED)
            handle.released()
        if alive and self._stop is None and not node.is_leaving:
            self._report(self._fault_of_node(node, f"{node.name} is lost: {why}"))

    def _fault_of_node(self, node: RemoteNode, cause: str) -> Fault:
        """Return what has become of a machine as a fault of its first rank."""
        first = self.machines.ranks_of(node)[0]
        return Fault(
            kind=FaultKind.NODE_LOST,
            rank=first.rank,
            step=first.slot.get(Cell.COMMITTED_STEP),
            cause=cause,
            at_ns=self._clock.monotonic_ns(),
            origin=Origin.OUTSIDE,
        )

    def let_go(self, node: RemoteNode) -> bool:
        """Have all ranks end in order, and start again without a machine that was asked to stop."""
        if self._stop is not None or not self._script.restarts:
            return False
        self._leaving.append(node)
        if self._has_not_begun:
            self._let_them_go()
        elif not self._attempt.is_ending:
            self._report(self._fault_of_node(node, f"{node.name} was asked to stop"))
            self.machine.advance(RunEvent.INCIDENT_BEGAN)
            self._end_rest(self._script.grace_period_s)
        return True

    def _let_them_go(self) -> None:
        """Have those leave that were asked to: no rank runs. Their links end next."""
        for node in self._leaving:
            node.order(_LEFT.event)
            node.is_leaving = True
        self._leaving.clear()

    def rank_not_started(self, handle: RankHandle) -> None:
        """Have a process started that did not come."""
        self.schedule_respawn(handle)
