"""What a feature gets of the run that it works next to, and whom the features bring along for it.

A feature's ``parent.py`` has for that one or more of the functions that are named here. Each is found by its name.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddp_runner import installed
from ddp_runner.core.launch_plan import LaunchPlan
from ddp_runner.core.lifecycle import Machine, RunEvent, RunState
from ddp_runner.supervisor.ports import EventRecorder, HelperPolicy, Observer, RespawnScheduler
from ddp_runner.supervisor.processes.node import Node
from ddp_runner.supervisor.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class OfMachine:
    """One machine of a run: ``beside_machine(OfMachine) -> Observer`` works next to each."""

    plan: LaunchPlan
    node: Node
    world: World
    recorder: EventRecorder
    repair: RespawnScheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class OfRun(OfMachine):
    """A training as a whole: ``beside_run(OfRun) -> Observer`` works next to the machine that decides."""

    machine: Machine[RunState, RunEvent]


def observers(around: OfMachine) -> tuple[Observer, ...]:
    """Make whoever the features bring along for this machine, and where it decides for the run, too."""
    functions = ("beside_run",) * isinstance(around, OfRun) + ("beside_machine",)
    return tuple(
        getattr(part, name)(around)
        for part in installed.parts("parent")
        for name in functions
        if hasattr(part, name)
    )


def policies(among: tuple[Observer, ...]) -> tuple[HelperPolicy, ...]:
    """Return those of them that have a helper process."""
    return tuple(one for one in among if isinstance(one, HelperPolicy))
