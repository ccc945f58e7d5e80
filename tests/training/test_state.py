"""The state of a rank: captured, restored, and freed of what an unfinished step changed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ddp_runner.checkpoint.entry_names import live_name
from ddp_runner.data.order import ORDER_VERSION
from ddp_runner.kernel.group.transfer import receive_state, send_state
from ddp_runner.kernel.rules.election import EMPTY_STEP
from ddp_runner.training.components.buffers import Buffers
from tests.kernel.group.joining import join
from tests.processes import hosted_store, run_ranks
from tests.scenarios.wrapping import Wrapper

from .building import FEATURES, as_plain, bits_of, build_model, build_state, micro_batches


def advance(state, steps):
    """Train by hand, so that every part of the state moves."""
    for step in range(steps):
        torch.manual_seed(step)
        inputs, targets, _ = micro_batches(step, 0)[0].batch
        state.model.train()
        state.optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.mse_loss(state.model(inputs), targets)
        loss.backward()
        state.optimizer.step()
        state.ema.update(state.model) if state.ema is not None else None
        state.committed_step += 1
        state.samples += len(inputs)
        state.monitor.observe(
            step=state.committed_step, epoch=0, loss=float(loss.detach()), applied=True
        )
        state.buffers.notice()
        state.buffers.keep()
        state.side.keep(step + 1)


def test_a_fresh_state_is_empty():
    """It must be filled before it trains: it stands in no election."""
    state = build_state()
    state.committed_step = EMPTY_STEP
    assert bits_of(state)["counters"] == {
        "committed_step": EMPTY_STEP,
        "begun_step": EMPTY_STEP,
        "samples": 0,
        "attended_step": 0,
        "all_used_steps": 0,
    }


@pytest.mark.parametrize("ema", [True, False])
def test_a_restored_state_goes_on_as_the_captured_one(ema):
    """Model, optimizer, average, monitor and counters come over: the next step gives equal bits."""
    source, other = build_state(ema=ema), build_state(ema=ema)
    advance(source, 4)
    advance(other, 1)
    source.boundary_done_step = 3
    other.restore(copy.deepcopy(source.capture()))
    assert bits_of(other) == bits_of(source)
    for state in (source, other):
        advance_once_more(state)
    assert bits_of(other) == bits_of(source)


def advance_once_more(state):
    torch.manual_seed(99)
    inputs, targets, _ = micro_batches(50, 0)[0].batch
    state.optimizer.zero_grad(set_to_none=True)
    torch.nn.functional.mse_loss(state.model(inputs), targets).backward()
    state.optimizer.step()


def _hand_over(me, port):
    state = build_state()
    scale = torch.amp.GradScaler("cpu", enabled=True, init_scale=4.0)
    if me.rank == 0:
        advance(state, 4)
        scale.load_state_dict({**scale.state_dict(), "scale": 64.0, "_growth_tracker": 7})
    state.precision.scaler = scale
    with join(me, port) as group:
        if me.rank == 0:
            send_state(group, state.capture(), to=(1,))
        else:
            state.restore(receive_state(group, source=0))
    advance_once_more(state)
    weights = {name: tensor.tolist() for name, tensor in state.model.state_dict().items()}
    average = {
        name: tensor.tolist() for name, tensor in state.ema.state_dict()["parameters"].items()
    }
    return weights, average, state.precision.state_dict(), state.capture()["counters"]


def test_a_received_state_has_the_rate_of_its_newest_step():
    """What is saved before the next step says that rate, not the highest one."""
    source, other = build_state(), build_state()
    for group in source.optimizer.param_groups:
        group["lr"] = 0.00123
    advance(source, 1)
    other.restore(copy.deepcopy(source.capture()))
    rates = [group["lr"] for group in other.capture()["optimizer"]["param_groups"]]
    assert rates == [0.00123] * len(rates)


class Counting(nn.Module):
    """Counts its forwards in a buffer that is not saved with the model."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, 1)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, inputs):
        self.count += 1
        return self.layer(inputs)


