"""One rank over several devices: its loss and gradient are those of the whole batch."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn

from ddp_runner.kernel.replica.data_parallel import (
    Cut,
    copies_of,
    loss_over_devices,
    part_ends,
)
from ddp_runner.kernel.replica.loss import Weighted, read_loss
from ddp_runner.kernel.rules.faults import FaultError
from ddp_runner.training.components.recompute import checkpoint_activations

CPU = torch.device("cpu")


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclass
class Fields:
    x: torch.Tensor
    name: str


class Model(nn.Module):
    """Shared weights, a frozen layer, one that is never used, buffers, a recurrent layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(4, 4)
        self.again = nn.Linear(4, 4)
        self.again.weight = self.first.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(requires_grad=False)
        self.unused = nn.Linear(4, 4)
        self.recurrent = nn.GRU(4, 4, batch_first=True)
        self.last = nn.Linear(4, 1)
        self.double()

    def forward(self, x):
        x = self.frozen(self.again(torch.tanh(self.first(x))))
        return self.last(self.recurrent(x.unsqueeze(1))[0][:, 0])


def batch_of(count):
    numbers = torch.Generator().manual_seed(5)
    x = torch.randn(count, 4, generator=numbers, dtype=torch.float64)
    return x, x.sum(1, keepdim=True)


def mean(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def counted(model, batch):
    """A sum over the samples whose target is positive."""
    wanted = batch[1] > 0
    error = (model(batch[0]) - batch[1])[wanted] ** 2
    return Weighted(error.sum(), wanted.sum()), {"largest": batch[1].mean()}


def gradients(model, loss):
    model.zero_grad(set_to_none=True)
    output = read_loss(loss)
    output.value.backward()
    return {name: one.grad for name, one in model.named_parameters()}


def shared_out(loss, model, batch, *, devices, count):
    return loss_over_devices(loss, model, batch, devices=(CPU,) * devices, count=count)


@pytest.mark.parametrize(("devices", "count"), [(2, 8), (3, 7), (4, 5), (4, 2), (3, 1)])
@pytest.mark.parametrize("loss", [mean, counted])
def test_loss_and_gradient_are_those_of_the_whole_batch(devices, count, loss):
    """Also where the parts are of unequal size, or there are fewer samples than devices."""
    model, batch = Model(), batch_of(count)
    whole = gradients(model, loss(model, batch))
    parted = gradients(model, shared_out(loss, model, batch, devices=devices, count=count))
    assert whole.keys() == parted.keys()
    for name, gradient in whole.items():
        if gradient is None:
            assert parted[name] is None, name
        else:
            torch.testing.assert_close(parted[name], gradient, rtol=1e-5, atol=1e-7)
    one, other = (
        read_loss(loss(model, batch)),
        read_loss(shared_out(loss, model, batch, devices=devices, count=count)),
    )
    torch.testing.assert_close(other.value, one.value)
    assert other.parts.keys() == one.parts.keys()
    for name, number in one.parts.items():
        torch.testing.assert_close(other.parts[name], number)
    if one.weight is not None:
        assert float(other.weight) == float(one.weight)


def test_a_mean_of_means_would_be_another_gradient():
    """The control of the test above: of 7 samples in 3 parts, not each part counts the same."""
    model, (x, y) = Model(), batch_of(7)
    whole = gradients(model, mean(model, (x, y)))
    ends = [0, *part_ends(7, pieces=3)]
    plain = [mean(model, (x[a:b], y[a:b])) for a, b in itertools.pairwise(ends)]
    parted = gradients(model, torch.stack(plain).mean())
    name = "last.weight"
    assert not torch.allclose(parted[name], whole[name], rtol=1e-3)


@pytest.mark.parametrize(
    ("count", "pieces", "ends"),
    [(8, 2, [4, 8]), (7, 3, [2, 4, 7]), (2, 4, [1, 2]), (1, 3, [1]), (5, 1, [5])],
)
def test_parts_are_as_equal_as_can_be_and_none_empty(count, pieces, ends):
    """The same on each machine: a function of the numbers alone."""
    assert part_ends(count, pieces=pieces) == ends


def test_parameters_without_use_keep_no_gradient():
    """Weight decay would change one that had zeros; one that is frozen has none either."""
    model, batch = Model(), batch_of(6)
    found = gradients(model, shared_out(mean, model, batch, devices=3, count=6))
    without = {name for name, gradient in found.items() if gradient is None}
    assert without == {"frozen.weight", "frozen.bias", "unused.weight", "unused.bias"}


def test_a_copy_shows_its_parameters_and_shares_what_was_shared():
    """A penalty over model.parameters() counts on each device; a weight in two places is one."""
    model = Model()
    (copy,) = copies_of(model, [CPU])
    assert [name for name, _ in copy.named_parameters()] == [
        name for name, _ in model.named_parameters()
    ]
    assert copy.again.weight is copy.first.weight
    assert copy.first.weight is not model.first.weight

    def penalized(model, batch):
        return mean(model, batch) + sum(one.square().sum() for one in model.parameters())

    batch = batch_of(6)
    whole = gradients(model, penalized(model, batch))
    parted = gradients(model, shared_out(penalized, model, batch, devices=2, count=6))
    torch.testing.assert_close(parted["unused.weight"], whole["unused.weight"])


def test_buffers_are_those_of_the_first_part():
    """As of torch's DataParallel: what the copies have changed in theirs is lost with them."""
    norm = nn.BatchNorm1d(2)
    x = torch.arange(16.0).reshape(8, 2)
    alone = nn.BatchNorm1d(2)
    alone(x[:4])
    loss = shared_out(
        lambda model, batch: model(batch).square().mean(), norm, x, devices=2, count=8
    )
    assert loss.requires_grad
    assert torch.equal(norm.running_mean, alone.running_mean)
    assert int(norm.num_batches_tracked) == 1


def test_the_same_bits_each_time_and_dropout_differs_between_parts():
    """The random numbers of a part go on where those of the part before have ended."""
    model, x = nn.Sequential(nn.Dropout(0.5)), torch.ones(64, 8)
    seen = []

    def noted(model, batch):
        seen.append(model(batch).detach())
        return (batch.requires_grad_() * 1.0).mean()

    for _ in range(2):
        torch.manual_seed(1)
        shared_out(noted, model, x.clone(), devices=2, count=64)
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])
    assert torch.equal(seen[1], seen[3])


