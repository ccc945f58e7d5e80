"""The DDP replica on real gloo ranks: sums, signals, buffers, unfinished reductions."""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading

import pytest
import torch
from torch import nn

from ddp_runner.core.settings import DdpSettings
from ddp_runner.kernel.group import group as group_module
from ddp_runner.kernel.group import waits as waits_module
from ddp_runner.kernel.group.abort import AbortSwitch
from ddp_runner.kernel.replica.loss_module import Signal
from ddp_runner.kernel.replica.replica import BUCKET_TENSORS, Replica, bucket_cap_mb
from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.kernel.wire.board import SLOT_BYTES, Board
from tests.processes import hosted_store, poll, poll_settled, ranks, results, run_ranks
from tests.scenarios.leftovers import has_lost_a_peer, is_idle, unread_bytes

from .joining import freed_after_s, is_stopped, join, trip_when_asked

WIDTH = 400  # two layers of 640 kB: more than one bucket
FREED_WITHIN_S = 12.0  # far below the group's timeout


class Branching(nn.Module):
    """Two layers, of which ``second`` takes part only where the batch says so."""

    def __init__(self, *, normalise=False):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if normalise else nn.Identity()
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs, *, use_second):
        hidden = self.norm(self.first(inputs))
        return self.second(hidden) if use_second else hidden


def loss_of(model, batch):
    inputs, use_second = batch
    return model(inputs, use_second=use_second).square().mean()


def fresh_model(**options):
    torch.manual_seed(3)
    return Branching(**options)


def batch_of(rank, micro_step=0, *, use_second=True):
    generator = torch.Generator().manual_seed(100 * rank + micro_step)
    return torch.randn(3, WIDTH, generator=generator), use_second


def make_slot():
    return Board(memoryview(bytearray(SLOT_BYTES)), 1).slot(0)


def make_replica(model, group, *, slot=None, **options):
    settings = DdpSettings(bucket_cap_mb=1, **options)
    return Replica(model, loss_of, group=group, settings=settings, slot=slot or make_slot())


def no_votes():
    return [0.0] * len(Signal)


def weight_of(rank):
    return (0.5, 0.3, 0.2)[rank]


def gradients(model):
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def _accumulate_once(replica, rank, micro_steps, *, votes):
    replica.zero_gradients()
    for micro_step in range(micro_steps):
        last = micro_step == micro_steps - 1
        with contextlib.nullcontext() if last else replica.without_sync():
            loss = replica.forward(
                batch_of(rank, micro_step),
                weight=weight_of(rank) / micro_steps,
                votes=votes if last else no_votes(),
            )
            loss.backward()
    replica.check_reduced()


def _sum_gradients(me, port, options, micro_steps):
    model = fresh_model()
    votes = no_votes()
    votes[Signal.SAVE] = me.rank
    votes[Signal.PREEMPT] = 1.0
    with join(me, port) as group:
        replica = make_replica(model, group, **options)
        for _ in range(2):
            _accumulate_once(replica, me.rank, micro_steps, votes=votes)
        return gradients(model), replica.signals()[0], replica.signals(scale=4.0)[0]


def _by_plain_autograd(me, rank, micro_steps):
    """One rank's own gradients and loss, computed in a process like a rank's."""
    model, loss_sum = fresh_model(), 0.0
    for micro_step in range(micro_steps):
        loss = loss_of(model, batch_of(rank, micro_step)) * (weight_of(rank) / micro_steps)
        loss.backward()
        loss_sum += float(loss.detach())
    return gradients(model), loss_sum


def _alone(rank, micro_steps):
    return run_ranks(_by_plain_autograd, 1, rank, micro_steps)[0]


COMBINATIONS = [
    {"find_unused_parameters": unused, "gradient_as_bucket_view": view}
    for unused, view in itertools.product([True, False], repeat=2)
]


