"""What belongs to one run and does not change with its ranks: its state, its ranks, its record, its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_runner.core.lifecycle import Machine, RunEvent, RunState
from ddp_runner.core.limits import RecoveryLimits
from ddp_runner.supervisor.ports import Checkpoints, RunRecord
from ddp_runner.supervisor.run_facts import RunFacts
from ddp_runner.supervisor.world import World
from ddp_runner.system.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """``resume``: the checkpoint that the user has asked for. ``loading_s``: the deadline of one batch of data."""

    settings: RecoveryLimits
    resume: str
    log_dir: str
    loading_s: float
    machine: Machine[RunState, RunEvent]
    world: World
    record: RunRecord
    published: Checkpoints
    clock: Clock

    @property
    def facts(self) -> RunFacts:
        """What is known of the run as a whole."""
        return self.record.facts
