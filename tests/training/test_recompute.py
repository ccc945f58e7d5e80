"""Activation checkpointing: the same bits with less kept, and a clear answer to names that are none."""

from __future__ import annotations

import copy
import pickle
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.training.components.recompute import checkpoint_activations
from ddp_runner.values.generators import seed_all, seed_step

WIDTH = 8


class Block(nn.Module):
    """Has all that a second forward could do twice: statistics, a counter, three kinds of chance."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("drift", torch.ones(WIDTH))

    def forward(self, inputs, *, shift=0.0):
        self.seen += 1
        self.drift = self.drift * 0.9
        inputs = self.norm(self.linear(inputs)) * self.drift + shift
        noise = random.random() + np.random.rand()  # noqa: NPY002
        return self.dropout(torch.relu(inputs)) + noise * inputs


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, inputs):
        for number, layer in enumerate(self.layers):
            inputs = layer(inputs, shift=0.1 * number)
        return self.head(inputs)


def trained(asked, *, steps=4, micro_steps=2):
    """State dict and losses after ``steps``, and how often the first block ran forward."""
    seed_all(5)
    model = Net()
    found = checkpoint_activations(model, asked)
    calls = []
    model.layers[0].linear.register_forward_hook(lambda *_: calls.append(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for micro_step in range(micro_steps):
            seed_step(seed=5, step=step, rank=0, micro_step=micro_step)
            loss = model(torch.randn(6, WIDTH)).square().mean() / micro_steps
            loss.backward()
            losses.append(loss.item() + random.random() + np.random.rand())  # noqa: NPY002
        optimizer.step()
    return {**model.state_dict(), "losses": torch.tensor(losses)}, len(calls), found


@pytest.mark.parametrize(
    "asked", ["all", ("layers.0, layers.2",), ("layers",), ("*.dropout", "layers.*")]
)
def test_checkpointed_blocks_train_to_the_same_bits(asked):
    """Dropout, batch statistics, counters and whoever draws from Python or NumPy are as without it."""
    plain, calls, _ = trained("off")
    other, again, found = trained(asked)
    assert found
    assert again == 2 * calls, "it did compute the first block twice"
    assert plain.keys() == other.keys(), "and names stay"
    for name, value in plain.items():
        assert torch.equal(value, other[name]), name


def test_activations_of_checkpointed_blocks_are_not_kept():
    """What backward holds between the two is less; without gradients nothing is computed twice."""

    def kept(asked):
        seed_all(5)
        model = Net()
        checkpoint_activations(model, asked)
        sizes = {}

        def pack(tensor):
            sizes[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(torch.randn(512, WIDTH))
        return sum(sizes.values())

    assert kept("all") < kept("off") / 3
    model = Net()
    checkpoint_activations(model, "all")
    with torch.no_grad():
        assert not model(torch.randn(4, WIDTH)).requires_grad


def test_copies_and_files_have_the_plain_class():
    """Who pickles or copies the model needs nothing of ours to read it."""
    model = Net()
    checkpoint_activations(model, "all")
    assert type(model.layers[0]) is not Block
    assert isinstance(model.layers[0], Block)
    assert [type(layer) for layer in copy.deepcopy(model).layers] == [Block] * 3
    assert [type(layer) for layer in pickle.loads(pickle.dumps(model)).layers] == [Block] * 3
    assert repr(model) == repr(Net())


def test_all_takes_outermost_lists_of_blocks():
    """Experts inside a block are part of it; heads without parts are no blocks."""

    class Expert(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(2))

    model = nn.Module()
    model.stages = nn.Sequential(Expert(), Expert())
    model.heads = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    assert checkpoint_activations(model, "all") == ("stages.0", "stages.1")


def test_all_uses_the_switch_of_the_model():
    """As transformers has it; a class that has the method and cannot do it falls back to its blocks."""

    class Own(Net):
        can = True

        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs=None):
            if not self.can:
                raise ValueError("no")
            self.given = gradient_checkpointing_kwargs

    model = nn.Module()
    model.inner = Own()
    assert checkpoint_activations(model, "all") == ("inner",)
    assert model.inner.given == {"use_reentrant": False}
    Own.can = False
    assert checkpoint_activations(Own(), "all") == ("layers.0", "layers.1", "layers.2")


def test_a_pattern_without_a_module_names_the_nearest():
    """One line, with names that there are and what they have; a list of numbers is shown once."""
    with pytest.raises(
        BadInputError,
        match=r"layer\.\*.*matches no module; .* are layers\.\* \(3 modules, 264 parameters\), ",
    ) as caught:
        checkpoint_activations(Net(), ("layers.1", "layer.*"))
    assert "\n" not in str(caught.value)
    assert "layers.2" not in str(caught.value)
    with pytest.raises(BadInputError, match=r"nearest names are Block \(3 modules, 264 param"):
        checkpoint_activations(Net(), ("Blok",))
    with pytest.raises(
        BadInputError, match=r"no list of like blocks .* such as .*0 \(1 module, 6 para"
    ):
        checkpoint_activations(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "all")


def test_a_block_that_checkpoints_by_itself_may_be_inside():
    """Torch's checkpoints nest; the numbers stay."""

    class Inner(Block):
        def forward(self, inputs, *, shift=0.0):
            return checkpoint(super().forward, inputs, use_reentrant=False) + shift

    def gradient(asked):
        seed_all(3)
        model = nn.Module()
        model.layers = nn.Sequential(Inner(), Inner())
        checkpoint_activations(model, asked)
        # Both forwards move what this block counts: only its random numbers are looked at.
        for layer in model.layers:
            layer.norm.eval()
        seed_step(seed=1, step=0, rank=0, micro_step=0)
        model.layers(torch.ones(4, WIDTH)).square().sum().backward()
        return model.layers[0].linear.weight.grad

    plain, other = gradient("off"), gradient("all")
    assert torch.isfinite(plain).all()
    assert torch.isfinite(other).all()