@pytest.mark.parametrize("micro_steps", [1, 3])
@pytest.mark.parametrize("options", COMBINATIONS, ids=str)
def test_gradients_of_two_ranks_are_their_sum_bit_for_bit(options, micro_steps):
    """Two numbers have one sum: DDP's equals plain autograd's, never divided by the world."""
    with hosted_store() as port:
        answers = run_ranks(_sum_gradients, 2, port, options, micro_steps)
    (first, _), (second, _) = _alone(0, micro_steps), _alone(1, micro_steps)
    for reduced, _, _ in answers:
        for gradient, one, other in zip(reduced, first, second, strict=True):
            assert torch.equal(gradient, one + other)


class Rotating(nn.Module):
    """Residual layers, the last of another type, of which ``first`` begins: their gradients come in that order."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.layers[1].double()
        self.layers[3].double()

    def forward(self, x, *, first):
        for number in range(4):
            layer = self.layers[(first + number) % 4]
            x = x + torch.tanh(layer(x.to(layer.weight.dtype)))
        return x


def _rotate(me, port, options, wrapped_at):
    """The gradients of four steps, by a replica that is made again before those in ``wrapped_at``."""
    torch.manual_seed(3)
    model, found = Rotating(), []
    with join(me, port) as group:
        for step in range(4):
            if step in wrapped_at:
                settings = DdpSettings(bucket_cap_mb=1, **options)
                replica = Replica(
                    model,
                    lambda net, batch: net(batch[0], first=batch[1]).square().mean(),
                    group=group,
                    settings=settings,
                    slot=make_slot(),
                )
            replica.zero_gradients()
            batch = (batch_of(me.rank, step)[0], step)
            replica.forward(batch, weight=weight_of(me.rank), votes=no_votes()).backward()
            replica.check_reduced()
            found.append(gradients(model))
            if step + 1 in wrapped_at:
                replica.close()
    return found


def test_the_order_of_gradients_and_the_search_change_no_bit():
    """Three ranks: whether DDP searches or not, and whenever the model is wrapped, sums are the same."""
    modes = [
        {"find_unused_parameters": True},
        {"find_unused_parameters": False},
        {"find_unused_parameters": False, "gradient_as_bucket_view": False},
        {"find_unused_parameters": False, "static_graph": True},
    ]
    answers = []
    for options in modes:
        for wrapped_at in ((0,), (0, 1, 3)):
            with hosted_store() as port:
                answers += run_ranks(_rotate, 3, port, options, wrapped_at)
    for other in answers[1:]:
        for one, same in zip(answers[0], other, strict=True):
            assert all(map(torch.equal, one, same))


def test_a_bucket_of_many_small_tensors_is_cut_by_their_number():
    """Of few tensors, or large ones, it is as large as it was asked for, whatever of them is frozen."""
    small = [nn.Parameter(torch.zeros(4)) for _ in range(5000)]
    assert bucket_cap_mb(small, 25) * 2**20 == 16 * BUCKET_TENSORS
    assert bucket_cap_mb(small, 0.01) == 0.01
    assert bucket_cap_mb(small[:BUCKET_TENSORS], 25) == 25
    large = nn.Parameter(torch.zeros(10_000_000))
    for models in ([*small, large], [large, *small], [*small, *[large] * 100]):
        assert bucket_cap_mb(models, 25) * 2**20 == 16 * BUCKET_TENSORS
    for one in small:
        one.requires_grad_(False)
    assert bucket_cap_mb([*small, large], 25) == 25


def test_many_small_tensors_do_not_have_large_ones_summed_alone():
    """Control: what a bucket of small ones costs once is less than what sums of their own cost in every step."""
    small = [nn.Parameter(torch.zeros(4)) for _ in range(5000)]
    layers = [nn.Parameter(torch.zeros(25_000)) for _ in range(300)]
    assert bucket_cap_mb([*small, *layers], 25) == pytest.approx(30_080_000 / 5300 * 1000 / 2**20)
    between = [one for layer in layers for one in (layer, *small[:16])]
    assert bucket_cap_mb(between, 25) == pytest.approx(30_076_800 / 5100 * 1000 / 2**20, rel=0.02)


MANY = 1500  # more than one bucket has


def _sum_of_many(me, port, options, large):
    """How many buckets there are after two steps, and the gradients."""
    torch.manual_seed(3)
    made = [torch.randn(1 + number % 3) for number in range(MANY)]
    model = nn.ParameterList([*made, *(torch.randn(size) for size in large)])

    def loss(model, factor):
        return torch.stack([(one * factor).square().sum() for one in model]).sum()

    with join(me, port) as group:
        settings = DdpSettings(bucket_cap_mb=25, **options)
        replica = Replica(model, loss, group=group, settings=settings, slot=make_slot())
        for _ in range(2):
            replica.zero_gradients()
            replica.forward(
                float(me.rank + 1), weight=weight_of(me.rank), votes=no_votes()
            ).backward()
            replica.check_reduced()
        return len(replica._ddp.reducer._get_zeros_like_grad_buckets()), gradients(model)


@pytest.mark.parametrize(
    ("options", "large"),
    [(COMBINATIONS[0], ()), (COMBINATIONS[3], (500_000,))],
    ids=["alike", "beside a large one"],
)
def test_many_small_tensors_are_summed_in_buckets_of_a_thousand(options, large):
    """Exactly: two numbers have one sum, in whatever bucket they are."""
    with hosted_store() as port:
        answers = run_ranks(_sum_of_many, 2, port, options, large)
    torch.manual_seed(3)
    made = [torch.randn(1 + number % 3) for number in range(MANY)]
    made += [torch.randn(size) for size in large]
    sums = [_share_of(one, 0) + _share_of(one, 1) for one in made]
    for buckets, summed in answers:
        assert 2 <= buckets <= 3 + len(large)
        assert all(map(torch.equal, summed, sums))


def _share_of(values, rank):
    parameter = nn.Parameter(values.clone())
    ((parameter * float(rank + 1)).square().sum() * weight_of(rank)).backward()
    return parameter.grad


@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("options", COMBINATIONS, ids=str)
def test_gradients_and_signals_are_the_same_on_every_rank(options, micro_steps):
    """With weights they sum to the mean over samples; loss and votes ride along, summed as well."""
    with hosted_store() as port:
        answers = run_ranks(_sum_gradients, 3, port, options, micro_steps)
    alone = [_alone(rank, micro_steps) for rank in range(3)]
    for number, gradient in enumerate(answers[0][0]):
        expected = sum(one[0][number] for one in alone)
        torch.testing.assert_close(gradient, expected)
        assert all(torch.equal(gradient, other[0][number]) for other in answers[1:])
    signals = answers[0][1]
    assert all(other[1] == signals for other in answers[1:])
    assert signals[Signal.LOSS] == pytest.approx(sum(loss for _, loss in alone))
    assert signals[Signal.SAVE] == 0 + 1 + 2
    assert signals[Signal.PREEMPT] == 3
    assert signals[Signal.INTERRUPT] == 0
    assert answers[0][2] == [signal / 4 for signal in signals]


def _reduce_partly_used(me, port, options, ranks_that_use_second):
    model = fresh_model()
    with join(me, port) as group:
        replica = make_replica(model, group, **options)
        batch = batch_of(me.rank, use_second=me.rank in ranks_that_use_second)
        replica.zero_gradients()
        replica.forward(batch, weight=1.0, votes=no_votes()).backward()
        replica.check_reduced()
        return gradients(model)


@pytest.mark.parametrize("gradient_as_bucket_view", [True, False])
def test_a_layer_used_by_one_rank_has_its_gradient_everywhere(
    gradient_as_bucket_view,
):
    """With find_unused_parameters the others add nothing; no rank waits or diverges."""
    options = {
        "find_unused_parameters": True,
        "gradient_as_bucket_view": gradient_as_bucket_view,
    }
    with hosted_store() as port:
        answers = run_ranks(_reduce_partly_used, 2, port, options, (1,))
    model = fresh_model()
    loss_of(model, batch_of(1)).backward()
    for reduced in answers:
        assert torch.equal(reduced[-1], model.second.bias.grad)
        assert torch.equal(reduced[-2], model.second.weight.grad)


def test_a_layer_used_by_nobody_is_left_alone():
    """With find_unused_parameters a frozen-out layer has no gradient and is no error."""
    with hosted_store() as port:
        answers = run_ranks(_reduce_partly_used, 2, port, {"find_unused_parameters": True}, ())
    for reduced in answers:
        assert reduced[-1] is None
        assert reduced[0] is not None


def _find_unfinished(me, port, ranks_that_use_second, trips):
    """The step as the trainer makes it; returns how it ended, and whether weights changed."""
    model = fresh_model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    switch = AbortSwitch()
    moments, outcome = None, "stepped"
    try:
        with join(me, port, switch=switch) as group:
            replica = make_replica(model, group, find_unused_parameters=False)
            moments = trip_when_asked(me, switch) if trips and me.rank == 1 else None
            batch = batch_of(me.rank, use_second=me.rank in ranks_that_use_second)
            replica.zero_gradients()
            me.say("backward")
            replica.forward(batch, weight=1.0, votes=no_votes()).backward()
            try:
                replica.check_reduced()
            except RuntimeError as error:
                me.say(str(error))
                me.hear()  # stays in the group: the peer shall be freed by its own switch
                raise
            optimizer.step()
    except (RuntimeError, ConnectionError):
        outcome = "raised"
    freed_s = freed_after_s(moments) if moments is not None else None
    pairs = zip(before, model.parameters(), strict=True)
    return outcome, freed_s, all(torch.equal(old, new) for old, new in pairs)


def test_an_unfinished_reduction_is_found_before_the_optimizer():
    """The rank that left a layer out learns it after backward; its peer, blocked, is freed."""
    with hosted_store() as port, ranks(_find_unfinished, 2, port, (1,), True) as world:
        for process in world:
            assert process.hear() == "backward"
        assert "finished reduction" in world[0].hear()
        world[1].say("trip")
        outcome, freed_s, untouched = world[1].result()
        assert outcome == "raised"
        assert freed_s < FREED_WITHIN_S
        assert untouched
        world[0].say("leave")
        assert world[0].result()[::2] == ("raised", True)


def test_a_finished_reduction_is_no_error():
    """Control: the same step with the layer in use everywhere raises nothing and steps."""
    with hosted_store() as port, ranks(_find_unfinished, 2, port, (0, 1), False) as world:
        for process in world:
            assert process.hear() == "backward"
        for outcome, _, untouched in results(world):
            assert (outcome, untouched) == ("stepped", False)


def _leave_out_in_last_micro_batch(me, port, find_unused):
    """Two micro-batches; on rank 1 the second one leaves a layer out."""
    model = fresh_model()
    with join(me, port) as group:
        replica = make_replica(model, group, find_unused_parameters=find_unused)
        replica.zero_gradients()
        with replica.without_sync():
            replica.forward(batch_of(me.rank), weight=1.0, votes=no_votes()).backward()
        last = batch_of(me.rank, use_second=me.rank == 0)
        replica.forward(last, weight=1.0, votes=no_votes()).backward()
        if find_unused or me.rank == 0:
            replica.check_reduced()
            return gradients(model)
        with pytest.raises(RuntimeError, match="finished reduction") as raised:
            replica.check_reduced()
        return str(raised.value)


def test_a_layer_unused_in_the_last_micro_batch_has_its_whole_gradient():
    """With find_unused_parameters what earlier micro-batches gave is reduced, nothing is lost."""
    model = fresh_model()
    for rank, last in ((0, True), (1, False)):
        loss_of(model, batch_of(rank)).backward()
        loss_of(model, batch_of(rank, use_second=last)).backward()
    with hosted_store() as port:
        for reduced in run_ranks(_leave_out_in_last_micro_batch, 2, port, True):
            for found, parameter in zip(reduced, model.parameters(), strict=True):
                torch.testing.assert_close(found, parameter.grad)


def test_a_layer_left_out_of_the_last_micro_batch_only_is_named():
    """It has a gradient, of an earlier micro-batch: having none would not show it."""
    with (
        hosted_store() as port,
        ranks(_leave_out_in_last_micro_batch, 2, port, False) as world,
    ):
        message = world[1].result()
    assert message.endswith("no gradient came for second.weight, second.bias")


def _count_use(me, port, ranks_that_use_second):
    with join(me, port) as group:
        replica = make_replica(fresh_model(), group, find_unused_parameters=True)
        found = []
        for users in (ranks_that_use_second, range(me.world_size)):
            batch = batch_of(me.rank, use_second=me.rank in users)
            replica.forward(batch, weight=1.0, votes=no_votes()).backward()
            found.append(replica.every_parameter_was_used())
        return found


@pytest.mark.parametrize("users", [(), (1,), (0, 1, 2)])
def test_all_ranks_know_alike_whether_every_parameter_was_used(users):
    """One rank that left a layer out is enough, and it hears of this step alone."""
    with hosted_store() as port:
        answers = run_ranks(_count_use, 3, port, users)
    assert answers == [[len(users) == 3, True]] * 3


USERS = [
    (0, 1, 2),
    (1,),
    (1, 2),
    (0, 1, 2),
    (),
    (0, 1, 2),
    (0, 1, 2),
]  # of the second layer, by step


def _use_from_step_to_step(me, port, options):
    found = []
    with join(me, port) as group:
        model = fresh_model()
        replica = make_replica(model, group, **options)
        for users in USERS:
            replica.zero_gradients()
            before = group_module.collectives_begun()
            batch = batch_of(me.rank, use_second=me.rank in users)
            replica.forward(batch, weight=weight_of(me.rank), votes=no_votes()).backward()
            replica.check_reduced()
            begun = group_module.collectives_begun() - before
            found.append((begun, replica.every_parameter_was_used(), gradients(model)))
    return found


def _sums_by_hand(users):
    model, sums = fresh_model(), None
    for rank in range(3):
        model.zero_grad(set_to_none=True)
        (loss_of(model, batch_of(rank, use_second=rank in users)) * weight_of(rank)).backward()
        own = gradients(model)
        sums = own if sums is None else [_plus(a, b) for a, b in zip(sums, own, strict=True)]
    return sums


def _plus(a, b):
    return b if a is None else a if b is None else a + b


@pytest.mark.parametrize("sent_as", ["auto", "bf16"])
def test_the_map_of_used_parameters_is_summed_only_where_it_is_needed(sent_as):
    """What one rank leaves out gets the others' sum, what all leave out no gradient, in any order of steps."""
    options = {"find_unused_parameters": True, "gradient_dtype": sent_as}
    with hosted_store() as port:
        answers = run_ranks(_use_from_step_to_step, 3, port, options)
    for steps in answers:
        for users, (_, all_used, reduced) in zip(USERS, steps, strict=True):
            assert all_used == (len(users) == 3)
            for got, wanted in zip(reduced, _sums_by_hand(users), strict=True):
                assert (got is None) == (wanted is None)
                if got is not None:
                    torch.testing.assert_close(got, wanted, rtol=0.02, atol=1e-4)
        buckets = steps[0][0]
        assert buckets > 1
        # One more where it is needed, and in the step after that, when nobody waits to know.
        assert [begun - buckets for begun, _, _ in steps] == [0, 1, 1, 1, 1, 1, 0]


