"""The parts of a loop of one's own, in one process: what is kept, its batches, its misuse, its module."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import signal
import tempfile
import threading
from collections import OrderedDict, defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

from ddp_runner.checkpoint.left_out import left_out
from ddp_runner.config import from_flat
from ddp_runner.core.step_schedule import RunLength
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.faults import FaultError, FaultKind, Origin
from ddp_runner.training.components.start_weights import completed
from ddp_runner.training.local_runtime import local_runtime
from ddp_runner.training.own_loop import model_replica
from ddp_runner.training.own_loop.attached_run import AttachedRun
from ddp_runner.training.own_loop.batches import (
    GivenBatches,
    OwnBatches,
    leave_deaths_to_loaders,
    length_of,
    why_alike,
    why_spawned,
)
from ddp_runner.training.own_loop.declared import RepeatStep
from ddp_runner.training.own_loop.kept import KeptObjects, KeptState
from ddp_runner.training.own_loop.net import AttachedModule, refuse_unfit

from .building import bits_of

CPU = torch.device("cpu")


@contextlib.contextmanager
def run_in(folder):
    settings = from_flat(
        {
            "log_dir": str(folder / "logs"),
            "checkpoint_dir": str(folder / "kept"),
            "display": "none",
        }
    )
    runtime = local_runtime(settings, 0, 1)
    made = AttachedRun(settings, runtime, arguments="", on_end=lambda _: None)
    yield made
    made._leave()


@pytest.fixture
def run(tmp_path):
    with run_in(tmp_path) as made:
        yield made


def parts():
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


DATA = [(torch.ones(3, 2), torch.ones(3, 1))] * 4


def one_step(run, net, optimizer, body=None, **how):
    """A loop of one step, whose body is usual, or ``body``."""
    for x, y in run.steps(DATA, max_steps=how.get("max_steps", 1)):
        with run.step():
            if body is not None:
                body(x, y)
            else:
                (net(x) - y).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()


# --- misuse: one line each, with the line of the user's file ---


def _closure(run):
    model, optimizer = parts()
    net = run.ddp(model)
    run.keep(model=model, optimizer=optimizer)

    def body(x, y):
        net(x).sum().backward()
        optimizer.step(lambda: None)

    one_step(run, net, optimizer, body)


def _forward_after_update(run):
    model, optimizer = parts()
    net = run.ddp(model)
    run.keep(model=model, optimizer=optimizer)

    def body(x, y):
        net(x).sum().backward()
        optimizer.step()
        net(x)

    one_step(run, net, optimizer, body)


def _gan(body, *, finds_unused=True):
    """A block of a GAN, both of whose parts are in one net: ``body`` updates first the one, then the other."""

    def misused(run):
        both = nn.ModuleDict({"g": nn.Linear(2, 2), "d": nn.Linear(2, 1)})
        both.forward = lambda name, x: both[name](x)
        one, other = (torch.optim.SGD(both[name].parameters(), lr=0.1) for name in "dg")
        net = run.ddp(both, find_unused_parameters=finds_unused)
        run.keep(both=both, one=one, other=other)
        one_step(run, net, one, lambda x, _: body(net, x, one, other))

    return misused


def _losses_first(net, x, one, other):
    fake = net("g", x)
    d_loss, g_loss = net("d", fake.detach()).mean(), -net("d", fake).mean()
    d_loss.backward()
    one.step()
    g_loss.backward()
    other.step()


def _one_after_the_other(net, x, one, other):
    net("d", net("g", x).detach()).mean().backward()
    one.step()
    net("d", net("g", x)).mean().backward()
    other.step()


def _late_backward(net, x, one, other):
    loss = net("d", x).mean()
    loss.backward(retain_graph=True)
    one.step()
    loss.backward()
    other.step()


def _no_update(run):
    model, optimizer = parts()
    net = run.ddp(model)
    run.keep(model=model, optimizer=optimizer)
    one_step(run, net, optimizer, lambda x, y: net(x).sum().backward())


def _unkept_optimizer(run):
    model, optimizer = parts()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    net = run.ddp(model)
    run.keep(model=model, optimizer=optimizer)

    def body(x, y):
        net(x).sum().backward()
        other.step()

    one_step(run, net, optimizer, body)


def _collective_after_update(run):
    model, optimizer = parts()
    net = run.ddp(model)
    run.keep(model=model, optimizer=optimizer)

    def body(x, y):
        net(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.distributed.all_reduce(torch.ones(1))

    one_step(run, net, optimizer, body)


def _forward_outside(run):
    model, optimizer = parts()
    net = run.ddp(model)
    run.keep(model=model, optimizer=optimizer)
    for x, _ in run.steps(DATA, max_steps=1):
        net(x)


def _step_outside(run):
    model, optimizer = parts()
    run.ddp(model)
    run.keep(model=model, optimizer=optimizer)
    for _ in run.steps(DATA, max_steps=1):
        optimizer.step()


def _batch_without_block(run):
    model, optimizer = parts()
    run.ddp(model)
    run.keep(model=model, optimizer=optimizer)
    for _ in run.steps(DATA, max_steps=2):
        pass


def _two_begins(run):
    model, optimizer = parts()
    run.ddp(model)
    run.keep(model=model, optimizer=optimizer)
    for _ in run.steps(DATA, max_steps=1):
        run.begin_step()
        run.begin_step()


def _batch_within_a_step(run):
    model, optimizer = parts()
    run.ddp(model)
    run.keep(model=model, optimizer=optimizer)
    for _ in run.steps(DATA, max_steps=2):
        run.begin_step()


def _two_ends(run):
    model, optimizer = parts()
    net = run.ddp(model)
    run.keep(model=model, optimizer=optimizer)

    def body(x, y):
        net(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.end_step()

    one_step(run, net, optimizer, body)


def _kept_twice(*, local_first):
    def misused(run):
        module = nn.Linear(1, 1)
        calls = [lambda: run.keep(net=module), lambda: run.keep_local(own=module)]
        for call in calls[::-1] if local_first else calls:
            call()

    return misused


def _late_keep(run):
    model, optimizer = parts()
    run.ddp(model)
    run.keep(model=model, optimizer=optimizer)
    for _ in run.steps(DATA, max_steps=1):
        run.keep(more=model)


def _steps_twice(run):
    model, optimizer = parts()
    net = run.ddp(model)
    run.keep(model=model, optimizer=optimizer)
    one_step(run, net, optimizer)
    run.steps(DATA, max_steps=1)


def _unkept_parameter(run):
    model, optimizer = parts()
    run.ddp(nn.Sequential(model, nn.Linear(1, 1)))
    run.keep(model=model, optimizer=optimizer)
    run.steps(DATA, max_steps=1)


def _unkept_module_of_optimizer(run):
    model, _ = parts()
    _, other = parts()
    run.ddp(model)
    run.keep(model=model, optimizer=other)
    run.steps(DATA, max_steps=1)


class Around(torch.optim.Optimizer):
    """Around another optimizer, as a lookahead."""

    def __init__(self, inner):
        self.inner, self.param_groups, self.slow = inner, inner.param_groups, []

    def state_dict(self):
        return {"inner": self.inner.state_dict(), "slow": self.slow}


def _two_nets(run):
    run.ddp(nn.Linear(1, 1))
    run.ddp(nn.Linear(1, 1))


def _trained_outside(run):
    model, criterion = nn.Linear(2, 1), nn.Linear(1, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
    run.world_size = 2
    run.ddp(model)
    run.keep(model=model, criterion=criterion, optimizer=optimizer)
    run.steps([], max_steps=1)


def _compiled_net(run):
    model, optimizer = parts()
    net = torch.compile(run.ddp(model))
    run.keep(model=model, optimizer=optimizer)
    one_step(run, net, optimizer)


def _lbfgs(run):
    model, _ = parts()
    run.ddp(model)
    run.keep(model=model, optimizer=torch.optim.LBFGS(model.parameters()))


def _no_length(run):
    model, optimizer = parts()
    run.ddp(model)
    run.keep(model=model, optimizer=optimizer)
    run.steps(iter(DATA), epochs=2)


def _no_end(run):
    model, optimizer = parts()
    run.ddp(model)
    run.keep(model=model, optimizer=optimizer)
    run.steps(DATA)


def _short_batches(run):
    model, optimizer = parts()
    net = run.ddp(model)
    run.keep(model=model, optimizer=optimizer)

    class Short(list):
        def __len__(self):
            return 9

    for x, y in run.steps(Short(DATA), epochs=1):
        with run.step():
            (net(x) - y).square().mean().backward()
            optimizer.step()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")  # as a compiler is imported
@pytest.mark.parametrize(
    ("misused", "says"),
    [
        (_closure, "computes the loss again"),
        (_lbfgs, "keep(optimizer=...): is an LBFGS, which asks for the loss several times a step"),
        (_forward_after_update, "the net is called after optimizer.step()"),
        (
            _gan(_losses_first),
            "no gradient came for g.weight, g.bias before optimizer.step(): a block holds one update",
        ),
        (
            _gan(_losses_first, finds_unused=False),
            "run.ddp(..., find_unused_parameters=True) permits that",
        ),
        (_gan(_one_after_the_other), "within one step: a block holds one update"),
        (_gan(_late_backward), "backward() comes after optimizer.step() within one step: a block"),
        (_no_update, "the block ended without optimizer.step(), and with gradients"),
        (_unkept_optimizer, "SGD.step() of an optimizer that is not kept"),
        (_collective_after_update, "a collective after optimizer.step() within one step"),
        (_forward_outside, "the net is called with gradients outside"),
        (_step_outside, "optimizer.step() outside of"),
        (_batch_without_block, "a batch was given and no step made of it"),
        (_two_begins, "a step begins within another one"),
        (_batch_within_a_step, "a batch is asked for within a step"),
        (_two_ends, "run.end_step() without run.begin_step()"),
        (_late_keep, "keep() comes after run.steps()"),
        (_steps_twice, "steps() comes after run.steps()"),
        (_unkept_parameter, "1.weight of the net is in no kept module"),
        (_unkept_module_of_optimizer, "updates a parameter of a module that is not kept"),
        (_trained_outside, "criterion.weight is trained and is not in the net"),
        (_compiled_net, "compile the model first, run.ddp(torch.compile(model))"),
        (_two_nets, "ddp() is called a second time"),
        (_no_length, "the batches have no length"),
        (_no_end, "needs max_steps= or epochs="),
        (_kept_twice(local_first=True), "keep(net=...): run.keep_local() has this"),
        (_kept_twice(local_first=False), "keep_local(own=...): run.keep() has this"),
        (_short_batches, "the batches ended after 4 steps of epoch 1"),
        (lambda run: run.keep(x=nn.Linear(1, 1), y=[1]), "has no state_dict()"),
        (lambda run: run.keep(x=Around(parts()[1])), "keep the optimizer that it wraps"),
        (lambda run: run.every(steps=1, epochs=1), "every() needs steps= or epochs="),
        (lambda run: run.ddp(nn.Linear(1, 1), static_graph=True), "static_graph=...) is none of"),
        (lambda run: run.steps(DATA, max_steps=1), "no net"),
        (lambda run: run.step().__enter__(), "run.step() needs a batch"),
        (lambda run: run.end_step(), "run.end_step() without run.begin_step()"),
        (lambda run: run.loader(DATA, batch_size=0), "loader() needs batch_size="),
        (lambda run: run.loader(DATA, batch_size=1, num_workers=-1), "num_workers= of 0 or more"),
        (lambda run: run.note(loss=torch.ones(3)), "note(loss=...) is a Tensor of 3 elements"),
        (lambda run: run.note(model="small"), "note(model=...) is a str: give one number"),
    ],
)
def test_misuse_is_one_line_with_the_line_of_the_file(run, misused, says):
    with pytest.raises(BadInputError, match=r".") as caught:
        misused(run)
    text = str(caught.value)
    assert says in text
    assert "\n" not in text
    assert text.startswith(("test_own_loop.py:", "keep(", "run.")), text


@pytest.mark.parametrize(
    "net", [nn.Embedding(3, 2, sparse=True), nn.Sequential(nn.EmbeddingBag(3, 2, sparse=True))]
)
def test_sparse_gradients_are_refused_where_ranks_sum_them(net):
    """A rank alone sums nothing."""
    refuse_unfit(AttachedModule(net), ranks=1)
    with pytest.raises(BadInputError, match=r"has sparse gradients, .* make it with sparse=False"):
        refuse_unfit(AttachedModule(net), ranks=2)


def test_a_gan_trains_with_a_block_of_each_update(run):
    """As the messages about two updates in one block say it."""
    both = nn.ModuleDict({"g": nn.Linear(2, 2), "d": nn.Linear(2, 1)})
    both.forward = lambda name, x: both[name](x)
    optimizers = {name: torch.optim.SGD(both[name].parameters(), lr=0.1) for name in "dg"}
    net = run.ddp(both, find_unused_parameters=True)
    run.keep(both=both, **optimizers)
    changed = []
    for x, _ in run.steps(DATA, max_steps=3):
        before, name = copy.deepcopy(both.state_dict()), "dg"[run.step_number % 2]
        with run.step():
            fake = net("g", x)
            loss = net("d", fake.detach()).mean() if name == "d" else -net("d", fake).mean()
            loss.backward()
            optimizers[name].step()
            both.zero_grad()
        changed.append({k[0] for k, one in both.state_dict().items() if not one.equal(before[k])})
    assert changed[-3:] == [{"d"}, {"g"}, {"d"}]


def test_what_does_not_take_back_its_state_is_refused(run):
    class Forgetful:
        count = 0

        def state_dict(self):
            self.count += 1
            return {"count": self.count}

        def load_state_dict(self, state):
            pass

    with pytest.raises(BadInputError, match="another state_dict"):
        run.keep(forgetful=Forgetful())


# --- the loop ---


def test_a_stop_ends_the_loop_and_functions_are_called_in_between(run):
    model, optimizer = parts()
    net = run.ddp(model)
    run.keep(model=model, optimizer=optimizer)
    called = []
    run.every(steps=2)(lambda: called.append(run.step_number))
    for x, y in run.steps(DATA, max_steps=9):
        with run.step():
            (net(x) - y).square().mean().backward()
            optimizer.step()
            if run.step_number == 4:
                run.stop()
    assert run.step_number == 6, "the vote of step 5 is heard with step 6's gradients"
    assert called == [2, 4, 6]


def test_a_function_is_called_between_steps_with_what_the_loop_has_changed(run):
    """It returns its result, also behind the last step, and is none of the steps."""
    model, optimizer = parts()
    net = run.ddp(model)
    run.keep(model=model, optimizer=optimizer)
    with pytest.raises(BadInputError, match=r"after run\.steps"):
        run.join()
    batches, found = run.steps(DATA, max_steps=2), []
    run.join()
    for x, y in batches:
        with run.step():
            (net(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if run.step_number > len(found):  # the first body is made twice
            found.append(
                run.together(lambda: (run.step_number, float(model.weight.detach().sum())))
            )
    assert [step for step, _ in found] == [1, 2]
    assert found[1][1] == float(model.weight.detach().sum()) != found[0][1]
    assert run.has_ended


def test_an_error_of_a_function_between_steps_ends_a_program_without_supervisor(run):
    model, optimizer = parts()
    run.ddp(model)
    run.keep(model=model, optimizer=optimizer)
    batches = run.steps(DATA, max_steps=2)
    with pytest.raises(ZeroDivisionError):
        run.together(lambda: 1 / 0)
    del batches


def test_a_block_may_skip_its_batch_though_gradients_were_left(run):
    """Of a loop that drops gradients at the beginning of each block: they are not the skipped block's."""
    model, optimizer = parts()
    net = run.ddp(model)
    run.keep(model=model, optimizer=optimizer)

    def body(x, y):
        if run.step_number != 1:
            optimizer.zero_grad()
            (net(x) - y).square().mean().backward()
            optimizer.step()

    one_step(run, net, optimizer, body, max_steps=3)
    assert run.step_number == 3


