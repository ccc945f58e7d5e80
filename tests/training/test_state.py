"""The state of a rank: captured, restored, and freed of what an unfinished step changed."""

from __future__ import annotations

import copy

import pytest
import torch

from ddp_runner.collective.transfer import receive_state, send_state
from ddp_runner.core.election import EMPTY_STEP
from tests.collective.joining import join
from tests.processes import hosted_store, run_ranks

from .building import as_plain, bits_of, build_model, build_state, micro_batches


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
        state.buffers.keep()


def test_a_fresh_state_is_empty():
    """It must be filled before it trains: it stands in no election."""
    state = build_state()
    state.committed_step = EMPTY_STEP
    assert bits_of(state)["counters"] == {
        "committed_step": EMPTY_STEP,
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
    source.attended_step = 3
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


def test_an_average_that_was_not_saved_starts_anew():
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
    """Assigns its statistics anew at each forward, as models do that were not written for DDP."""

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


def test_a_buffer_that_was_assigned_anew_is_dropped_too():
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
