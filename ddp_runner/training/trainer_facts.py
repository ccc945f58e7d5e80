"""What a trainer says of itself to the program that has made it. Changes nothing."""

from __future__ import annotations

import platform
from typing import Any

import torch

from ddp_runner.core.board import Cell
from ddp_runner.core.settings import Settings
from ddp_runner.training.rank_context import TaskParts
from ddp_runner.training.runtime import Runtime
from ddp_runner.training.use_figures import costs_of, tokens_of
from ddp_runner.version import VERSION


def info_of(settings: Settings, runtime: Runtime, parts: TaskParts | None) -> dict[str, Any]:
    """Of :meth:`DDPTrainer.info`; ``parts``: what was built, once it is."""
    info = runtime.rank_info
    found: dict[str, Any] = {
        "task": settings.run.task,
        "name": settings.run.name,
        "rank": info.rank,
        "world_size": info.world_size,
        "device": info.device,
        "log_dir": settings.run.log_dir,
        "checkpoint_dir": settings.run.checkpoint_dir,
        "versions": {
            "ddp_runner": VERSION,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    if parts is None:
        return found
    workload, state = parts.workload, parts.state
    trained = sum(one.numel() for one in state.model.parameters() if one.requires_grad)
    return {
        **found,
        "run_id": runtime.run_id,
        "precision": state.precision.name,
        "parameters": workload.parameters,
        "trained_parameters": trained,
        "batch_size": state.tuning.micro_batch_size,
        "global_batch": workload.global_batch,
        "total_steps": workload.length.total_steps,
        "steps_per_epoch": workload.length.steps_per_epoch,
        "committed_step": max(0, state.committed_step),
    }


def performance_of(runtime: Runtime, parts: TaskParts | None) -> dict[str, float | None]:
    """Of :meth:`DDPTrainer.performance`."""
    slot, reading = runtime.slot, runtime.slot.read()
    steps = slot.get(Cell.OWN_STEPS)
    train_s = (reading.productive_ns + reading.data_wait_ns) / 1e9
    found: dict[str, float | None] = {
        "steps": steps,
        "train_s": train_s,
        "data_wait_s": reading.data_wait_ns / 1e9,
        "checkpoint_s": reading.checkpoint_ns / 1e9,
        "comparison_s": reading.comparison_ns / 1e9,
        "evaluation_s": reading.evaluation_ns / 1e9,
    }
    rates: dict[str, float | None] = dict.fromkeys(
        ("steps_per_s", "samples_per_s", "tokens_per_s", "flops_utilization", "data_wait_share")
    )
    peaks: dict[str, float | None] = dict.fromkeys(
        ("peak_rss_bytes", "peak_loader_bytes", "peak_device_bytes")
    )
    if parts is None:
        return {**found, **rates, **peaks}
    peaks.update({name: size for name, size in parts.memory.peaks().items() if name in peaks})
    if steps and train_s > 0:
        steps_per_s = steps / train_s
        rates["steps_per_s"] = steps_per_s
        rates["samples_per_s"] = steps_per_s * parts.workload.global_batch
        rates["data_wait_share"] = reading.data_wait_ns / 1e9 / train_s
        tokens, done = tokens_of(parts), parts.state.committed_step
        if tokens is not None and done > 0:
            tokens_per_s = rates["tokens_per_s"] = tokens / done * steps_per_s
            if (costs := costs_of(parts)) is not None:
                needed, peak = costs
                ranks = runtime.rank_info.world_size
                rates["flops_utilization"] = tokens_per_s * needed / (peak * ranks)
    return {**found, **rates, **peaks}
