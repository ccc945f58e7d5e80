"""The step and its commit, on real gloo ranks: agreed, exact, and nothing half done."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ddp_runner.kernel.group.abort import AbortSwitch
from ddp_runner.kernel.rules.exits import StopReason
from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.kernel.step.session import Votes
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.training.components.loss_spikes import LossSpikes
from ddp_runner.training.exactness.own_share import OwnShare, first_difference
from ddp_runner.training.loading.batch_copy import to_device
from ddp_runner.training.step import Stepper, StepRules, own_share
from tests.kernel.group.joining import join
from tests.processes import hosted_store, run_ranks

from .building import (
    CPU,
    MICRO_BATCH,
    TOTAL_STEPS,
    bits_of,
    build_model,
    build_replica,
    build_state,
    build_stepper,
    make_slot,
    micro_batches,
    optim_settings,
)

NO_VOTES = Votes()


def train(me, group, state, steps, *, micro_steps=1, **ddp):
    """Steps ``steps`` on a fresh replica; their results."""
    replica = build_replica(state, group, **ddp)
    stepper = build_stepper(
        state, replica, rank=me.rank, world_size=me.world_size, micro_steps=micro_steps
    )
    return [
        stepper.run(micro_batches(step, me.rank, micro_steps=micro_steps), votes=NO_VOTES)
        for step in steps
    ]


def _train_in_peace(me, port, world_size, micro_steps):
    state = build_state()
    with join(me, port) as group:
        results = train(me, group, state, range(4), micro_steps=micro_steps)
    return results, bits_of(state)


@pytest.mark.parametrize("micro_steps", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_step_has_the_same_result_and_weights_on_every_rank(world_size, micro_steps):
    """Loss, gradient norm, rate and all state are the same bits everywhere, and the loss falls."""
    with hosted_store() as port:
        answers = run_ranks(_train_in_peace, world_size, port, world_size, micro_steps)
    results, bits = answers[0]
    assert all(other == (results, bits) for other in answers[1:])
    assert [result.step for result in results] == [1, 2, 3, 4]
    assert all(
        result.applied and result.wanted.stop is None and not result.wanted.save
        for result in results
    )
    assert all(result.grad_norm > 0 and math.isfinite(result.loss) for result in results)
    assert bits["counters"]["samples"] == 4 * MICRO_BATCH * micro_steps * world_size


def _mean_loss_of_one_step(me, port):
    state = build_state()
    with torch.no_grad():
        state.model.eval()
        model = state.model
        expected = sum(
            float(torch.nn.functional.mse_loss(model(batch.batch[0]), batch.batch[1]))
            for batch in micro_batches(0, me.rank, micro_steps=2)
        )

    def loss_in_eval_mode(module, batch):
        module.eval()
        return torch.nn.functional.mse_loss(module(batch[0]), batch[1])

    with join(me, port) as group:
        replica = build_replica(state, group, loss=loss_in_eval_mode)
        stepper = build_stepper(
            state, replica, rank=me.rank, world_size=me.world_size, micro_steps=2
        )
        result = stepper.run(micro_batches(0, me.rank, micro_steps=2), votes=NO_VOTES)
    return expected, result.loss


def test_the_loss_is_the_mean_over_the_global_batch():
    """However many ranks and micro-batches share it."""
    with hosted_store() as port:
        answers = run_ranks(_mean_loss_of_one_step, 3, port)
    mean = sum(own for own, _ in answers) / 6
    assert all(loss == pytest.approx(mean, rel=1e-5) for _, loss in answers)


def _one_rank_is_poisoned(me, port, poison):
    state = build_state()
    with join(me, port) as group:
        replica = build_replica(state, group)
        stepper = build_stepper(state, replica, rank=me.rank, world_size=me.world_size)
        stepper.run(micro_batches(0, me.rank), votes=NO_VOTES)
        before = bits_of(state)
        mine = poison if me.rank == 1 else 0.0
        skipped = stepper.run(micro_batches(1, me.rank, poison=mine), votes=NO_VOTES)
        after = bits_of(state)
        resumed = stepper.run(micro_batches(2, me.rank), votes=NO_VOTES)
    return before, skipped, after, resumed


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_loss_not_finite_on_one_rank_is_skipped_by_all(poison):
    """No weight, optimizer state or average changes; the step counts, and the next one works."""
    with hosted_store() as port:
        answers = run_ranks(_one_rank_is_poisoned, 3, port, poison)
    for before, skipped, after, resumed in answers:
        assert not skipped.applied
        assert skipped.step == 2
        for untouched in ("model", "optimizer", "ema"):
            assert after[untouched] == before[untouched]
        assert after["counters"]["committed_step"] == 2
        assert resumed.applied
        assert resumed.step == 3
    assert len({repr(answer[2]) for answer in answers}) == 1


def _one_step_explodes(me, port, ranks):
    """Seven usual steps, so that there is something to compare with; then one that is not."""
    state = build_state()
    with join(me, port) as group:
        replica = build_replica(state, group)
        stepper = build_stepper(state, replica, rank=me.rank, world_size=me.world_size)
        for step in range(7):
            stepper.run(micro_batches(step, me.rank), votes=NO_VOTES)
        before = bits_of(state)
        mine = 1e5 if me.rank in ranks else 0.0
        skipped = stepper.run(micro_batches(7, me.rank, poison=mine), votes=NO_VOTES)
        after = bits_of(state)
        resumed = stepper.run(micro_batches(8, me.rank), votes=NO_VOTES)
    same = all(before[part] == after[part] for part in ("model", "optimizer", "ema", "explosions"))
    return same, skipped, resumed.applied


@pytest.mark.parametrize("ranks", [(1,), (0, 1, 2)], ids=["one rank", "every rank"])
def test_a_loss_that_explodes_is_skipped_by_all_and_its_ranks_named(ranks):
    """Before the optimizer, without a trace in the state; the next step works."""
    with hosted_store() as port:
        answers = run_ranks(_one_step_explodes, 3, port, ranks)
    for untouched, skipped, resumed in answers:
        assert untouched
        assert not skipped.applied
        assert "has exploded" in skipped.explosion
        assert skipped.broken_ranks == ranks
        assert resumed


def _rates_after_an_explosion(me, port):
    """The learning rates of two runs, of which one lowers its rate at the explosion of its fourth step."""
    found = []
    for factor in (1.0, 0.5):
        state = build_state()
        state.loss_spikes = LossSpikes(
            window=0,
            loss_factor=10.0,
            grad_factor=100.0,
            warmup_steps=1,
            loss_max=1e4,
            rate_factor=factor,
            recover_steps=4,
        )
        with join(me, port, generation=len(found) + 1) as group:
            replica = build_replica(state, group)
            stepper = build_stepper(state, replica, rank=me.rank, world_size=me.world_size)
            poisons = {3: 1e6 if me.rank == 1 else 0.0}
            results = [
                stepper.run(
                    micro_batches(step, me.rank, poison=poisons.get(step, 0.0)), votes=NO_VOTES
                )
                for step in range(9)
            ]
        assert [result.applied for result in results] == [step != 3 for step in range(9)]
        assert "above explosion_loss_max" in results[3].explosion
        found.append([result.learning_rate for result in results])
    return found


def test_an_explosion_lowers_the_rates_of_the_steps_behind_it():
    """On all ranks alike, and back in equal parts; the control trains at the schedule's."""
    with hosted_store() as port:
        (usual, lowered), other = run_ranks(_rates_after_an_explosion, 2, port)
    assert other == [usual, lowered]
    shares = [one / all_of_it for one, all_of_it in zip(lowered, usual, strict=True)]
    assert shares == pytest.approx([1, 1, 1, 1, 0.625, 0.75, 0.875, 1, 1])


