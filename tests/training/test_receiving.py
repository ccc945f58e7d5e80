"""What becomes of a state that comes: into whose memory it is written, and what it costs to take it over."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddp_runner.checkpoint.entry_names import load_bare_state
from ddp_runner.core.settings import OptimSettings
from ddp_runner.kernel.group.transfer import receive_state, send_state
from ddp_runner.kernel.rules.election import EMPTY_STEP
from ddp_runner.training.components.optimizer import build_optimizer
from ddp_runner.training.components.optimizer_state import load_optimizer_state
from tests.kernel.group.joining import join
from tests.processes import hosted_store, run_ranks

from .building import bits_of, build_state
from .test_state import advance, advance_once_more

CPU = torch.device("cpu")


def places_of(state):
    """Where everything lies that a commit changes."""
    return [tensor.data_ptr() for tensor in state.steady_tensors() if tensor.ndim]


def _write_over(me, port):
    state = build_state(ema=False)
    advance(state, 4 if me.rank == 0 else 2)
    if me.rank == 1:
        state.committed_step = EMPTY_STEP
    before = places_of(state)
    with join(me, port) as group:
        if me.rank == 0:
            send_state(group, state.capture(), to=(1,))
        else:
            state.restore(receive_state(group, source=0, into=state.to_write_over()))
    is_in_place = places_of(state) == before
    received = bits_of(state)
    advance_once_more(state)
    return is_in_place, received, bits_of(state)


def test_an_empty_rank_is_written_over_in_place():
    """Weights and moments come into the memory that it has, and it goes on as its source does."""
    with hosted_store() as port:
        source, receiver = run_ranks(_write_over, 2, port)
    assert receiver == source
    assert receiver[0]


def test_a_rank_that_stands_at_a_step_is_not_written_over():
    """Its own may be the newest that is left, should the source die on the way."""
    state = build_state()
    advance(state, 2)
    assert state.to_write_over() is None


def test_nothing_is_written_over_while_a_save_reads_it():
    """The same wait as before a step."""
    state = build_state()
    waited = []
    state.readers.append(lambda: waited.append(True))
    state.committed_step = EMPTY_STEP
    assert state.to_write_over() is not None
    assert waited


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "adafactor", "muon"])
def test_an_optimizer_s_state_is_loaded_as_torch_loads_it(name):
    """Every bit, type and option."""
    if name == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has none")

    def trained(steps):
        torch.manual_seed(steps)
        model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))
        made = build_optimizer(model, OptimSettings(optimizer=name), device=CPU)
        for _ in range(steps):
            made.zero_grad()
            model(torch.randn(3, 4)).square().sum().backward()
            made.step()
        return model, made

    saved = trained(3)[1].state_dict()
    loaded, expected = trained(1)[1], trained(1)[1]
    load_optimizer_state(loaded, saved)
    parts = getattr(expected, "parts", [expected])
    if parts == [expected]:
        expected.load_state_dict(saved)
    assert str(loaded.state_dict()) == str(saved)
    if parts == [expected]:
        assert str(loaded.state_dict()) == str(expected.state_dict())


def test_an_optimizer_s_state_of_other_groups_is_refused():
    """As torch refuses it."""
    model = nn.Linear(3, 2)
    one = build_optimizer(model, OptimSettings(), device=CPU)
    other = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="different number of parameter groups"):
        load_optimizer_state(one, other.state_dict())


class Doubling(nn.Linear):
    """Loads in a way of its own."""

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        doubled = {**state_dict, f"{prefix}bias": state_dict[f"{prefix}bias"] * 2}
        super()._load_from_state_dict(doubled, prefix, *rest)


def test_a_module_that_loads_in_its_own_way_does_so():
    """Nothing that users hang on loading is left out."""
    source, target = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(Doubling(2, 2))
    load_bare_state(target, source.state_dict())
    assert torch.equal(target[0].bias, source[0].bias * 2)
    heard = []
    hooked = nn.Sequential(nn.Linear(2, 2))
    hooked[0].register_load_state_dict_post_hook(lambda *_: heard.append(True))
    load_bare_state(hooked, source.state_dict())
    assert heard
    assert torch.equal(hooked[0].weight, source[0].weight)


@pytest.mark.parametrize("wrong", ["missing", "unexpected", "shape"])
def test_a_state_of_another_model_is_refused(wrong):
    """With torch's own words, and nothing of it is taken over half by us."""
    model = nn.Linear(3, 2)
    state = dict(nn.Linear(3, 2).state_dict())
    if wrong == "missing":
        del state["bias"]
    elif wrong == "unexpected":
        state["more"] = torch.zeros(1)
    else:
        state["bias"] = torch.zeros(3)
    with pytest.raises(RuntimeError, match=r"Missing|Unexpected|size mismatch"):
        load_bare_state(model, state)
