"""The supervisor's loop: signals, sockets and ticks in, one :class:`Agent` at work, an exit code out."""

from __future__ import annotations

import os
import selectors
import signal
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from ddp_runner.checkpoint.unreported import Published
from ddp_runner.core.board import Cell
from ddp_runner.core.exits import RunStatus, StopReason
from ddp_runner.core.launch_plan import LaunchPlan
from ddp_runner.core.lifecycle import Machine, RunEvent, RunState
from ddp_runner.core.secrets import without_secrets
from ddp_runner.core.stopping import StopSignal
from ddp_runner.observe.format import printable
from ddp_runner.observe.script_summary import ScriptSummary
from ddp_runner.observe.summary import RunSummary
from ddp_runner.observe.view import RunView
from ddp_runner.supervisor.features.folders import FolderKeeper
from ddp_runner.supervisor.nodes.coordinator import CoordinatorSupervisor
from ddp_runner.supervisor.nodes.other_nodes import OtherNodes, Place
from ddp_runner.supervisor.nodes.remote_node import RemoteNode
from ddp_runner.supervisor.processes.after_save import AfterSave
from ddp_runner.supervisor.processes.children import Ended, end_descendants
from ddp_runner.supervisor.processes.node import Node
from ddp_runner.supervisor.processes.operating_system import Linux
from ddp_runner.supervisor.processes.resources import StorePlace
from ddp_runner.supervisor.processes.zygote_start import ZygoteAhead
from ddp_runner.supervisor.reporting.outputs import Outputs
from ddp_runner.supervisor.reporting.recorder import Recorder
from ddp_runner.supervisor.reporting.run_view import run_view
from ddp_runner.supervisor.reporting.run_watch import RunWatch
from ddp_runner.supervisor.reporting.side_programs import PageKeeper, TrackerKeeper
from ddp_runner.supervisor.reporting.start_progress import Start
from ddp_runner.supervisor.run_facts import Ending, RunFacts
from ddp_runner.supervisor.script.agent import ScriptAgent
from ddp_runner.supervisor.signal_box import INSISTENT, SAVE_SIGNAL, STOP_SIGNALS, SignalBox
from ddp_runner.supervisor.supervisor import Supervisor
from ddp_runner.supervisor.world import World
from ddp_runner.system import parent_death
from ddp_runner.system.clock import SYSTEM_CLOCK, Clock
from ddp_runner.system.folder_owner import FolderOwner, new_term
from ddp_runner.system.folder_probe import FolderProbe
from ddp_runner.system.node_link import NodeLink
from ddp_runner.system.run_directories import RunDirectories

TICK_S = 0.1
PAUSE_S = (
    1.0  # between two turns: this process did not run, and other machines are not blamed for it
)
STATUS_INTERVAL_S = 0.5
FAULTS_SHOWN = 3
_QUIT = "SIGQUIT"  # a shell has its background jobs ignore it; a run ends of it all the same


def supervise(
    plan: LaunchPlan, place: Place | None = None, *, ahead: ZygoteAhead | None = None
) -> int:
    """Run ``plan`` to its end and return the exit code.

    ``place``: this machine's in a run on several, of which it is the coordinator. ``ahead``: a zygote that imports torch already, if one was started.
    Must be called from the main thread. Raises BadInputError before any process was started; after that, every ending is an exit code.
    """
    directories = RunDirectories(plan.settings.run)
    directories.refuse_if_held()
    parent_death.adopt_orphans()
    parent_death.set_process_name("ddp:supervisor")
    signals = SignalBox()
    with signals.installed(), selectors.DefaultSelector() as selector:
        if place is not None:
            return _coordinate(
                plan, place, signals=signals, selector=selector, directories=directories
            )
        node = Node(plan, selector, system=Linux(ahead), clock=SYSTEM_CLOCK)
        outputs = Outputs(plan.as_written, ranks=plan.world_size, seal=node.log_seal)
        published = Published(Path(plan.settings.run.checkpoint_dir))
        agent: Agent
        if plan.script is not None:
            agent = ScriptAgent(
                plan,
                plan.script,
                node,
                outputs=outputs,
                directories=directories,
                published=published,
                clock=SYSTEM_CLOCK,
            )
        else:
            agent = Supervisor(
                plan,
                node,
                outputs=outputs,
                directories=directories,
                published=published,
                clock=SYSTEM_CLOCK,
            )
        loop = _Loop(agent, signals=signals, selector=selector, clock=SYSTEM_CLOCK)
        try:
            return loop.run()
        finally:
            end_descendants(timeout_s=10.0)
            node.close()
            directories.release()


