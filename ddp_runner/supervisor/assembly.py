"""Builds a run from its plan: the kernel's parts, what works next to them, and the loop that drives them."""

from __future__ import annotations

import selectors
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from ddp_runner.checkpoint.unreported import Published
from ddp_runner.core.launch_plan import LaunchPlan
from ddp_runner.kernel.parent.loop import Agent, Loop
from ddp_runner.kernel.parent.node_keeper import NodeKeeper, StorePolicy
from ddp_runner.kernel.parent.ports import HelperPolicy, Host, Observer
from ddp_runner.kernel.parent.run_context import RunContext
from ddp_runner.kernel.parent.run_end import RunEnd
from ddp_runner.kernel.parent.run_facts import Ending
from ddp_runner.kernel.parent.signal_box import SignalBox
from ddp_runner.kernel.parent.supervisor import Parts, Supervisor
from ddp_runner.kernel.parent.world import World
from ddp_runner.kernel.processes.children import end_descendants
from ddp_runner.kernel.processes.node import Node
from ddp_runner.kernel.processes.operating_system import Linux
from ddp_runner.kernel.processes.resources import StorePlace, remove_temporary_files
from ddp_runner.kernel.processes.zygote_start import ZygoteAhead
from ddp_runner.kernel.recovery.communicator_cut import Cutting
from ddp_runner.kernel.recovery.repair import Repair
from ddp_runner.kernel.recovery.zygote_keeper import ZygoteKeeper
from ddp_runner.kernel.rules.exits import RunStatus
from ddp_runner.kernel.rules.lifecycle import RUN_TABLE, Machine, RunEvent, RunState
from ddp_runner.kernel.system import parent_death
from ddp_runner.kernel.system.clock import SYSTEM_CLOCK, Clock
from ddp_runner.kernel.system.folder_owner import FolderOwner, new_term
from ddp_runner.observe.summary import RunSummary, Summary
from ddp_runner.supervisor import around
from ddp_runner.supervisor.beside.folders import FolderKeeper
from ddp_runner.supervisor.beside.saver_keeper import SaverKeeper
from ddp_runner.supervisor.beside.stage_change import StageChange
from ddp_runner.supervisor.node_plans import node_plan
from ddp_runner.features.machines.parent.coordinator import (
    CoordinatorSupervisor,
    HearsNodes,
    Heir,
    NodeTraffic,
    missing_nodes,
)
from ddp_runner.features.machines.parent.other_nodes import Coordinates, Door, OtherNodes, Place
from ddp_runner.features.machines.parent.remote_node import RemoteNode
from ddp_runner.supervisor.reporting.outputs import Outputs
from ddp_runner.supervisor.reporting.recorder import Recorder
from ddp_runner.supervisor.reporting.run_begin import RunBegin
from ddp_runner.supervisor.reporting.run_screen import RunScreen, Shown, run_summary
from ddp_runner.supervisor.reporting.start_progress import Start
from ddp_runner.features.machines.links.folder_probe import FolderProbe
from ddp_runner.system.run_directories import RunDirectories


class OwnAgent(Shown, Agent, Protocol):
    """An agent of a feature's, which decides in a run in place of a :class:`Supervisor`, and has all that is shown of it."""

    def summary(self, ending: Ending) -> Summary:
        """Return what summary.json holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherMachines:
    """The other machines of a run, and the names of its coordinator in the folders that they may share."""

    nodes: tuple[RemoteNode, ...]
    owner: FolderOwner
    probes: tuple[FolderProbe, ...]


class MakesAgent(Protocol):
    """Makes the agent of a run."""

    def __call__(
        self,
        plan: LaunchPlan,
        node: Node,
        *,
        outputs: Outputs,
        directories: RunDirectories,
        clock: Clock,
    ) -> OwnAgent:
        """Make it; no process has been started."""


class Succeeds(Protocol):
    """An agent that may take the place of a lost coordinator."""

    def succeed(self, heir: Heir) -> None:
        """Continue where the lost coordinator was; called before any other method."""


class Closes(Protocol):
    """Has something open that its owner closes in the end."""

    def close(self) -> None:
        """Close it."""


class OwnCoordinator(OwnAgent, Coordinates, HearsNodes, Succeeds, Protocol):
    """The same, on several machines, in place of a :class:`CoordinatorSupervisor`."""

    def decide_by_majority(self, place: Place) -> Closes:
        """Have a majority decide who coordinates, where it can; the caller closes the keeper."""


class MakesCoordinator(Protocol):
    """Makes the agent of a run on several machines."""

    def __call__(
        self,
        plan: LaunchPlan,
        node: Node,
        *,
        outputs: Outputs,
        directories: RunDirectories,
        clock: Clock,
        machines: OtherMachines,
    ) -> OwnCoordinator:
        """Make it; no process has been started."""


def _for_nothing(world: World) -> str:
    """Return that the run waits for nothing: all its ranks are here."""
    del world
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """All of one run but who supervises it: the kernel's parts, and the features next to them."""

    run: RunContext
    parts: Parts
    recorder: Recorder
    start: Start

    savers: SaverKeeper
    stages: StageChange
    features: tuple[Observer, ...]

    @property
    def plan(self) -> LaunchPlan:
        """The plan in force: that of the stage that is trained."""
        return self.stages.plan

    @property
    def spare(self) -> dict[str, object]:
        """What the process holds that waits to become a rank; empty if there is none."""
        shown = (one.shown().get("spare") for one in self.features)
        return dict(next(filter(None, shown), {}))

    def tidy_up(self, *, has_successor: bool) -> None:
        """Remove the run's leftovers on disk, and take up its saves; every process has ended.

        ``has_successor``: another supervisor continues the run and owns the files of its features.
        """
        for one in () if has_successor else self.features:
            one.tidies_up()
        for path in remove_temporary_files(Path(self.plan.settings.run.checkpoint_dir)):
            self.recorder.say(f"removed {path}, which an interrupted save left")
        self.recorder.saved_unreported()
        self.recorder.know_newest()


