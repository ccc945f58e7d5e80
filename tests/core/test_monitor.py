"""Names of figures, which of them a run is judged by, and which state is the best."""

from __future__ import annotations

import math

import pytest

from ddp_runner.core.monitor import (
    Best,
    Monitor,
    chosen,
    figure_name,
    is_of_evaluation,
    parts_of,
)


@pytest.mark.parametrize(
    ("data", "figure", "name"),
    [
        ("", "loss", "validation_loss"),
        ("", "bits_per_byte", "validation_bits_per_byte"),
        ("bach", "loss", "bach/loss"),
        ("v1.2", "top_5", "v1.2/top_5"),
    ],
)
def test_a_figure_has_one_name_that_says_of_which_data(data, figure, name):
    """And both can be read from it."""
    assert figure_name(data, figure) == name
    assert parts_of(name) == (data, figure)
    assert is_of_evaluation(name)


@pytest.mark.parametrize("name", ["loss", "grad_norm", "rss_bytes", "step_s"])
def test_a_figure_of_training_is_of_no_evaluation(name):
    """The control."""
    assert not is_of_evaluation(name)
    assert parts_of(name) == ("", name)


@pytest.mark.parametrize(
    ("wanted", "data", "found"),
    [
        ("auto", (), "train_loss"),
        ("auto", ("",), "validation_loss"),
        ("auto", ("all", "bach"), "all/loss"),
        ("train_loss", ("",), "train_loss"),
        ("bach/accuracy", ("all", "bach"), "bach/accuracy"),
    ],
)
def test_auto_is_the_loss_of_the_first_validation_data(wanted, data, found):
    """It follows from the data alone, and so is the same before an evaluation, after one and after a resume."""
    assert chosen(wanted, data) == found


@pytest.mark.parametrize(
    ("name", "figures", "train_loss", "found"),
    [
        ("validation_loss", {"validation_loss": 2.0}, 3.0, 2.0),
        ("validation_loss", {}, 3.0, None),  # not judged by another figure until there is one
        ("validation_loss", {"validation_loss": math.nan}, 3.0, None),
        ("train_loss", {"validation_loss": 2.0}, 3.0, 3.0),
        ("train_loss", {}, None, None),
        ("train_loss", {}, math.inf, None),
    ],
)
def test_a_checkpoint_is_judged_by_the_one_figure(name, figures, train_loss, found):
    """Never by another one in its place."""
    assert Monitor(name=name).value(figures, train_loss=train_loss) == found


@pytest.mark.parametrize(("mode", "kept"), [("min", [2, 3, 3, 3, 6]), ("max", [2, 2, 4, 4, 4])])
def test_the_best_is_the_first_of_equals(mode, kept):
    """By the mode; what is no number, and what was evaluated before the first step, is never the best."""
    monitor, best, found = Monitor(name="x", mode=mode), Best(), []
    assert best.after(0.0, step=0, monitor=monitor) == best
    for step, value in enumerate([3.0, 2.0, 4.0, math.nan, 1.0], start=2):
        best = best.after(value, step=step, monitor=monitor)
        found.append(best.step)
    assert found == kept
    assert best.after(best.value, step=9, monitor=monitor) == best


def test_an_evaluation_that_is_made_again_is_the_best_again():
    """A rank that had come to its end and one that had not stand alike; another figure begins by itself."""
    monitor = Monitor(name="x")
    best = Best().after(3.0, step=2, monitor=monitor).after(2.0, step=4, monitor=monitor)
    assert best.after(2.0, step=4, monitor=monitor) == best
    other = Monitor(name="y")
    assert best.after(9.0, step=6, monitor=other) == Best(of="min y", step=6, value=9.0)