def test_a_step_skipped_after_a_resume_keeps_unsaved_buffers():
    """It puts them back to what was restored, not to what they were when the model was built."""
    source, other = (build_state(model=Counting()) for _ in range(2))
    for step in (1, 2, 3):
        source.model(torch.zeros(1, FEATURES))
        source.committed_step = step
        source.buffers.notice()
        source.buffers.keep()
        source.side.keep(step)
    other.restore(copy.deepcopy(source.capture()))
    other.model(torch.zeros(1, FEATURES))
    other.buffers.drop()  # as the commit of a step that is not applied does
    other.side.keep(4)
    assert int(other.model.count) == 3


def test_a_replacement_gets_batch_statistics_scaler_average_and_counters():
    """Over the wire, as in a repair: whatever the next step depends on is the survivor's."""
    with hosted_store() as port:
        survivor, replacement = run_ranks(_hand_over, 2, port)
    assert replacement == survivor
    weights, _, scaler, counters = replacement
    assert weights["1.num_batches_tracked"] == 5
    assert (scaler["scale"], scaler["_growth_tracker"]) == (64.0, 7)
    assert counters["committed_step"] == 4


def test_a_captured_state_holds_the_live_tensors():
    """References, not copies: a capture costs nothing, and is valid until the next step."""
    state = build_state()
    captured = state.capture()["model"]
    assert captured["0.weight"].data_ptr() == state.model[0].weight.data_ptr()


def test_a_captured_state_survives_a_file(tmp_path):
    """Plain torch.save and a restricted load give back every bit."""
    source, other = build_state(), build_state()
    advance(source, 3)
    torch.save(source.capture(), tmp_path / "state.pt")
    other.restore(torch.load(tmp_path / "state.pt", weights_only=True))
    assert bits_of(other) == bits_of(source)


@pytest.mark.parametrize("missing", ["optimizer", "monitor", "counters"])
def test_a_state_that_was_restored_by_half_stands_in_no_election(missing):
    """However far it came: it is neither what it was nor what it was to become."""
    source, other = build_state(), build_state()
    advance(source, 4)
    advance(other, 6)
    half = source.capture()
    del half[missing]
    with pytest.raises(KeyError):
        other.restore(half)
    assert other.committed_step == EMPTY_STEP


def test_an_average_that_was_not_saved_starts_fresh():
    """A run that turns its average on later resumes from a state without one."""
    source, other = build_state(ema=False), build_state(ema=True)
    advance(source, 2)
    other.restore(source.capture())
    assert not other.ema.started
    assert other.committed_step == 2


def test_an_unfinished_step_is_dropped():
    """Gradients go, and buffers that forward had changed are those of the last commit again."""
    state = build_state()
    advance(state, 2)
    committed = bits_of(state)
    state.model.train()
    for step in range(3):
        loss = state.model(micro_batches(step, 0)[0].batch[0]).mean()
        loss.backward()
    assert as_plain(dict(state.model.named_buffers())) != as_plain(
        {name: tensor for name, tensor in committed["model"].items() if "running" in name}
    )
    assert bits_of(state) != committed
    state.drop_unfinished_step()
    assert bits_of(state) == committed
    assert all(parameter.grad is None for parameter in state.model.parameters())


