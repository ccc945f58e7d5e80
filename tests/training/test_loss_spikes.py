"""What counts as an explosion, and what must not: warm-up, noise, and jumps near zero."""

from __future__ import annotations

import json
import math
import random
from collections import deque
from statistics import median

import pytest

from ddp_runner.core.loss_spikes import RecentValues, broken_gradients
from ddp_runner.training.components.loss_spikes import LossSpikes


def watch(**changes):
    given = {"window": 20, "loss_factor": 10.0, "grad_factor": 100.0, "warmup_steps": 10}
    return LossSpikes(**{**given, **changes})


def limit_of(values, *, factor):
    return RecentValues(max(1, len(values)), values).explosion_limit(factor=factor)


def observe_all(explosions, losses, *, start=0):
    """Each loss with a gradient norm of 1; the steps that would have exploded."""
    found = []
    for step, loss in enumerate(losses, start=start):
        if explosions.limits().exceeded_by(loss=loss, grad_norm=1.0):
            found.append(step)
        else:
            explosions.observe(step=step, loss=loss, grad_norm=1.0)
    return found


def test_a_limit_is_far_above_the_usual_whatever_the_outliers():
    """A factor of the median, or many times the spread where that is wider, also that of the logarithms."""
    assert limit_of([2.0] * 9 + [500.0], factor=10.0) == 20.0
    assert limit_of([0.0, 2.0, 4.0] * 5, factor=2.0) == 42.0
    assert limit_of([1.0, 2.0, 4.0] * 5, factor=2.0) == pytest.approx(2.0 * 2.0**8)
    assert limit_of([1e-300, 1.0, 1e300] * 5, factor=2.0) == math.inf
    assert limit_of([-5.0, -4.0, -3.0], factor=10.0) == 16.0
    assert limit_of([], factor=10.0) == math.inf
    assert limit_of([0.0, 0.0], factor=10.0) == math.inf


@pytest.mark.parametrize("window", [1, 2, 7, 100])
def test_limits_follow_the_newest_values_bit_for_bit(window):
    """As they come out of the whole window, ties and equal extremes included."""
    rng = random.Random(window)
    recent, plain = RecentValues(window), deque(maxlen=window)
    for _ in range(4 * window):
        value = rng.choice([rng.gauss(0, 3), 1.5, -1.5, 0.0])
        recent.add(value)
        plain.append(value)
        middle = median(plain)
        spread = median(abs(one - middle) for one in plain)
        expected = max(middle * 3.0, middle + 20.0 * spread) if middle > 0 or spread else math.inf
        if min(plain) > 0:
            logs = [math.log(one) for one in plain]
            usual = median(logs)
            expected = max(expected, math.exp(usual + 8 * median(abs(one - usual) for one in logs)))
        assert recent.explosion_limit(factor=3.0) == expected
        assert recent.oldest_first() == list(plain)


@pytest.mark.parametrize("spread", [0.3, 0.9])
def test_losses_of_a_good_model_may_differ_by_orders_of_magnitude(spread):
    """Trained further, as from given weights: the first loss is low, so it hides no jump. Control: far above all of them."""
    rng = random.Random(1)
    losses = [rng.lognormvariate(-5, spread) for _ in range(3000)]
    losses[0] = math.exp(-5)
    losses[2000] = 1000 * max(losses)
    assert observe_all(watch(window=100), losses) == [2000]


@pytest.mark.parametrize("level", [1e-3, 1.0, 1e5])
def test_a_loss_far_above_the_last_is_an_explosion_everywhere(level):
    """One, and a row of them: what exploded does not become the usual."""
    losses = [3 * level, *[level] * 40]
    losses[35] = losses[37] = losses[38] = 50 * level
    assert observe_all(watch(), losses) == [35, 37, 38]


def test_a_gradient_far_above_the_last_steps_is_an_explosion_too():
    """The loss may not show it yet."""
    explosions = watch()
    assert observe_all(explosions, [1.0] * 40) == []
    limits = explosions.limits()
    assert "gradient norm 500" in limits.exceeded_by(loss=1.0, grad_norm=500.0)
    assert limits.exceeded_by(loss=1.0, grad_norm=99.0) == ""


def test_a_high_loss_in_warm_up_is_none():
    """Control: before the window is full, and while the rate still rises, anything may happen."""
    wild = [5.0, 900.0, 3.0, 1e6, 2.0, 4e4, *[2.0] * 22, 1e9]
    assert observe_all(watch(), wild) == []


def test_a_noisy_run_is_none():
    """Control: ten thousand losses and norms that vary by a factor of ten have no explosion."""
    chance = random.Random(7)
    explosions = watch(window=100)
    for step in range(10_000):
        loss, grad_norm = (chance.lognormvariate(0.0, 0.4) for _ in range(2))
        assert not explosions.limits().exceeded_by(loss=loss, grad_norm=grad_norm)
        explosions.observe(step=step, loss=loss, grad_norm=grad_norm)


