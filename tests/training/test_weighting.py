"""Each sample of the global batch has the same weight, however it is split over ranks and micro-batches."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ddp_runner.data.order import SampleOrder
from ddp_runner.kernel.replica.loss import LossForm, Weighted
from ddp_runner.kernel.step.session import Votes, WrapAgainError
from ddp_runner.training.step import Stepper, StepRules, clip_on_host, gradients_of, norm_on_host
from tests.data.mapped import map_loader
from tests.kernel.group.joining import join
from tests.processes import hosted_store, run_ranks

from .building import (
    CPU,
    MICRO_BATCH,
    as_plain,
    bits_of,
    build_replica,
    build_state,
    build_stepper,
    loss_of,
    make_slot,
    micro_batches,
    optim_settings,
)

GLOBAL_BATCH = 8  # its fractions are exact in every floating-point type
STEPS = 3


class Samples(torch.utils.data.Dataset):
    """Double precision, so that a wrong weight cannot hide in rounding."""

    def __len__(self):
        return GLOBAL_BATCH * STEPS

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(5, generator=generator, dtype=torch.float64) * (1 + index)


def mean_loss(model, batch):
    return model(batch).square().mean()


def token_loss(model, batch):
    """As of padded samples: sample n counts n tokens, those of index 0 and 8 none."""
    counts = (batch[:, 0].abs() * 3).floor()
    total = (model(batch).square().squeeze(1) * counts).sum()
    return Weighted(total, counts.sum()), {"tokens_a_sample": counts.mean()}


def _train(me, port, micro_batch_size, loss=mean_loss):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()
    optim = optim_settings(max_grad_norm=None)
    state = build_state(model=model, optim=optim, ema=False)
    loader = map_loader(
        Samples(),
        order=SampleOrder(
            seed=1, dataset_size=GLOBAL_BATCH * STEPS, global_batch_size=GLOBAL_BATCH
        ),
        rank=me.rank,
        world_size=me.world_size,
        total_steps=STEPS,
        micro_batch_size=micro_batch_size,
        seed=1,
        num_workers=0,
    )
    sizes, losses = [], []
    with join(me, port) as group:
        replica = build_replica(state, group, loss=loss)
        rules = StepRules(
            seed=1,
            rank=me.rank,
            global_batch=GLOBAL_BATCH,
            total_steps=STEPS,
            optim=optim,
            device=CPU,
        )
        stepper = Stepper(state, replica, rules=rules, slot=make_slot())
        for step in range(STEPS):
            taken = loader.take(step)
            sizes.append([len(one.indices) for one in taken])
            try:
                result = stepper.run(taken, votes=Votes())
            except WrapAgainError:  # as TaskSteps does, once the parts of the loss are known
                state.drop_unfinished_step()
                replica.close()
                replica = build_replica(state, group, loss=loss, form=state.tuning.loss_form)
                stepper = Stepper(state, replica, rules=rules, slot=make_slot())
                result = stepper.run(taken, votes=Votes())
            losses.append((result.loss, *result.parts.values()))
    loader.close()
    weights = [p.detach().clone() for p in model.parameters()]
    return sizes[0], losses if loss is token_loss else [one for one, *_ in losses], weights


def train(world_size, micro_batch_size, *how):
    with hosted_store() as port:
        answers = run_ranks(_train, world_size, port, micro_batch_size, *how)
    return [answer[0] for answer in answers], *answers[0][1:]


@pytest.fixture(scope="module")
def undivided():
    """All eight samples at once on one rank."""
    sizes, losses, weights = train(1, 8)
    assert sizes == [[8]]
    return losses, weights


@pytest.mark.parametrize(
    ("world_size", "micro_batch_size", "expected"),
    [
        (1, 3, [[3, 3, 2]]),
        (2, 3, [[2, 2], [2, 2]]),
        (3, 8, [[3], [3], [2]]),
        (3, 2, [[2, 1], [2, 1], [2]]),
        (3, 1, [[1, 1, 1], [1, 1, 1], [1, 1]]),
    ],
)
def test_every_split_of_the_global_batch_trains_the_same(
    undivided, world_size, micro_batch_size, expected
):
    """Uneven shares and uneven micro-batches too: equal but for the rounding of doubles."""
    sizes, losses, weights = train(world_size, micro_batch_size)
    assert sizes == expected
    assert losses == pytest.approx(undivided[0], rel=1e-6)  # reported in single precision
    for found, whole in zip(weights, undivided[1], strict=True):
        torch.testing.assert_close(found, whole, rtol=1e-11, atol=1e-12)


@pytest.fixture(scope="module")
def undivided_tokens():
    """The same of a loss with a weight."""
    _, losses, weights = train(1, 8, token_loss)
    return losses, weights


@pytest.mark.parametrize(("world_size", "micro_batch_size"), [(1, 3), (2, 1), (3, 2)])
def test_tokens_count_right_however_a_step_is_cut(undivided_tokens, world_size, micro_batch_size):
    """The sum of totals over the sum of weights, as of one big batch; numbers beside it by samples."""
    _, losses, weights = train(world_size, micro_batch_size, token_loss)
    for found, whole in zip(losses, undivided_tokens[0], strict=True):
        assert found == pytest.approx(whole, rel=1e-6)
    for found, whole in zip(weights, undivided_tokens[1], strict=True):
        torch.testing.assert_close(found, whole, rtol=1e-11, atol=1e-12)


def test_a_weighted_loss_is_the_total_over_the_weight(undivided_tokens):
    """Computed by hand, of the first step."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()
    order = SampleOrder(seed=1, dataset_size=GLOBAL_BATCH * STEPS, global_batch_size=GLOBAL_BATCH)
    batch = torch.stack([Samples()[index] for index in map(int, order.indices(0))])
    counts = (batch[:, 0].abs() * 3).floor()
    loss = (model(batch).square().squeeze(1) * counts).sum() / counts.sum()
    assert undivided_tokens[0][0] == pytest.approx((loss.item(), counts.mean().item()), rel=1e-6)


