"""What a task's loss() gives: one number with a graph, or one line that says what it is instead."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch

from ddp_runner.collective.loss import checked_loss
from ddp_runner.core.faults import FaultError, FaultKind
from ddp_runner.core.recovery import NEVER_RETRIED

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
    assert fault.cause.startswith(f"loss() gave {reported}"), fault.cause
    assert fault.cause.endswith(", not a scalar tensor, the mean loss of the batch")
    assert "\n" not in fault.cause
    assert fault.kind not in NEVER_RETRIED  # it is user code that is wrong, not a setting
    assert fault.kind is FaultKind.RANK_RAISED
    assert not fault.may_retry
