"""What a rank knows of its run beyond the trained state; kept from generation to generation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(slots=True)
class Progress:
    """What a rank knows of its run beyond the trained state; kept from generation to generation."""

    loss: float = math.nan
    validation_loss: float | None = None
    figures: dict[str, float] = field(default_factory=dict)
    checkpoint: str = ""
    checkpoint_step: int = -1
    is_from_memory: bool = False  # this process began with a copy of this launch's own
    changed_task: str = ""  # its file, where the checkpoint that was loaded is of another one

    def monitored(self, monitor: str, *, smoothed: float | None) -> float | None:
        """The loss that ``checkpoint.monitor`` names, or None; ``smoothed`` is that of training."""
        validation = self.validation_loss
        if monitor == "validation_loss" or (monitor == "auto" and validation is not None):
            return validation
        return smoothed if smoothed is not None and math.isfinite(smoothed) else None
