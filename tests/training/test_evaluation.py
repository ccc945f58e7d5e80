"""Validation over all ranks: the mean of a plain loop, whoever computes which part."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import Dataset

from ddp_runner.data.order import WholeOrder
from ddp_runner.kernel.replica.loss import Weighted
from ddp_runner.kernel.rules.exits import StopReason
from ddp_runner.kernel.rules.faults import FaultError
from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.training.components.precision import Precision
from ddp_runner.training.figures.evaluation import BATCHES_PER_ROUND, Evaluator
from tests.data.mapped import map_loader
from tests.kernel.group.joining import join
from tests.processes import hosted_store, run_ranks

from .building import CPU, FEATURES, bits_of, build_replica, build_state

BATCH = 4


class Numbers(Dataset):
    """Sample ``i`` is a function of ``i`` alone."""

    def __init__(self, size):
        self._size = size

    def __len__(self):
        return self._size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        inputs = torch.randn(FEATURES, generator=generator)
        return inputs, inputs.sum().unsqueeze(0)


class BatchedNumbers(Numbers):
    """Fetches many samples at once, as torch's loaders do where a dataset can."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class MeanSquare:
    """The part of a task that evaluation uses; ``calls`` counts forwards."""

    def __init__(self):
        self.calls = 0
        self.modes = set()

    def loss(self, model, batch):
        self.calls += 1
        self.modes.add((model.training, torch.is_grad_enabled()))
        inputs, targets = batch
        return torch.nn.functional.mse_loss(model(inputs), targets)


class Counting(MeanSquare):
    """As of padded samples: each counts as often as its first number says, some not at all."""

    def loss(self, model, batch):
        inputs, targets = batch
        counts = (inputs[:, 0].abs() * 2).floor()
        errors = (model(inputs) - targets).square().squeeze(1)
        return Weighted((errors * counts).sum(), counts.sum()), {"spread": errors.mean()}


def plain_mean(dataset):
    """The loss of every sample, one by one, averaged."""
    model = build_state().model.eval()
    with torch.no_grad():
        losses = [
            torch.nn.functional.mse_loss(model(inputs.unsqueeze(0)), targets.unsqueeze(0))
            for inputs, targets in (dataset[index] for index in range(len(dataset)))
        ]
    return float(torch.stack(losses).double().mean())


def run_evaluation(
    group, state, dataset, task, *, batches_max=0, stop_asked=lambda: None, names=()
):
    """One evaluation at step 3."""
    order = WholeOrder(
        seed=5, dataset_size=len(dataset), global_batch_size=BATCH * group.world_size
    )
    loader = map_loader(
        dataset,
        order=order,
        rank=group.rank,
        world_size=group.world_size,
        total_steps=min(order.steps_per_epoch, batches_max or order.steps_per_epoch),
        micro_batch_size=BATCH,
        seed=5,
        num_workers=0,
        phase=Phase.EVALUATE,
    )
    with loader:
        evaluator = Evaluator(
            loss=task.loss,
            model=state.model,
            precision=Precision("fp32", device=CPU),
            seed=5,
            stop_asked=stop_asked,
        )
        return evaluator.evaluate(loader, replica=build_replica(state, group), step=3, names=names)


def _evaluate(me, port, dataset, batches_max):
    state, task = build_state(), MeanSquare()
    with join(me, port) as group:
        return run_evaluation(group, state, dataset, task, batches_max=batches_max), task.calls


@pytest.mark.parametrize("size", [1, 2, 7, 24, 101])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_mean_is_that_of_a_plain_loop(world_size, size):
    """Every sample counts once, at any world size, also where ranks get different shares."""
    dataset = Numbers(size)
    with hosted_store() as port:
        answers = run_ranks(_evaluate, world_size, port, dataset, 0)
    for evaluation, _ in answers:
        assert evaluation.loss == pytest.approx(plain_mean(dataset), rel=1e-5)
        assert evaluation.samples == size
        assert evaluation.stop is None
    assert len({evaluation.loss for evaluation, _ in answers}) == 1