def test_a_jump_near_zero_is_none():
    """Control: a run that fits its data jumps and recovers; it is no worse than where it began."""
    assert observe_all(watch(), [2.0, *[1e-6] * 60, 1e-2, 1e-6, 2.0, 1e-6]) == []


def test_a_loss_that_is_not_finite_is_no_explosion():
    """It is another fault, with its own words."""
    explosions = watch()
    observe_all(explosions, [1.0] * 40)
    assert explosions.limits().exceeded_by(loss=math.nan, grad_norm=math.inf) == ""
    assert explosions.limits().exceeded_by(loss=math.inf, grad_norm=math.inf) == ""


def test_window_0_watches_nothing():
    """The way to switch it off."""
    assert observe_all(watch(window=0), [1.0] * 40 + [1e9]) == []


def test_state_continues_exactly():
    """A replacement, and a run that is resumed, set the same limits."""
    losses = [3.0 + math.sin(step) for step in range(60)]
    for cut in (0, 5, 25, 60):
        whole, first, second = watch(), watch(), watch()
        observe_all(whole, losses)
        observe_all(first, losses[:cut])
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        observe_all(second, losses[cut:], start=cut)
        assert second.limits() == whole.limits()


@pytest.mark.parametrize(
    ("norms", "limit", "broken"),
    [
        ([1.0, 1.5, 1.0], 90.0, ()),
        ([1.0, 1.5, math.nan], 90.0, (2,)),
        ([math.inf, math.nan, math.inf], 90.0, (0, 1, 2)),
        ([1.0, 31.0, 1.0], 90.0, (1,)),
        ([1.0, 1e30, 1.0], math.inf, ()),
    ],
    ids=["fault-free", "not a number", "everywhere", "too high", "no limit yet"],
)
def test_a_gradient_is_traced_by_the_ranks_own_norms(norms, limit, broken):
    """Each counts as if all ranks had one like it."""
    assert broken_gradients(norms, limit=limit) == broken


def test_a_threshold_of_its_own_holds_from_the_first_step_on():
    """Where nothing can be compared yet, and beside what can; the lower of both is the limit."""
    watched = watch(loss_max=7.0)
    assert watched.limits().exceeded_by(loss=7.5, grad_norm=1e9) == (
        "loss 7.5 is above explosion_loss_max=7"
    )
    assert watched.limits().exceeded_by(loss=7.0, grad_norm=1e9) == ""
    assert observe_all(watched, [6.0] * 40) == []
    assert watched.limits().loss == 7.0, "ten times the median would be 60"
    assert "grad" in watched.limits().exceeded_by(loss=1.0, grad_norm=500.0)
    low = watch(loss_max=7.0)
    observe_all(low, [0.2] * 40)
    assert low.limits().loss == pytest.approx(2.0)
    assert "far above the last steps" in low.limits().exceeded_by(loss=6.0, grad_norm=1.0)
    off = watch(window=0, loss_max=7.0)
    assert observe_all(off, [1.0, 8.0, 1.0, math.inf]) == [1]


def test_an_explosion_lowers_the_rate_which_comes_back_in_equal_parts():
    """Another one before that lowers what there is; held against a table by hand."""
    watched = watch(rate_factor=0.5, recover_steps=10)
    assert watched.rate_factor(99) == 1.0
    watched.exploded(step=100)
    found = [watched.rate_factor(step) for step in (100, 101, 105, 109, 110, 500)]
    assert found == pytest.approx([0.5, 0.55, 0.75, 0.95, 1.0, 1.0])
    assert watched.says_of_rate() == ", learning rate x 0.5, back in full at step 110"
    watched.exploded(step=105)
    found = [watched.rate_factor(step) for step in (105, 110, 115)]
    assert found == pytest.approx([0.375, 0.6875, 1.0])


def test_a_lowered_rate_is_part_of_the_state():
    """A process that follows goes on with it; a state from before it, or a going back, has none."""
    watched, follower = (watch(rate_factor=0.5, recover_steps=10) for _ in range(2))
    before = json.loads(json.dumps(watched.state_dict(), allow_nan=True))
    watched.exploded(step=100)
    follower.load_state_dict(json.loads(json.dumps(watched.state_dict())))
    assert [follower.rate_factor(s) for s in range(99, 120)] == [
        watched.rate_factor(s) for s in range(99, 120)
    ]
    follower.load_state_dict(before)
    assert follower.rate_factor(101) == 1.0


def test_without_a_factor_no_explosion_changes_a_rate():
    """The control: nothing is kept, and nothing said."""
    watched = watch()
    before = watched.state_dict()
    watched.exploded(step=100)
    assert watched.rate_factor(101) == 1.0
    assert watched.state_dict() == before
    assert watched.says_of_rate() == ""
