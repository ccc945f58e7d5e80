"""What tasks give for people: whatever they give or raise, training goes on, and one line says what was wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ddp_runner.training.helpers import Helpers


class Task:
    """Gives what it is made with, as its figures and as its sample."""

    def __init__(self, given):
        self._given = given

    def figures(self, loss):
        return self._given(loss)

    def sample(self, model):
        return self._given(model)


def helpers_of(given):
    warnings = []
    return Helpers(Task(given), warn=warnings.append), warnings


@pytest.mark.parametrize(
    ("given", "figures"),
    [
        (lambda loss: {"perplexity": math.exp(loss)}, {"perplexity": math.e}),
        (lambda loss: {"bits": torch.tensor(loss)}, {"bits": 1.0}),
        (lambda loss: {"bits": torch.tensor([loss])}, {"bits": 1.0}),
        (lambda loss: {"bits": np.float32(loss)}, {"bits": 1.0}),
        (lambda loss: {"bits": np.array(loss)}, {"bits": 1.0}),
        (lambda loss: {"good": loss < 2}, {"good": 1.0}),
        (lambda loss: {3: loss}, {"3": 1.0}),
        (lambda loss: {}, {}),
    ],
)
def test_numbers_of_every_kind_are_plain_ones(given, figures):
    helpers, warnings = helpers_of(given)
    made = helpers.figures(1.0)
    assert made == pytest.approx(figures)
    assert all(type(value) is float for value in made.values())
    assert warnings == []


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (lambda loss: {"name": "good", "bits": loss}, "returned a str for 'name', not a number"),
        (lambda loss: {"name": None, "bits": loss}, "returned None for 'name', not a number"),
        (
            lambda loss: {"name": torch.ones(3), "bits": loss},
            "returned a tensor of shape (3,) for 'name', not a number",
        ),
    ],
)
def test_what_is_no_number_is_left_out_alone(given, why):
    helpers, warnings = helpers_of(given)
    assert helpers.figures(1.0) == helpers.figures(1.0) == {"bits": 1.0}
    assert warnings == [f"the task's figures() {why}; left out"]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (lambda _loss: math.exp(1e4), "raised OverflowError: math range error (test_helpers.py:"),
        (lambda _loss: None, "returned None, not a dict of names and numbers"),
        (lambda loss: loss, "returned a float, not a dict of names and numbers"),
        (lambda _loss: {}["no such name"], "raised KeyError: 'no such name' (test_helpers.py:"),
    ],
)
def test_figures_that_cannot_be_are_one_warning(given, why):
    helpers, warnings = helpers_of(given)
    assert helpers.figures(1.0) == helpers.figures(1.0) == {}
    (warning,) = warnings
    assert warning.startswith(f"the task's figures() {why}")
    assert warning.endswith("; left out")


def test_a_sample_is_text_whatever_it_was_and_none_where_it_raised():
    assert helpers_of(lambda _model: 3.5)[0].sample(torch.nn.Linear(1, 1)) == "3.5"
    assert helpers_of(lambda _model: None)[0].sample(torch.nn.Linear(1, 1)) == ""
    helpers, warnings = helpers_of(lambda model: model(torch.ones(5)))
    assert helpers.sample(torch.nn.Linear(1, 1)) == ""
    (warning,) = warnings
    assert warning.startswith("the task's sample() raised RuntimeError: ")


def test_a_task_without_helpers_has_none():
    helpers = Helpers(object(), warn=pytest.fail)
    assert helpers.figures(1.0) == {}
    assert helpers.sample(torch.nn.Linear(1, 1)) == ""
