"""What a task's loss() gives: one number with a graph, or one line that says what it is instead."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch

from ddp_runner.kernel.replica.loss import (
    BadWeightError,
    LossForm,
    Weighted,
    checked_loss,
    read_loss,
)
from ddp_runner.kernel.rules.faults import FaultError, FaultKind
from ddp_runner.kernel.rules.recovery import NEVER_RETRIED

WEIGHT = torch.ones(3, requires_grad=True)
LOSS = (WEIGHT * 2).mean()


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_one_number_with_a_graph_is_taken(shape, dtype):
    """Whatever its shape and type: it becomes a float scalar."""
    loss = checked_loss(LOSS.to(dtype).reshape(shape))
    assert loss.shape == ()
    assert loss.dtype is torch.float32
    assert loss.requires_grad


def test_a_graph_is_not_asked_for_here():
    """An evaluation has no backward, and one rank's batch may hold nothing to learn from."""
    assert checked_loss(LOSS.detach()).item() == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("value", "reported"),
    [
        ((LOSS, "logits"), "a tuple of 2 (return the loss of it)"),
        ([LOSS], "a list of 1"),
        ({"loss": LOSS, "logits": WEIGHT}, "a dict of loss, logits (return the loss of it)"),
        (OrderedDict(loss=LOSS), "an OrderedDict of loss"),
        ({}, "a dict of nothing"),
        (None, "None (is a return missing?)"),
        (2.0, "a plain float (leave out .item() or float())"),
        ("2.0", "a str"),
        (WEIGHT * 2, "a tensor of shape (3,) (.mean() makes one number of it)"),
        (torch.ones(0), "a tensor of shape (0,)"),
        (torch.tensor(2), "a tensor of int64"),
        (torch.tensor(2j, requires_grad=True), "a tensor of complex64"),
    ],
)
def test_anything_else_is_a_fault_that_no_retry_repairs(value, reported):
    """It says what came, and what is expected, in one line."""
    with pytest.raises(FaultError) as raised:
        checked_loss(value)
    fault = raised.value.fault
    assert fault.cause.startswith(f"loss() returned {reported}"), fault.cause
    expected = "not a scalar tensor, (loss, {name: number}) or Wei"
    assert expected in fault.cause
    assert "\n" not in fault.cause
    assert fault.kind not in NEVER_RETRIED  # it is user code that is wrong, not a setting
    assert fault.kind is FaultKind.RANK_RAISED
    assert not fault.may_retry


def test_a_loss_may_have_named_numbers_and_a_weight():
    """Numbers and tensors of one element, without their graphs."""
    output = read_loss((Weighted(LOSS * 3, 3), {"recon": LOSS, "kl": 0.5}))
    assert output.value.item() == pytest.approx(6.0)
    assert output.value.requires_grad
    assert output.weight.item() == 3.0
    assert {name: number.item() for name, number in output.parts.items()} == {
        "recon": pytest.approx(2.0),
        "kl": 0.5,
    }
    assert not output.parts["recon"].requires_grad


@pytest.mark.parametrize(
    ("value", "reported"),
    [
        ((LOSS, {"loss": 1.0}), "a number named 'loss': give it a name of its own"),
        ((LOSS, {3: 1.0}), "a number named 3"),
        ((LOSS, {"kl": WEIGHT}), "as 'kl' a Tensor of shape (3,), not a number"),
        ((LOSS, {"kl": "much"}), "as 'kl' a str, not a number"),
        ((LOSS, {f"n{n}": 1.0 for n in range(33)}), "33 named numbers: at most 32"),
        (Weighted(WEIGHT, 3), "a Weighted whose total is a tensor of shape (3,)"),
        (Weighted(LOSS, "many"), "a Weighted whose weight is a str, not a number"),
        (Weighted(LOSS, WEIGHT), "a Weighted whose weight is a tensor of shape (3,), not a number"),
    ],
)
def test_what_is_no_number_beside_it_is_one_line(value, reported):
    with pytest.raises(FaultError) as raised:
        read_loss(value)
    assert raised.value.fault.cause.startswith(f"loss() returned {reported}")
    assert not raised.value.fault.may_retry


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), torch.tensor(-2.0)])
def test_a_weight_below_zero_or_not_finite_is_refused(weight):
    with pytest.raises(BadWeightError):
        read_loss(Weighted(LOSS, weight))


def test_forms_of_ranks_unite_in_one_order():
    """A rank whose batch lacks a number has room for it all the same."""
    one = LossForm(names=("recon", "kl"))
    other = LossForm(names=("adv",), is_weighted=True)
    assert one.united([other]) == other.united([one])
    assert one.united([other]).names == ("adv", "kl", "recon")
    assert one.united([other]).cells == 4
    assert not one.covers(read_loss(Weighted(LOSS, 1)))
    assert other.covers(read_loss(LOSS))
