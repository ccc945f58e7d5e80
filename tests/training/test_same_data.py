"""What is said of data that differs: who, what, and nothing that only one side knows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ddp_runner.training.exactness.same_data import agreed, differences
from ddp_runner.training.task_client import _may_change_samples

RECORD = {"samples": 100, "order": "2:aa", "sample 0": "a", "sample 50": "b", "sample 99": "c"}


def changed(**changes):
    return RECORD | {name.replace("_", " "): value for name, value in changes.items()}


def test_equal_data_differs_in_nothing():
    assert differences(RECORD, dict(RECORD)) == []


def test_what_differs_is_named():
    assert differences(RECORD, changed(sample_50="x")) == ["sample 50 is another one"]
    several = changed(sample_0="x", sample_50="y", sample_99="z")
    assert differences(RECORD, several) == ["samples 0, 50 and 99 are other ones"]
    assert differences(RECORD, changed(order="2:bb", sample_0="x")) == [
        "another order of the samples",
        "sample 0 is another one",
    ]


def test_of_another_length_nothing_else_is_said():
    assert differences(RECORD, changed(samples=99, order="2:bb", sample_0="x")) == [
        "99 samples instead of 100"
    ]


def test_what_one_side_does_not_know_is_not_compared():
    assert differences(RECORD, {}) == differences({}, RECORD) == []
    assert differences(RECORD, {"samples": 100, "sample 49": "b"}) == []


def test_orders_of_two_versions_are_not_compared():
    assert differences(RECORD, changed(order="3:bb")) == []


def test_most_ranks_are_right_and_of_two_the_lower_one():
    other = changed(sample_0="x")
    assert agreed({0: other, 1: RECORD, 2: RECORD})[1] == {0: ["sample 0 is another one"]}
    assert agreed({0: other, 1: RECORD})[1] == {1: ["sample 0 is another one"]}


def test_what_one_rank_could_not_see_is_taken_from_the_others():
    blind = {name: RECORD[name] for name in ("samples", "order")}
    assert agreed({0: blind, 1: RECORD}) == (RECORD, {})


def test_a_record_of_ranks_that_differ_holds_no_sample():
    record, _ = agreed({0: RECORD, 1: changed(sample_0="x")})
    assert record == {"samples": 100, "order": "2:aa"}


@pytest.mark.parametrize(
    ("followed", "of_data", "may"),
    [
        ([], [], False),
        (["model.norm.count", "model.seen"], [], False),
        (["model.seen", "task.steps"], [], True),
        ([], ["`data.level`"], True),
    ],
)
def test_samples_may_follow_the_task_and_never_the_model(followed, of_data, may):
    side = SimpleNamespace(followed_names=lambda: followed)
    assert _may_change_samples(SimpleNamespace(side=side, carried_of_data=of_data)) is may