def _every_micro_batch_of_one_rank_is_poisoned(me, port):
    state = build_state()
    with join(me, port) as group:
        replica = build_replica(state, group)
        stepper = build_stepper(
            state, replica, rank=me.rank, world_size=me.world_size, micro_steps=3
        )
        mine = math.nan if me.rank == 1 else 0.0
        bad = stepper.run(micro_batches(0, me.rank, micro_steps=3, poison=mine), votes=NO_VOTES)
        again = stepper.run(micro_batches(1, me.rank, micro_steps=3, poison=mine), votes=NO_VOTES)
    return bad.broken_ranks, again.broken_ranks


def test_the_broken_rank_is_named_however_many_micro_batches_it_has():
    """Micro-batches add their signals up; a rank counts once a step, and again in the next."""
    with hosted_store() as port:
        answers = run_ranks(_every_micro_batch_of_one_rank_is_poisoned, 3, port)
    assert answers == [((1,), (1,))] * 3


def _gradient_explodes(me, port):
    """The loss stays finite, the gradient does not."""
    state = build_state()

    def loss(model, batch):
        value = model(batch[0]).square().mean()
        return torch.where(value > -1.0, value, value) + torch.sqrt(value * 0.0)

    with join(me, port) as group:
        replica = build_replica(state, group, loss=loss)
        stepper = build_stepper(state, replica, rank=me.rank, world_size=me.world_size)
        before = bits_of(state)["optimizer"]
        result = stepper.run(micro_batches(0, me.rank), votes=NO_VOTES)
        return result.applied, math.isfinite(result.loss), bits_of(state)["optimizer"] == before


