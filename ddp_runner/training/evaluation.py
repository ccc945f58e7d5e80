"""Validation loss over all ranks, on the bare module. Never changes what training continues from."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

from ddp_runner.collective.replica import Replica
from ddp_runner.core.exits import StopReason
from ddp_runner.training.precision import Precision
from ddp_runner.training.rng import seed_step
from ddp_runner.training.step import to_device
from ddp_runner.training.task import Task

# Ranks agree this often whether to go on, so that a stop need not wait for a long evaluation.
BATCHES_PER_ROUND = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """``stop`` is set where the evaluation was left early; ``loss`` is then None."""

    loss: float | None
    samples: int
    stop: StopReason | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRules:
    """What stays the same for every evaluation."""

    seed: int
    batch_size: int
    batches_max: int  # per rank; 0: all


def evaluate(
    task: Task,
    model: nn.Module,
    dataset: Dataset[Any],
    *,
    replica: Replica,
    precision: Precision,
    rules: EvaluationRules,
    step: int,
    stop_asked: Callable[[], StopReason | None],
) -> Evaluation:
    """The mean loss per sample of ``dataset``; every rank must call it at the same step.

    A forward through DDP would broadcast buffers and put the ranks out of step, so the bare module
    is used, in eval mode and without gradients; train mode is restored.
    """
    group = replica.group
    mine, rounds = _share(dataset, rules, rank=group.rank, world_size=group.world_size)
    batches = ((len(indices), _fetch(dataset, indices)) for indices in mine)
    total_loss, total_samples = 0.0, 0
    was_training = model.training
    model.eval()
    seed_step(seed=rules.seed, step=step, rank=group.rank, micro_step=-1)
    try:
        for _ in range(rounds):
            loss, samples = _one_round(
                task, model, batches, device=group.device, precision=precision
            )
            reason = stop_asked()
            loss, count, preempted, interrupted = replica.sum_over_ranks(
                [
                    loss,
                    samples,
                    reason is StopReason.PREEMPTED,
                    reason is StopReason.INTERRUPTED,
                ]
            )
            total_loss += loss
            total_samples += int(count)
            if interrupted or preempted:
                stop = StopReason.INTERRUPTED if interrupted else StopReason.PREEMPTED
                return Evaluation(loss=None, samples=total_samples, stop=stop)
    finally:
        model.train(was_training)
    mean = total_loss / total_samples if total_samples else math.nan
    return Evaluation(loss=mean, samples=total_samples, stop=None)


def _share(
    dataset: Dataset[Any], rules: EvaluationRules, *, rank: int, world_size: int
) -> tuple[list[list[int]], int]:
    """The index batches of this rank, and the number of rounds, the same on every rank."""
    size = len(dataset)  # type: ignore[arg-type] # map-style: checked when it was built
    per_rank = -(-size // world_size)
    batches = -(-per_rank // rules.batch_size)
    if rules.batches_max:
        batches = min(batches, rules.batches_max)
    indices = np.arange(rank, size, world_size).tolist()
    cut = [
        indices[start : start + rules.batch_size]
        for start in range(0, batches * rules.batch_size, rules.batch_size)
    ]
    return [batch for batch in cut if batch], -(-batches // BATCHES_PER_ROUND)


@torch.no_grad()
def _one_round(
    task: Task,
    model: nn.Module,
    batches: Iterator[Any],
    *,
    device: torch.device,
    precision: Precision,
) -> tuple[float, int]:
    loss_sum, samples = 0.0, 0
    for size, cpu_batch in itertools.islice(batches, BATCHES_PER_ROUND):
        batch = to_device(cpu_batch, device)
        with precision.autocast():
            loss = task.loss(model, batch)
        loss_sum += float(loss) * size
        samples += size
    return loss_sum, samples


def _fetch(dataset: Dataset[Any], indices: list[int]) -> Any:
    fetch_many = getattr(dataset, "__getitems__", None)
    samples = fetch_many(indices) if fetch_many else [dataset[index] for index in indices]
    return default_collate(samples)