def _sum_with_another_default_type(me, port, dtype):
    torch.set_default_dtype(dtype)
    try:
        with join(me, port) as group:
            replica = make_replica(fresh_model(), group, find_unused_parameters=True)
            inputs, uses = batch_of(me.rank)
            votes = no_votes()
            votes[Signal.SAVE] = 4097.0  # beyond bfloat16
            replica.forward((inputs.to(dtype), uses), weight=0.5, votes=votes).backward()
            return replica.signals()[0][Signal.SAVE], replica.every_parameter_was_used()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_what_rides_along_is_exact_whatever_torch_s_default_type_is(dtype):
    """A task may leave another one set."""
    with hosted_store() as port:
        assert run_ranks(_sum_with_another_default_type, 2, port, dtype) == [(8194.0, True)] * 2


def _touch_nothing_on_rank_1(me, port, find_unused):
    def loss(model, batch):
        return loss_of(model, batch) if me.rank == 0 else torch.tensor(2.5)

    model = fresh_model()
    with join(me, port) as group:
        replica = Replica(
            model,
            loss,
            group=group,
            settings=DdpSettings(find_unused_parameters=find_unused),
            slot=make_slot(),
        )
        replica.forward(batch_of(me.rank), weight=0.5, votes=no_votes()).backward()
        if find_unused:
            replica.check_reduced()
            return gradients(model), replica.signals()[0][Signal.LOSS]
        with pytest.raises(RuntimeError, match="finished reduction") as raised:
            replica.check_reduced()
        return str(raised.value)


