"""Knows the other machines of a run, for whoever coordinates it: what they say, who is missing, and whose the folder is."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ddp_runner.features.machines.node_link import NodeLink
from ddp_runner.features.machines.parent.majority_keeper import Quorum
from ddp_runner.features.machines.parent.node_events import MissingNodes, NodeEvents, TakesNodes
from ddp_runner.kernel.rules.lifecycle import IN_WORLD

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddp_runner.core.launch_plan import LaunchPlan, NodeOptions
    from ddp_runner.features.machines.parent.other_nodes import OtherNodes
    from ddp_runner.features.machines.parent.remote_node import OtherMachines, RemoteNode
    from ddp_runner.kernel.parent.rank_handle import RankHandle
    from ddp_runner.kernel.parent.world import World
    from ddp_runner.kernel.system.clock import Clock

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


class Machines:
    """Owned by the agent that coordinates a run, of a training or of a script.

    ``nodes``: the other machines; ``owner``: this coordinator's name in the folder that they may share; ``missing``: knows
    who is not there, and since when. ``has_successor``: another coordinator has taken that folder, or was elected.
    """

    def __init__(
        self,
        agent: TakesNodes,
        machines: OtherMachines,
        *,
        plan: LaunchPlan,
        clock: Clock,
        keeps_checkpoints: bool = True,
    ) -> None:
        """``keeps_checkpoints``: the run has a folder of them, which machines may share."""
        assert plan.nodes is not None
        self.nodes, self.owner, self._probes = machines.nodes, machines.owner, machines.probes
        self._world = agent.world
        self.has_successor = False
        self._looked_at_owner_s = 0.0
        say = partial(agent.recorder.say, level="WARNING")
        self.quorum = Quorum(plan, self.nodes, agent.world, say=say, clock=clock)
        self.missing = MissingNodes(
            self.nodes,
            plan.nodes,
            patience_s=plan.settings.recovery.node_patience_s,
            has_left=self.has_done_all,
            now_s=clock.monotonic(),
        )
        self.on_event = NodeEvents(
            agent,
            self.nodes,
            least=plan.nodes.least,
            clock=clock,
            keeps_checkpoints=keeps_checkpoints,
        ).on_event

    def ranks_of(self, node: RemoteNode) -> list[RankHandle]:
        """Return the ranks of a machine."""
        return [self._world.ranks[rank] for rank in node.processes]

    def has_members(self, node: RemoteNode) -> bool:
        """Return whether any of its ranks takes part in the run."""
        return any(handle.membership in IN_WORLD for handle in self.ranks_of(node))

    def has_done_all(self, node: RemoteNode) -> bool:
        """Return whether all ranks of the machine have finished, so that it may go without being missed."""
        return all(handle.has_finished for handle in self.ranks_of(node))

    def take_folder(self, *, without: Sequence[int] = ()) -> None:
        """Make this coordinator the owner of the run's folder; ``without``: as of an Owner. Raises OSError."""
        self.owner.take(without=without)
        for probe in self._probes:
            probe.remove_others()

    def why_not_leader(
        self, now_s: float, *, is_superseded: Callable[[], bool], is_stopping: bool
    ) -> str | None:
        """Return in words that another machine coordinates; empty: none does, as far as is known; None: nobody has looked.

        ``is_superseded``: says whether another coordinator has the folder; ``is_stopping``: the run is asked to stop.
        """
        if now_s < self._looked_at_owner_s + OWNER_EVERY_S:
            return None
        self._looked_at_owner_s = now_s
        line = self.quorum.why_not_leader(is_stopping=is_stopping)
        if not line and is_superseded():
            line = f"another coordinator has taken {self.owner.folder}: this one ends"
        self.has_successor = bool(line)
        return line


class NodeTraffic:
    """Brings what comes from other machines, or of them, to the coordinator. Driven by its loop."""

    def __init__(self, others: OtherNodes, machines: Machines, *, clock: Clock) -> None:
        self.source = others
        self._machines = machines
        self._turned_at_s = clock.monotonic()

    def hear(self, link: object) -> None:
        """Read from the door for other machines (None), or the link to one of them, which is ready."""
        assert link is None or isinstance(link, NodeLink)
        for event in self.source.read(link):
            self._machines.on_event(event)

    def look(self, now_s: float) -> None:
        """Find who is silent for too long."""
        if now_s > self._turned_at_s + PAUSE_S:
            self.source.forgive(now_s)
        self._turned_at_s = now_s
        for event in self.source.look(now_s):
            self._machines.on_event(event)