def _counted(me, port, before, weight):
    state = build_state(ema=False)
    state.tokens, state.samples = before, 80
    state.tuning = state.tuning.with_loss_form(LossForm(is_weighted=weight is not None))

    def loss(model, batch):
        mean = loss_of(model, batch)
        return mean if weight is None else Weighted(mean * weight, weight)

    with join(me, port) as group:
        replica = build_replica(state, group, loss=loss, form=state.tuning.loss_form)
        stepper = build_stepper(state, replica, rank=0, world_size=1, tokens=5.0)
        stepper.run(micro_batches(0, 0), votes=Votes())
    return state.tokens


@pytest.mark.parametrize(
    ("before", "weight", "after"),
    [
        (36.0, None, 36.0 + 5 * MICRO_BATCH),  # of a stage before, with samples of another length
        (None, None, 5 * (80 + MICRO_BATCH)),  # a checkpoint that counted none
        (36.0, 7.0, 43.0),  # the loss counts for itself
    ],
)
def test_tokens_in_all_go_on_from_those_before(before, weight, after):
    """By what the task says of a sample, where its loss has no weight."""
    with hosted_store() as port:
        assert run_ranks(_counted, 1, port, before, weight) == [after]


def _without_weight(me, port):
    state = build_state(ema=False)
    state.tuning = state.tuning.with_loss_form(LossForm(is_weighted=True))
    before = bits_of(state)["model"]
    with join(me, port) as group:
        replica = build_replica(
            state,
            group,
            loss=lambda model, batch: Weighted(loss_of(model, batch) * 0, 0.0),
            form=state.tuning.loss_form,
        )
        stepper = build_stepper(state, replica, rank=me.rank, world_size=me.world_size)
        result = stepper.run(micro_batches(0, me.rank), votes=Votes())
    return result.applied, result.without_weight, state.tokens, bits_of(state)["model"] == before


def test_a_step_without_any_weight_is_skipped():
    """There is no mean of nothing; no weight and no statistic has changed."""
    with hosted_store() as port:
        assert run_ranks(_without_weight, 2, port) == [(False, True, 0.0, True)] * 2


@pytest.mark.parametrize("scale", [0.01, 1.0, 40.0, float("nan"), float("inf")])
def test_gradients_on_the_host_are_clipped_as_torch_clips_them(scale):
    """Norm and gradients to the bit: below the limit, about it, above it, and where it is no number."""
    torch.manual_seed(1)
    ours = [nn.Parameter(torch.zeros(size)) for size in ((3, 5), (7,), (1,))]
    for one in ours:
        one.grad = torch.randn(one.shape) * scale
    theirs = copy.deepcopy(ours)
    for one, other in zip(theirs, ours, strict=True):
        one.grad = other.grad.clone()
    norm = norm_on_host(gradients_of(ours))
    clip_on_host(ours, 4.0, norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs, 4.0)
    assert as_plain([norm, *gradients_of(ours)]) == as_plain([expected, *gradients_of(theirs)])