def test_a_backward_that_touches_no_parameter_adds_no_gradient():
    """With find_unused_parameters; the signals still ride, so that all agree on the step."""
    with hosted_store() as port:
        answers = run_ranks(_touch_nothing_on_rank_1, 2, port, True)
    model = fresh_model()
    own = loss_of(model, batch_of(0)) * 0.5
    own.backward()
    for reduced, loss in answers:
        assert loss == pytest.approx(float(own.detach()) + 1.25)
        for found, parameter in zip(reduced, model.parameters(), strict=True):
            torch.testing.assert_close(found, parameter.grad)


def test_a_rank_whose_backward_touches_no_parameter_names_them_all():
    """Without it the reduction cannot finish anywhere, and that rank alone knows why."""
    names = [name for name, _ in fresh_model().named_parameters()]
    with hosted_store() as port, ranks(_touch_nothing_on_rank_1, 2, port, False) as world:
        assert world[1].result().endswith(f"no gradient came for {', '.join(names)}")


def _detached_loss(model, batch):
    return loss_of(model, batch).detach().requires_grad_()


def _loss_without_a_graph(me, port, options):
    with join(me, port) as group:
        replica = Replica(
            fresh_model(),
            _detached_loss,
            group=group,
            settings=DdpSettings(**options),
            slot=make_slot(),
        )
        replica.forward(batch_of(me.rank), weight=1.0, votes=no_votes()).backward()
        with pytest.raises(RuntimeError, match="finished reduction"):
            replica.check_reduced()
        return True


