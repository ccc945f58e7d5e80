"""Knows the other machines of a script's run: which of them take part in the next start, and which are lost."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

from ddp_runner.features.machines.parent.coordinator import LEAVES, OWNER_EVERY_S, missing_nodes
from ddp_runner.features.machines.parent.majority_keeper import Quorum
from ddp_runner.features.machines.parent.node_events import (
    MissingNodes,
    NodeEvents,
    TakesNodes,
    Verdict,
)
from ddp_runner.kernel.rules.faults import Fault, FaultKind, Origin
from ddp_runner.kernel.rules.lifecycle import IN_WORLD, Membership, MembershipEvent, RankEvent
from ddp_runner.kernel.wire.board import Cell

if TYPE_CHECKING:
    from ddp_runner.core.launch_plan import LaunchPlan
    from ddp_runner.features.machines.parent.remote_node import OtherMachines, RemoteNode
    from ddp_runner.kernel.parent.rank_handle import RankHandle
    from ddp_runner.kernel.parent.run_facts import Ending
    from ddp_runner.kernel.system.clock import Clock

_BACK = (MembershipEvent.TRIED_AGAIN, MembershipEvent.TAKEN_BACK, MembershipEvent.TO_REPLACE)


class ScriptMachines:
    """Owned by a :class:`ScriptAgent` of a run on several machines.

    A script cannot take anybody in while it runs. So a machine takes part from one start of all ranks to the next.
    """

    def __init__(
        self, agent: TakesNodes, machines: OtherMachines, *, plan: LaunchPlan, clock: Clock
    ) -> None:
        assert plan.nodes is not None
        self._nodes, self.owner, self._probes = machines.nodes, machines.owner, machines.probes
        self._world, self._options = agent.world, plan.nodes
        self._clock = clock
        self._ranks_per_node = plan.ranks_per_node
        self._looked_at_owner_s = 0.0
        self._leaving: list[RemoteNode] = []  # as soon as all ranks have ended
        self.quorum = Quorum(
            plan,
            machines.nodes,
            agent.world,
            say=partial(agent.recorder.say, level="WARNING"),
            clock=clock,
        )
        self._missing = MissingNodes(
            machines.nodes,
            plan.nodes,
            patience_s=plan.settings.recovery.node_patience_s,
            has_left=self.has_done_all,
            now_s=clock.monotonic(),
        )
        self.on_event = NodeEvents(
            agent, machines.nodes, least=plan.nodes.least, clock=clock, keeps_checkpoints=False
        ).on_event

    def node(self, number: int) -> RemoteNode:
        """Return the machine of this number."""
        return next(one for one in self._nodes if one.number == number)

    def waits_for(self) -> str:
        """Return in words which machines the run cannot begin without; empty: none."""
        return missing_nodes(self._nodes, self._options, self._world)

    def take_folder(self) -> None:
        """Make this coordinator the owner of the run's folder. Raises OSError."""
        self.owner.take()
        for probe in self._probes:
            probe.remove_others()

    def why_not_leader(self, now_s: float, *, has_folder: bool, is_stopping: bool) -> str:
        """Return in words that another machine coordinates; empty where none does, as far as is known.

        ``has_folder``: the folder holds the term of this one; ``is_stopping``: the run is asked to stop.
        """
        if now_s < self._looked_at_owner_s + OWNER_EVERY_S:
            return ""
        self._looked_at_owner_s = now_s
        if line := self.quorum.why_not_leader(is_stopping=is_stopping):
            return line
        is_other = has_folder and self.owner.is_other()
        return f"another coordinator has taken {self.owner.folder}: this one ends" * is_other

    def gather(self, now_s: float, *, has_trained: bool) -> Verdict:
        """Have those take part in the next start that are there, or are waited for. Called while no rank runs."""
        verdict = self._missing.look(now_s, has_trained=has_trained)
        for node in verdict.without:
            for handle in self._ranks_of(node):
                if handle.membership in IN_WORLD:
                    handle.member.advance(MembershipEvent.DROPPED)
        for node in self._nodes:
            for handle in self._ranks_of(node):
                if self._stays(node) and handle.membership is Membership.DROPPED:
                    for event in _BACK:
                        handle.member.advance(event)
        return verdict

    def are_some_still_leaving(self) -> bool:
        """Return whether a machine is there that was let go: its link ends next."""
        return any(node.is_there and not self._stays(node) for node in self._nodes)

    @staticmethod
    def _stays(node: RemoteNode) -> bool:
        return node.is_there and not node.is_leaving

    def trains(self) -> None:
        """Note that all ranks that take part have begun."""
        for node in self._nodes:
            if all(handle.membership in IN_WORLD for handle in self._ranks_of(node)):
                self._missing.trains(node)

    def lost(self, node: RemoteNode, why: str) -> Fault | None:
        """Note that a machine is lost, with all its ranks; the fault that this is, where any of them ran."""
        now_s = self._clock.monotonic()
        self._missing.lost(node, now_s)
        with contextlib.suppress(ValueError):
            self._leaving.remove(node)
        alive = [handle for handle in self._ranks_of(node) if handle.is_alive]
        for handle in alive:
            handle.machine.advance(RankEvent.EXITED)
            handle.released()
        return self.fault_of(node, f"{node.name} is lost: {why}") if alive else None

    def fault_of(self, node: RemoteNode, cause: str) -> Fault:
        """Return what has become of a machine as a fault of its first rank."""
        first = self._ranks_of(node)[0]
        return Fault(
            kind=FaultKind.NODE_LOST,
            rank=first.rank,
            step=first.slot.get(Cell.COMMITTED_STEP),
            cause=cause,
            at_ns=self._clock.monotonic_ns(),
            origin=Origin.OUTSIDE,
        )

    def asked_to_leave(self, node: RemoteNode) -> None:
        """Note that a machine is let go, as soon as all ranks have ended."""
        self._leaving.append(node)

    def let_go(self, end: Ending) -> None:
        """Have those leave that were asked to: no rank runs. Their links end next."""
        for node in self._leaving:
            node.order(end.event)
            node.is_leaving = True
        self._leaving.clear()

    def has_done_all(self, node: RemoteNode) -> bool:
        """Return whether all ranks of the machine have finished, so that it may go without being missed."""
        return all(handle.has_finished for handle in self._ranks_of(node))

    def place(self, rank: int) -> str:
        """Return the machine of a rank, for people; empty for -1."""
        if rank < 0:
            return ""
        return f"node {rank // self._ranks_per_node} ({self._world.host_of(rank)})"

    def _ranks_of(self, node: RemoteNode) -> list[RankHandle]:
        return [self._world.ranks[rank] for rank in node.processes]


LEFT = f"{LEAVES}, from the script's own checkpoint"
