"""The control of all that a run may have besides: with none of it, ranks compute what a loop by hand does."""

from __future__ import annotations

import pytest
import torch

from ddp_runner.kernel.step.session import Votes
from ddp_runner.training.components.lr_schedule import learning_rate
from ddp_runner.values.generators import seed_step
from tests.kernel.group.joining import join
from tests.processes import hosted_store, run_ranks

from .building import (
    MICRO_BATCH,
    TOTAL_STEPS,
    build_model,
    build_replica,
    build_state,
    build_stepper,
    loss_of,
    micro_batches,
    optim_settings,
)

STEPS, RANKS = 4, 2


def _by_hand(me, micro_steps):
    """Each rank's gradient by itself, and their sum; batch statistics are those of rank 0."""
    model = build_model()
    every, optim = list(model.parameters()), optim_settings()
    groups = [
        {"params": [p for p in every if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in every if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(optim.beta1, optim.beta2), fused=True)
    parameters = [p for group in groups for p in group["params"]]
    for step in range(STEPS):
        own = [gradients_of(model, step, rank, micro_steps) for rank in reversed(range(RANKS))]
        for parameter, *parts in zip(every, *own, strict=True):
            parameter.grad = sum(parts[1:], start=parts[0])
        torch.nn.utils.clip_grad_norm_(parameters, optim.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, total_steps=TOTAL_STEPS, settings=optim)
        optimizer.step()
    assert me.rank == 0
    return {name: one.clone() for name, one in model.state_dict().items()}


def gradients_of(model, step, rank, micro_steps):
    buffers = [one.clone() for one in model.buffers()]
    model.zero_grad()
    taken = micro_batches(step, rank, micro_steps=micro_steps)
    for number, one in enumerate(taken):
        seed_step(seed=7, step=step, rank=rank, micro_step=number)
        share = MICRO_BATCH / (MICRO_BATCH * micro_steps * RANKS)
        (loss_of(model, one.batch) * share).backward()
    if rank != 0:
        for buffer, was in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(was)
    return [one.grad for one in model.parameters()]


def _train(me, port, micro_steps):
    state = build_state(ema=False)
    with join(me, port) as group:
        how = {"rank": me.rank, "world_size": me.world_size, "micro_steps": micro_steps}
        stepper = build_stepper(state, build_replica(state, group), **how)
        for step in range(STEPS):
            stepper.run(micro_batches(step, me.rank, micro_steps=micro_steps), votes=Votes())
    return {name: one.clone() for name, one in state.weights().items()}


@pytest.mark.parametrize("micro_steps", [1, 4])
def test_two_ranks_train_to_the_bits_of_a_loop(micro_steps):
    """Dropout, batch statistics, clipping and schedule included; whole, and accumulated in four."""
    (expected,) = run_ranks(_by_hand, 1, micro_steps)  # with the threads of a rank
    with hosted_store() as port:
        answers = run_ranks(_train, RANKS, port, micro_steps)
    for weights in answers:
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], one) for name, one in expected.items())
