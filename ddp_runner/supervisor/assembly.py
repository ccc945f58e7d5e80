"""Builds a run from its plan: the kernel's parts, what works next to them, and the loop that drives them."""

from __future__ import annotations

import selectors
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from ddp_runner.checkpoint.unreported import Published
from ddp_runner.core.launch_plan import LaunchPlan
from ddp_runner.kernel.parent.loop import Agent, Loop, Traffic
from ddp_runner.kernel.parent.ports import Host, Observer
from ddp_runner.kernel.parent.run_context import RunContext
from ddp_runner.kernel.parent.run_end import RunEnd
from ddp_runner.kernel.parent.run_facts import Ending
from ddp_runner.kernel.parent.signal_box import SignalBox
from ddp_runner.kernel.parent.supervisor import Parts, Supervisor
from ddp_runner.kernel.parent.world import World
from ddp_runner.kernel.processes.children import end_descendants
from ddp_runner.kernel.processes.node import Node
from ddp_runner.kernel.processes.operating_system import Linux
from ddp_runner.kernel.processes.resources import remove_temporary_files
from ddp_runner.kernel.processes.zygote_start import ZygoteAhead
from ddp_runner.kernel.recovery.communicator_cut import Cutting
from ddp_runner.kernel.recovery.repair import Repair
from ddp_runner.kernel.rules.lifecycle import RUN_TABLE, Machine, RunEvent, RunState
from ddp_runner.kernel.system import parent_death
from ddp_runner.kernel.system.clock import SYSTEM_CLOCK, Clock
from ddp_runner.observe.summary import RunSummary, Summary
from ddp_runner.supervisor import around
from ddp_runner.supervisor.beside.folders import FolderKeeper
from ddp_runner.supervisor.beside.saver_keeper import SaverKeeper
from ddp_runner.supervisor.beside.stage_change import StageChange
from ddp_runner.supervisor.node_plans import node_plan
from ddp_runner.supervisor.reporting.outputs import Outputs
from ddp_runner.supervisor.reporting.recorder import Recorder
from ddp_runner.supervisor.reporting.run_begin import RunBegin
from ddp_runner.supervisor.reporting.run_screen import Machines, RunScreen, Shown, run_summary
from ddp_runner.supervisor.reporting.start_progress import Start
from ddp_runner.system.run_directories import RunDirectories


class OwnAgent(Shown, Agent, Protocol):
    """An agent of a feature's, which decides in a run in place of a :class:`Supervisor`, and has all that is shown of it."""

    def summary(self, ending: Ending) -> Summary:
        """Return what summary.json holds."""


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
    repair = Repair(run, cutting=cutting, observers=features)
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
        policies=(*around.policies(features), savers),
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
    plan: LaunchPlan, *, ahead: ZygoteAhead | None = None, agent: MakesAgent | None = None
) -> int:
    """Run ``plan`` on this machine to its end and return the exit code.

    ``ahead``: a zygote that imports torch already, if one was started. ``agent``: makes who decides in place of a
    :class:`Supervisor`. Must be called from the main thread. Raises BadInputError before any process was started;
    after that, every ending is an exit code.
    """
    with supervising(plan) as here:
        return here.supervise(ahead, agent)


@contextmanager
def supervising(plan: LaunchPlan) -> Iterator[Here]:
    """Make this process the supervisor of ``plan``. Raises BadInputError while another run holds its folders."""
    directories = RunDirectories(plan.settings.run)
    directories.refuse_if_held()
    parent_death.adopt_orphans()
    parent_death.set_process_name("ddp:supervisor")
    signals = SignalBox()
    with signals.installed(), selectors.DefaultSelector() as selector:
        yield Here(plan, signals=signals, selector=selector, directories=directories)


class Here:
    """Supervises ``plan`` from this process and machine, until it has ended."""

    def __init__(
        self,
        plan: LaunchPlan,
        *,
        signals: SignalBox,
        selector: selectors.BaseSelector,
        directories: RunDirectories,
    ) -> None:
        self.plan = plan
        self.selector = selector
        self.directories = directories
        self._signals = signals

    def supervise(self, ahead: ZygoteAhead | None, agent: MakesAgent | None) -> int:
        """Run on this machine alone."""
        plan, directories = self.plan, self.directories
        node = Node(node_plan(plan), self.selector, system=Linux(ahead), clock=SYSTEM_CLOCK)
        outputs = Outputs(plan.as_written, ranks=plan.world_size, seal=node.log_seal)
        if agent is not None:
            own = agent(plan, node, outputs=outputs, directories=directories, clock=SYSTEM_CLOCK)
            with self.cleared(node):
                return self.driven(own, own, summary=own.summary).exit_code
        run = assembled(plan, node, outputs=outputs, directories=directories, clock=SYSTEM_CLOCK)
        supervisor = Supervisor(run.run, run.parts)
        with self.cleared(node):
            return self.driven(run, supervisor, summary=summary_of(run, supervisor)).exit_code

    def driven(
        self,
        shown: Shown,
        agent: Agent,
        *,
        summary: Callable[[Ending], Summary | None],
        traffic: Traffic | None = None,
        others: Machines | None = None,
    ) -> Ending:
        """Drive ``agent`` to its ending, and conclude what is shown of it. ``traffic``: that with ``others``, its machines."""
        folders = FolderKeeper(
            self.directories,
            node=agent.node,
            world=agent.world,
            recorder=shown.recorder,
            ask_save=agent.ask_save,
        )
        screen = RunScreen(agent, shown, folders, clock=SYSTEM_CLOCK, others=others)
        loop = Loop(
            agent,
            signals=self._signals,
            selector=self.selector,
            clock=SYSTEM_CLOCK,
            limit=self.plan.time_limit,
            sideshows=(screen,),
            traffic=traffic,
        )
        ending = loop.run()
        screen.finish(ending, signals=self._signals, summary=summary)
        return ending

    @contextmanager
    def cleared(self, node: Node) -> Iterator[None]:
        """Leave no process and no folder taken, whatever happens."""
        try:
            yield
        finally:
            end_descendants(timeout_s=10.0)
            node.close()
            self.directories.release()


def summary_of(run: Assembly, supervisor: Supervisor) -> Callable[[Ending], RunSummary]:
    """Return what makes the summary of a run from its ending."""
    return lambda ending: run_summary(supervisor, run.recorder, ending, run.run.clock.monotonic())