def test_a_gradient_that_is_not_finite_is_skipped_too():
    """The loss alone would not show it."""
    with hosted_store() as port:
        assert run_ranks(_gradient_explodes, 2, port) == [(False, True, True)] * 2


def _gradient_of_one_rank_is_broken(me, port, recomputes, finds_unused):
    """Rank 1's own gradient at step 1; then who says so, and where a next step leads."""
    state = build_state()

    def loss(model, batch):
        # A reentrant checkpoint works with plain backward only, and not where DDP looks for unused ones.
        def made(inputs):
            return torch.nn.functional.mse_loss(model(inputs), batch[1])

        inputs = batch[0] if finds_unused else batch[0].requires_grad_()
        value = made(inputs) if finds_unused else checkpoint(made, inputs, use_reentrant=True)
        return value + torch.sqrt(value * 0.0) if batch[2] else value

    def given(step):
        return micro_batches(step, me.rank, micro_steps=2, poison=float(me.rank == step == 1))

    with join(me, port) as group:
        replica = build_replica(state, group, loss=loss, find_unused_parameters=finds_unused)
        stepper = build_stepper(
            state, replica, rank=me.rank, world_size=me.world_size, micro_steps=2
        )
        stepper.run(given(0), votes=NO_VOTES)
        result = stepper.run(given(1), votes=NO_VOTES)
        norm = stepper.own_gradient_norm(given(1)) if recomputes else 0.0
        stepper.run(given(2), votes=NO_VOTES)
        return result.applied, result.broken_ranks, math.isfinite(norm), bits_of(state)


@pytest.mark.parametrize("finds_unused", [True, False])
def test_a_broken_gradient_computed_again_names_its_rank_without_trace(finds_unused):
    """The sum over ranks does not show whose it was; what follows is as if nobody had asked."""
    with hosted_store() as port:
        asked = run_ranks(_gradient_of_one_rank_is_broken, 3, port, True, finds_unused)
    with hosted_store() as port:
        unasked = run_ranks(_gradient_of_one_rank_is_broken, 3, port, False, finds_unused)
    assert [answer[:3] for answer in asked] == [
        (False, (), True), (False, (), False), (False, (), True)
    ]  # fmt: skip
    assert [answer[3] for answer in asked] == [answer[3] for answer in unasked]


def test_a_skipped_step_is_not_recomputed_from_local_state():
    """It would begin with what that step has left: another gradient, and a healthy device suspected."""
    kept = SimpleNamespace(local=SimpleNamespace(names=("env",)), committed_step=1)
    share = SimpleNamespace(compute=lambda *_, **__: pytest.fail("it is computed"))
    assert Stepper.own_gradient_norm(SimpleNamespace(_state=kept, _share=share), []) is None


