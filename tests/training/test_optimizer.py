"""AdamW: groups, order, fused kernels, refusals."""

import pytest
import torch
from torch import nn

from ddp_runner.core.settings import OptimSettings
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.training.components.optimizer import build_optimizer

CPU = torch.device("cpu")
SETTINGS = OptimSettings(learning_rate=0.01, weight_decay=0.3, beta1=0.8, beta2=0.95)


def model():
    return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def test_weight_decay_is_for_matrices_only():
    """Biases and norms do not decay; every other parameter does, in the model's order."""
    built = model()
    decayed, plain = build_optimizer(built, SETTINGS, device=CPU).param_groups
    assert decayed["weight_decay"] == 0.3
    assert plain["weight_decay"] == 0.0
    in_order = list(built.parameters())
    assert [id(p) for p in decayed["params"]] == [id(p) for p in in_order if p.ndim >= 2]
    assert [id(p) for p in plain["params"]] == [id(p) for p in in_order if p.ndim < 2]
    assert (decayed["lr"], decayed["betas"]) == (0.01, (0.8, 0.95))


def test_frozen_parameters_are_left_out_and_tied_ones_stand_once():
    """A frozen layer gets no state; a weight shared by two layers gets one."""
    built = model()
    built[0].requires_grad_(False)
    built.append(nn.Linear(4, 4))
    built[4].weight = built[1].weight
    groups = build_optimizer(built, SETTINGS, device=CPU).param_groups
    found = [id(p) for group in groups for p in group["params"]]
    assert len(found) == len(set(found)) == 7
    assert id(built[0].weight) not in found


def test_a_model_without_trainable_parameters_is_bad_input():
    """The message names the option and the model."""
    built = model().requires_grad_(False)
    with pytest.raises(BadInputError, match=r"--task=Sequential: .*no trainable parameter"):
        build_optimizer(built, SETTINGS, device=CPU)


def test_the_fused_kernel_is_used_on_the_cpu_and_steps():
    """Fused is on for float parameters, and its step equals the plain one within tolerance."""
    torch.manual_seed(0)
    built = model()
    fused = build_optimizer(built, SETTINGS, device=CPU)
    assert all(group["fused"] for group in fused.param_groups)
    before = [p.detach().clone() for p in built.parameters()]
    plain_parameters = [nn.Parameter(p.detach().clone()) for p in built.parameters()]
    plain = torch.optim.AdamW(
        [
            {"params": [p for p in plain_parameters if p.ndim >= 2], "weight_decay": 0.3},
            {"params": [p for p in plain_parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=(0.8, 0.95),
        foreach=False,
    )
    for ours, theirs in zip(built.parameters(), plain_parameters, strict=True):
        ours.grad = torch.randn_like(ours)
        theirs.grad = ours.grad.clone()
    fused.step()
    plain.step()
    for ours, theirs, old in zip(built.parameters(), plain_parameters, before, strict=True):
        torch.testing.assert_close(ours, theirs)
        assert not torch.equal(ours, old)


def test_complex_parameters_fall_back_to_the_plain_kernel():
    """Control: what the fused kernel refuses is still trained."""
    built = nn.ParameterList([nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))])
    optimizer = build_optimizer(built, SETTINGS, device=CPU)
    built[0].grad = torch.ones_like(built[0])
    optimizer.step()
    assert built[0].abs().sum() > 0