def test_activations_are_recomputed_in_each_copy():
    """Backward computes a copy's block again with that copy's weights, to the same gradient."""
    torch.manual_seed(2)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    model.append(nn.Linear(4, 1))
    model = model.double()
    batch = batch_of(6)
    plain = gradients(model, shared_out(mean, model, batch, devices=2, count=6))
    checkpoint_activations(model, ("0", "1", "2"))
    kept = gradients(model, shared_out(mean, model, batch, devices=2, count=6))
    for name, gradient in plain.items():
        assert torch.equal(kept[name], gradient), name


def test_every_kind_of_batch_is_cut_where_its_samples_are():
    """Tensors by their first dimension, lists of a thing for each sample by their places."""
    x = torch.arange(8.0).reshape(4, 2)
    batch = {
        "x": [x, (x, Pair(x, x))],
        "texts": ["a", "b", "c", "d"],
        "lengths": [torch.ones(3), torch.ones(2), torch.ones(5), torch.ones(1)],
        "scale": torch.tensor(2.0),
        "fields": Fields(x, "name"),
        "ordered": OrderedDict(y=x),
        "tag": "whole",
        "none": None,
    }
    part = Cut(begin=1, end=3, count=4, device=CPU).part_of(batch)
    cut = x[1:3]
    assert torch.equal(part["x"][0], cut)
    assert torch.equal(part["x"][1][0], cut)
    assert type(part["x"][1][1]) is Pair
    assert torch.equal(part["x"][1][1].right, cut)
    assert part["texts"] == ["b", "c"]
    assert [len(one) for one in part["lengths"]] == [2, 5]
    assert float(part["scale"]) == 2.0
    assert torch.equal(part["fields"].x, cut)
    assert part["fields"].name == "name"
    assert type(part["ordered"]) is OrderedDict
    assert (part["tag"], part["none"]) == ("whole", None)


def test_a_pair_of_two_samples_is_no_list_of_samples():
    """(inputs, targets) of two samples is cut in each, not between them."""
    x, y = torch.ones(2, 3), torch.zeros(2)
    part = Cut(begin=0, end=1, count=2, device=CPU).part_of((x, y))
    assert [tuple(one.shape) for one in part] == [(1, 3), (1,)]


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (torch.ones(3, 8), "one is of shape (3, 8)"),
        (object(), "there is no rule to split a object"),
        ({"scale": torch.tensor(1.0)}, "no tensor with its 4 samples first"),
        ((torch.ones(4), torch.ones(9, 4)), "must come first in each tensor"),
    ],
)
def test_a_batch_that_cannot_be_cut_ends_the_run_with_its_reason(batch, words):
    """No retry repairs it, and no part of it is trained on as if it were all."""
    with pytest.raises(FaultError) as raised:
        shared_out(lambda model, batch: model(batch), nn.Identity(), batch, devices=2, count=4)
    assert words in raised.value.fault.cause
    assert not raised.value.fault.may_retry


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_compute_the_gradient_of_one():
    """On real devices: the copies' gradients come back to the first."""
    devices = [torch.device("cuda:0"), torch.device("cuda:1")]
    model = Model().to(devices[0])
    batch = tuple(one.to(devices[0]) for one in batch_of(7))
    whole = gradients(model, mean(model, batch))
    parted = gradients(model, loss_over_devices(mean, model, batch, devices=devices, count=7))
    for name, gradient in whole.items():
        if gradient is not None:
            torch.testing.assert_close(parted[name], gradient, rtol=1e-5, atol=1e-7)