def test_a_loss_that_reaches_no_parameter_is_found_too():
    """DDP's own check is blind where no parameter takes part; ours always has the signals'."""
    with hosted_store() as port:
        assert run_ranks(_loss_without_a_graph, 2, port, {"find_unused_parameters": False})


def _share_statistics(me, port):
    model = fresh_model(normalise=True)
    with join(me, port) as group:
        replica = make_replica(model, group)
        replica.forward(batch_of(me.rank), weight=0.5, votes=no_votes()).backward()
        own = {name: buffer.clone() for name, buffer in model.named_buffers()}
        replica.share_buffers(list(model.buffers()))
        return own, dict(model.named_buffers())


def test_batch_statistics_of_rank_0_become_everyone_s_within_the_step():
    """Forward changed them differently on each rank; afterwards all hold rank 0's, counts too."""
    with hosted_store() as port:
        answers = run_ranks(_share_statistics, 3, port)
    own_of_first = answers[0][0]
    assert not torch.equal(answers[1][0]["norm.running_mean"], own_of_first["norm.running_mean"])
    for _, shared in answers:
        assert shared.keys() == own_of_first.keys()
        for name, buffer in shared.items():
            assert torch.equal(buffer, own_of_first[name])


def _look_at_board(me, port):
    slot = make_slot()
    model = fresh_model()
    with join(me, port) as group:
        replica = make_replica(model, group, slot=slot)
        slot.stamp(Phase.BACKWARD, 1)
        with replica.without_sync():
            replica.forward(batch_of(me.rank), weight=0.5, votes=no_votes()).backward()
        while_accumulating = slot.read().phase
        replica.forward(batch_of(me.rank), weight=0.5, votes=no_votes()).backward()
        return while_accumulating, slot.read().phase


