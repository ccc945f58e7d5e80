"""Plateau and early stop over tables of losses, against torch's own scheduler and by hand."""

from __future__ import annotations

import math
import random

import pytest
import torch

from ddp_runner.core.improvement import Improvement, ImprovementRules


def factors(losses, **rules):
    """The factor of the learning rate after each evaluation."""
    given, now, found = ImprovementRules(**rules), Improvement(), []
    for loss in losses:
        now = now.after(loss, given)
        found.append(now.rate_factor)
    return found


def by_torch(losses, *, patience, min_delta, factor, cooldown):
    """What torch's own ReduceLROnPlateau makes of a rate of 1; its patience is the one that still waits."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer,
        factor=factor,
        patience=patience - 1,
        threshold=min_delta,
        threshold_mode="abs",
        cooldown=cooldown,
        eps=0.0,
    )
    found = []
    for loss in losses:
        scheduler.step(loss)
        found.append(optimizer.param_groups[0]["lr"])
    return found


def test_a_plateau_is_what_torchs_own_scheduler_takes_for_one():
    """Losses that fall, wander, repeat and are no numbers; every patience, margin and cool-down."""
    for seed in range(20):
        chance = random.Random(seed)
        losses = [
            chance.choice([math.nan, 1.0, chance.gauss(3.0 - at / 40, 0.3)]) for at in range(120)
        ]
        patience, cooldown = chance.randint(1, 6), chance.randint(0, 5)
        min_delta, factor = chance.choice([0.0, 0.05, 0.5]), chance.choice([0.1, 0.5, 0.9])
        found = factors(
            losses,
            plateau_patience=patience,
            plateau_min_delta=min_delta,
            plateau_factor=factor,
            plateau_cooldown=cooldown,
        )
        expected = by_torch(
            losses, patience=patience, min_delta=min_delta, factor=factor, cooldown=cooldown
        )
        assert found == pytest.approx(expected, rel=1e-12)
        assert found[-1] < 1.0


TABLE = [  # losses, patience, margin, after how many of them the run ends
    ([3.0, 2.0, 1.0, 0.5], 1, 0.0, None),
    ([3.0, 3.0], 1, 0.0, 2),
    ([3.0, 2.0, 2.1, 2.2, 2.3], 3, 0.0, 5),
    ([3.0, 2.0, 2.1, 1.9, 2.2, 2.3], 3, 0.0, None),
    ([3.0, 2.9, 2.8, 2.7], 2, 0.15, None),  # 2.8 is 0.2 below the best that counts
    ([3.0, 2.9, 2.86], 2, 0.15, 3),
    ([math.nan, math.nan, 1.0], 2, 0.0, 2),
    ([math.nan, 1.0, math.inf, math.nan], 2, 0.0, 4),
    ([3.0, 3.0, 3.0], 0, 0.0, None),
]


@pytest.mark.parametrize(("losses", "patience", "margin", "end"), TABLE)
def test_a_run_ends_after_so_many_evaluations_without_improvement(losses, patience, margin, end):
    """In a row, by more than the margin, each against the best so far."""
    rules = ImprovementRules(stop_patience=patience, stop_min_delta=margin)
    now, ended = Improvement(), None
    for number, loss in enumerate(losses, start=1):
        now = now.after(loss, rules)
        if now.is_over(rules):
            ended = number
            break
    assert ended == end