def assembled(
    plan: LaunchPlan,
    node: Node,
    *,
    outputs: Outputs,
    directories: RunDirectories,
    clock: Clock,
    published: Published | None = None,
    others: Sequence[Host] = (),
    waits_for: Callable[[World], str] = _for_nothing,
) -> Assembly:
    """Put a run together. ``others``: its other machines; ``waits_for``: what it cannot begin without, in words."""
    world = World(node, others)
    published = published or Published(Path(plan.settings.run.checkpoint_dir))
    recorder = _recorder(plan, outputs, world=world, published=published, clock=clock)
    run = _context(plan, world, recorder, published, clock)
    cutting = Cutting(world=world, recorder=recorder)
    features: list[Observer] = []
    repair = Repair(
        run,
        cutting=cutting,
        injections_left=lambda rank: _merged(one.injections_left(rank) for one in features),
    )
    savers = SaverKeeper(plan, node=node, recorder=recorder, clock=clock)
    features += _features(plan, node, run=run, recorder=recorder, repair=repair)
    stages = StageChange(plan, node, repair=repair, recorder=recorder, others=features, clock=clock)
    start = Start(
        node=node,
        world=world,
        recorder=recorder,
        settings=plan.settings,
        waits_for=partial(waits_for, world),
    )
    parts = Parts(
        node=node,
        start=start,
        cutting=cutting,
        repair=repair,
        keeper=_keeper(run, node, repair, policies=(*around.policies(features), savers)),
        run_end=RunEnd(run, start=start, cutting=cutting, owed=savers.owed),
        opening=RunBegin(
            recorder, directories, plan=lambda: stages.plan, shown_bytes=start.shown_bytes
        ),
        stages=stages,
        observers=(*features, savers, stages),
        goes_on_behind=plan.loop is not None,
    )
    return Assembly(
        run=run,
        parts=parts,
        recorder=recorder,
        start=start,
        savers=savers,
        stages=stages,
        features=tuple(features),
    )


def _recorder(
    plan: LaunchPlan, outputs: Outputs, *, world: World, published: Published, clock: Clock
) -> Recorder:
    return Recorder(
        outputs,
        name=plan.settings.run.name,
        published=published,
        clock=clock,
        host_of=world.host_of,
    )


def _features(
    plan: LaunchPlan, node: Node, *, run: RunContext, recorder: Recorder, repair: Repair
) -> Sequence[Observer]:
    return around.observers(
        around.OfRun(
            plan=plan,
            node=node,
            world=run.world,
            recorder=recorder,
            repair=repair,
            machine=run.machine,
        )
    )


def _merged(parts: Iterable[Mapping[int, int]]) -> dict[int, int]:
    return {number: times for part in parts for number, times in part.items()}


def _keeper(
    run: RunContext, node: Node, repair: Repair, *, policies: Sequence[HelperPolicy]
) -> NodeKeeper:
    """Return who looks after the processes of this machine that are no ranks."""
    world, recorder = run.world, run.record
    zygotes = ZygoteKeeper(run.settings, node=node, world=world, recorder=recorder, repair=repair)
    stores = StorePolicy(run.facts, node=node, stopped_max_s=run.settings.stopped_max_s)
    return NodeKeeper(
        zygotes, stores, policies, node=node, world=world, recorder=recorder, clock=run.clock
    )


