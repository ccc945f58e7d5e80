"""The learning rate is a pure function of the step."""

import pytest
import torch

from ddp_runner.core.settings import OptimSettings
from ddp_runner.training.components.lr_schedule import apply_learning_rate, learning_rate


def rates(total_steps, **settings):
    chosen = OptimSettings(learning_rate=1.0, **settings)
    return [learning_rate(s, total_steps=total_steps, settings=chosen) for s in range(total_steps)]


def test_warm_up_rises_in_equal_parts_to_the_full_rate():
    """The first step already trains; the last of warm-up has the full rate."""
    assert rates(100, warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_decay_falls_at_every_step_and_stays_above_the_minimum(schedule):
    """After warm-up the rate falls strictly, and reaches the minimum where the run ends."""
    found = rates(50, warmup_steps=5, schedule=schedule, min_learning_rate=0.1)
    falling = found[5:]
    assert falling == sorted(set(falling), reverse=True)
    assert falling[-1] > 0.1
    settings = OptimSettings(learning_rate=1.0, schedule=schedule, min_learning_rate=0.1)
    for step in (50, 51, 5000):
        assert learning_rate(step, total_steps=50, settings=settings) == pytest.approx(0.1)


def test_cosine_is_half_way_down_in_the_middle():
    """Half of the decay steps give half of the decay."""
    assert rates(100, warmup_steps=0, schedule="cosine")[50] == pytest.approx(0.5)


def test_constant_stays_at_the_full_rate():
    """Control: constant ignores the minimum."""
    found = rates(50, warmup_steps=10, schedule="constant", min_learning_rate=0.1)
    assert set(found[10:]) == {1.0}


@pytest.mark.parametrize("total_steps", [1, 2, 3, 40, 199])
def test_warm_up_longer_than_the_run_still_reaches_the_full_rate(total_steps):
    """Warm-up takes half of the run at most, and no step is without a rate."""
    found = rates(total_steps, warmup_steps=100)
    assert max(found) == 1.0
    assert min(found) > 0.0


def test_the_rate_is_set_in_every_group_even_a_tensor():
    """A tensor rate is filled in place: compiled optimizers hold a reference to it."""
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    held = torch.tensor(0.5)
    optimizer = torch.optim.SGD([{"params": [weights[0]]}, {"params": [weights[1]]}], lr=0.5)
    optimizer.param_groups[1]["lr"] = held
    apply_learning_rate(optimizer, 0.25)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert optimizer.param_groups[1]["lr"] is held
    assert held.item() == 0.25