def test_the_board_says_reduce_once_a_rank_s_own_backward_is_done():
    """A supervisor can distinguish who still computes from who waits for others."""
    with hosted_store() as port:
        assert run_ranks(_look_at_board, 2, port) == [(Phase.BACKWARD, Phase.REDUCE)] * 2


def _wait_for_a_late_sum(me, port):
    slot = make_slot()
    with join(me, port) as group:
        replica = make_replica(fresh_model(), group, slot=slot)
        slot.stamp(Phase.EVALUATE, 1)
        if me.rank == 1:
            me.hear()
            replica.sum_over_ranks([1.0])
            return None
        thread = threading.Thread(target=replica.sum_over_ranks, args=([1.0],))
        thread.start()
        poll(lambda: slot.read().phase is Phase.REDUCE, what="the wait on the board")
        me.say("waits")
        thread.join()
        return slot.read().phase, slot.read().phase_since_ns > 1


def test_who_waits_for_a_sum_stands_on_the_board_as_waiting():
    """Rank 1 is late in its evaluation: rank 0 is not, and goes on with its own afterwards."""
    with hosted_store() as port, ranks(_wait_for_a_late_sum, 2, port) as world:
        assert world[0].hear() == "waits"
        world[1].say("go")
        assert results(world)[0] == (Phase.EVALUATE, True)


