"""What a logged step says of a rank's memory and of its speed in tokens, beside its losses. Changes nothing."""

from __future__ import annotations

import torch

from ddp_runner.core.device_peaks import arithmetic_of, flops_per_token, peak_flops
from ddp_runner.memory.manager import MemoryManager
from ddp_runner.training.rank_context import TaskParts


class UseFigures:
    """Of one generation, whose model trains and freezes the same parameters; another after a change.

    With ``log.gpu_watch_s=0`` it has nothing to say.
    """

    def __init__(self, parts: TaskParts, *, world_size: int) -> None:
        self._parts = parts
        self._world_size = world_size
        self._is_on = parts.settings.log.gpu_watch_s > 0
        self._tokens = tokens_of(parts)
        self._costs = costs_of(parts)

    def take(self, *, seconds: float) -> dict[str, float]:
        """Of the time since the call before, which was ``seconds`` long."""
        if not self._is_on:
            return {}
        values = memory_figures(self._parts.memory)
        before, self._tokens = self._tokens, tokens_of(self._parts)
        if self._tokens is None:
            return values
        tokens_per_s = max(0.0, self._tokens - (before or 0.0)) / seconds
        values["tokens_per_s"] = tokens_per_s
        if self._costs is not None:
            needed, peak = self._costs
            values["flops_utilization"] = tokens_per_s * needed / (peak * self._world_size)
        return values


def memory_figures(memory: MemoryManager) -> dict[str, float]:
    """By the newest look at memory, in bytes: of the process, of its loader workers, on its device."""
    reading = memory.newest()
    used = None
    if reading.device_total_bytes is not None and reading.device_free_bytes is not None:
        used = reading.device_total_bytes - reading.device_free_bytes
    values = {
        "rss_bytes": reading.rss_bytes,
        "loader_bytes": reading.loader_bytes,
        "device_allocated_bytes": reading.device_allocated_bytes,
        "device_reserved_bytes": reading.device_reserved_bytes,
        "device_used_bytes": used,
        "device_total_bytes": reading.device_total_bytes,
    }
    return {name: float(value) for name, value in values.items() if value is not None}


def tokens_of(parts: TaskParts) -> float | None:
    """Tokens of all steps so far, over all ranks: the weight of a weighted loss, else by what a sample has.

    None where neither is known.
    """
    if parts.state.tokens is not None:
        return parts.state.tokens
    each = getattr(parts.workload.task, "tokens_per_sample", None)
    if isinstance(each, bool) or not isinstance(each, (int, float)) or not each > 0:
        return None
    return float(each) * parts.state.samples


def costs_of(parts: TaskParts) -> tuple[float, float] | None:
    """FLOP that a token needs, and the peak of the rank's devices in FLOP per second; None where it is not known."""
    device, run = parts.workload.device, parts.settings.run
    arithmetic = arithmetic_of(parts.state.precision.name, run.matmul_precision)
    if device.type != "cuda" or arithmetic is None:
        return None
    peak = peak_flops(torch.cuda.get_device_name(device), arithmetic)
    if peak is None:
        return None
    sizes = [(one.numel(), one.requires_grad) for one in parts.state.model.parameters()]
    trained = sum(size for size, is_trained in sizes if is_trained)
    frozen = sum(size for size, is_trained in sizes if not is_trained)
    return flops_per_token(trained=trained, frozen=frozen), peak * len(parts.workload.devices)


def speed_report(parts: TaskParts) -> dict[str, float]:
    """What the summary makes tokens per second of, and the share of the peak, as far as it is known."""
    if not parts.settings.log.gpu_watch_s:
        return {}
    found: dict[str, float] = {}
    if (tokens := tokens_of(parts)) is not None:
        found["all_tokens"] = tokens
    if (costs := costs_of(parts)) is not None:
        found["flops_per_token"], found["peak_flops"] = costs
    return found
