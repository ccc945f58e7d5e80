"""Builds a run on several machines on the coordinator's machine, and drives it to its end."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_runner.features.machines.folder_probe import FolderProbe
from ddp_runner.features.machines.parent.coordinator import CoordinatorSupervisor
from ddp_runner.features.machines.parent.machines import NodeTraffic, missing_nodes
from ddp_runner.features.machines.parent.other_nodes import Door, OtherNodes
from ddp_runner.features.machines.parent.remote_node import OtherMachines, RemoteNode
from ddp_runner.kernel.parent.run_facts import Ending
from ddp_runner.kernel.processes.node import Node
from ddp_runner.kernel.processes.operating_system import Linux
from ddp_runner.kernel.processes.resources import StorePlace
from ddp_runner.kernel.rules.exits import RunStatus
from ddp_runner.kernel.system import parent_death
from ddp_runner.kernel.system.clock import SYSTEM_CLOCK
from ddp_runner.kernel.system.folder_owner import FolderOwner, new_term
from ddp_runner.supervisor.assembly import Here, assembled, summary_of, supervising
from ddp_runner.supervisor.node_plans import node_plan
from ddp_runner.supervisor.reporting.outputs import Outputs

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddp_runner.core.launch_plan import LaunchPlan
    from ddp_runner.features.machines.parent.coordinator import Heir
    from ddp_runner.features.machines.parent.other_nodes import Place
    from ddp_runner.features.machines.parent.script_coordinator import ScriptCoordinator
    from ddp_runner.features.script.rules import ScriptPlan
    from ddp_runner.observe.summary import Summary
    from ddp_runner.supervisor.reporting.run_screen import Shown

    _Agent = CoordinatorSupervisor | ScriptCoordinator
    _Shown = tuple[_Agent, Shown, Callable[[Ending], Summary | None]]


def coordinate(plan: LaunchPlan, place: Place, *, script: ScriptPlan | None = None) -> int:
    """Coordinate a run from this machine, and return the exit code. ``script``: what is run as it is; None for a training.

    Must be called from the main thread. Raises BadInputError before any process was started.
    """
    options, folder = place.meeting.options, Path(plan.settings.run.checkpoint_dir)
    with supervising(plan) as here:
        node = _node_at(here, place)
        owner = FolderOwner(folder, new_term(), at=(options.host, options.port))
        node.term = owner.term
        return _coordinated(here, place, node, owner, script=script)


def take_over(heir: Heir, *, script: ScriptPlan | None = None) -> int:
    """Coordinate a run whose coordinator was lost, from the machine that took its place; return the exit code."""
    parent_death.set_process_name("ddp:supervisor")
    here = Here(
        heir.plan,
        signals=heir.signals,
        selector=heir.selector,
        directories=heir.taken.directories,
    )
    return _coordinated(here, heir.place, heir.node, heir.taken.owner, script=script, heir=heir)


def _coordinated(
    here: Here,
    place: Place,
    node: Node,
    owner: FolderOwner,
    *,
    script: ScriptPlan | None,
    heir: Heir | None = None,
) -> int:
    """Run with ranks on other machines too. ``heir``: what there is of a coordinator before this one."""
    plan = here.plan
    names = (plan.settings.run.checkpoint_dir, plan.settings.run.log_dir)
    probes = [FolderProbe(Path(name), owner.term) for name in names]
    for probe in probes:
        probe.write()
    others = _other_machines(plan, node, place)
    machines = OtherMachines(nodes=tuple(others), owner=owner, probes=tuple(probes))
    agent, shown, summary = _agent(here, node, machines, script)
    elects = plan.settings.recovery.elect_coordinator
    majority = agent.machines.quorum.open(place, term=owner.term) if elects else None
    links = OtherNodes(
        plan,
        Door(
            meeting=place.meeting,
            listening=place.listening,
            store=(place.store_host, node.store_at.port),
            term=owner.term,
            number=place.number,
            logs_number=node.logs_number,
        ),
        nodes=others,
        selector=here.selector,
        coordinator=agent,
        clock=SYSTEM_CLOCK,
    )
    if heir is not None:
        agent.succeed(heir)
    ending = Ending.of(RunStatus.FAILED, "the coordinator has failed")
    with here.cleared(node):
        try:
            traffic = NodeTraffic(links, agent.machines, clock=SYSTEM_CLOCK)
            ending = here.driven(shown, agent, summary=summary, traffic=traffic, others=links)
        finally:
            links.end((agent.ending or ending).event)
            if majority is not None:
                majority.close()
            for probe in probes:
                probe.remove()
    return ending.exit_code


def _agent(here: Here, node: Node, machines: OtherMachines, script: ScriptPlan | None) -> _Shown:
    """Return who decides on this machine, what is shown of it, and what makes the summary."""
    plan = here.plan
    outputs = Outputs(plan.settings, ranks=plan.world_size, seal=node.log_seal)
    if script is not None:
        # Only the feature that runs scripts leads here.
        from ddp_runner.features.machines.parent.script_coordinator import (  # noqa: PLC0415
            ScriptCoordinator,
        )

        own = ScriptCoordinator(
            plan,
            node,
            script=script,
            outputs=outputs,
            directories=here.directories,
            clock=SYSTEM_CLOCK,
            machines=machines,
        )
        return own, own, own.summary
    assert plan.nodes is not None
    run = assembled(
        plan,
        node,
        outputs=outputs,
        directories=here.directories,
        clock=SYSTEM_CLOCK,
        others=machines.nodes,
        waits_for=partial(missing_nodes, machines.nodes, plan.nodes),
    )
    supervisor = CoordinatorSupervisor(
        run.run,
        run.parts,
        plan=plan,
        recorder=run.recorder,
        machines=machines,
    )
    return supervisor, run, summary_of(run, supervisor)


def _node_at(here: Here, place: Place) -> Node:
    """Return the node of this machine, one of several."""
    per_node = here.plan.ranks_per_node
    first, port = place.number * per_node, here.plan.settings.ddp.port
    return Node(
        node_plan(here.plan),
        here.selector,
        system=Linux(),
        clock=SYSTEM_CLOCK,
        ranks=range(first, first + per_node),
        store=StorePlace.on_this_machine(port, address=place.address),
    )


def _other_machines(plan: LaunchPlan, node: Node, place: Place) -> list[RemoteNode]:
    assert plan.nodes is not None
    per_node = plan.ranks_per_node
    return [
        RemoteNode(
            number,
            ranks=range(number * per_node, (number + 1) * per_node),
            slots={rank: node.slot(rank) for rank in range(plan.world_size)},
            clock=SYSTEM_CLOCK,
        )
        for number in range(plan.nodes.most)
        if number != place.number
    ]