def _coordinate(
    plan: LaunchPlan,
    place: Place,
    *,
    signals: SignalBox,
    selector: selectors.BaseSelector,
    directories: RunDirectories,
) -> int:
    """Supervise like :func:`supervise`, with ranks on other machines too."""
    assert plan.nodes is not None
    per_node = plan.ranks_per_node
    first = place.number * per_node
    node = Node(
        plan,
        selector,
        system=Linux(),
        clock=SYSTEM_CLOCK,
        ranks=range(first, first + per_node),
        store=StorePlace.on_this_machine(plan.settings.ddp.port, address=place.address),
    )
    owner = FolderOwner(Path(plan.settings.run.checkpoint_dir), new_term())
    node.term = owner.term
    run = plan.settings.run
    probes = [FolderProbe(Path(name), owner.term) for name in (run.checkpoint_dir, run.log_dir)]
    for probe in probes:
        probe.write()
    others = [
        RemoteNode(
            number,
            ranks=range(number * per_node, (number + 1) * per_node),
            slots={rank: node.slot(rank) for rank in range(plan.world_size)},
            clock=SYSTEM_CLOCK,
        )
        for number in range(plan.nodes.most)
        if number != place.number
    ]
    supervisor = CoordinatorSupervisor(
        plan,
        node,
        outputs=Outputs(plan.settings, ranks=plan.world_size, seal=node.log_seal),
        directories=directories,
        published=Published(Path(plan.settings.run.checkpoint_dir)),
        clock=SYSTEM_CLOCK,
        others=others,
        owner=owner,
        probes=probes,
    )
    links = OtherNodes(
        plan,
        place.meeting,
        store=(place.store_host, node.store_at.port),
        term=owner.term,
        nodes=others,
        listening=place.listening,
        selector=selector,
        beat=supervisor.beat,
        keeps=supervisor.keeps,
        clock=SYSTEM_CLOCK,
    )
    loop = _Loop(supervisor, signals=signals, selector=selector, clock=SYSTEM_CLOCK, others=links)
    ending = Ending.of(RunStatus.FAILED, "the coordinator has failed")
    try:
        loop.run()
        ending = supervisor.ending or ending
    finally:
        links.end(ending.event)
        for probe in probes:
            probe.remove()
        end_descendants(timeout_s=10.0)
        node.close()
        directories.release()
    return ending.event.exit_code


class Agent(Protocol):
    """What decides in a run. The loop hands it each event, and asks it at each turn to do what is due.

    A :class:`Supervisor` repairs a training in place; a :class:`ScriptAgent` starts a script again.
    """

    plan: LaunchPlan
    node: Node
    world: World
    directories: RunDirectories
    outputs: Outputs
    recorder: Recorder
    facts: RunFacts
    machine: Machine[RunState, RunEvent]
    start: Start

    @property
    def ending(self) -> Ending | None:
        """How the run has ended; None while it has not. Nothing else is asked of it then but what to say."""

    def on_packet(self, packet: bytes, rank: int | None) -> None:
        """A packet came in; ``rank`` is that of the process that sent it, None for one that is no rank."""

    def on_ended(self, ended: Ended) -> None:
        """A child process was reaped."""

    def ask_stop(self, reason: StopReason, *, by: StopSignal = StopSignal.OTHER) -> None:
        """Have the run end in order, or at once if the same is asked again."""

    def ask_save(self) -> None:
        """Have a checkpoint made, and go on."""

    def advance(self) -> None:
        """Do whatever the facts allow now; it waits for nothing."""

    def end_at_once(self, line: str) -> None:
        """End a run that has no ending as it is, as a failed one."""

    def fail(self, detail: str) -> None:
        """End the run because the agent is at fault itself; one that has ended stays so."""

    def tidy_up(self) -> None:
        """Remove what the run has left on disk; every process has ended."""

    def closing_words(self) -> str:
        """Return the words after the run's ending; empty if there are none."""

    def summary(self, ending: Ending) -> RunSummary | ScriptSummary | None:
        """Return the content of summary.json; every process has ended."""