def _abort_before_the_commit(me, port, ends_in_silence):
    """Where the reduction is over: a wait for a copy of the weights ends, and an abort has come."""
    state, switch, slot = build_state(), AbortSwitch(), make_slot()
    before = bits_of(state)
    outcome = "committed"
    try:
        with join(me, port, switch=switch) as group:
            group.ends_in_silence = ends_in_silence
            replica = build_replica(state, group)
            stepper = build_stepper(
                state, replica, rank=me.rank, world_size=me.world_size, slot=slot
            )
            state.readers.append(switch.trip)
            stepper.run(micro_batches(0, me.rank), votes=NO_VOTES)
    except ConnectionError as error:
        outcome = str(error)
    state.readers.clear()
    state.drop_unfinished_step()
    return outcome, slot.get(Cell.DIRTY), bits_of(state) == before


@pytest.mark.parametrize(
    ("ends_in_silence", "expected"),
    [
        (True, ("aborted before the device had finished", 0, True)),
        (False, ("committed", 0, False)),
    ],
    ids=["NCCL's abort", "gloo's abort"],
)
def test_a_step_that_an_abort_may_have_cut_short_is_not_committed(ends_in_silence, expected):
    """And leaves no trace; where the collectives would have said so themselves it is whole."""
    with hosted_store() as port:
        answers = run_ranks(_abort_before_the_commit, 2, port, ends_in_silence)
    assert answers == [expected] * 2


def _abort_while_buffers_are_shared(me, port):
    """The sum is whole; the abort comes while the device has rank 0's running statistics to receive."""
    state, switch, slot = build_state(), AbortSwitch(), make_slot()
    before = bits_of(state)
    with pytest.raises(ConnectionError), join(me, port, switch=switch) as group:  # noqa: PT012
        group.ends_in_silence = True
        group.finish_on_device = switch.trip
        replica = build_replica(state, group)
        stepper = build_stepper(state, replica, rank=me.rank, world_size=me.world_size, slot=slot)
        stepper.run(micro_batches(0, me.rank), votes=NO_VOTES)
    state.drop_unfinished_step()
    return state.committed_step, slot.get(Cell.DIRTY), bits_of(state) == before


def test_a_step_whose_buffers_an_abort_cut_is_not_committed():
    """They are broadcast after the device was looked at: it has ended them before the step is confirmed."""
    with hosted_store() as port:
        answers = run_ranks(_abort_while_buffers_are_shared, 2, port)
    assert answers == [(0, 0, True)] * 2


class _AssignsStatistics(torch.nn.Module):
    """Its moving mean is a new tensor at each forward."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 1)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("own", torch.zeros(1), persistent=False)

    def forward(self, inputs):
        self.mean = 0.9 * self.mean + 0.1 * inputs.mean(0)
        self.own = inputs[: torch.distributed.get_rank() + 1]  # of another shape on each rank
        return self.layer(inputs - self.mean)


def _train_with_assigned_statistics(me, port):
    torch.manual_seed(3)
    state, means = build_state(model=_AssignsStatistics()), []
    with join(me, port) as group:
        replica = build_replica(state, group)
        stepper = build_stepper(state, replica, rank=me.rank, world_size=me.world_size)
        for step, poison in enumerate((0.0, 0.0, math.nan, 0.0)):
            stepper.run(micro_batches(step, me.rank, poison=poison), votes=NO_VOTES)
            means.append(state.model.mean.tolist())
    return means, bits_of(state)


def test_buffers_that_a_module_assigns_again_are_rank_0_s_everywhere():
    """Its state is the same on all ranks after each commit, and a skipped step leaves it alone."""
    with hosted_store() as port:
        first, other = run_ranks(_train_with_assigned_statistics, 2, port)
    assert first == other
    means, _ = first
    assert means[1] == means[2]
    assert means[0] != means[1] != means[3]


class _Branches(torch.nn.Module):
    """Uses one of two layers at a time, as a mixture of experts does."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(6, 1), torch.nn.Linear(6, 1)])

    def forward(self, inputs, branch):
        return self.layers[branch](inputs)


