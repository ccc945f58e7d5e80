"""Sums of gradients in another type: rounded as asked for, signals whole, the same on all ranks."""

from __future__ import annotations

import pytest
import torch

from ddp_runner.collective.replica import Signal
from tests.processes import hosted_store, run_ranks

from .joining import join
from .test_replica import (
    _accumulate_once,
    _sum_gradients,
    fresh_model,
    gradients,
    make_replica,
    no_votes,
)

AS_TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("name", sorted(AS_TORCH))
@pytest.mark.parametrize("unused", [True, False])
def test_gradients_are_summed_in_the_type_asked_for(name, unused):
    """Each number is a sum of rounded ones; loss and votes have all the bits that they have without."""
    options = {"find_unused_parameters": unused}
    with hosted_store() as port:
        plain = run_ranks(_sum_gradients, 2, port, options, 2)
    with hosted_store() as port:
        found = run_ranks(_sum_gradients, 2, port, {**options, "gradient_dtype": name}, 2)
    assert found[0][1] == plain[0][1] == found[1][1], "signals"
    for one, other, exact in zip(found[0][0], found[1][0], plain[0][0], strict=True):
        assert torch.equal(one, other)
        rounded = one.to(AS_TORCH[name]).to(one.dtype)
        assert torch.equal(one, rounded), "it has come in that type"
        torch.testing.assert_close(one, exact, rtol=2e-2, atol=1e-4)
        assert torch.equal(one, exact) == (name == "fp32")


def _odd_votes(me, port, name):
    model = fresh_model()
    votes = no_votes()
    votes[Signal.SAVE] = float("nan") if me.rank == 0 else 1e30
    votes[Signal.PREEMPT] = 2.0**-140 * (me.rank + 1)
    votes[Signal.INTERRUPT] = 16_777_213.0 if me.rank == 1 else 0.0
    with join(me, port) as group:
        replica = make_replica(model, group, gradient_dtype=name)
        _accumulate_once(replica, me.rank, 1, votes=votes)
        return replica.signals()[0], gradients(model)


def test_signals_that_a_half_type_does_not_have_come_whole():
    """NaN, what is far too large or small for fp16, and whole numbers of 24 bits."""
    with hosted_store() as port:
        found = run_ranks(_odd_votes, 2, port, "fp16")
    for signals, summed in found:
        assert signals[Signal.SAVE] != signals[Signal.SAVE], "not a number"
        assert signals[Signal.PREEMPT] == 3 * 2.0**-140
        assert signals[Signal.INTERRUPT] == 16_777_213.0
        assert all(torch.isfinite(gradient).all() for gradient in summed)