def _sum_a_few(me, port):
    with join(me, port) as group:
        return make_replica(fresh_model(), group).sum_over_ranks([me.rank, 0.1, 2.0**60])


def test_a_few_numbers_are_summed_in_double_precision():
    """A count beyond float32's range of whole numbers stays exact."""
    with hosted_store() as port:
        assert run_ranks(_sum_a_few, 2, port) == [[1.0, 0.2, 2.0**61]] * 2


def _build_and_leave(me, port):
    """Wrap the same model for several generations; what hooks are left on its parameters."""
    model = fresh_model()
    reduced = []
    for generation in range(1, 4):
        with join(me, port, generation=generation) as group:
            replica = make_replica(model, group, find_unused_parameters=False)
            _accumulate_once(replica, me.rank, 1, votes=no_votes())
            reduced.append(gradients(model))
            del replica
    return reduced


def test_a_model_can_be_wrapped_again_for_each_generation():
    """An earlier replica leaves no hook behind: gradients of each generation are the same bits."""
    with hosted_store() as port:
        for first, *later in run_ranks(_build_and_leave, 2, port):
            for reduced in later:
                assert all(torch.equal(a, b) for a, b in zip(first, reduced, strict=True))


def test_one_rank_alone_needs_no_store():
    """World 1 has the same replica, with its own gradients and signals."""
    ((reduced, signals, _),) = run_ranks(_sum_gradients, 1, 0, {}, 1)
    alone, loss = _alone(0, 1)
    assert all(torch.equal(a, b) for a, b in zip(reduced, alone, strict=True))
    assert signals[Signal.LOSS] == pytest.approx(loss)


def _stay_in_the_map_of_used_parameters(me, port):
    """Rank 1 sums its gradients and comes no further; rank 0's gloo never ends what it has begun."""
    switch = AbortSwitch()
    moments = trip_when_asked(me, switch) if me.rank == 0 else []
    if me.rank == 0:
        group_module._fail_operations = lambda _group: None
        AbortSwitch._shut_down_all = lambda *_, **__: None
    else:
        waits_module.GroupOfReducer.allreduce = lambda *_: me.hear()
    with contextlib.suppress(RuntimeError, ConnectionError), join(me, port, switch=switch) as group:
        replica = make_replica(fresh_model(), group, find_unused_parameters=True)
        loss = replica.forward(batch_of(me.rank), weight=0.5, votes=no_votes())
        me.say("here")
        loss.backward()
        me.say("never")
    return freed_after_s(moments) if me.rank == 0 else 0.0


def test_the_reducer_s_own_collectives_end_with_the_abort():
    """DDP waits for them in C++, where it would stay as long as gloo's timeout."""
    with hosted_store() as port, ranks(_stay_in_the_map_of_used_parameters, 2, port) as world:
        for process in world:
            assert process.hear() == "here"
        poll_settled(lambda: is_idle(world[0].pid), what="rank 0 waiting for the map")
        world[0].say("trip")
        assert world[0].result() < FREED_WITHIN_S
        world[1].say("end")


BACKWARD, BUFFERS, SUM = "backward", "buffers", "sum"