class _Loop:
    """Feeds events to an :class:`Agent` until it has an ending."""

    def __init__(
        self,
        supervisor: Agent,
        *,
        signals: SignalBox,
        selector: selectors.BaseSelector,
        clock: Clock,
        others: OtherNodes | None = None,
    ) -> None:
        self._clock = clock
        self._others = others
        self._turned_at_s = clock.monotonic()
        self._began_s = clock.monotonic()
        self._supervisor = supervisor
        self._plan = supervisor.plan
        self._node = supervisor.node
        self._world = supervisor.world
        self._outputs = supervisor.outputs
        self._signals = signals
        self._selector = selector
        self._folders = FolderKeeper(
            supervisor.directories,
            node=supervisor.node,
            world=supervisor.world,
            recorder=supervisor.recorder,
            ask_save=supervisor.ask_save,
        )
        say, log_dir = supervisor.recorder.say, Path(self._plan.settings.run.log_dir)
        self._after_save = AfterSave(
            self._plan.settings.checkpoint.after_save or "",
            log_dir=log_dir,
            environment=self._node.guardian.marked(os.environ),
            say=say,
        )
        supervisor.recorder.observers.append(self._after_save.take)
        self._trackers = TrackerKeeper(
            self._plan.settings.log.trackers, log_dir, clock=clock, say=say
        )
        self._watch = RunWatch.of(
            self._plan,
            node=self._node.ranks[0] // self._plan.ranks_per_node,
            clock=clock,
            say=say,
        )
        supervisor.recorder.readings.append(self._watch.figures)
        self._page = PageKeeper(
            self._plan.settings.log,
            log_dir,
            clock=clock,
            say=say,
            announce=supervisor.outputs.announce,
        )
        # Whoever has a program beside the run.
        self._beside = (self._trackers, self._page, self._watch, self._after_save)
        self._shown_at_s = 0.0
        self._status_at_s = 0.0
        self._memory_at_s = 0.0
        self._is_hurried = False  # nothing is waited for
        selector.register(signals, selectors.EVENT_READ, None)

    def run(self) -> int:
        """Loop to the ending, then show and return it."""
        self._node.start_zygote()
        self._start_guardian()
        while self._supervisor.ending is None:
            try:
                self._turn()
            except Exception:  # noqa: BLE001, PERF203 - the supervisor's boundary: still ends everything
                self._supervisor.fail(traceback.format_exc())
        return self._finish()

    def _start_guardian(self) -> None:
        """Start the guardian while torch is imported. It is optional: only a SIGKILL of this process needs one."""
        try:
            self._node.start_guardian()
        except OSError as error:
            reason = error.strerror or str(error)
            self._outputs.say(
                f"no guardian could be started ({reason}): should this process be killed, what the "
                "task has started itself stays",
                level="WARNING",
            )

    def _turn(self) -> None:
        for key, _ in self._selector.select(TICK_S):
            if key.data is None:
                self._take_signals()
            elif key.data[0] is self._others:
                self._hear_node(key.data[1])
            elif (received := self._node.receive(*key.data)) is not None:
                self._supervisor.on_packet(*received)
        for ended in self._node.reap():
            self._take_ended(ended)
        self._after_save.look()
        self._look_at_nodes()
        self._look_at_clock()
        self._supervisor.advance()
        self._show()

    def _take_ended(self, ended: Ended) -> None:
        """A child was reaped: of those beside the run, or of the run itself."""
        if not any(one.took(ended) for one in self._beside):
            self._supervisor.on_ended(ended)

    def _hear_node(self, link: NodeLink | None) -> None:
        """The door for other machines, or the link to one of them, is ready."""
        assert self._others is not None
        assert isinstance(self._supervisor, CoordinatorSupervisor)
        for event in self._others.read(link):
            self._supervisor.on_node_event(event)

    def _look_at_nodes(self) -> None:
        if self._others is None:
            return
        assert isinstance(self._supervisor, CoordinatorSupervisor)
        now_s = self._clock.monotonic()
        if now_s > self._turned_at_s + PAUSE_S:
            self._others.forgive(now_s)
        self._turned_at_s = now_s
        for event in self._others.look(now_s):
            self._supervisor.on_node_event(event)

    def _look_at_clock(self) -> None:
        """Ask for the end once, where the time of this launch is over."""
        limit = self._plan.time_limit
        if limit is None or self._clock.monotonic() < self._began_s + limit.seconds:
            return
        self._plan = replace(self._plan, time_limit=None)
        self._outputs.say(limit.why)
        self._supervisor.ask_stop(StopReason.PREEMPTED)

    def _take_signals(self) -> None:
        for number in self._signals.take():
            reason = STOP_SIGNALS.get(signal.Signals(number))
            if reason is not None:
                by = INSISTENT.get(signal.Signals(number), StopSignal.OTHER)
                self._supervisor.ask_stop(reason, by=by)
            elif number == signal.SIGQUIT and self._supervisor.ending is None:
                self._is_hurried = True
                self._supervisor.end_at_once(f"{_QUIT}: ended at once")
            elif number == SAVE_SIGNAL:
                self._supervisor.ask_save()

    def _show(self) -> None:
        now_s = self._clock.monotonic()
        if now_s - self._memory_at_s >= 1.0:
            self._memory_at_s = now_s
            self._world.measure_memory()
        if self._others is not None:
            for number, message in self._others.watched():
                self._watch.hear(number, message)
        self._watch.look(self._world.ranks)
        if (proposed := self._watch.shares(self._world.present)) is not None:
            self._supervisor.recorder.record(proposed)
        accounting = self._supervisor.recorder.accounting
        if accounting.first_step_s is None:
            first_ns = self._world.ranks[0].slot.get(Cell.FIRST_STEP_NS)
            accounting.first_step_s = first_ns / 1e9 if first_ns else None
        if now_s - self._shown_at_s < TICK_S:
            return
        self._shown_at_s = now_s
        self._supervisor.start.look(now_s)
        view = self._view()
        self._outputs.show(view)
        if now_s - self._status_at_s >= STATUS_INTERVAL_S:
            self._status_at_s = now_s
            self._look_after_folders()
            self._outputs.status(view)

    def _look_after_folders(self) -> None:
        if self._outputs.may_write:
            self._folders.look()
            if self._supervisor.facts.kept is None:
                self._trackers.look()
                self._page.look()

    def _view(self) -> RunView:
        supervisor, now_s = self._supervisor, self._clock.monotonic()
        accounting = supervisor.recorder.accounting
        return run_view(
            supervisor.plan,
            self._world.ranks,
            doing=supervisor.start.doing(now_s),
            facts=supervisor.facts,
            state=supervisor.machine.state,
            began_s=accounting.began_s,
            faults_total=accounting.faults_total,
            restarts=accounting.restarts,
            now_ns=self._clock.monotonic_ns(),
            trackers=self._trackers.links(),
            nodes=() if self._others is None else self._others.views(),
            watch=self._watch,
            faults=accounting.newest_faults(FAULTS_SHOWN, now_s=now_s),
            losses=supervisor.recorder.losses.points(),
            evaluated=supervisor.recorder.evaluated,
            time_s=accounting.shares(self._world.present[0].slot.read(), now_s=now_s),
        )

    def _finish(self) -> int:
        """End every process first: whatever is written after that is the last word."""
        supervisor, outputs = self._supervisor, self._outputs
        ending = supervisor.ending
        assert ending is not None
        if self._others is not None:
            failed = ending.status in (RunStatus.FAILED, RunStatus.GAVE_UP)
            is_before_all = failed and not supervisor.facts.ever_formed
            self._others.announce_end(ending.event, but_parked=is_before_all)
        self._watch.end()
        stays = set(self._trackers.pids)
        if self._after_save.is_owed:
            beside = (self._after_save.pid, self._node.guardian.pid)
            stays |= {pid for pid in beside if pid is not None}
        left = end_descendants(timeout_s=10.0, but=stays)
        if left:
            outputs.say(f"processes {left} would not end", level="ERROR")
        if outputs.may_write:
            self._look_after_folders()
            supervisor.tidy_up()
        self._after_save.finish(
            is_cut_short=self._is_interrupted,
            grace_s=self._plan.settings.checkpoint.after_save_grace_s,
        )
        supervisor.start.look(self._clock.monotonic())
        outputs.show_rest()
        self._say_ending()
        summary = supervisor.summary(ending)
        supervisor.recorder.record(ending.event)
        self._trackers.end(int(ending.exit_code))
        end_descendants(timeout_s=10.0)
        self._watch.close()
        if summary is not None and supervisor.facts.kept is None:
            gpus, rank_use = self._watch.summary(self._world.ranks)
            summary = replace(summary, gpus=gpus, rank_use=rank_use)
            if isinstance(summary, RunSummary):
                links, epochs = self._trackers.links(), self._watch.epochs()
                summary = replace(summary, trackers=links, gpu_epochs=epochs)
        outputs.finish(self._view(), summary)
        if ending.error_line:
            sys.stdout.flush()
            line = without_secrets(ending.error_line, outputs.hidden)
            sys.stderr.write(f"ddp_runner: error: {printable(line)}\n")
        return int(ending.exit_code)

    def _is_interrupted(self) -> bool:
        """Return True if a signal has arrived that stops a run."""
        taken = [signal.Signals(number) for number in self._signals.take() if number]
        return any(one in STOP_SIGNALS or one == signal.SIGQUIT for one in taken)

    def _say_ending(self) -> None:
        ending, recorder = self._supervisor.ending, self._supervisor.recorder
        assert ending is not None
        if ending.detail:
            recorder.say(ending.detail, level="ERROR")
        if not ending.error_line and self._supervisor.machine.state is RunState.FAILED:
            is_wanted = ending.status in (RunStatus.PREEMPTED, RunStatus.INTERRUPTED)
            recorder.say(ending.reason, level="INFO" if is_wanted else "ERROR")
            if closing := self._supervisor.closing_words():
                recorder.say(closing)
        finished = self._world.present[0].finished
        sample = finished.report.get("sample") if finished is not None else None
        if sample:
            recorder.say(f"a sample of what it learned:\n{sample}")
