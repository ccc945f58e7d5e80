"""What one rank trains with, from its start to its end, whatever the generation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ddp_runner.checkpoint.store import CheckpointStore
from ddp_runner.core.settings import Settings
from ddp_runner.data.loader import SafeDataLoader
from ddp_runner.memory.manager import MemoryManager
from ddp_runner.training.build import Workload
from ddp_runner.training.runtime import Runtime
from ddp_runner.training.state import TrainState


@dataclass(slots=True)
class Progress:
    """What a rank knows of its run beyond the trained state; kept from generation to generation."""

    loss: float = math.nan
    validation_loss: float | None = None
    figures: dict[str, float] = field(default_factory=dict)
    checkpoint: str = ""
    checkpoint_step: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParts:
    """What one rank trains with, from its start to its end, whatever the generation."""

    settings: Settings
    workload: Workload
    state: TrainState
    loader: SafeDataLoader
    memory: MemoryManager
    store: CheckpointStore
    runtime: Runtime
    progress: Progress