class _Moving(torch.nn.Module):
    """Assigns its statistics again at each forward, as models do that were not written for DDP."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 1)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("seen", None)
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, inputs):
        self.mean = 0.9 * self.mean + 0.1 * inputs.mean(0)
        self.cache = inputs.flatten()
        return self.layer(inputs - self.mean)


def test_a_buffer_that_was_assigned_again_is_dropped_too():
    """The module has the tensor of the last commit again, with its values; the batch is untouched."""
    state = build_state(model=_Moving(), ema=False)
    advance(state, 2)
    mean, committed = state.model.mean, bits_of(state)
    inputs = micro_batches(3, 0)[0].batch[0]
    given = inputs.clone()
    for _ in range(2):
        state.model(inputs).mean().backward()
    mean.add_(1.0)
    assert bits_of(state) != committed
    state.drop_unfinished_step()
    assert bits_of(state) == committed
    assert state.model.mean is mean
    assert torch.equal(inputs, given)


class _Lazy(torch.nn.Module):
    """Makes its statistics when its first batch comes; ``scratch`` is no part of its state."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 1)
        self.register_buffer("mean", None)
        self.register_buffer("scratch", None, persistent=False)

    def forward(self, inputs):
        self.scratch = inputs.mean(0)
        self.mean = self.scratch if self.mean is None else 0.9 * self.mean + 0.1 * self.scratch
        return self.layer(inputs - self.mean)


@pytest.mark.parametrize("committed_steps", [0, 1, 3])
def test_a_buffer_that_is_filled_late_is_dropped_too(committed_steps):
    """Registered as None: so it is again when the step that filled it is not done."""
    state = build_state(model=_Lazy())
    advance(state, committed_steps)
    committed = bits_of(state)
    assert ("mean" in committed["model"]) == (committed_steps > 0)
    for step in range(2):
        state.model(micro_batches(step, 0)[0].batch[0]).mean().backward()
    assert bits_of(state) != committed
    state.drop_unfinished_step()
    assert bits_of(state) == committed
    assert (state.model.scratch is None) is (committed_steps == 0)


@pytest.mark.parametrize("own_steps", [0, 2])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_state_with_buffers_filled_late_is_taken_over(steps, own_steps):
    """By a fresh process, and by one that goes back to before or after they were filled."""
    state, other = (build_state(model=_Lazy()) for _ in range(2))
    advance(state, steps)
    advance(other, own_steps)
    other.restore(copy.deepcopy(state.capture()))
    assert bits_of(other) == bits_of(state)
    for each in (state, other):
        advance(each, 2)
    assert bits_of(other) == bits_of(state)
    other.model(micro_batches(0, 0)[0].batch[0])
    other.drop_unfinished_step()
    assert bits_of(other) == bits_of(state)


class _Target(torch.nn.Module):
    """Its target has no gradient; forward moves it, by ``write``, from call ``at`` on."""

    def __init__(self, write, at=1):
        super().__init__()
        self.layer = torch.nn.Linear(6, 1)
        self.target = torch.nn.Linear(6, 1).requires_grad_(False)
        self.fixed = torch.nn.Linear(6, 1).requires_grad_(False)
        self._write = write
        self._at = at
        self._calls = 0

    def forward(self, inputs):
        self._calls += 1
        if self._calls >= self._at:
            for slow, quick in zip(self.target.parameters(), self.layer.parameters(), strict=True):
                self._write(slow, quick)
        return self.layer(inputs) + self.target(inputs).detach() + self.fixed(inputs)


def _by_data(slow, quick):
    slow.data = 0.9 * slow.data + 0.1 * quick.data


def _in_data(slow, quick):
    slow.data.lerp_(quick.data, 0.1)


def _in_place(slow, quick):
    with torch.no_grad():
        slow.lerp_(quick, 0.1)


@pytest.mark.parametrize(
    ("write", "at"), [(_by_data, 1), (_in_data, 1), (_in_place, 1), (_in_place, 2), (_by_data, 2)]
)
def test_a_parameter_that_forward_writes_is_dropped_too(write, at):
    """A step that is done again moves the target once, not twice; a fixed one is not even copied."""
    state = build_state(model=_Target(write, at), ema=False)
    advance(state, 3)
    committed = bits_of(state)
    for step in range(2):
        state.model(micro_batches(step, 0)[0].batch[0]).mean().backward()
    assert bits_of(state) != committed
    state.drop_unfinished_step()
    assert bits_of(state) == committed
    assert len(state.buffers.followed()) == 2
    other = build_state(model=_Target(write, at), ema=False)
    other.restore(copy.deepcopy(state.capture()))
    other.model(micro_batches(0, 0)[0].batch[0]).mean().backward()
    other.drop_unfinished_step()
    assert bits_of(other) == committed, "in the first step of a process that took the state over"
    steady = {tensor.data_ptr() for tensor in state.steady_tensors()}
    assert not steady & {p.data_ptr() for p in state.model.target.parameters()}
    assert steady >= {p.data_ptr() for p in state.model.fixed.parameters()}


