"""Shows a run while it lasts, writes its last words and its summary, and looks after the programs next to it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Protocol

from ddp_runner.core.gpu_reading import Watched
from ddp_runner.core.launch_plan import LaunchPlan
from ddp_runner.kernel.parent.loop import Agent
from ddp_runner.kernel.parent.run_facts import Ending
from ddp_runner.kernel.parent.signal_box import STOP_SIGNALS, SignalBox
from ddp_runner.kernel.processes.children import Ended, end_descendants
from ddp_runner.kernel.rules.exits import RunStatus
from ddp_runner.kernel.rules.lifecycle import RunState
from ddp_runner.kernel.rules.secrets import without_secrets
from ddp_runner.kernel.system.clock import Clock
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.kernel.wire.events import RunEnds
from ddp_runner.observe.format import printable
from ddp_runner.observe.summary import EndOfRun, RunSummary, Summary
from ddp_runner.observe.view import LAST, NodeView, RunView
from ddp_runner.supervisor.around import OfScreen, programs
from ddp_runner.supervisor.beside.folders import FolderKeeper
from ddp_runner.supervisor.reporting.recorder import Recorder
from ddp_runner.supervisor.reporting.run_view import Around, run_view
from ddp_runner.supervisor.reporting.run_watch import RunWatch
from ddp_runner.supervisor.reporting.start_progress import Start

SHOW_INTERVAL_S = 0.1
STATUS_INTERVAL_S = 0.5
MEMORY_INTERVAL_S = 1.0


class Shown(Protocol):
    """What is shown of a run besides its ranks."""

    @property
    def plan(self) -> LaunchPlan:
        """The plan in force."""

    @property
    def recorder(self) -> Recorder:
        """What has happened."""

    @property
    def start(self) -> Start:
        """How far the start has come."""

    @property
    def spare(self) -> dict[str, object]:
        """What the process holds that waits to become a rank; empty if there is none."""

    def tidy_up(self, *, has_successor: bool) -> None:
        """Remove the run's leftovers on disk; every process has ended. ``has_successor``: another supervisor continues."""


class Machines(Protocol):
    """The other machines of a run, which a feature knows."""

    @property
    def has_successor(self) -> bool:
        """True if another coordinator now controls them."""

    def watched(self) -> Iterable[tuple[int, Watched]]:
        """Return the usage that machines have reported since the last call, by their numbers."""

    def views(self) -> tuple[NodeView, ...]:
        """Return for people how each of them is."""

    def announce_end(self, ends: RunEnds, *, but_parked: bool = False) -> None:
        """Say how the run has ended."""


