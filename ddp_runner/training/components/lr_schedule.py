"""The learning rate as a pure function of the step: there is no schedule state to lose."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ddp_runner.core.settings import OptimSettings


def learning_rate(step: int, *, total_steps: int, settings: OptimSettings) -> float:
    """The rate for the optimizer step number ``step``, counted from 0, of ``total_steps``.

    Linear warm-up to ``learning_rate``, then constant, or a cosine or line down to
    ``min_learning_rate``, which would be reached at ``total_steps``; it holds beyond. Warm-up takes
    at most half of the run, so that a run shorter than its warm-up still reaches the full rate.
    """
    peak, floor = settings.learning_rate, settings.min_learning_rate
    warmup_steps = min(settings.warmup_steps, total_steps // 2)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if settings.schedule == "constant":
        return peak
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if settings.schedule == "linear":
        return peak + (floor - peak) * progress
    return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def apply_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set ``rate`` in every parameter group, in place where the group holds a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):  # compiled optimizers read it by reference
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