def _count(me, port, dataset):
    state = build_state()
    with join(me, port) as group:
        found = run_evaluation(group, state, dataset, Counting(), names=("spread",))
    return found.loss, found.parts


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_weights_and_named_numbers_are_those_of_one_plain_loop(world_size):
    """The sum of all totals over that of all weights, and means over all samples, however they are sharded."""
    dataset = Numbers(37)
    model, task = build_state().model.eval(), Counting()
    with torch.no_grad():
        batches = [tuple(one.unsqueeze(0) for one in dataset[i]) for i in range(len(dataset))]
        found = [task.loss(model, batch) for batch in batches]
    total = sum(float(one.total) for one, _ in found) / sum(float(one.weight) for one, _ in found)
    spread = sum(float(parts["spread"]) for _, parts in found) / len(dataset)
    with hosted_store() as port:
        answers = run_ranks(_count, world_size, port, dataset)
    for loss, parts in answers:
        assert loss == pytest.approx(total, rel=1e-5)
        assert parts == {"spread": pytest.approx(spread, rel=1e-5)}


def test_a_dataset_that_fetches_many_at_once_gives_the_same():
    """``__getitems__`` is only a faster way to the same samples."""
    with hosted_store() as port:
        batched = run_ranks(_evaluate, 2, port, BatchedNumbers(21), 0)
    with hosted_store() as port:
        single = run_ranks(_evaluate, 2, port, Numbers(21), 0)
    assert batched == single


def test_the_batches_per_rank_can_be_limited():
    """A limit is a number of batches on each rank, all of them from the front."""
    with hosted_store() as port:
        for evaluation, calls in run_ranks(_evaluate, 2, port, Numbers(1000), 3):
            assert calls == 3
            assert evaluation.samples == 2 * 3 * BATCH


def test_a_limit_beyond_the_data_changes_nothing():
    """Control: it never invents samples."""
    with hosted_store() as port:
        for evaluation, _ in run_ranks(_evaluate, 2, port, Numbers(9), 50):
            assert evaluation.samples == 9


def _evaluate_until_stopped(me, port, stop):
    state, task = build_state(), MeanSquare()
    asked = 0

    def stop_asked():
        nonlocal asked
        asked += 1
        rank, when, reason = stop
        return reason if me.rank == rank and asked >= when else None

    with join(me, port) as group:
        evaluation = run_evaluation(group, state, Numbers(1000), task, stop_asked=stop_asked)
    return evaluation, task.calls, state.model.training


@pytest.mark.parametrize("reason", [StopReason.PREEMPTED, StopReason.INTERRUPTED])
def test_a_stop_that_one_rank_hears_ends_it_on_all_ranks(reason):
    """They leave after the same round, long before the end, without a figure."""
    with hosted_store() as port:
        answers = run_ranks(_evaluate_until_stopped, 3, port, (1, 2, reason))
    for evaluation, calls, training in answers:
        assert (evaluation.loss, evaluation.stop) == (None, reason)
        assert calls == 2 * BATCHES_PER_ROUND
        assert training


def _look_at_modes(me, port, was_training):
    state, task = build_state(), MeanSquare()
    state.model.train(was_training)
    before = bits_of(state)
    with join(me, port) as group:
        run_evaluation(group, state, Numbers(10), task)
    return task.modes, state.model.training, bits_of(state) == before


@pytest.mark.parametrize("was_training", [True, False])
def test_it_computes_in_eval_mode_without_gradients_and_restores_the_mode(was_training):
    """Batch statistics and weights are untouched."""
    with hosted_store() as port:
        for modes, training, untouched in run_ranks(_look_at_modes, 2, port, was_training):
            assert modes == {(False, False)}
            assert training == was_training
            assert untouched


class _Broken(Numbers):
    def __getitem__(self, index):
        if index == 5:
            raise ValueError("broken image")
        return super().__getitem__(index)


def _evaluate_broken(me):
    state = build_state()
    with join(me, 0) as group, pytest.raises(FaultError) as raised:
        run_evaluation(group, state, _Broken(10), MeanSquare())
    return raised.value.fault.cause, raised.value.fault.step, raised.value.fault.phase


def test_a_bad_validation_sample_is_named_as_one():
    """Its index is one of another dataset; the step is that of training."""
    ((cause, step, phase),) = run_ranks(_evaluate_broken, 1)
    assert cause.startswith("validation sample 5 (epoch 1) could not be loaded: ValueError: broken")
    assert (step, phase) == (3, "evaluate")


class _Raises(MeanSquare):
    def loss(self, model, batch):
        raise RuntimeError("user code")


def _raise_inside(me):
    state = build_state()
    state.model.train()
    with join(me, 0) as group, pytest.raises(RuntimeError, match="user code"):
        run_evaluation(group, state, Numbers(10), _Raises())
    return state.model.training


def test_the_mode_is_restored_when_user_code_raises():
    """The repair that follows trains on."""
    assert run_ranks(_raise_inside, 1) == [True]