class RunScreen:
    """Driven by the supervisor's loop: it has a turn after each of the supervisor's, and the last word."""

    def __init__(
        self,
        supervisor: Agent,
        shown: Shown,
        folders: FolderKeeper,
        *,
        clock: Clock,
        others: Machines | None = None,
    ) -> None:
        self._clock = clock
        self._others = others
        self._supervisor = supervisor
        self._shown = shown
        self._recorder = recorder = shown.recorder
        self._node = supervisor.node
        self._world = supervisor.world
        self._outputs = recorder.outputs
        self._folders = folders
        plan, say = shown.plan, recorder.say
        self._watch = RunWatch.of(
            plan, node=self._node.ranks[0] // plan.ranks_per_node, clock=clock, say=say
        )
        recorder.readings.append(self._watch.figures)
        screen = OfScreen(
            plan=plan,
            node=self._node,
            clock=clock,
            say=say,
            announce=self._outputs.announce,
        )
        self._programs = programs(screen)
        recorder.observers.extend(one.take for one in self._programs)
        self._shown_at_s = self._status_at_s = self._memory_at_s = 0.0

    def took(self, ended: Ended) -> bool:
        """Return whether a child that was reaped was one of the programs next to the run."""
        return any(one.took(ended) for one in self._programs) or self._watch.took(ended)

    def look_first(self) -> None:
        """Give each program its turn."""
        for one in self._programs:
            one.look_first()

    def look(self, now_s: float) -> None:
        """Measure, and show what there is to see, each in its time."""
        if now_s - self._memory_at_s >= MEMORY_INTERVAL_S:
            self._memory_at_s = now_s
            self._world.measure_memory()
        if self._others is not None:
            for number, message in self._others.watched():
                self._watch.hear(number, message)
        self._watch.look(self._world.ranks)
        if (proposed := self._watch.shares(self._world.present)) is not None:
            self._recorder.record(proposed)
        accounting = self._recorder.accounting
        if accounting.first_step_s is None:
            first_ns = self._world.present[0].slot.get(Cell.FIRST_STEP_NS)
            # A rank that was taken over may have made its first step before.
            first_step_s = max(first_ns / 1e9, self._recorder.facts.formed_at_s)
            accounting.first_step_s = first_step_s if first_ns and first_step_s else None
        if now_s - self._shown_at_s < SHOW_INTERVAL_S or self._has_successor:
            return
        self._shown_at_s = now_s
        self._shown.start.look(now_s)
        view = self._view()
        self._outputs.show(view)
        if now_s - self._status_at_s >= STATUS_INTERVAL_S:
            self._status_at_s = now_s
            self._look_after_folders()
            self._outputs.status(view)

    @property
    def _has_successor(self) -> bool:
        return self._others is not None and self._others.has_successor

    def _look_after_folders(self) -> None:
        if self._outputs.may_write:
            self._folders.look()
            if self._recorder.kept is None:
                for one in self._programs:
                    one.look()

    def _view(self) -> RunView:
        now_ns = self._clock.monotonic_ns()
        return run_view(
            self._shown.plan,
            self._world.ranks,
            self._recorder,
            state=self._supervisor.machine.state,
            doing=self._shown.start.doing(now_ns / 1e9),
            now_ns=now_ns,
            around=Around(
                trackers=self._links(),
                nodes=() if self._others is None else self._others.views(),
                watch=self._watch,
                spare=self._shown.spare,
            ),
        )

    def _links(self) -> dict[str, str]:
        return {name: link for one in self._programs for name, link in one.links().items()}

    def finish(
        self,
        ending: Ending,
        *,
        signals: SignalBox,
        summary: Callable[[Ending], Summary | None],
    ) -> None:
        """End every process first: whatever is written after that is the last word."""
        self._end_ranks(ending)
        had_files = self._outputs.may_write
        if self._has_successor:
            self._outputs.leave()
        elif had_files:
            self._look_after_folders()
        if had_files:
            self._shown.tidy_up(has_successor=self._has_successor)
        is_cut_short = partial(_is_interrupted, signals)
        for one in self._programs:
            one.finish(is_cut_short=is_cut_short)
        self._shown.start.look(self._clock.monotonic())
        self._outputs.show_rest()
        self._say_ending(ending)
        record = summary(ending)
        self._recorder.record(ending.event)
        for one in self._programs:
            one.end(int(ending.exit_code), is_cut_short=is_cut_short)
        end_descendants(timeout_s=10.0)
        self._watch.close()
        self._outputs.finish(self._view(), self._with_use(record))
        if ending.error_line:
            sys.stdout.flush()
            line = without_secrets(ending.error_line, self._outputs.hidden)
            sys.stderr.write(f"ddp_runner: error: {printable(line)}\n")

    def _end_ranks(self, ending: Ending) -> None:
        """End all processes but those that have to finish their own work."""
        if self._others is not None:
            failed = ending.status in (RunStatus.FAILED, RunStatus.GAVE_UP)
            is_before_all = failed and not self._supervisor.facts.ever_formed
            self._others.announce_end(ending.event, but_parked=is_before_all)
        self._watch.end()
        stays = {pid for one in self._programs for pid in one.outlasts()}
        left = end_descendants(timeout_s=10.0, but=stays)
        if left:
            self._outputs.say(f"processes {left} would not end", level="ERROR")

    def _with_use(self, summary: Summary | None) -> Summary | None:
        """Return the summary with what GPUs and ranks have used, and the links of trackers."""
        if summary is None or self._recorder.kept is not None:
            return summary
        gpus, rank_use = self._watch.summary(self._world.ranks)
        summary = summary.with_use(gpus=gpus, rank_use=rank_use)
        if isinstance(summary, RunSummary):
            links, epochs = self._links(), self._watch.epochs()
            summary = replace(summary, trackers=links, gpu_epochs=epochs)
        return summary

    def _say_ending(self, ending: Ending) -> None:
        recorder = self._recorder
        if ending.detail:
            recorder.say(ending.detail, level="ERROR")
        if not ending.error_line and self._supervisor.machine.state is RunState.FAILED:
            is_wanted = ending.status in (RunStatus.PREEMPTED, RunStatus.INTERRUPTED)
            recorder.say(ending.reason, level=LAST if is_wanted else "ERROR")
            if closing := self._supervisor.closing_words():
                recorder.say(closing, level=LAST)
        finished = self._world.present[0].finished
        sample = finished.report.get("sample") if finished is not None else None
        if sample:
            recorder.say(f"a sample of what it learned:\n{sample}")


def _is_interrupted(signals: SignalBox) -> bool:
    """Return whether a signal has come that stops a run."""
    taken = [signal.Signals(number) for number in signals.take() if number]
    return any(one in STOP_SIGNALS or one == signal.SIGQUIT for one in taken)


def run_summary(supervisor: Agent, recorder: Recorder, ending: Ending, now_s: float) -> RunSummary:
    """Return what summary.json holds; every process has ended."""
    if recorder.kept is not None:
        return recorder.kept
    ranks = supervisor.world.present
    finished = [handle.finished for handle in ranks if handle.finished is not None]
    end = EndOfRun(
        status=ending.status,
        exit_code=ending.exit_code,
        reading=ranks[0].slot.read(),
        finished=finished if len(finished) == len(ranks) else [],
        now_s=now_s,
    )
    return recorder.accounting.summary(
        end,
        facts=recorder.findings,
        world_size=len(ranks),
        steps_per_epoch=recorder.facts.steps_per_epoch,
        own_step_s={handle.rank: handle.own_step_s for handle in supervisor.world.ranks},
    )
