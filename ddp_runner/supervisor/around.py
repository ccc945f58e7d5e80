"""What a feature gets of the run that it works next to, and whom the features bring along for it.

A feature's ``parent.py`` has for that one or more of the functions that are named here. Each is found by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_runner import installed
from ddp_runner.core.launch_plan import LaunchPlan
from ddp_runner.kernel.parent.ports import EventRecorder, HelperPolicy, Observer, RespawnScheduler
from ddp_runner.kernel.parent.world import World
from ddp_runner.kernel.processes.children import Ended
from ddp_runner.kernel.processes.node import Node
from ddp_runner.kernel.rules.lifecycle import Machine, RunEvent, RunState
from ddp_runner.kernel.system.clock import Clock
from ddp_runner.kernel.wire import events
from ddp_runner.supervisor.reporting.program import Say


@dataclass(frozen=True, slots=True, kw_only=True)
class OfMachine:
    """One machine of a run: ``beside_machine(OfMachine) -> Observer | None`` works next to each."""

    plan: LaunchPlan
    node: Node
    world: World
    recorder: EventRecorder
    repair: RespawnScheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class OfRun(OfMachine):
    """A training as a whole: ``beside_run(OfRun) -> Observer | None`` works next to the machine that decides."""

    machine: Machine[RunState, RunEvent]


@dataclass(frozen=True, slots=True, kw_only=True)
class OfScreen:
    """Any run, as who shows it sees it: ``program_beside(OfScreen) -> ProgramBeside`` runs programs next to it.

    ``announce`` shows a line on the console and writes it nowhere.
    """

    plan: LaunchPlan
    node: Node
    clock: Clock
    say: Say
    announce: Callable[[str], None]


class ProgramBeside:
    """A program next to a run, or several, which may die. What is not overridden does nothing."""

    def take(self, event: events.Event) -> None:
        """Hear an event of the run."""

    def look_first(self) -> None:
        """Get a turn, before anything is shown."""

    def look(self) -> None:
        """Start what is due: from here on the run may write into its folders."""

    def took(self, ended: Ended) -> bool:
        """Return True if a reaped child was one of its programs."""
        del ended
        return False

    def links(self) -> Mapping[str, str]:
        """Return the addresses of what it keeps of the run elsewhere, by name."""
        return {}

    def outlasts(self) -> set[int]:
        """Return the pids of those that are not ended with the ranks."""
        return set()

    def finish(self, *, is_cut_short: Callable[[], bool]) -> None:
        """All ranks have ended: wait for what is owed, unless that is cut short."""

    def end(self, exit_code: int, *, is_cut_short: Callable[[], bool]) -> None:
        """The last event is written: end its programs; what they have left to do may be cut short."""


def programs(around: OfScreen) -> tuple[ProgramBeside, ...]:
    """Make whoever the features bring along."""
    return tuple(function(around) for function in _functions("program_beside"))


def reader_of_gpus(interval_s: float, *, clock: Clock, say: Say) -> Any:
    """Make who asks the driver of GPUs, by ``reader_of_gpus()`` of a feature; None where none brings one along."""
    for function in _functions("reader_of_gpus"):
        return function(interval_s, clock=clock, say=say)
    return None


def _functions(name: str) -> list[Callable[..., Any]]:
    return [getattr(part, name) for part in installed.parts("parent") if hasattr(part, name)]


def observers(around: OfMachine) -> tuple[Observer, ...]:
    """Make whoever the features bring along for this machine, and where it decides for the run, too."""
    functions = ("beside_run",) * isinstance(around, OfRun) + ("beside_machine",)
    made = (
        getattr(part, name)(around)
        for part in installed.parts("parent")
        for name in functions
        if hasattr(part, name)
    )
    return tuple(one for one in made if one is not None)


def policies(among: Sequence[Observer]) -> tuple[HelperPolicy, ...]:
    """Return those of them that have a helper process."""
    return tuple(one for one in among if isinstance(one, HelperPolicy))