class UnlikeBlock(nn.Sequential):
    """Not in a list of alike ones."""


def test_parts_are_named_by_their_class():
    """Wherever they are in the model, beside parts that are named as before."""
    model = nn.Sequential()
    model.down, model.up = UnlikeBlock(nn.Linear(2, 2)), UnlikeBlock(nn.Tanh())
    model.encoder = nn.Sequential(nn.Linear(2, 2))
    asked = ("UnlikeBlock", "encoder.*")
    assert checkpoint_activations(model, asked) == ("down", "up", "encoder.0")


class DownBlock(nn.Module):
    """Has parts of its own."""

    def __init__(self, width):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(width, width, 1), nn.BatchNorm1d(width)


class UpBlock(DownBlock):
    """The same, on the other side."""


def test_without_a_list_of_blocks_their_classes_are_named():
    """What is there several times comes first, then what is larger; the whole model is no part of itself."""
    model = nn.Module()
    model.net = nn.Module()
    model.net.down1, model.net.down2 = DownBlock(2), DownBlock(4)
    model.net.up1, model.net.up2 = UpBlock(8), UpBlock(4)
    model.net.middle = DownBlock(16)
    model.net.up1.again = model.net.up2.conv  # one that two have counts once
    with pytest.raises(BadInputError) as caught:
        checkpoint_activations(model, "all")
    assert str(caught.value).endswith(
        "finds no list of like blocks in the model: name its parts, such as"
        " DownBlock (3 modules, 342 parameters), UpBlock (2 modules, 116 parameters)"
    )
    asked = ("DownBlock", "UpBlock")
    assert len(checkpoint_activations(model, asked)) == 5, "the words can be written as they stand"


def test_a_second_forward_leaves_the_buffers_where_they_were():
    """Who holds a buffer, as DDP does, goes on with what the first forward wrote into it."""
    seed_all(5)
    model = Net()
    checkpoint_activations(model, ["layers.*"])
    norms = [layer.norm for layer in model.layers]
    before = [(norm.running_mean, norm.running_var, norm.num_batches_tracked) for norm in norms]
    model(torch.randn(4, WIDTH)).sum().backward()
    for norm, held in zip(norms, before, strict=True):
        assert norm.running_mean is held[0]
        assert norm.running_var is held[1]
        assert norm.num_batches_tracked is held[2]
        assert int(held[2]) == 1
