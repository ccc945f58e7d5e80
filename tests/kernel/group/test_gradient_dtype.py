"""Sums of gradients in another type: rounded as asked for, signals whole, the same on all ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ddp_runner.kernel.replica.bucket_sums import BucketSums
from ddp_runner.kernel.replica.replica import Signal
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


class OfOneDevice:
    """A group of one rank, as one whose device waits for its sums. A sum is what the rank has sent."""

    ends_in_silence, rank, world_size = True, 0, 1

    def refuse_aborted(self):
        pass

    def begin_sum(self, tensor):
        future = torch.futures.Future()
        future.set_result([tensor])
        return SimpleNamespace(get_future=lambda: future)


class HandMade:
    """A bucket of ``parameters``, which lie in ``memory`` in this order."""

    def __init__(self, memory, parameters):
        self.buffer, self.parameters = lambda: memory, lambda: parameters
        self.index, self.is_last = lambda: 0, lambda: True


def test_signals_are_whole_in_a_bucket_where_another_one_was():
    """DDP lays its buckets out again, and a GPU's memory may be given to another one of the same size at once."""
    signal, weight = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    sums = BucketSums(
        OfOneDevice(), signal, not_all_used=1, gradient_dtype="bf16", on_begun=lambda: None
    )
    memory = torch.empty(6)
    for parameters in ([signal, weight], [weight, signal]):
        memory.fill_(4097.0)  # beyond bfloat16
        sums.begin(HandMade(memory, parameters)).wait()
        found = dict(zip(map(id, parameters), memory.split(3), strict=True))
        assert found[id(signal)].tolist() == [4097.0] * 3
        assert found[id(weight)].tolist() == [4096.0] * 3
