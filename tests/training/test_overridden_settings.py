"""Settings of a kept optimizer or scheduler that a resumed program gives otherwise than its checkpoint."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from .test_own_loop import kept_state

KINDS = {
    "none": lambda optimizer: None,
    "LambdaLR": lambda one: lr_scheduler.LambdaLR(one, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda one: lr_scheduler.MultiplicativeLR(one, lambda epoch: 0.9),
    "StepLR": lambda one: lr_scheduler.StepLR(one, 2),
    "MultiStepLR": lambda one: lr_scheduler.MultiStepLR(one, [2, 3]),
    "ConstantLR": lambda one: lr_scheduler.ConstantLR(one, total_iters=2),
    "LinearLR": lambda one: lr_scheduler.LinearLR(one, total_iters=3),
    "ExponentialLR": lambda one: lr_scheduler.ExponentialLR(one, 0.9),
    "PolynomialLR": lambda one: lr_scheduler.PolynomialLR(one, 6),
    "CosineAnnealingLR": lambda one: lr_scheduler.CosineAnnealingLR(one, 6),
    "CosineAnnealingWarmRestarts": lambda one: lr_scheduler.CosineAnnealingWarmRestarts(one, 2),
    "CyclicLR": lambda one: lr_scheduler.CyclicLR(one, 0.01, 0.2, step_size_up=2),
    "OneCycleLR": lambda one: lr_scheduler.OneCycleLR(one, 0.2, total_steps=20),
    "ReduceLROnPlateau": lambda one: lr_scheduler.ReduceLROnPlateau(one, patience=0),
    "ChainedScheduler": lambda one: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(one, total_iters=2), lr_scheduler.ExponentialLR(one, 0.9)]
    ),
    "SequentialLR": lambda one: lr_scheduler.SequentialLR(
        one,
        [lr_scheduler.LinearLR(one, total_iters=2), lr_scheduler.CosineAnnealingLR(one, 6)],
        milestones=[2],
    ),
}
# In torch up to 2.9 its state has a function, which is refused.
if hasattr(torch.optim.swa_utils.SWALR, "_set_anneal_func"):
    KINDS["SWALR"] = lambda one: torch.optim.swa_utils.SWALR(one, swa_lr=0.05)
OF_TORCH = {
    name
    for name, kind in vars(lr_scheduler).items()
    if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler)
}


def program(schedule, *, groups=1, **how):
    """What a program has made when its loop begins: optimizer, scheduler and the state of both."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(groups)))
    parts = [{"params": layer.parameters()} for layer in model]
    optimizer = torch.optim.SGD(parts, **{"lr": 0.1, "momentum": 0.9, **how})
    scheduler = schedule(optimizer)
    others = {} if scheduler is None else {"scheduler": scheduler}
    state = kept_state(model=model, optimizer=optimizer, **others)
    state.committed_step = 0
    return optimizer, scheduler, state


def trained(schedule, *, steps=5, **how):
    """The state of a program that has trained some steps."""
    optimizer, scheduler, state = program(schedule, **how)
    for parameter in state.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for _ in range(steps):
        optimizer.step()
        if scheduler is not None:
            scheduler.step(*[1.0] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))
    state.side.keep(0)
    return state.capture()


def test_every_scheduler_of_torch_is_tried_here():
    """A new one must be added."""
    assert OF_TORCH - {"LRScheduler", "_LRScheduler"} <= KINDS.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_an_unchanged_program_overrides_no_setting(kind):
    """Wherever its scheduler has moved the rates; control: another rate, momentum and weight decay are named."""
    captured = trained(KINDS[kind])
    *_, same = program(KINDS[kind])
    same.restore(captured)
    assert same.overridden() == []
    *_, other = program(KINDS[kind], weight_decay=0.5)
    other.restore(captured)
    assert other.overridden() == ["optimizer weight_decay=0 (the program gives 0.5)"]


def test_settings_that_have_no_effect_are_named_with_both_values():
    """Of each group, and of schedulers, also of those in others; at each resume until the program agrees."""
    captured = trained(KINDS["SequentialLR"], groups=2)

    def shorter(one):
        made = [lr_scheduler.LinearLR(one, total_iters=3), lr_scheduler.CosineAnnealingLR(one, 5)]
        return lr_scheduler.SequentialLR(one, made, milestones=[3])

    for _ in range(2):
        *_, other = program(shorter, groups=2, lr=0.01)
        other.restore(captured)
        captured = other.capture()
        assert other.overridden() == [
            "optimizer (group 0) lr=0.1 (the program gives 0.01)",
            "optimizer (group 1) lr=0.1 (the program gives 0.01)",
            "scheduler milestones=[2] (the program gives [3])",
            "scheduler 0.total_iters=2 (the program gives 3)",
            "scheduler 1.T_max=6 (the program gives 5)",
        ]
    *_, agrees = program(KINDS["SequentialLR"], groups=2)
    agrees.restore(captured)
    assert agrees.overridden() == []


def test_a_setting_that_the_loop_itself_changes_is_not_named():
    """The rate that a loop writes is no constructor's, and one that it has written as given now holds."""
    optimizer, _, state = program(KINDS["none"])
    optimizer.param_groups[0]["lr"] = 0.01
    *_, same = program(KINDS["none"])
    same.restore(state.capture())
    assert same.overridden() == []
    *_, other = program(KINDS["none"], lr=0.01)
    other.restore(state.capture())
    assert other.overridden() == []
    older = {key: value for key, value in state.capture().items() if key != "given"}
    *_, of_an_older_file = program(KINDS["none"], lr=0.5)
    of_an_older_file.restore(older)
    assert of_an_older_file.overridden() == []
