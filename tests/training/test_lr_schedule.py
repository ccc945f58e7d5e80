"""The learning rate is a pure function of the step."""

from itertools import pairwise

import pytest
import torch

from ddp_runner.core.settings import OptimSettings
from ddp_runner.training.components.lr_schedule import (
    apply_learning_rate,
    learning_rate,
    schedule_words,
    warmup_end,
)


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


def hand(total_steps, schedulers, milestones):
    """The rates that a loop with torch's own schedulers trains with."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    made = [make(optimizer) for make in schedulers]
    chained = torch.optim.lr_scheduler.SequentialLR(optimizer, made, milestones)
    found = []
    for _ in range(total_steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        chained.step()
    return found


def warm_up(steps):
    """torch's own: the first step has one part of the rate, the one after the last all of it."""
    kind = torch.optim.lr_scheduler.LinearLR
    return lambda optimizer: kind(optimizer, 1 / steps, 1.0, steps - 1)


def down(steps, *, to):
    kind = torch.optim.lr_scheduler.LinearLR
    return lambda optimizer: kind(optimizer, 1.0, to, steps)


def cosine(steps, *, to):
    kind = torch.optim.lr_scheduler.CosineAnnealingLR
    return lambda optimizer: kind(optimizer, steps, to)


def flat(optimizer):
    return torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0, 1)


def falls_with_root(warmup_steps):
    def factor(passed):
        return (warmup_steps / (passed + warmup_steps)) ** 0.5

    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


@pytest.mark.parametrize(
    ("settings", "schedulers", "milestones"),
    [
        ({"schedule": "cosine", "min_learning_rate": 0.2}, [cosine(80, to=0.2)], [20]),
        ({"schedule": "linear", "min_learning_rate": 0.2}, [down(80, to=0.2)], [20]),
        (
            {"schedule": "wsd", "decay_steps": 30, "min_learning_rate": 0.2},
            [flat, down(30, to=0.2)],
            [20, 70],
        ),
        ({"schedule": "wsd", "decay_steps": 0.3}, [flat, down(30, to=0.0)], [20, 70]),
        ({"schedule": "wsd", "decay_steps": 99}, [down(80, to=0.0)], [20]),
        (
            {"schedule": "wsd", "schedule_steps": 80, "decay_steps": 10},
            [flat, down(10, to=0.0)],
            [20, 70],
        ),
        ({"schedule": "inverse_sqrt"}, [falls_with_root(20)], [20]),
        (
            {"schedule": "cosine", "schedule_steps": 200, "min_learning_rate": 0.2},
            [cosine(180, to=0.2)],
            [20],
        ),
    ],
)
def test_each_schedule_is_that_of_torchs_own_schedulers(settings, schedulers, milestones):
    """A hundred steps with warm-up, held against a loop with what torch has."""
    expected = hand(100, [warm_up(20), *schedulers], milestones)
    assert rates(100, warmup_steps=20, **settings) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("share", "steps", "of_longer"),
    [(0.2, 20, 40), (0.155, 16, 31), (0.6, 50, 100), (0.004, 0, 1)],
)
def test_a_warm_up_below_1_is_a_share_of_the_schedule(share, steps, of_longer):
    """Rounded to a step, and at most half."""
    assert rates(100, warmup_steps=share) == rates(100, warmup_steps=steps)
    longer = rates(100, warmup_steps=share, schedule_steps=200)
    assert longer == rates(100, warmup_steps=of_longer, schedule_steps=200)


@pytest.mark.parametrize(
    ("total_steps", "steps"), [(156, 15), (999, 99), (1000, 100), (50_000, 100)]
)
def test_without_a_word_the_warm_up_of_a_short_run_is_short(total_steps, steps):
    """A hundred steps, or a tenth of the schedule where that is less."""
    assert warmup_end(OptimSettings(), total_steps=total_steps) == steps
    assert warmup_end(OptimSettings(warmup_steps=100), total_steps=total_steps) == min(
        100, total_steps // 2
    )


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "inverse_sqrt"])
def test_a_schedule_that_ends_before_the_run_holds_its_last_rate(schedule):
    """From schedule_steps on; what goes down has come to the lowest rate by then."""
    found = rates(60, warmup_steps=4, schedule=schedule, schedule_steps=40, min_learning_rate=0.1)
    assert len(set(found[40:])) == 1
    assert found[39] > found[40]
    if schedule != "inverse_sqrt":
        assert found[40] == pytest.approx(0.1)


def test_inverse_sqrt_stays_above_the_lowest_rate_and_needs_no_warm_up():
    """Without one its time scale is ten thousand steps, as transformers has it."""
    found = rates(200, warmup_steps=2, schedule="inverse_sqrt", min_learning_rate=0.25)
    assert min(found) == found[-1] == 0.25
    alone = rates(20_000, warmup_steps=0, schedule="inverse_sqrt")
    assert (alone[0], alone[10_000]) == (1.0, pytest.approx(0.5**0.5))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"schedule": "constant", "warmup_steps": 0}, "constant"),
        ({"schedule": "constant", "warmup_steps": 1}, "constant, after 1 step of warm-up"),
        (
            {"schedule": "cosine", "warmup_steps": 0.05},
            "cosine to 1e-05 at step 2,000, after 100 steps of warm-up",
        ),
        (
            {"schedule": "linear", "warmup_steps": 5000},
            "linear to 1e-05 at step 2,000, after 1,000 steps of warm-up",
        ),
        (
            {"schedule": "cosine", "warmup_steps": 0, "schedule_steps": 500},
            "cosine to 1e-05 at step 500",
        ),
        (
            {"schedule": "wsd", "warmup_steps": 0, "decay_steps": 0.1},
            "wsd, going down from step 1,800 to 1e-05 at step 2,000",
        ),
        (
            {"schedule": "inverse_sqrt", "warmup_steps": 0},
            "inverse_sqrt, no lower than 1e-05, up to step 2,000",
        ),
        (
            {"schedule": "range_test", "warmup_steps": 0, "decay_steps": 100},
            "range_test, going up from 1e-05 at step 1,900 to step 2,000",
        ),
    ],
)
def test_a_schedule_is_said_with_its_last_step(settings, words):
    """As it comes out for this run: shares in steps, a warm-up as it was cut."""
    made = OptimSettings(min_learning_rate=1e-5, **settings)
    assert schedule_words(made, total_steps=2000) == words


def test_a_range_test_goes_up_by_equal_factors():
    """From the lowest rate at its first step to the highest at its last; before it the lowest holds."""
    found = rates(30, warmup_steps=0, schedule="range_test", min_learning_rate=1e-6, decay_steps=21)
    assert found[:10] == [1e-6] * 10
    assert found[29] == 1.0
    factors = [after / before for before, after in pairwise(found[9:])]
    assert factors == pytest.approx([10 ** (6 / 20)] * 20)