def _branches_change_after_a_broken_gradient(me, port, recomputes):
    """Layer 0 up to step 1, whose gradient is broken on rank 1; layer 1 alone from there on."""
    torch.manual_seed(3)
    state = build_state(model=_Branches())
    step = 0

    def loss(model, batch):
        value = torch.nn.functional.mse_loss(model(batch[0], int(step > 1)), batch[1])
        return value + torch.sqrt(value * 0.0) if batch[2] else value

    with join(me, port) as group:
        replica = build_replica(state, group, loss=loss)
        stepper = build_stepper(
            state, replica, rank=me.rank, world_size=me.world_size, micro_steps=2
        )
        applied, norm = [], 0.0
        for step in range(4):
            given = micro_batches(step, me.rank, micro_steps=2, poison=float(me.rank == step == 1))
            applied.append(stepper.run(given, votes=NO_VOTES).applied)
            if recomputes and not applied[-1]:
                norm = stepper.own_gradient_norm(given)
    return applied, math.isfinite(norm), bits_of(state)


def test_a_step_with_other_parameters_than_the_repeated_one_works():
    """What DDP notes as used is of the step that it reduces, never of a look at one before."""
    with hosted_store() as port:
        asked = run_ranks(_branches_change_after_a_broken_gradient, 2, port, True)
    with hosted_store() as port:
        unasked = run_ranks(_branches_change_after_a_broken_gradient, 2, port, False)
    assert [answer[:2] for answer in asked] == [
        ([True, False, True, True], rank == 0) for rank in (0, 1)
    ]
    assert [answer[2] for answer in asked] == [answer[2] for answer in unasked]


class _Steep(torch.autograd.Function):
    """Its gradient is close to what a float can hold."""

    @staticmethod
    def forward(ctx, value):
        del ctx
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        del ctx
        return gradient * (torch.finfo(torch.float32).max * 0.9)


def _overflows(me, port, scale, breaks):
    state = build_state(ema=False)
    state.precision.scaler = torch.amp.GradScaler("cpu", init_scale=scale)

    def loss(model, batch):
        value = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
        if breaks == "loss":
            return value * float("nan")
        if breaks == "norm":  # the square of a gradient that is finite, also when scaled, is not
            return value + 1e25 * model[0].bias.sum()
        # Of every rank: so steep that two of them overflow even without a scale.
        return value + 3 * _Steep.apply(model[0].bias.sum()) if breaks == "steep" else value

    with join(me, port) as group:
        replica = build_replica(state, group, loss=loss)
        stepper = build_stepper(state, replica, rank=me.rank, world_size=me.world_size)
        result = stepper.run(micro_batches(0, me.rank), votes=NO_VOTES)
        return result.applied, result.overflowed, state.precision.scaler.get_scale()


@pytest.mark.parametrize(
    ("scale", "breaks", "expected"),
    [
        (1024.0, "steep", (False, True, 512.0)),
        (1.0, "steep", (False, False, 0.5)),
        (1024.0, "loss", (False, False, 512.0)),
        (1024.0, "norm", (False, False, 1024.0)),
        (1024.0, "nothing", (True, False, 1024.0)),
    ],
    ids=["scale too high", "no scale left", "loss not finite", "norm too large", "fault-free"],
)
def test_an_overflow_in_fp16_is_the_scaler_s_while_it_scales(scale, breaks, expected):
    """The scale falls and nothing is wrong; a loss that is no number is not a matter of the scale."""
    with hosted_store() as port:
        assert run_ranks(_overflows, 2, port, scale, breaks) == [expected] * 2


def _train_scaled(me, port, scale):
    state = build_state()
    if scale is not None:
        state.precision.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    with join(me, port) as group:
        results = train(me, group, state, range(4), micro_steps=2)
    assert {result.loss_scale for result in results} == {scale}
    results = [dataclasses.replace(result, loss_scale=None) for result in results]
    return results, {**bits_of(state), "scaler": None}


def test_a_loss_scale_that_fits_changes_no_bit():
    """A power of two; norm, signals and weights are those of a step without it."""
    answers = []
    for scale in (None, 1024.0):
        with hosted_store() as port:
            answers += run_ranks(_train_scaled, 2, port, scale)
    assert all(answer == answers[0] for answer in answers[1:])


