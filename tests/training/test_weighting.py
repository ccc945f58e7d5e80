"""Each sample of the global batch has the same weight, however it is split over ranks and micro-batches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddp_runner.data.loader import SafeDataLoader
from ddp_runner.data.order import SampleOrder
from ddp_runner.training.step import Stepper, StepRules, Votes
from tests.collective.joining import join
from tests.processes import hosted_store, run_ranks

from .building import CPU, build_replica, build_state, make_slot, optim_settings

GLOBAL_BATCH = 8  # its fractions are exact in every floating-point type
STEPS = 3


class Samples(torch.utils.data.Dataset):
    """Double precision, so that a wrong weight cannot hide in rounding."""

    def __len__(self):
        return GLOBAL_BATCH * STEPS

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(5, generator=generator, dtype=torch.float64) * (1 + index)


def _train(me, port, micro_batch_size):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()
    optim = optim_settings(max_grad_norm=None)
    state = build_state(model=model, optim=optim, ema=False)
    loader = SafeDataLoader(
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
        replica = build_replica(
            state, group, loss=lambda model, batch: model(batch).square().mean()
        )
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
            micro_batches = loader.take(step)
            sizes.append([len(one.indices) for one in micro_batches])
            losses.append(stepper.run(micro_batches, votes=Votes()).loss)
    loader.close()
    return sizes[0], losses, [p.detach().clone() for p in model.parameters()]


def train(world_size, micro_batch_size):
    with hosted_store() as port:
        answers = run_ranks(_train, world_size, port, micro_batch_size)
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
