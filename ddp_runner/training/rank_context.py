"""The parts that one rank trains with, from its start to its end, in any generation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ddp_runner.checkpoint.store import CheckpointStore
from ddp_runner.core.settings import Settings
from ddp_runner.data.loader import Loader
from ddp_runner.kernel.group.device import DeviceProgress
from ddp_runner.kernel.step.runtime import Runtime
from ddp_runner.memory.manager import MemoryManager
from ddp_runner.training.exactness.same_data import SameData
from ddp_runner.training.figures.profiling import StepProfile
from ddp_runner.training.saves.saving import Saving
from ddp_runner.training.starting.compiling import Compiler
from ddp_runner.training.state import Progress, TrainState
from ddp_runner.training.workload import TaskWorkload, Workload


class Feed(Protocol):
    """The source of a step's batches."""

    @property
    def waited_s(self) -> float:
        """Seconds that the newest step has waited for its batches."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParts:
    """The parts that one rank trains with, from its start to its end, in any generation."""

    settings: Settings
    workload: Workload
    state: TrainState
    loader: Feed
    memory: MemoryManager
    store: CheckpointStore
    runtime: Runtime
    progress: Progress
    saving: Saving
    device: DeviceProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskParts(RankParts):
    """The same for a Task. ``on_wait``: what a loader calls while it waits."""

    workload: TaskWorkload
    loader: Loader

    on_wait: Callable[[], None]
    same_data: SameData
    compiler: Compiler
    profile: StepProfile