def _be_stopped_where_the_others_are_awaited(me, port, what, find_unused):
    """One step whole; then rank 0 waits in ``what``, where rank 1 joins it when it is told to."""
    switch = AbortSwitch()
    moments = trip_when_asked(me, switch) if me.rank == 0 else []
    model = fresh_model(normalise=True)

    def step(replica):
        replica.zero_gradients()
        loss = replica.forward(batch_of(me.rank), weight=0.5, votes=no_votes())
        join_in = {
            BACKWARD: loss.backward,
            BUFFERS: lambda: replica.share_buffers(list(model.buffers())),
            SUM: lambda: replica.sum_over_ranks([1.0] * 100),
        }
        me.say("here")
        if me.rank == 1:
            me.hear()
        join_in[what]()

    with contextlib.suppress(RuntimeError, ConnectionError), join(me, port, switch=switch) as group:
        replica = make_replica(model, group, find_unused_parameters=find_unused)
        replica.forward(batch_of(me.rank), weight=0.5, votes=no_votes()).backward()
        step(replica)
        poll(lambda: switch.tripped, what="the abort")  # where the collective was whole by then
    return freed_after_s(moments)


@pytest.mark.parametrize("find_unused", [True, False])
@pytest.mark.parametrize("what", [BACKWARD, BUFFERS, SUM])
def test_a_rank_that_was_stopped_while_its_peer_died_is_freed(what, find_unused):
    """gloo then writes to a connection that is gone, and forgets who waits for that: nobody may."""
    with (
        hosted_store() as port,
        ranks(_be_stopped_where_the_others_are_awaited, 2, port, what, find_unused) as (here, peer),
    ):
        assert here.hear() == peer.hear() == "here"
        poll_settled(lambda: is_idle(here.pid), what="rank 0 waiting for the other")
        here.signal(signal.SIGSTOP)
        poll(lambda: is_stopped(here), what="the stop")
        peer.say("join")
        poll_settled(lambda: unread_bytes(here.pid), what="what rank 1 has to say")
        peer.signal(signal.SIGKILL)
        poll(lambda: has_lost_a_peer(here.pid), what="the end of its connection")
        here.signal(signal.SIGCONT)
        here.say("trip")
        assert here.result() < FREED_WITHIN_S


def _read_beside(me, port):
    with join(me, port) as group:
        replica = make_replica(fresh_model(), group)
        _accumulate_once(replica, me.rank, 1, votes=no_votes())
        precise = torch.tensor(1 / 3, dtype=torch.float64)
        return (
            replica.signals(),
            replica.signals(beside=precise),
            replica.signals(beside=precise.float()),
        )


def test_a_number_that_is_read_with_the_signals_loses_no_bit():
    """Nor do they, whichever of the two is the more precise."""
    with hosted_store() as port:
        for (plain, nothing), double, single in run_ranks(_read_beside, 2, port):
            assert nothing is None
            assert double == (plain, 1 / 3)
            assert single == (plain, float(torch.tensor(1 / 3)))


def _be_aborted_within(me, moment):
    switch = AbortSwitch()
    begun = []

    def loss(model, batch):
        if moment == "forward":
            switch.trip()
        return loss_of(model, batch)

    def step(group):
        begin_sum = group.begin_sum
        group.begin_sum = lambda tensor: (begun.append(tensor.numel()), begin_sum(tensor))[1]
        model = fresh_model()
        replica = Replica(
            model, loss, group=group, settings=DdpSettings(bucket_cap_mb=1), slot=make_slot()
        )
        replica.zero_gradients()
        loss_now = replica.forward(batch_of(0), weight=1.0, votes=no_votes())
        if moment == "backward":
            switch.trip()
        loss_now.backward()

    with pytest.raises(ConnectionError, match="aborted"), join(me, 0, switch=switch) as group:
        step(group)
    return begun


@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_an_abort_ends_a_step_before_its_next_sum(moment):
    """Nobody waits for the rest of a large model's forward and backward; no sum was begun, so nobody has stepped."""
    assert run_ranks(_be_aborted_within, 1, moment) == [[]]
