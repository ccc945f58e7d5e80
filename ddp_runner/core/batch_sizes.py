"""How many samples a step has, and how many are computed at once. Values only."""

from __future__ import annotations

from ddp_runner.core.settings import DataSettings


def global_batch(data: DataSettings, *, world_size: int) -> int:
    """Samples of a step over all ranks."""
    return data.global_batch_size or data.batch_size * data.accumulation * world_size


def micro_batch(data: DataSettings) -> int:
    """Most samples of one forward pass."""
    return data.micro_batch_size or data.batch_size


def evaluation_batch(data: DataSettings) -> int:
    """Samples that a rank evaluates at once."""
    return data.evaluation_batch_size or data.batch_size
