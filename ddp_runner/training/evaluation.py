"""Validation loss over all ranks, on the bare module. Never changes what training continues from."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from ddp_runner.collective.loss import checked_loss
from ddp_runner.collective.replica import Replica
from ddp_runner.core.exits import StopReason
from ddp_runner.core.faults import FaultError
from ddp_runner.data.loader import MicroBatch, SafeDataLoader
from ddp_runner.training.batch_copy import to_device
from ddp_runner.training.components.precision import Precision
from ddp_runner.training.components.rng import seed_step
from ddp_runner.training.task import Task

# Ranks agree this often whether to go on, so that a stop need not wait for a long evaluation.
BATCHES_PER_ROUND = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """``stop`` is set where the evaluation was left early; ``loss`` is then None."""

    loss: float | None
    samples: int
    stop: StopReason | None


def evaluate(
    task: Task,
    model: nn.Module,
    loader: SafeDataLoader,
    *,
    replica: Replica,
    precision: Precision,
    seed: int,
    step: int,
    stop_asked: Callable[[], StopReason | None],
    after_round: Callable[[], None] = lambda: None,
    round_done: Callable[[], None] = lambda: None,
) -> Evaluation:
    """The mean loss per sample of what ``loader`` serves; every rank must call it at the same step.

    ``after_round`` is called when this rank has done its part of some batches, ``round_done`` when all have.

    A forward through DDP would broadcast buffers and put the ranks out of step, so the bare module
    is used, in eval mode and without gradients; train mode is restored.
    """
    group = replica.group
    rounds = -(-loader.total_steps // BATCHES_PER_ROUND)
    batches = _batches(loader, step)
    total_loss, total_samples = 0.0, 0
    was_training = model.training
    model.eval()
    seed_step(seed=seed, step=step, rank=group.rank, micro_step=-1)
    try:
        for _ in range(rounds):
            loss, samples = _one_round(
                task, model, batches, device=group.device, precision=precision
            )
            after_round()
            reason = stop_asked()
            loss, count, preempted, interrupted = replica.sum_over_ranks(
                [
                    loss,
                    samples,
                    reason is StopReason.PREEMPTED,
                    reason is StopReason.INTERRUPTED,
                ]
            )
            round_done()
            total_loss += loss
            total_samples += int(count)
            if interrupted or preempted:
                stop = StopReason.INTERRUPTED if interrupted else StopReason.PREEMPTED
                return Evaluation(loss=None, samples=total_samples, stop=stop)
    finally:
        model.train(was_training)
    mean = total_loss / total_samples if total_samples else math.nan
    return Evaluation(loss=mean, samples=total_samples, stop=None)


def _batches(loader: SafeDataLoader, step: int) -> Iterator[list[MicroBatch]]:
    """The rank's part of each global batch, in order; nothing where the last one leaves it out."""
    try:
        for number in range(loader.total_steps):
            yield loader.take(number)
    except FaultError as error:  # it tells of the loader's own steps
        raise FaultError(replace(error.fault, step=step)) from error


@torch.no_grad()
def _one_round(
    task: Task,
    model: nn.Module,
    batches: Iterator[list[MicroBatch]],
    *,
    device: torch.device,
    precision: Precision,
) -> tuple[float, int]:
    loss_sum, samples = 0.0, 0
    taken = itertools.chain.from_iterable(itertools.islice(batches, BATCHES_PER_ROUND))
    for micro_batch in taken:
        batch = to_device(micro_batch.batch, device)
        with precision.autocast():
            loss = checked_loss(task.loss(model, batch))
        size = len(micro_batch.indices)
        loss_sum += float(loss) * size
        samples += size
    return loss_sum, samples