def test_a_step_without_an_update_carries_a_stop_and_changes_no_weight(run):
    """As a framework's loop ends that decides between two steps, where no sum over ranks is due."""
    model, optimizer = parts()
    net = run.ddp(model)
    run.keep(model=model, optimizer=optimizer)
    weights, seen = [], 0
    for x, y in run.steps(DATA, max_steps=9):
        with run.step():
            if run.step_number == 3:
                weights.append(copy.deepcopy(model.state_dict()))
                run.stop()
            else:
                (net(x) - y).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        seen = run.step_number
    assert (seen, run.has_ended) == (4, True)
    assert all(torch.equal(one, weights[0][name]) for name, one in model.state_dict().items())


def _train_by_hooks(run, net, optimizer, body=lambda: None):
    """As a framework's loop does, which is entered again after an error; how often its body has begun and ended."""
    batches, begun, ended = run.steps(DATA, max_steps=3), 0, 0
    while not run.has_ended:
        try:
            for x, y in batches:
                run.begin_step()
                begun += 1
                body()
                (net(x) - y).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                run.end_step()
                ended += 1
                assert run.step_number == ended
        except BaseException as error:  # noqa: PERF203 - the loop is entered again
            if not run.fail_step(error):
                raise
    return begun, ended


def test_hooks_train_as_a_plain_loop_does_without_a_supervisor(run):
    """The first body is made twice, and what is behind the end of a step is reached once for each."""
    model, optimizer = parts()
    plain = copy.deepcopy(model)
    net = run.ddp(model)
    run.keep(model=model, optimizer=optimizer)
    assert _train_by_hooks(run, net, optimizer) == (4, 3)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x, y in DATA[:3]:
        (plain(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(model.weight, plain.weight)


@pytest.mark.parametrize("error", [ValueError("a cosmic ray"), KeyboardInterrupt()])
def test_an_error_between_the_hooks_ends_a_program_without_supervisor(run, error):
    model, optimizer = parts()
    net = run.ddp(model)
    run.keep(model=model, optimizer=optimizer)

    def body():
        if run.step_number == 1:
            raise error

    with pytest.raises(type(error)) as caught:
        _train_by_hooks(run, net, optimizer, body)
    assert caught.value is error


def test_an_error_outside_of_a_step_is_not_taken_in(run):
    """It is none of the run's; what end_step() raises is, also once it is given to fail_step()."""
    assert run.fail_step(ValueError()) is False
    assert run.fail_step(RepeatStep()) is True


def test_a_loss_may_be_noted_behind_backward_too(run):
    """Then it goes with the gradients of the next step: the mean over ranks is that of the step before."""
    model, optimizer = parts()
    net = run.ddp(model)
    run.keep(model=model, optimizer=optimizer)
    known = []
    for number, (x, _) in enumerate(run.steps(DATA, max_steps=3)):
        known.append(run._state.monitor.last)
        with run.step():
            net(x).sum().backward()
            run.note(loss=float(number))
            optimizer.step()
            optimizer.zero_grad()
    assert known[-1] is not None
    assert run._state.monitor.last == known[-1] + 1


@pytest.mark.parametrize(
    ("accumulate", "samples"), [(1, 6), (2, 12)], ids=["each batch", "two batches a step"]
)
def test_samples_of_a_loader_are_counted(run, accumulate, samples):
    """By its batch size: two steps of three samples, or of twice as many."""
    model, optimizer = parts()
    net = run.ddp(model)
    run.keep(model=model, optimizer=optimizer)
    loader = DataLoader(TensorDataset(torch.ones(12, 2)), batch_size=3)
    for _ in run.steps(loader, max_steps=2, accumulate=accumulate):
        with run.step():
            net(torch.ones(3, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert run._state.samples == samples


def test_the_net_is_the_bare_module_between_steps(run):
    model, optimizer = parts()
    net = run.ddp(model)
    run.keep(model=net, optimizer=optimizer)
    assert net.module is model
    before = net(torch.ones(1, 2))
    one_step(run, net, optimizer)
    assert net(torch.ones(1, 2)) != before
    assert list(net.state_dict()) == ["module.weight", "module.bias"]


# --- what is kept ---


def kept_state(**objects):
    kept = KeptObjects()
    for name, value in objects.items():
        kept.add(name, value)
    return KeptState(kept, settings=from_flat({}), device=CPU, dataset_size=8)


def test_a_defaultdict_in_a_kept_object_keeps_its_default():
    """``keep`` tries whether an object takes its own state back."""

    class Seen:
        def __init__(self):
            self.by_step = defaultdict(list)

        def state_dict(self):
            return {"by_step": self.by_step}

        def load_state_dict(self, state):
            self.by_step = state["by_step"]

    seen = Seen()
    KeptObjects().add("seen", seen)
    assert seen.by_step[0] == []


def two_optimizers():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).to(torch.bfloat16)
    first = torch.optim.Adam(model[0].parameters(), lr=0.1)
    second = torch.optim.SGD(model[1].parameters(), lr=0.2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(second, 1, gamma=0.5)
    state = kept_state(model=model, first=first, second=second, schedule=schedule)
    state.committed_step = 0
    return model, first, second, schedule, state


def make_step(model, first, second, schedule):
    model(torch.ones(3, 2, dtype=torch.bfloat16)).sum().backward()
    for one in (first, second):
        one.step()
        one.zero_grad()
    schedule.step()


def test_a_replaced_rank_steps_a_schedule_of_epochs_without_a_warning():
    """At the end of the first epoch its optimizer has made no step in its process."""
    *_, state = two_optimizers()
    state.committed_step = 3
    *_, schedule, other = two_optimizers()
    other.restore(state.capture())
    schedule.step()  # a warning is an error here


def test_a_state_of_several_optimizers_goes_to_another_process_whole():
    """Moments by their parameters and in their own types, rates as the schedule has them."""
    model, first, second, schedule, state = two_optimizers()
    make_step(model, first, second, schedule)
    first.state[model[0].weight]["exp_avg"] = torch.full((2, 2), 1 / 3)  # float32, of a bfloat16
    state.side.keep(1)
    torch.manual_seed(1)
    other_model, other_first, other_second, other_schedule, other = two_optimizers()
    other.restore(state.capture())
    for own, received in zip(model.parameters(), other_model.parameters(), strict=True):
        assert torch.equal(own, received)
    moment = other_first.state[other_model[0].weight]["exp_avg"]
    assert moment.dtype == torch.float32
    assert torch.equal(moment, torch.full((2, 2), 1 / 3))
    buffer = second.state[model[1].weight]["momentum_buffer"]
    assert torch.equal(other_second.state[other_model[1].weight]["momentum_buffer"], buffer)
    assert other_second.param_groups[0]["lr"] == 0.1
    assert other_schedule.last_epoch == schedule.last_epoch == 1


def test_two_optimizers_of_one_parameter_keep_their_own_moments():
    """Each has its own entry, and groups that they share are shared by them after a restore."""

    def made():
        model = nn.Linear(2, 1)
        outer = torch.optim.SGD(model.parameters(), lr=0.1)
        inner = torch.optim.Adam(outer.param_groups, lr=0.2)
        outer.param_groups = inner.param_groups
        state = kept_state(model=model, outer=outer, inner=inner)
        state.committed_step = 0
        return model, outer, inner, state

    model, outer, inner, state = made()
    model(torch.ones(3, 2)).sum().backward()
    inner.step()
    outer.state[model.weight]["before"] = torch.full((1, 2), 7.0)
    other_model, other_outer, other_inner, other = made()
    other.restore(state.capture())
    assert torch.equal(other_outer.state[other_model.weight]["before"], torch.full((1, 2), 7.0))
    moments = other_inner.state[other_model.weight]
    assert torch.equal(moments["exp_avg"], inner.state[model.weight]["exp_avg"])
    assert moments["step"] == 1
    assert other_outer.param_groups is other_inner.param_groups
    named = [name for name in state.replicated() if "weight" in name]
    assert len(named) == 5, named


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_step_given_up_puts_schedules_and_rates_back():
    """What was changed between two steps, outside of a block, holds."""
    _, first, second, schedule, state = two_optimizers()
    first.param_groups[0]["lr"] = 0.7
    state.keep_between()
    first.param_groups[0]["lr"] = 0.9
    schedule.step()
    state.drop_unfinished_step()
    assert first.param_groups[0]["lr"] == 0.7
    assert (schedule.last_epoch, second.param_groups[0]["lr"]) == (0, 0.2)
    assert state.committed_step == 0


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_commit_that_is_broken_off_keeps_what_its_step_has_made():
    """What is kept is kept where the loop asks for its next batch, which it has not done."""
    _, _, _, schedule, state = two_optimizers()
    state.keep_between()
    schedule.step()
    state.change_ends(1, applied=True, all_used=True)
    state.committed_step = 1
    state.committed()
    state.drop_unfinished_step()
    assert schedule.last_epoch == 1
    schedule.step()
    state.drop_unfinished_step()
    assert schedule.last_epoch == 1


def test_a_weight_written_before_the_update_comes_from_another_rank():
    """Nobody has kept it, so this rank is no source of it; from then on it is put back."""
    model, *_, state = two_optimizers()
    state.keep_between()
    with torch.no_grad():
        model[0].weight.clamp_(-0.1, 0.1)
    state.drop_unfinished_step()
    assert state.committed_step == -1


# --- batches ---


def own_batches(batches, **how):
    length = length_of(
        batches, accumulate=how.get("accumulate", 1), max_steps=how.get("max_steps", 12), epochs=0
    )
    given = GivenBatches(batches=batches, length=length, accumulate=how.get("accumulate", 1))
    return OwnBatches(
        given,
        seed=0,
        rank=0,
        say=lambda _: None,
        warn=how.get("warn", lambda _: None),
        alive=how.get("alive", lambda: None),
    )


def shuffled():
    data = TensorDataset(torch.arange(20.0))
    return DataLoader(data, batch_size=5, shuffle=True, collate_fn=jitter)


def jitter(items):
    return torch.stack([one[0] for one in items]) + torch.rand(())


class EndsItsWorker(torch.utils.data.Dataset):
    """Ends the process that loads its second sample, by a signal or by an exit."""

    def __init__(self, way):
        self.way = way

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 1:
            self.way()
        return index


@pytest.mark.parametrize(
    ("way", "error", "message"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), FaultError, "exited unexpectedly"),
        (lambda: os._exit(1), RuntimeError, "exited unexpectedly"),
        (lambda: 1 / 0, ZeroDivisionError, "division"),
    ],
    ids=["killed", "ended", "raised"],
)
def test_only_a_killed_worker_is_a_fault_from_outside(way, error, message, monkeypatch):
    """However often it comes, the run is not to blame."""
    leave_deaths_to_loaders()
    own = own_batches(DataLoader(EndsItsWorker(way), batch_size=2, num_workers=1))
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # where the worker leaves its sockets
        monkeypatch.setattr(tempfile, "tempdir", short)
        with pytest.raises(error, match=message) as caught:
            own.take(0)
    if error is FaultError:
        assert (caught.value.fault.origin, caught.value.fault.kind) == (
            Origin.OUTSIDE,
            FaultKind.RANK_RAISED,
        )


def test_a_process_that_comes_late_draws_the_same_batches():
    early, late = own_batches(shuffled()), own_batches(shuffled())
    drawn = [early.take(step)[0] for step in range(12)]
    assert torch.equal(late.take(9)[0], drawn[9])
    assert torch.equal(late.take(10)[0], drawn[10])
    assert torch.equal(late.take(3)[0], drawn[3]), "back again, after a roll-back"
    assert not torch.equal(drawn[0], drawn[4]), "each epoch has an order of its own"


def test_a_step_that_is_done_again_has_its_batch_as_it_was():
    batches = own_batches(shuffled())
    first = batches.take(0)[0]
    as_it_was = first.clone()
    assert batches.take(0)[0] is first
    first.mul_(2)  # a loop may
    assert torch.equal(batches.take(0)[0], as_it_was)


def test_a_wait_that_is_cut_short_leaves_no_batch_out():
    stops = iter([False, True, False, False])

    def alive():
        if next(stops):
            raise RuntimeError("leave")

    batches, plain = own_batches(shuffled(), alive=alive), own_batches(shuffled())
    batches.take(0)
    with pytest.raises(RuntimeError):
        batches.take(1)
    assert torch.equal(batches.take(1)[0], [plain.take(0)[0], plain.take(1)[0]][1])


def test_spawned_workers_of_an_unguarded_program_are_refused():
    """They would import the program, and begin its run again in each."""
    data = TensorDataset(torch.zeros(4, 1))
    spawned = DataLoader(data, num_workers=1, multiprocessing_context="spawn")
    assert "import the program" in why_spawned(spawned, is_guarded=lambda: False)
    assert why_spawned(spawned, is_guarded=lambda: True) == ""
    forked = DataLoader(data, num_workers=1, multiprocessing_context="fork")
    for harmless in (forked, DataLoader(data), [1, 2]):
        assert why_spawned(harmless, is_guarded=lambda: False) == ""


def test_batches_without_a_length_begin_again_when_they_end():
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(3))

    batches = own_batches(DataLoader(Endless(), batch_size=None), max_steps=7, accumulate=2)
    assert [batches.take(step) for step in range(4)] == [[0, 1], [2, 0], [1, 2], [0, 1]]


def test_loaders_that_give_every_rank_the_same_are_named():
    data = TensorDataset(torch.arange(4.0))
    assert "in order" in why_alike(DataLoader(data))
    assert "an order of its own" in why_alike(DataLoader(data, shuffle=True))
    assert why_alike(DataLoader(data, sampler=DistributedSampler(data, 2, 0))) == ""
    assert why_alike(DATA) == ""


def test_the_length_of_a_run():
    assert length_of(DATA, accumulate=1, max_steps=0, epochs=3) == RunLength(
        steps_per_epoch=4, total_steps=12
    )
    assert length_of(DATA, accumulate=3, max_steps=5, epochs=0) == RunLength(
        steps_per_epoch=1, total_steps=5
    )


# --- the module ---


@dataclasses.dataclass
class Outputs:
    loss: torch.Tensor
    names: list


@pytest.mark.parametrize(
    "outputs",
    [
        lambda h: h,
        lambda h: (h, "text", None),
        lambda h: {"logits": h, "more": [h * 2, 3]},
        lambda h: OrderedDict(logits=h),
        lambda h: Outputs(loss=h, names=[1]),
        lambda h: SimpleNamespace(more=SimpleNamespace(loss=h), names=[1]),
        lambda h: torch.distributions.Normal(h, 1.0),
    ],
    ids=["tensor", "tuple", "nested", "mapping", "dataclass", "namespace", "object"],
)
def test_signals_ride_behind_outputs_of_any_structure(outputs):
    """And the gradients are those of the bare module."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            return outputs(self.layer(x))

    model = Model()
    carried = torch.tensor([3.0, 4.0])
    carrier = model_replica._Carrier(model, cells=2, device=CPU, take=lambda: carried)
    found = []
    made = carrier(torch.ones(1, 2))
    assert type(made) is type(model(torch.ones(1, 2)))
    model_replica._each_tensor(made, found.append)
    found[0].mul_(2)  # a loop may change an output in place
    found[0].sum().backward()
    assert torch.equal(carrier.signal.grad, carried)
    assert torch.equal(model.layer.weight.grad, torch.full((2, 2), 2.0))


def test_an_output_that_backward_needs_is_not_changed_unseen():
    model = nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1))
    carrier = model_replica._Carrier(model, cells=1, device=CPU, take=lambda: torch.zeros(1))
    made = carrier(torch.ones(1, 2))
    made.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        made.sum().backward()


# --- found by reading: each was wrong once ---


def test_code_behind_a_block_counts_once_a_step(run):
    """The first body is a rehearsal, and what follows it is taken back: schedule, average, frozen copy."""
    model, optimizer = parts()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    frozen = nn.Linear(2, 1).requires_grad_(False)
    ema = torch.optim.swa_utils.AveragedModel(model)
    net = run.ddp(model)
    run.keep(model=model, optimizer=optimizer, schedule=schedule, frozen=frozen, ema=ema)
    start = frozen.weight.clone()
    for x, y in run.steps(DATA, max_steps=3):
        with run.step():
            (net(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
        ema.update_parameters(model)
        frozen.weight.add_(1.0)
    assert schedule.last_epoch == 3
    assert int(ema.n_averaged) == 3
    assert torch.equal(frozen.weight, start + 3)


def test_draws_within_a_block_follow_those_before_it(run):
    """One seed a step: what was drawn before the block is not drawn again within it."""
    model, optimizer = parts()
    net = run.ddp(model)
    run.keep(model=model, optimizer=optimizer)
    goes_on = []
    for x, y in run.steps(DATA, max_steps=2):
        torch.rand(1)
        state = torch.get_rng_state()
        with run.step():
            goes_on.append(torch.equal(torch.get_rng_state(), state))
            (net(x) - y).square().mean().backward()
            optimizer.step()
    assert goes_on == [True] * 3, "with the rehearsal"


def test_a_fused_optimizer_is_scaled_once_after_a_rehearsal(run):
    """The loss scaler leaves its scale on an optimizer whose step was cut short."""
    weights = []
    for is_ours in (False, True):
        torch.manual_seed(2)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        net = run.ddp(model) if is_ours else model
        if is_ours:
            run.keep(model=model, optimizer=optimizer, scaler=scaler)
        for x, y in run.steps(DATA, max_steps=2) if is_ours else DATA[:2]:
            with run.step() if is_ours else contextlib.nullcontext():
                scaler.scale((net(x) - y).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        weights.append(model.weight.detach().clone())
    assert torch.equal(*weights)


def test_what_functions_change_between_steps_stays(run):
    """An average, and a target that is filled now and then; of the net only the buffers are put back."""
    model, optimizer = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1)), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(model)
    target = nn.Linear(2, 1).requires_grad_(False)
    net = run.ddp(model)
    run.keep(model=model, optimizer=optimizer, average=average, target=target)
    seen = []

    @run.every(steps=2)
    def between():
        average.update_parameters(model)
        target.weight.fill_(float(run.step_number))
        before = model[1].running_mean.clone()
        with torch.no_grad():
            net(torch.full((4, 2), 100.0))  # in train mode
        seen.append(before)

    for x, y in run.steps(DATA, max_steps=5):
        if run.step_number in (2, 4):
            assert torch.equal(model[1].running_mean, seen[-1])
        with run.step():
            (net(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.isfinite(model[1].running_mean).all()
    assert int(average.n_averaged) == 2
    assert torch.equal(target.weight, torch.full((1, 2), 4.0))


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_functions_begin_again_from_what_they_found():
    """A step after them is given up: they are called once more, on what there was before."""
    model, *_, schedule, state = two_optimizers()
    state.committed_step = 4
    state.boundary_done_step = 4
    state.keep_between()
    was = model[0].weight.clone()
    state.begin_functions(room_bytes=1e9)
    schedule.step()
    with torch.no_grad():
        model[0].weight.mul_(2)
    state.end_functions()
    state.drop_unfinished_step()
    assert torch.equal(model[0].weight, was)
    assert (schedule.last_epoch, state.boundary_done_step, state.committed_step) == (0, 3, 4)
    state.keep_between()
    assert state.buffers.followed_names() == [], "no step has written one"


def test_a_step_after_functions_leaves_nothing_where_it_is_given_up():
    """A count in the model, which forward and functions change: both begin from what it was before the functions."""
    model, *_, state = two_optimizers()
    model.calls = model.evaluations = 0
    for step in range(1, 9):
        state.committed_step = step
        model.calls += 1
        state.keep_between()
        state.begin_functions(room_bytes=1e9)
        model.calls += 10
        model.evaluations += 1
        state.end_functions()
        model.calls += 100
        state.drop_unfinished_step()
        assert (model.calls, model.evaluations, state.take_lost()) == (step, 0, []), step


def test_what_functions_change_for_the_first_time_is_undone_or_lost():
    """They are called after each step, too often for copies of everything; a count is first changed in the sixth call."""
    model, *_, state = two_optimizers()
    model.evaluations = 0
    for step in range(1, 7):
        state.committed_step = step
        state.keep_between()
        state.side._copied_s = float("inf")  # no time for another copy
        state.begin_functions(room_bytes=1e9)
        model.evaluations += step == 6
        state.end_functions()
    state.drop_unfinished_step()
    lost = state.take_lost()
    assert (model.evaluations, lost) in ((0, []), (1, ["model.model.evaluations"]))


def test_the_mode_of_each_module_is_part_of_the_state():
    """It goes to another process, and is put back where a step or a function has changed it."""
    model, *_, state = two_optimizers()
    state.committed_step = 4
    model[1].eval()
    state.keep_between()
    other_model, *_, other = two_optimizers()
    other.restore(state.capture())
    state.begin_functions(room_bytes=1e9)
    model.eval()
    state.end_functions()
    assert state.capture()["in_eval"] == ["model", "model.0", "model.1"]
    state.drop_unfinished_step()
    model.train()
    state.drop_unfinished_step()
    for one in (model, other_model):
        assert [part.training for part in one.modules()] == [True, True, False]


@pytest.mark.parametrize(("room_bytes", "committed_step"), [(1e9, 4), (1, -1)])
def test_what_functions_change_on_the_modules_is_undone(room_bytes, committed_step):
    """Numbers, lists and tensors beside the weights, first changed now; without room a tensor has no copy."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model.temperature, model.seen, model[1].mask = 1.0, [], torch.ones(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = kept_state(model=model, optimizer=optimizer)
    state.committed_step = 4
    state.keep_between()
    state.begin_functions(room_bytes=room_bytes)
    model.temperature *= 0.5
    model.seen.append(4)
    model.late = True
    model[1].mask.mul_(0.5)
    state.end_functions()
    state.drop_unfinished_step()
    assert (model.temperature, model.seen, hasattr(model, "late")) == (1.0, [], False)
    assert state.committed_step == committed_step
    if committed_step == 4:
        assert torch.equal(model[1].mask, torch.ones(2))


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize(("writes", "committed_step"), [(False, 4), (True, -1)])
def test_without_room_written_weights_cost_the_state(writes, committed_step):
    """Of those that functions have written there is no copy: the state comes from elsewhere."""
    model, *_, schedule, state = two_optimizers()
    state.committed_step = 4
    state.keep_between()
    state.begin_functions(room_bytes=1)
    schedule.step()
    if writes:
        with torch.no_grad():
            model[0].weight.mul_(2)
    state.end_functions()
    state.drop_unfinished_step()
    assert schedule.last_epoch == 0
    assert state.committed_step == committed_step


def test_a_state_that_was_received_is_not_followed():
    """Its weights are written by whoever receives it, not by a step."""
    state, other = two_optimizers()[-1], two_optimizers()[-1]
    other.restore(state.capture())
    other.keep_between()
    assert other.buffers.followed_names() == []


def test_a_weight_that_is_written_without_a_change_costs_no_step(run):
    model, optimizer = parts()
    net = run.ddp(model)
    run.keep(model=model, optimizer=optimizer)
    updates = []
    for x, y in run.steps(DATA, max_steps=3):
        with run.step():
            with torch.no_grad():
                model.weight.clamp_(-10, 10)
            (net(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            updates.append(run.step_number)
    assert updates == [0, 1, 2]


def test_states_of_two_optimizers_are_compared_and_saved_after_a_look():
    model, first, second, schedule, state = two_optimizers()
    make_step(model, first, second, schedule)
    names = list(state.replicated())
    assert "model.1.weight (momentum_buffer)" in names
    assert len(state.steady_tensors()) == len(list(model.parameters())) + 2 * 3 + 2
    state.capture()


def test_a_generator_of_the_loader_s_own_is_where_it_was():
    """torch's own recipe; for a process that comes late, and in another order in each epoch."""

    def loader():
        data = TensorDataset(torch.arange(20.0))
        own = torch.Generator().manual_seed(5)
        return DataLoader(data, batch_size=5, shuffle=True, generator=own)

    early, late = own_batches(loader()), own_batches(loader())
    drawn = [early.take(step)[0][0] for step in range(12)]
    assert torch.equal(late.take(9)[0][0], drawn[9])
    assert not torch.equal(drawn[0], drawn[4])


class SeedsItself(RandomSampler):
    """As people write one, after DistributedSampler."""

    def set_epoch(self, epoch):
        self.generator.manual_seed(40 + epoch)


def test_a_seed_that_set_epoch_gives_a_generator_stays():
    """In a process that comes late, too, which has seen no other epoch."""

    def loader():
        data = TensorDataset(torch.arange(20.0))
        own = SeedsItself(data, generator=torch.Generator().manual_seed(40))
        return DataLoader(data, batch_size=5, sampler=own)

    early = own_batches(loader())
    drawn = [early.take(step)[0][0] for step in range(12)]
    for step in (5, 9):
        assert torch.equal(own_batches(loader()).take(step)[0][0], drawn[step])
    order = torch.randperm(20, generator=torch.Generator().manual_seed(42))
    assert torch.equal(torch.cat(drawn[8:]), order.float())


def test_a_body_may_take_something_out_of_its_batch():
    batches = own_batches([{"x": 1, "label": 2}] * 4, max_steps=4)
    batches.take(0)[0].pop("label")
    assert batches.take(0)[0] == {"x": 1, "label": 2}


def test_what_cannot_be_copied_is_named_once():
    """A lock, say, which any body may have taken when its step is done again."""
    said = []
    batches = own_batches([{"lock": threading.Lock(), "x": 1}] * 4, max_steps=4, warn=said.append)
    for step in (0, 0, 1, 2):
        batches.take(step)
    assert len(said) == 1
    assert said[0].startswith("the batches hold a lock, which cannot be copied")


@pytest.mark.filterwarnings("ignore:Grad strides")
def test_gradients_of_gradients_carry_no_signal(run):
    """As for a gradient penalty: the net's outputs are differentiated before backward."""
    model, optimizer = parts()
    net = run.ddp(model)
    run.keep(model=model, optimizer=optimizer)
    for x, _ in run.steps(DATA, max_steps=3):
        with run.step():
            inputs = x.clone().requires_grad_()
            out = net(inputs).square().sum()
            (slope,) = torch.autograd.grad(out, inputs, create_graph=True)
            (out + slope.square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert run.step_number == 3


class Counting(nn.Linear):
    """Uses how often it was called, which its state dict has not."""

    def __init__(self):
        super().__init__(2, 1)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


def _summary_of_late(folder, *, steps, reads_late):
    """Of a launch whose loop reads behind the block what its body sets behind the update, or does not."""
    with run_in(folder) as made:
        model = Counting()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        net = made.ddp(model)
        made.keep(model=model, optimizer=optimizer)

        def train(x, y):
            (net(x) - y).square().mean().backward()
            optimizer.step()
            return 1

        if reads_late:
            for x, y in made.steps(DATA, max_steps=steps):
                with made.step():
                    done = train(x, y)
                assert done
                assert made._state.side.followed_names() == ["model.model.calls"]
        else:
            for x, y in made.steps(DATA, max_steps=steps):
                with made.step():
                    train(x, y)
        assert model.calls == steps
    return json.loads((folder / "logs" / "summary.json").read_text())


@pytest.mark.parametrize("reads_late", [True, False])
def test_one_rank_that_rehearses_nothing_is_not_proved(tmp_path, reads_late):
    """It has no drills, so nothing has shown that its steps can be repeated. Control: the first step is repeated."""
    assert _summary_of_late(tmp_path, steps=2, reads_late=reads_late)["exact"]
    summary = _summary_of_late(tmp_path, steps=4, reads_late=reads_late)
    assert summary["exact"] is not reads_late, summary["inexact_reasons"]


@pytest.mark.parametrize("way", ["for", "while", "generator"])
def test_what_is_set_behind_the_update_is_there_behind_the_block(run, way):
    """As where a function makes the whole step: the first body of a launch is not for nothing then, in no form of loop."""
    model, optimizer = parts()
    net = run.ddp(model)
    run.keep(model=model, optimizer=optimizer)

    def train(x, y):
        (net(x) - y).square().mean().backward()
        optimizer.step()
        return 1

    def given():
        yield from run.steps(DATA, max_steps=2)

    if way == "generator":
        for x, y in given():
            with run.step():
                done = train(x, y)
            assert done
    elif way == "for":
        for x, y in run.steps(DATA, max_steps=2):
            with run.step():
                result = train(x, y)
            assert result
    else:
        batches = iter(run.steps(DATA, max_steps=2))
        while (batch := next(batches, None)) is not None:
            with run.step():
                found = train(*batch)
            assert found
    assert run.step_number == 2


def test_data_may_stay_in_its_order(run):
    """``shuffle`` and ``num_workers`` are as a DataLoader's."""
    model, optimizer = parts()
    net = run.ddp(model)
    run.keep(model=model, optimizer=optimizer)
    data = TensorDataset(torch.arange(8.0).unsqueeze(1).expand(8, 2).contiguous())
    seen = []
    for (x,) in run.steps(
        run.loader(data, batch_size=2, shuffle=False, num_workers=1), max_steps=3
    ):
        with run.step():
            net(x).sum().backward()
            optimizer.step()
            seen += x[:, 0].tolist()
    assert seen == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def _changes_of_a_launch(folder, *, samples, steps, **options):
    with run_in(folder) as made:
        model, optimizer = parts()
        net = made.ddp(model)
        made.keep(model=model, optimizer=optimizer)
        data = TensorDataset(torch.ones(24, 2), torch.ones(24, 1))
        batches = made.loader(data, batch_size=samples, **options)
        for x, y in made.steps(batches, max_steps=steps):
            with made.step():
                (net(x) - y).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return made._state.changes


def test_an_end_before_the_checkpoint_is_refused_as_the_loop_has_it(tmp_path):
    """The length is an argument of ``run.steps()``, and no option."""
    _changes_of_a_launch(tmp_path, samples=3, steps=3)
    with pytest.raises(BadInputError, match=r"^run\.steps\(\): the run would end at step 2, and "):
        _changes_of_a_launch(tmp_path, samples=3, steps=2)


@pytest.mark.parametrize("samples", [3, 6])
def test_a_resume_with_larger_batches_is_a_change(tmp_path, samples):
    """Its steps are others than those of a run from the start, so it is not exact; equal ones change nothing."""
    _changes_of_a_launch(tmp_path, samples=3, steps=2)
    changes = _changes_of_a_launch(tmp_path, samples=samples, steps=4)
    expected = ("samples in a step 3 -> 6 at step 2",) if samples == 6 else ()
    assert changes == expected


def test_a_resume_in_another_order_of_samples_is_a_change(tmp_path):
    """The two halves are of no one order."""
    _changes_of_a_launch(tmp_path, samples=3, steps=2)
    changes = _changes_of_a_launch(tmp_path, samples=3, steps=4, shuffle=False)
    assert changes == ("order of the samples shuffled -> the dataset's at step 2",)


def test_another_kept_name_is_refused_at_a_resume():
    *_, state = two_optimizers()
    captured = {**state.capture(), "kept": ["model", "first", "second", "sched"]}
    with pytest.raises(ValueError, match="sched, and this loop model, first, second, schedule"):
        state.restore(captured)


def test_files_of_a_loop_lack_what_its_program_has_frozen():
    """And are completed by what the program builds again, under the names that it keeps."""

    def kept():
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)
        state = kept_state(model=model, optimizer=optimizer)
        state.only_trained = True
        state.note_start(init_from="", later=())
        return model, optimizer, state

    (model, optimizer, source), (other, _, state) = kept(), kept()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    source.committed_step = 1
    saved = copy.deepcopy(source.capture_for_file())
    assert left_out(saved) == ("model.0.weight", "model.0.bias")
    state.restore(completed(saved, state.weights()))
    assert torch.equal(other[1].weight, model[1].weight)
    assert bits_of(state)["optimizer"] == bits_of(source)["optimizer"]