@pytest.mark.parametrize("write", [_by_data, _in_data, _in_place])
def test_what_forward_writes_in_the_very_first_step_is_dropped(write):
    """Once it is given up, and once it is skipped: before that step nobody knows who is written."""
    state = build_state(model=_Target(write), ema=False)
    begun = bits_of(state)
    state.buffers.hold_frozen()
    for _ in range(2):
        state.model(micro_batches(0, 0)[0].batch[0]).mean().backward()
        state.drop_unfinished_step()
        assert bits_of(state) == begun
    state.model(micro_batches(0, 0)[0].batch[0])
    state.buffers.notice()  # it is committed, without effect
    state.drop_unfinished_step()
    assert (bits_of(state)["model"], len(state.buffers.followed())) == (begun["model"], 2)
    advance(state, 2)
    committed = bits_of(state)
    state.model(micro_batches(9, 0)[0].batch[0])
    state.drop_unfinished_step()
    assert bits_of(state) == committed


@pytest.mark.parametrize("write", [_by_data, _in_place])
def test_what_forward_begins_to_write_late_is_dropped(write):
    """The step in which it begins is given up twice, and ends as if it had been done once."""
    state, calm = (build_state(model=_Target(write, at=100), ema=False) for _ in range(2))
    calm.restore(copy.deepcopy(state.capture()))
    for each in (state, calm):
        each.buffers.hold_frozen()
        advance(each, 3)
        assert each.buffers.followed() == []
        each.model._at = 0
    committed = bits_of(state)
    for _ in range(2):
        state.model._at = 0  # it counts, and the count is put back too
        state.model(micro_batches(3, 0)[0].batch[0]).mean().backward()
        assert bits_of(state) != committed
        state.drop_unfinished_step()
        assert bits_of(state) == committed
    for each in (state, calm):
        each.model._at = 0
        advance(each, 1)
        assert len(each.buffers.followed()) == 2
    assert bits_of(state) == bits_of(calm) != committed


def test_a_state_that_is_taken_over_is_what_is_held():
    """A step that begins to write right after that falls back to what was received."""
    source, state = (build_state(model=_Target(_in_place, at=100), ema=False) for _ in range(2))
    with torch.no_grad():
        source.model.target.weight.fill_(7.0)
    state.buffers.hold_frozen()
    advance(state, 2)
    state.restore(copy.deepcopy(source.capture()))
    received = bits_of(state)
    state.model._at = 0
    state.model(micro_batches(3, 0)[0].batch[0])
    state.drop_unfinished_step()
    assert bits_of(state) == received