def _vote(me, port, votes):
    state = build_state()
    with join(me, port) as group:
        replica = build_replica(state, group)
        stepper = build_stepper(
            state, replica, rank=me.rank, world_size=me.world_size, micro_steps=2
        )
        batches = micro_batches(0, me.rank, micro_steps=2)
        result = stepper.run(batches, votes=votes[me.rank])
        quiet = stepper.run(batches, votes=NO_VOTES)
    return tuple((one.wanted.stop, one.wanted.save) for one in (result, quiet))


PREEMPT = Votes(stop=StopReason.PREEMPTED)
INTERRUPT = Votes(stop=StopReason.INTERRUPTED)


@pytest.mark.parametrize(
    ("votes", "agreed"),
    [
        ((NO_VOTES, NO_VOTES), (None, False)),
        ((NO_VOTES, Votes(save=True)), (None, True)),
        ((PREEMPT, NO_VOTES), (StopReason.PREEMPTED, False)),
        ((PREEMPT, INTERRUPT), (StopReason.INTERRUPTED, False)),
        ((INTERRUPT, Votes(save=True)), (StopReason.INTERRUPTED, True)),
    ],
)
def test_one_rank_s_vote_is_every_rank_s_decision(votes, agreed):
    """All learn it in the same step; an interrupt weighs most; the next step has no votes."""
    with hosted_store() as port:
        for decided, afterwards in run_ranks(_vote, 2, port, votes):
            assert decided == agreed
            assert afterwards == (None, False)


def _train_with_breaks(me, port, breaks, ddp):
    """Six steps, with a new generation and replica before each step in ``breaks``."""
    state = build_state()
    results = []
    bounds = [0, *breaks, 6]
    for generation, (first, last) in enumerate(itertools.pairwise(bounds), start=1):
        with join(me, port, generation=generation) as group:
            results += train(me, group, state, range(first, last), **ddp)
    return results, bits_of(state)


@pytest.mark.parametrize("gradient_as_bucket_view", [True, False])
@pytest.mark.parametrize("find_unused_parameters", [True, False])
def test_rebuilding_the_replica_changes_no_bit(find_unused_parameters, gradient_as_bucket_view):
    """Three ranks, where the order of a sum shows: broken twice or never, the same weights."""
    ddp = {
        "find_unused_parameters": find_unused_parameters,
        "gradient_as_bucket_view": gradient_as_bucket_view,
    }
    with hosted_store() as port:
        fault_free = run_ranks(_train_with_breaks, 3, port, (), ddp)
    with hosted_store() as port:
        broken = run_ranks(_train_with_breaks, 3, port, (1, 4), ddp)
    assert fault_free == broken


def _settle_only(me, port):
    state = build_state()
    with join(me, port) as group:
        replica = build_replica(state, group, find_unused_parameters=False, static_graph=True)
        stepper = build_stepper(state, replica, rank=me.rank, world_size=me.world_size)
        before = bits_of(state)
        stepper.settle(micro_batches(0, me.rank))
        gradients = [p.grad for p in state.model.parameters() if p.grad is not None]
        return bits_of(state) == before, len(gradients)


def test_settling_leaves_no_trace_in_the_state():
    """Weights, batch statistics and counters are as before; the gradients are gone."""
    with hosted_store() as port:
        assert run_ranks(_settle_only, 2, port) == [(True, 0)] * 2


def _fail_on_one_rank_then_redo(me, port, fails):
    """Step 1 is begun twice: the first time rank 1's forward raises after it changed statistics."""
    state = build_state()
    trouble = [fails and me.rank == 1]

    def loss(model, batch):
        value = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
        if trouble[0] and state.committed_step == 1:
            trouble[0] = False
            raise RuntimeError("user code")
        return value

    def train_to_the_end(generation):
        with (
            join(me, port, generation=generation) as group,
            contextlib.closing(build_replica(state, group, loss=loss)) as replica,
        ):
            stepper = build_stepper(
                state, replica, rank=me.rank, world_size=me.world_size, micro_steps=2
            )
            while state.committed_step < 3:
                batches = micro_batches(state.committed_step, me.rank, micro_steps=2)
                results.append(stepper.run(batches, votes=NO_VOTES))

    generation, results = 1, []
    if fails:
        with pytest.raises(RuntimeError):
            train_to_the_end(generation)
        state.drop_unfinished_step()
        generation = 2
    train_to_the_end(generation)
    return generation, results, bits_of(state)


