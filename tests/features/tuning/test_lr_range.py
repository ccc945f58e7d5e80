"""What the losses of a range test say: the mean by hand, where it explodes, and which rate is suggested."""

import math
import random

import pytest

from ddp_runner.features.tuning.lr_range import (
    SETTLED,
    Curve,
    Point,
    Smoothed,
    curve_of,
    suggestion,
)


def points(losses, *, low=1e-6, high=10.0):
    ratio = high / low
    count = len(losses)
    return [
        Point(rate=low * ratio ** (place / (count - 1)), loss=loss)
        for place, loss in enumerate(losses)
    ]


def bowl(count=100):
    """Flat, falls around 1e-3, lowest about 0.03, then up."""
    found = []
    for point in points([0.0] * count):
        x = math.log10(point.rate)
        found.append(2.0 - 1.5 / (1 + math.exp(-3 * (x + 3))) + math.exp(4 * x))
    return found


def curve(losses):
    """As measured, without any smoothing."""
    known = points(losses)
    return Curve(
        points=tuple(Smoothed(rate=one.rate, loss=one.loss, smoothed=one.loss) for one in known),
        exploded=False,
    )


def test_the_mean_is_that_of_a_loop_written_by_hand():
    """Weights 0.98 to the power of the age, over their sum."""
    losses = [3.0, 1.0, 2.5, 0.5, 0.75]
    found = curve_of(points(losses))
    assert not found.exploded
    for last, point in enumerate(found.points):
        weights = [0.98 ** (last - place) for place in range(last + 1)]
        mean = sum(w * v for w, v in zip(weights, losses, strict=False)) / sum(weights)
        assert point.smoothed == pytest.approx(mean, rel=1e-12)
        assert point.loss == losses[last]


def test_a_longer_test_never_changes_the_points_before():
    """So that it does not matter how soon a run is ended once its loss has exploded."""
    whole = points([*bowl(), 1e3, 1e6, 1e9])
    curves = [curve_of(whole[:length]) for length in range(1, len(whole) + 1)]
    for one in curves:
        assert one.points == curves[-1].points[: len(one.points)]
    first = next(place for place, one in enumerate(curves) if one.exploded)
    assert all(one == curves[-1] for one in curves[first:])


@pytest.mark.parametrize("broken", [None, math.nan, math.inf, 1e9])
def test_what_explodes_ends_the_curve(broken):
    """A loss that is no number, or four times the lowest."""
    losses = [2.0 - place / 10 for place in range(12)]
    found = curve_of(points([*losses, broken, 0.1]))
    assert found.exploded
    assert [one.loss for one in found.points] == losses


def test_a_few_low_losses_at_the_begin_explode_nothing_later():
    """A mean over few samples may be low by chance; a loss that is no number counts at once."""
    found = curve_of(points([0.1, 0.2, *[2.0] * 30]))
    assert not found.exploded
    assert suggestion(found) is None
    assert curve_of(points([0.1, math.nan, 2.0])).exploded


def test_losses_below_zero_do_not_explode_by_themselves():
    """Control: four times a negative lowest would be lower still."""
    losses = [-1.0, -5.0, -4.0, -3.0, -6.0] * 4
    assert not curve_of(points(losses)).exploded
    assert curve_of(points([*losses, 1e4])).exploded


def test_suggestions_are_where_the_curve_has_them():
    """The steepest place is known of the formula, the lowest is looked for by hand."""
    losses = bowl()
    found = suggestion(curve(losses))
    assert found is not None
    assert found.steepest == pytest.approx(1e-3, rel=0.3)
    rates = [one.rate for one in points(losses)]
    assert found.tenth == rates[losses.index(min(losses))] / 10
    middle = sorted([found.steepest, found.valley, found.tenth])[1]
    assert found.rate == pytest.approx(middle, rel=0.05)
    assert float(f"{found.rate:.1e}") == found.rate


@pytest.mark.parametrize("losses", [[1.0 + n / 9 for n in range(20)], [1.0] * 20, [2.0, 1.0]])
def test_a_loss_that_does_not_fall_suggests_nothing(losses):
    """Nor do two points, or none."""
    assert suggestion(curve_of(points(losses))) is None
    assert suggestion(curve_of([])) is None


def test_a_loss_that_only_falls_has_its_lowest_at_the_end():
    """The steepest place is before it."""
    losses = [math.exp(-place / 10) for place in range(50)]
    found = suggestion(curve(losses))
    assert found.tenth == pytest.approx(1.0)
    assert found.steepest < 10.0


def valley_of_fastai(losses):
    """``valley`` of fastai's callback/schedule.py, which compares each point with all before it."""
    count = len(losses)
    begin, end = 0, 0
    lengths = [1] * count
    for i in range(1, count):
        for j in range(i):
            if losses[i] < losses[j] and lengths[i] < lengths[j] + 1:
                lengths[i] = lengths[j] + 1
            if lengths[end] < lengths[i]:
                end = i
                begin = end - lengths[end]
    section = (end - begin) / 3
    return begin + int(section) + int(section / 2)


def test_the_valley_is_that_of_fastai():
    """Of noisy curves, whose longest fall has rises in between."""
    for seed in range(20):
        noise = random.Random(seed)
        losses = [value + noise.uniform(-0.3, 0.3) for value in bowl(60)]
        found = suggestion(curve(losses))
        settled = points(losses)[SETTLED - 1 :]
        assert found.valley == settled[valley_of_fastai([one.loss for one in settled])].rate