def test_frozen_parameters_that_outweigh_the_others_are_held_for_one_step_only():
    """Control: a large model with a small adapter has no room for all of it twice."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 64), torch.nn.Linear(64, 1))
    model[0].requires_grad_(False)
    state = build_state(model=model, ema=False)
    state.buffers.hold_frozen()
    assert len(state.buffers._held) == 2
    advance(state, 1)
    state.buffers.hold_frozen()
    assert state.buffers._held == {}


def test_a_state_that_is_taken_over_is_no_sign_of_a_target():
    """Control: loading writes the fixed parameters; so does an average that is swapped in."""
    state, other = (build_state(model=_Target(_in_place, at=100)) for _ in range(2))
    advance(state, 2)
    other.restore(copy.deepcopy(state.capture()))
    with other.ema.swapped_in(other.model):
        pass
    other.buffers.drop()
    advance(other, 2)
    assert other.buffers.followed() == []


def test_a_buffer_that_changes_its_shape_is_kept_as_it_is():
    """One that is filled by the first forward, or grows."""
    state = build_state(model=_Moving(), ema=False)
    state.model.mean = torch.zeros(0)
    state.buffers.keep()
    state.model.mean = torch.arange(4.0)
    state.buffers.keep()
    state.model.mean = torch.zeros(9)
    state.drop_unfinished_step()
    assert state.model.mean.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_dropping_right_after_a_commit_changes_nothing():
    """Control: what was committed stays."""
    state = build_state()
    advance(state, 1)
    committed = bits_of(state)
    state.drop_unfinished_step()
    assert bits_of(state) == committed


def test_buffers_received_with_a_state_count_as_committed():
    """A step that breaks right after a transfer falls back to what was received."""
    source, other = build_state(), build_state()
    advance(source, 2)
    other.restore(source.capture())
    other.model.train()
    other.model(torch.randn(4, 6))
    other.drop_unfinished_step()
    assert bits_of(other) == bits_of(source)


def test_a_model_without_buffers_has_nothing_to_drop():
    """The empty case of the fused copies."""
    state = build_state(model=torch.nn.Linear(6, 1))
    state.buffers.keep()
    state.drop_unfinished_step()
    assert state.trainable()


def test_frozen_parameters_are_not_trainable():
    """What the optimizer does not update is in the model's state only."""
    model = build_model()
    model[0].weight.requires_grad_(False)
    state = build_state(model=model)
    assert not any(parameter is model[0].weight for parameter in state.trainable())
    assert "0.weight" in state.capture()["model"]


@pytest.mark.parametrize("missing", ["model", "optimizer", "monitor", "counters", "scaler"])
def test_a_state_with_a_part_missing_is_refused(missing):
    """A wrong file is an error, never a state that is half of one run and half of another."""
    captured = build_state().capture()
    del captured[missing]
    with pytest.raises(KeyError):
        build_state().restore(captured)


def compiled(model):
    return torch.compile(model, backend="eager")


def with_live_names(state):
    """The captured state as files of earlier versions have it: with the names of the live model."""
    captured = copy.deepcopy(state.capture())
    for part in (captured["model"], captured["ema"]["parameters"], captured["ema"]["buffers"]):
        for name in list(part):
            part[live_name(state.model, name)] = part.pop(name)
    captured["followed"] = [live_name(state.model, name) for name in captured.get("followed", ())]
    return captured


@pytest.mark.parametrize("saves", [lambda state: state.capture(), with_live_names])
@pytest.mark.parametrize("wraps", [compiled, Wrapper])
def test_a_state_goes_on_in_a_model_that_is_wrapped_otherwise(wraps, saves):
    """Weights, average and what is followed come over, with and without a wrapper on either side."""
    plain, wrapped = build_state(), build_state(model=wraps(build_model()))
    for state in (plain, wrapped):
        next(iter(state.model.parameters())).requires_grad_(False)
        state.buffers = Buffers(state.model)
        advance(state, 1)
        follow(state)
        advance(state, 2)
    for source, target in ((plain, wrapped), (wrapped, plain), (wrapped, wrapped)):
        advance(source, 1)
        target.restore(copy.deepcopy(saves(source)))
        assert tensors_of(target) == tensors_of(source)
        assert len(target.buffers.followed()) == 1


def follow(state):
    """As if forward had moved the frozen parameter."""
    state.buffers.follow([name for name in state.weights() if name.endswith("0.weight")][:1])
    state.buffers.keep()


def tensors_of(state):
    """Bits and positions, without the names that a wrapper of the user's own changes."""
    captured = state.capture()
    average = captured["ema"]
    parts = (captured["model"], average["parameters"], average["buffers"])
    return [list(as_plain(part).values()) for part in parts] + [as_plain(captured["optimizer"])]