def test_a_step_that_broke_is_redone_to_the_same_bits():
    """Gradients and batch statistics of the broken try, and its random numbers, leave no trace."""
    with hosted_store() as port:
        fault_free = run_ranks(_fail_on_one_rank_then_redo, 2, port, False)
    with hosted_store() as port:
        broken = run_ranks(_fail_on_one_rank_then_redo, 2, port, True)
    assert [answer[0] for answer in fault_free] == [1, 1]
    assert [answer[0] for answer in broken] == [2, 2]
    assert [answer[1:] for answer in fault_free] == [answer[1:] for answer in broken]


class _WatchedSlot:
    """Passes stores on to a real slot, and notes what the weights were at each."""

    def __init__(self, slot, state):
        self._slot = slot
        self._state = state
        self.seen = []

    def get(self, cell):
        return self._slot.get(cell)

    def set(self, cell, value):
        first = next(self._state.model.parameters())
        self.seen.append((cell, value, float(first.detach().sum())))
        self._slot.set(cell, value)

    def stamp(self, phase, now_ns):
        self.seen.append((Cell.PHASE, phase, None))
        self._slot.stamp(phase, now_ns)

    def reach(self, moment):
        self._slot.reach(moment)


def _commit_under_watch(me):
    state = build_state()
    slot = _WatchedSlot(make_slot(), state)
    with join(me, 0) as group:
        replica = build_replica(state, group, slot=slot)
        stepper = build_stepper(state, replica, rank=0, world_size=1, slot=slot)
        before = float(next(state.model.parameters()).detach().sum())
        slot.seen.clear()  # of the wrapping
        stepper.run(micro_batches(0, 0), votes=NO_VOTES)
    return before, slot.seen


def test_the_board_says_dirty_while_the_weights_change():
    """Dirty is stored before the first weight changes, clean only after the step is counted."""
    ((before, seen),) = run_ranks(_commit_under_watch, 1)
    phases = [value for cell, value, _ in seen if cell is Cell.PHASE]
    assert phases == [Phase.FORWARD, Phase.BACKWARD, Phase.REDUCE, Phase.OPTIMIZER]
    stores = [(cell, value) for cell, value, _ in seen if cell is not Cell.PHASE]
    assert stores == [(Cell.DIRTY, 1), (Cell.COMMITTED_STEP, 1), (Cell.DIRTY, 0)]
    weights = [weight for cell, _, weight in seen if cell is not Cell.PHASE]
    assert weights[0] == before
    assert weights[1] != before


def _rates(me):
    optim = optim_settings(max_grad_norm=None)
    state = build_state(optim=optim)
    with join(me, 0) as group:
        replica = build_replica(state, group)
        stepper = build_stepper(state, replica, rank=0, world_size=1, optim=optim)
        return [
            stepper.run(micro_batches(step, 0), votes=NO_VOTES).learning_rate
            for step in range(TOTAL_STEPS)
        ]


def test_the_rate_follows_the_schedule_over_the_whole_run():
    """It warms up, peaks at the setting and falls; the optimizer was given what is reported."""
    (rates,) = run_ranks(_rates, 1)
    assert max(rates) == pytest.approx(0.01)
    assert rates.index(max(rates)) <= 2
    assert rates[-1] < 0.001
    assert rates[2:] == sorted(rates[2:], reverse=True)


def test_a_batch_on_the_cpu_is_handed_on_as_it_is():
    """Control: no copy where there is nothing to move, whatever the batch's type."""
    batch = {"inputs": torch.ones(2), "names": ["a"], "pair": (torch.zeros(1), 3)}
    assert to_device(batch, CPU) is batch


