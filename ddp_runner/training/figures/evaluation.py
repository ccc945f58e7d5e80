"""Validation loss and metrics over all ranks, on the bare module. Never changes what training continues from."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch
from torch import nn

from ddp_runner.core.monitor import LOSS, figure_name
from ddp_runner.data.loader import Loader, MicroBatch
from ddp_runner.kernel.group.group import Group
from ddp_runner.kernel.replica.loss import BadWeightError, Loss, bad_weight, read_loss
from ddp_runner.kernel.replica.replica import Replica
from ddp_runner.kernel.rules.exits import StopReason
from ddp_runner.kernel.rules.faults import FaultError
from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.kernel.wire.messages import Metrics
from ddp_runner.training.components.precision import Precision
from ddp_runner.training.figures.measuring import Alone, Meter, OverRanks
from ddp_runner.training.helpers import Helpers
from ddp_runner.training.loading.batch_copy import to_device
from ddp_runner.training.loading.loaders import make_validation_loader
from ddp_runner.training.rank_context import TaskParts
from ddp_runner.values.generators import seed_step

# Ranks agree this often whether to go on, so that a stop need not wait for a long evaluation.
BATCHES_PER_ROUND = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """``stop`` is set where the evaluation was left early; ``loss`` is then None."""

    loss: float | None
    samples: int
    stop: StopReason | None
    parts: Mapping[str, float] = field(default_factory=dict)  # means over the samples, by name
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the task's metrics(), by name


class Summing(OverRanks, Protocol):
    """Defines what an evaluation asks of the ranks among which the samples are divided."""

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        ...

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        """Return the sums of all ranks."""
        ...


class OneRank(Alone):
    """One process that evaluates all samples."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        """Return the values."""
        return values


@dataclass(slots=True, kw_only=True)
class _Sums:
    """Over the samples of some batches; the weight is their number, where the loss has none."""

    loss: float = 0.0
    weight: float = 0.0
    samples: int = 0
    parts: dict[str, float] = field(default_factory=dict)

    def add_of_all(
        self, mine: _Sums, replica: Summing, *, wanted: StopReason | None
    ) -> StopReason | None:
        """Add what every rank has summed; returns why to stop, if one of them wants to, as this one ``wanted``."""
        loss, count, preempted, interrupted, weight, *parts = replica.sum_over_ranks(
            [
                mine.loss,
                mine.samples,
                wanted is StopReason.PREEMPTED,
                wanted is StopReason.INTERRUPTED,
                mine.weight,
                *(mine.parts.get(name, 0.0) for name in self.parts),
            ]
        )
        self.loss += loss
        self.weight += weight
        self.samples += int(count)
        for name, number in zip(self.parts, parts, strict=True):
            self.parts[name] += number
        if interrupted:
            return StopReason.INTERRUPTED
        return StopReason.PREEMPTED if preempted else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Evaluates a task's model. ``seed``: of the run. ``meter``: measures the same batches, where the task has metrics.

    ``after_round`` is called when this rank has done its part of some batches, ``round_done`` when all have.
    """

    loss: Loss
    model: nn.Module
    precision: Precision
    seed: int
    stop_asked: Callable[[], StopReason | None]
    after_round: Callable[[], None] = lambda: None
    round_done: Callable[[], None] = lambda: None
    meter: Meter | None = None

    def evaluate(
        self, loader: Loader, *, replica: Summing, step: int, names: Sequence[str] = ()
    ) -> Evaluation:
        """Return the mean loss per sample of what ``loader`` serves; every rank must call it at the same step.

        Of a loss with weights of its own: per weight. ``names``: of the numbers beside it that are wanted.

        A forward through DDP would broadcast buffers and put the ranks out of step, so the bare module
        is used, in eval mode and without gradients; train mode is restored.
        """
        model, meter = self.model, self.meter
        batches = _batches(loader, step)
        total = _Sums(parts=dict.fromkeys(names, 0.0))
        metrics: Mapping[str, float] = {}
        was_training = model.training
        model.eval()
        if meter is not None:
            meter.begin()
        seed_step(seed=self.seed, step=step, rank=replica.rank, micro_step=-1)
        try:
            for _ in range(-(-loader.total_steps // BATCHES_PER_ROUND)):
                mine = self._one_round(batches, replica)
                self.after_round()
                stop = total.add_of_all(mine, replica, wanted=self.stop_asked())
                self.round_done()
                if stop is not None:
                    return Evaluation(loss=None, samples=total.samples, stop=stop)
            if meter is not None:
                metrics = meter.figures(replica)
        finally:
            model.train(was_training)
        return Evaluation(
            loss=total.loss / total.weight if total.weight else math.nan,
            samples=total.samples,
            stop=None,
            parts={name: value / max(1, total.samples) for name, value in total.parts.items()},
            metrics=metrics,
        )

    @torch.no_grad()
    def _one_round(self, batches: Iterator[list[MicroBatch]], replica: Summing) -> _Sums:
        sums = _Sums()
        taken = itertools.chain.from_iterable(itertools.islice(batches, BATCHES_PER_ROUND))
        for micro_batch in taken:
            batch = to_device(micro_batch.batch, replica.device)
            try:
                with self.precision.autocast():
                    output = read_loss(self.loss(self.model, batch))
                    if self.meter is not None:
                        self.meter.take(self.model, batch, samples=len(micro_batch.indices))
            except BadWeightError as error:
                raise bad_weight(error, rank=replica.rank, samples=micro_batch.indices) from error
            size = len(micro_batch.indices)
            if output.weight is None:
                sums.loss += float(output.value) * size
                sums.weight += size
            else:
                sums.loss += float(output.value)
                sums.weight += float(output.weight)
            sums.samples += size
            for name, number in output.parts.items():
                sums.parts[name] = sums.parts.get(name, 0.0) + float(number) * size
        return sums


def _batches(loader: Loader, step: int) -> Iterator[list[MicroBatch]]:
    """The rank's part of each global batch, in order; nothing where the last one leaves it out."""
    try:
        for number in range(loader.total_steps):
            yield loader.take(number)
    except FaultError as error:  # its step is one of the loader's own
        raise FaultError(replace(error.fault, step=step)) from error


def figures_of(
    data: str, evaluation: Evaluation, helpers: Helpers, *, loss: float
) -> dict[str, float]:
    """Return the figures by their full names. The task's own values replace those derived from its loss."""
    found = {LOSS: loss, **helpers.figures(loss), **evaluation.parts, **evaluation.metrics}
    return {figure_name(data, name): value for name, value in found.items()}


class Validation:
    """The evaluations of one generation on one rank, from the samples to what is said of them."""

    def __init__(self, parts: TaskParts, group: Group) -> None:
        self._parts = parts
        self._group = group
        workload = parts.workload
        self._helpers = Helpers(workload.task, warn=self._warn_once)
        meter = Meter(workload.task, workload.metrics, device=group.device)
        self._meter = meter if meter.is_on else None

    def evaluate(self, replica: Replica) -> StopReason | None:
        """Evaluate the state as it is, where there is something to evaluate; every rank must call it.

        Returns why it was left early, if it was: then all is as if it had not begun.
        """
        parts, state, slot = self._parts, self._parts.state, self._parts.runtime.slot
        names = tuple(parts.workload.validation_samples)
        if not names:
            return None
        began_ns = time.monotonic_ns()
        slot.stamp(Phase.EVALUATE, began_ns)
        state.side.look()
        parts.workload.loss.turn_to(state.committed_step, is_training=False)
        figures: dict[str, float] = {}
        samples = 0
        stop: StopReason | None = None
        with (
            parts.compiler.aside(),
            contextlib.nullcontext() if state.ema is None else state.ema.swapped_in(state.model),
        ):
            for name in names:
                evaluation = self._evaluate_one(name, replica)
                stop = evaluation.stop
                if evaluation.loss is None:
                    break
                figures |= figures_of(name, evaluation, self._helpers, loss=evaluation.loss)
                samples += evaluation.samples
        # What is saved, and compared at the end, is what the steps made.
        state.drop_evaluation()
        slot.add(Cell.EVALUATION_NS, time.monotonic_ns() - began_ns)
        if stop is not None:
            return stop
        state.figures = figures
        self._report(time.monotonic_ns() - began_ns, samples=samples)
        return None

    def _evaluate_one(self, name: str, replica: Replica) -> Evaluation:
        parts, state, slot = self._parts, self._parts.state, self._parts.runtime.slot
        with (
            make_validation_loader(parts, self._group, name) as loader,
            parts.memory.beside(lambda: loader.worker_pids),
        ):
            evaluator = Evaluator(
                loss=parts.workload.loss,
                model=state.model,
                precision=state.precision,
                seed=parts.settings.run.seed,
                stop_asked=parts.runtime.stop_asked,
                after_round=partial(parts.memory.in_evaluation, state.committed_step),
                round_done=partial(slot.count_done, state.committed_step),
                meter=self._meter,
            )
            return evaluator.evaluate(
                loader, replica=replica, step=state.own_step, names=state.tuning.loss_names
            )

    def _warn_once(self, text: str) -> None:
        """Log a warning on one rank only, as it holds on every rank."""
        if self._group.rank == 0:
            self._parts.runtime.logger.warning(text)

    def _report(self, took_ns: int, *, samples: int) -> None:
        if self._group.rank != 0:
            return
        runtime, step = self._parts.runtime, self._parts.state.committed_step
        figures = self._parts.state.figures
        shown = "  ".join(f"{name} {value:.4f}" for name, value in figures.items())
        there = sum(self._parts.workload.validation_samples.values())
        of_all = f" of {there:,}" if samples < there else ""
        at = f"({samples:,}{of_all} samples, {took_ns / 1e9:.1f} s)"
        runtime.logger.info(f"evaluated at step {step:,}: {shown}  {at}", step=step)
        runtime.report(Metrics(rank=runtime.rank_info.rank, step=step, values=dict(figures)))
