"""Computes a logged step's figures of memory and of speed in tokens, next to its losses. Changes nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from ddp_runner.memory.manager import MemoryManager
from ddp_runner.training.rank_context import TaskParts


class UseFigures:
    """The figures of one generation, whose model trains and freezes the same parameters; a change makes another one.

    With ``log.gpu_watch_s=0`` it has no figures.
    """

    def __init__(self, parts: TaskParts, *, world_size: int) -> None:
        self._parts = parts
        self._world_size = world_size
        self._is_on = parts.settings.log.gpu_watch_s > 0
        self._tokens = tokens_of(parts)
        self._costs = costs_of(parts)

    def take(self, *, seconds: float) -> dict[str, float]:
        """Return the figures of the time since the previous call, which was ``seconds`` long."""
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
    """Return the newest memory readings in bytes: of the process, of its loader workers, on its device."""
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
        "memory_efficiency": reading.memory_efficiency,
    }
    return {name: float(value) for name, value in values.items() if value is not None}


def tokens_of(parts: TaskParts) -> float | None:
    """Tokens of all steps so far, over all ranks: the weight of a weighted loss, else by what a sample has.

    None where neither is known.
    """
    if parts.state.tokens is not None:
        return parts.state.tokens
    each = tokens_per_sample(parts.workload.task)
    return None if each is None else each * parts.state.samples


def tokens_per_sample(task: object) -> float | None:
    """Return the task's number of tokens for each sample; None if it gives no number above 0."""
    each = getattr(task, "tokens_per_sample", None)
    if isinstance(each, bool) or not isinstance(each, (int, float)) or not 0 < each < math.inf:
        return None
    return float(each)


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
    """Return the figures from which the summary computes tokens per second, and the share of the peak."""
    if not parts.settings.log.gpu_watch_s:
        return {}
    found: dict[str, float] = {}
    if (tokens := tokens_of(parts)) is not None:
        found["all_tokens"] = tokens
    if (costs := costs_of(parts)) is not None:
        found["flops_per_token"], found["peak_flops"] = costs
    return found


# What GPUs can compute at most, and what a model needs for a token. Guesses nothing: unknown is
# None. Peaks are NVIDIA's own figures for dense matrices (half of those "with sparsity"), in
# FLOP per second: - A100 datasheet nvidia-a100-datasheet-us-nvidia-1758950; A10: a10-datasheet
# - H100 and H200: https://www.nvidia.com/en-us/data-center/h100/ and /h200/ - B200: the DGX
# B200 datasheet, by its eight GPUs - L40S: https://www.nvidia.com/en-us/data-center/l40s/ -
# V100: volta-v100-datasheet-update-us-1165301 - T4: t4-tensor-core-datasheet-951643

FP32, TF32, BF16, FP16 = "fp32", "tf32", "bf16", "fp16"
_TERA = 1e12


def _ampere_on(fp32: float, tf32: float, half: float) -> Mapping[str, float]:
    return {FP32: fp32 * _TERA, TF32: tf32 * _TERA, BF16: half * _TERA, FP16: half * _TERA}


def _before_ampere(fp32: float, half: float) -> Mapping[str, float]:
    return {FP32: fp32 * _TERA, TF32: fp32 * _TERA, FP16: half * _TERA}


# All words must stand in torch's name of the device; the first row that fits counts.
_PEAKS: tuple[tuple[tuple[str, ...], Mapping[str, float]], ...] = (
    (("H100", "NVL"), _ampere_on(60, 417.5, 835.5)),
    (("H100", "PCIe"), _ampere_on(51, 378, 756)),
    (("H100", "HBM3"), _ampere_on(67, 494.7, 989.4)),
    (("H200", "NVL"), _ampere_on(60, 417.5, 835.5)),
    (("H200",), _ampere_on(67, 494.7, 989.4)),
    (("B200",), _ampere_on(75, 1125, 2250)),
    (("A100",), _ampere_on(19.5, 156, 312)),
    (("L40S",), _ampere_on(91.6, 183, 362)),
    (("A10",), _ampere_on(31.2, 62.5, 125)),
    (("V100S", "PCIE"), _before_ampere(16.4, 130)),
    (("V100", "SXM2"), _before_ampere(15.7, 125)),
    (("V100", "PCIE"), _before_ampere(14, 112)),
    (("T4",), _before_ampere(8.1, 65)),
)


def peak_flops(device: str, arithmetic: str) -> float | None:
    """Return a device's peak FLOP per second in ``fp32``, ``tf32``, ``bf16`` or ``fp16``, by torch's name for it.

    None for a device that is not in the table, an arithmetic that it does not support, and a part of a
    GPU (MIG), whose share of the peak is not published.
    """
    words = device.replace("-", " ").split()
    if "MIG" in words:
        return None
    return next(
        (peaks.get(arithmetic) for named, peaks in _PEAKS if all(one in words for one in named)),
        None,
    )


def arithmetic_of(precision: str, matmul_precision: str) -> str | None:
    """Return the arithmetic of matrix products: the run's ``precision``, or how torch multiplies float32.

    None for ``medium``, where torch takes what the device has.
    """
    if precision != FP32:
        return precision
    return {"highest": FP32, "high": TF32}.get(matmul_precision)


def flops_per_token(*, trained: int, frozen: int) -> float:
    """Return the FLOP that a step needs for a token, by the parameters: 6 for a trained one, 2 for a frozen one.

    Two in forward, two for the gradient of the weight, two for that of its input: 6N of Kaplan et al.
    (2020, section 2.1). Attention over the sequence and activations that are computed again are left out,
    and gradients that pass through frozen layers: so it is no more than what is really computed.
    """
    return 6.0 * trained + 2.0 * frozen