def _shares_of_a_step(me, port, micro_steps, options):
    """This rank's share of step 1, computed alone and noted in the step itself; and the bits after it."""
    state = build_state(model=_with_odd_parts())
    with join(me, port) as group:
        replica = build_replica(state, group, loss=_loss_of_odd_parts, **options)
        stepper = build_stepper(
            state, replica, rank=me.rank, world_size=me.world_size, micro_steps=micro_steps
        )
        stepper.run(micro_batches(0, me.rank, micro_steps=micro_steps), votes=NO_VOTES)
        given = micro_batches(1, me.rank, micro_steps=micro_steps)
        buffers = {name: value.clone() for name, value in state.model.named_buffers()}
        rules = StepRules(
            seed=7,
            rank=me.rank,
            global_batch=MICRO_BATCH * micro_steps * me.world_size,
            total_steps=TOTAL_STEPS,
            optim=optim_settings(),
            device=CPU,
        )
        twin = build_state(model=_with_odd_parts())
        twin.restore(state.capture())
        for name, value in twin.model.named_buffers():
            assert torch.equal(value, buffers[name])
        alone = own_share(twin, _loss_of_odd_parts, given, rules=rules, slot=make_slot(), step=1)
        with stepper.noted() as notes:
            stepper.run(given, votes=NO_VOTES)
        named = [name for name, _ in state.named_parameters()]
        after = bits_of(state)
        stepper.run(micro_batches(2, me.rank, micro_steps=micro_steps), votes=NO_VOTES)
        return alone, notes.share(), named, after


class _OddParts(torch.nn.Module):
    """A layer that is tied, one that rank 1 alone uses, one that nobody does, one not in order in memory."""

    def __init__(self):
        super().__init__()
        self.body = build_model()
        self.bent = torch.nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.sometimes = torch.nn.Linear(1, 1)
        self.never = torch.nn.Linear(1, 1)
        self.tied = self.sometimes

    def forward(self, inputs):
        bent = self.bent(inputs[:, :4].reshape(-1, 2, 2, 1).repeat(1, 1, 1, 2)).sum()
        made = self.body(inputs) + bent
        return self.tied(made) if float(inputs[0, 0]) > 0 else made


def _with_odd_parts():
    torch.manual_seed(3)
    return _OddParts()


def _loss_of_odd_parts(model, batch):
    inputs, targets, _ = batch
    return torch.nn.functional.mse_loss(model(inputs), targets)


@pytest.mark.parametrize("micro_steps", [1, 3])
@pytest.mark.parametrize("view", [True, False])
def test_a_share_computed_alone_has_the_bits_of_the_rank_s_part(micro_steps, view):
    """Gradients before they are summed, by bare names, and the losses; with parameters that one rank
    alone uses, or nobody, or that are tied or lie in another order in memory."""
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": view}
    with hosted_store() as port:
        answers = run_ranks(_shares_of_a_step, 2, port, micro_steps, options)
    for alone, noted, names, _ in answers:
        assert first_difference(alone, noted, names=names) == ""
        assert alone == noted
        assert len(noted.losses) == len(noted.samples) == micro_steps
        assert {"bent.weight", "body.0.weight"} <= noted.gradients.keys() <= set(names)
        assert "never.weight" not in noted.gradients
    (one, _, _, after), (other, _, _, other_after) = answers
    assert one.gradients != other.gradients
    assert after == other_after


def test_the_first_difference_has_the_name_of_its_parameter():
    """Samples come before gradients, which come before the loss."""
    share = OwnShare(samples=("a",), losses=("b",), gradients={"x": "1", "y": "2"})
    names = ["x", "y"]

    def found(**changes):
        return first_difference(share, dataclasses.replace(share, **changes), names=names)

    assert found() == ""
    assert found(gradients={"x": "1", "y": "3"}, losses=("c",)) == "y"
    assert found(gradients={"y": "2"}) == "x"
    assert found(losses=("c",)) == "the loss"
    assert found(samples=("c",), gradients={}) == "the samples"
    assert OwnShare.from_record(json.loads(json.dumps(share.to_record()))) == share