def _context(
    plan: LaunchPlan, world: World, recorder: Recorder, published: Published, clock: Clock
) -> RunContext:
    machine: Machine[RunState, RunEvent] = Machine(RUN_TABLE, RunState.STARTING)
    return RunContext(
        settings=plan.settings.recovery,
        resume=plan.settings.run.resume,
        log_dir=plan.settings.run.log_dir,
        loading_s=plan.settings.data.loader_timeout_s,
        machine=machine,
        world=world,
        record=recorder,
        published=published,
        clock=clock,
    )


def supervise(
    plan: LaunchPlan,
    place: Place | None = None,
    *,
    ahead: ZygoteAhead | None = None,
    agent: MakesAgent | None = None,
    coordinator: MakesCoordinator | None = None,
) -> int:
    """Run ``plan`` to its end and return the exit code.

    ``place``: this machine's in a run on several, of which it is the coordinator. ``ahead``: a zygote that imports torch already, if one was started.
    ``agent``: makes who decides in place of a :class:`Supervisor`; with a ``place`` ``coordinator`` does.
    Must be called from the main thread. Raises BadInputError before any process was started; after that, every ending is an exit code.
    """
    directories = RunDirectories(plan.settings.run)
    directories.refuse_if_held()
    parent_death.adopt_orphans()
    parent_death.set_process_name("ddp:supervisor")
    signals = SignalBox()
    with signals.installed(), selectors.DefaultSelector() as selector:
        at = _Here(plan, signals=signals, selector=selector, directories=directories)
        if place is not None:
            return at.coordinate(place, coordinator)
        return at.supervise(ahead, agent)


