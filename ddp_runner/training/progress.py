"""Holds a rank's facts about its run beyond the trained state; kept from generation to generation."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Progress:
    """A rank's facts about its run beyond the trained state; kept from generation to generation."""

    loss: float = math.nan
    checkpoint: str = ""
    checkpoint_step: int = -1
    is_from_memory: bool = False  # this process began with a copy of this launch's own
    changed_task: str = ""  # its file, where the checkpoint that was loaded is of another one
