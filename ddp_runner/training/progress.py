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
    changed_task: str = ""  # its file, where the checkpoint that was loaded is of another one