def in_order(names):
    """Two towers of the same shapes: in which order they were made shows in no name and no result."""

    class Towers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(4)
            made = {name: torch.nn.Linear(FEATURES, 1) for name in sorted(names)}
            self.towers = torch.nn.ModuleDict({name: made[name] for name in names})

        def forward(self, inputs):
            return self.towers["left"](inputs) + self.towers["right"](inputs.square())

    return build_state(model=Towers())


def moments(state):
    """What the optimizer holds, by the name of the parameter."""
    return {
        name: {key: value.tolist() for key, value in state.optimizer.state[parameter].items()}
        for name, parameter in state.named_parameters()
    }


def test_moments_go_to_the_parameters_of_their_names():
    """However the model's parts are ordered here: a module list made from a set has any order."""
    source, other = in_order(("left", "right")), in_order(("right", "left"))
    advance(source, 3)
    assert moments(source)["towers.left.weight"] != moments(source)["towers.right.weight"]
    captured = copy.deepcopy(source.capture())
    other.restore(captured)
    assert moments(other) == moments(source)
    for state in (source, other):
        advance(state, 2)
    assert moments(other) == moments(source)
    assert {n: p.tolist() for n, p in other.named_parameters()} == {
        n: p.tolist() for n, p in source.named_parameters()
    }


def test_a_state_without_names_of_moments_is_taken_by_position():
    """It is of an earlier version, whose models came in the same order."""
    source, other = in_order(("left", "right")), in_order(("left", "right"))
    advance(source, 3)
    captured = copy.deepcopy(source.capture())
    del captured["optimizer_names"]
    other.restore(captured)
    assert moments(other) == moments(source)


def test_moments_of_other_parameters_are_refused():
    source, other = in_order(("left", "right")), in_order(("left", "right"))
    advance(source, 1)
    captured = copy.deepcopy(source.capture())
    captured["optimizer_names"][0] = "towers.middle.weight"
    with pytest.raises(ValueError, match=r"of other parameters: towers\.left\.weight"):
        other.restore(captured)


def test_a_state_names_the_order_of_its_samples():
    """It is kept by whoever goes on with the state; one of before it had a name is of the first order."""
    captured = build_state().capture()
    assert captured["order"] == ORDER_VERSION
    old = {name: part for name, part in captured.items() if name != "order"}
    state = build_state()
    state.restore(old)
    assert state.order_version == state.capture()["order"] == 1
    state.restore(captured)
    assert state.order_version == ORDER_VERSION


def test_a_state_of_an_unknown_order_is_refused():
    """A newer program has made it; the samples that come next are not known here."""
    captured = build_state().capture() | {"order": 3}
    with pytest.raises(ValueError, match="in order 3"):
        build_state().restore(captured)


def convolutional():
    """Weights in channels_last, as a task may have them, with momentum that shows an order of its own."""
    torch.manual_seed(4)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 5, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.LazyLinear(1)
    )
    model(torch.ones(1, 3, 6, 6))
    return build_state(model=model.to(memory_format=torch.channels_last))


def learn(state, steps):
    for step in steps:
        inputs = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(step))
        state.optimizer.zero_grad(set_to_none=True)
        state.model(inputs.to(memory_format=torch.channels_last)).square().sum().backward()
        state.optimizer.step()
        state.ema.update(state.model)
        state.committed_step = step + 1
        state.buffers.keep()


def _hand_over_convolutions(me, port):
    state = convolutional()
    if me.rank == 0:
        learn(state, range(3))
    with join(me, port) as group:
        if me.rank == 0:
            send_state(group, state.capture(), to=(1,))
        else:
            state.restore(receive_state(group, source=0))
    strides = [one.stride() for one in state.steady_tensors()]
    learn(state, range(3, 6))
    return bits_of(state), strides


def test_a_replacement_of_a_channels_last_model_gets_its_moments_in_order():
    """What comes over the wire is contiguous; fused kernels take it for what lies like the weights."""
    with hosted_store() as port:
        survivor, replacement = run_ranks(_hand_over_convolutions, 2, port)
    assert replacement == survivor