class Coordinator(Agent, Coordinates, HearsNodes, Succeeds, Protocol):
    """Decides in a run on several machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Coordinating:
    """Holds who decides in a run on several machines, and what is shown of it."""

    agent: Coordinator
    shown: Shown
    summary: Callable[[Ending], Summary | None]
    close: Callable[[], None]


def take_over(heir: Heir, *, coordinator: MakesCoordinator | None = None) -> int:
    """Coordinate a run whose coordinator was lost, from the machine that took its place; return the exit code.

    ``coordinator``: as for :func:`supervise`.
    """
    parent_death.set_process_name("ddp:supervisor")
    at = _Here(
        heir.plan,
        signals=heir.signals,
        selector=heir.selector,
        directories=heir.taken.directories,
    )
    return at.coordinate(heir.place, coordinator, heir)


class _Here:
    """Supervises ``plan`` from this process and machine, until it has ended."""

    def __init__(
        self,
        plan: LaunchPlan,
        *,
        signals: SignalBox,
        selector: selectors.BaseSelector,
        directories: RunDirectories,
    ) -> None:
        self._plan = plan
        self._signals = signals
        self._selector = selector
        self._directories = directories

    def supervise(self, ahead: ZygoteAhead | None, agent: MakesAgent | None) -> int:
        """Run on this machine alone."""
        plan, directories = self._plan, self._directories
        node = Node(node_plan(plan), self._selector, system=Linux(ahead), clock=SYSTEM_CLOCK)
        outputs = Outputs(plan.as_written, ranks=plan.world_size, seal=node.log_seal)
        if agent is not None:
            own = agent(plan, node, outputs=outputs, directories=directories, clock=SYSTEM_CLOCK)
            with self._cleared(node):
                return self._driven(own, own, summary=own.summary).exit_code
        run = assembled(plan, node, outputs=outputs, directories=directories, clock=SYSTEM_CLOCK)
        supervisor = Supervisor(run.run, run.parts)
        with self._cleared(node):
            return self._driven(run, supervisor, summary=_summary(run, supervisor)).exit_code

    def coordinate(
        self, place: Place, coordinator: MakesCoordinator | None, heir: Heir | None = None
    ) -> int:
        """Run with ranks on other machines too. ``heir``: what there is of a coordinator before this one."""
        plan = self._plan
        node, owner = self._begun(place) if heir is None else (heir.node, heir.taken.owner)
        names = (plan.settings.run.checkpoint_dir, plan.settings.run.log_dir)
        probes = [FolderProbe(Path(name), owner.term) for name in names]
        for probe in probes:
            probe.write()
        others = _other_machines(plan, node, place)
        machines = OtherMachines(nodes=tuple(others), owner=owner, probes=tuple(probes))
        coordinating = self._coordinator(node, machines, coordinator, place)
        supervisor = coordinating.agent
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
            selector=self._selector,
            coordinator=supervisor,
            clock=SYSTEM_CLOCK,
        )
        if heir is not None:
            supervisor.succeed(heir)
        ending = Ending.of(RunStatus.FAILED, "the coordinator has failed")
        with self._cleared(node):
            try:
                ending = self._driven(
                    coordinating.shown,
                    supervisor,
                    summary=coordinating.summary,
                    traffic=NodeTraffic(links, supervisor, clock=SYSTEM_CLOCK),
                )
            finally:
                links.end((supervisor.ending or ending).event)
                coordinating.close()
                for probe in probes:
                    probe.remove()
        return ending.exit_code

    def _coordinator(
        self,
        node: Node,
        machines: OtherMachines,
        coordinator: MakesCoordinator | None,
        place: Place,
    ) -> _Coordinating:
        """Return who decides, on this machine, in a run on several."""
        plan, directories = self._plan, self._directories
        outputs = Outputs(plan.settings, ranks=plan.world_size, seal=node.log_seal)
        elects = plan.settings.recovery.elect_coordinator
        if coordinator is not None:
            own = coordinator(
                plan,
                node,
                outputs=outputs,
                directories=directories,
                clock=SYSTEM_CLOCK,
                machines=machines,
            )
            close = own.decide_by_majority(place).close if elects else _nothing
            return _Coordinating(agent=own, shown=own, summary=own.summary, close=close)
        assert plan.nodes is not None
        run = assembled(
            plan,
            node,
            outputs=outputs,
            directories=directories,
            clock=SYSTEM_CLOCK,
            others=machines.nodes,
            waits_for=partial(missing_nodes, machines.nodes, plan.nodes),
        )
        supervisor = CoordinatorSupervisor(
            run.run,
            run.parts,
            plan=plan,
            recorder=run.recorder,
            others=machines.nodes,
            owner=machines.owner,
            probes=machines.probes,
        )
        return _Coordinating(
            agent=supervisor,
            shown=run,
            summary=_summary(run, supervisor),
            close=supervisor.decide_by_majority(place).close if elects else _nothing,
        )

    def _begun(self, place: Place) -> tuple[Node, FolderOwner]:
        """Return the node of this machine, and the owner that the folder of the checkpoints will have."""
        options, folder = place.meeting.options, Path(self._plan.settings.run.checkpoint_dir)
        node = self._node_at(place)
        owner = FolderOwner(folder, new_term(), at=(options.host, options.port))
        node.term = owner.term
        return node, owner

    def _node_at(self, place: Place) -> Node:
        """Return the node of this machine, one of several."""
        per_node = self._plan.ranks_per_node
        first, port = place.number * per_node, self._plan.settings.ddp.port
        return Node(
            node_plan(self._plan),
            self._selector,
            system=Linux(),
            clock=SYSTEM_CLOCK,
            ranks=range(first, first + per_node),
            store=StorePlace.on_this_machine(port, address=place.address),
        )

    def _driven(
        self,
        shown: Shown,
        agent: Agent,
        *,
        summary: Callable[[Ending], Summary | None],
        traffic: NodeTraffic | None = None,
    ) -> Ending:
        """Drive ``agent`` to its ending, and conclude what is shown of it."""
        folders = FolderKeeper(
            self._directories,
            node=agent.node,
            world=agent.world,
            recorder=shown.recorder,
            ask_save=agent.ask_save,
        )
        others = None if traffic is None else traffic.source
        screen = RunScreen(agent, shown, folders, clock=SYSTEM_CLOCK, others=others)
        loop = Loop(
            agent,
            signals=self._signals,
            selector=self._selector,
            clock=SYSTEM_CLOCK,
            limit=self._plan.time_limit,
            sideshows=(screen,),
            traffic=traffic,
        )
        ending = loop.run()
        screen.finish(ending, signals=self._signals, summary=summary)
        return ending

    @contextmanager
    def _cleared(self, node: Node) -> Iterator[None]:
        """Leave no process and no folder taken, whatever happens."""
        try:
            yield
        finally:
            end_descendants(timeout_s=10.0)
            node.close()
            self._directories.release()


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


def _nothing() -> None:
    """Close nothing: no majority decides."""


def _summary(run: Assembly, supervisor: Supervisor) -> Callable[[Ending], RunSummary]:
    return lambda ending: run_summary(supervisor, run.recorder, ending, run.run.clock.monotonic())
