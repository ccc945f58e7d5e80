"""The odd replica out."""

from __future__ import annotations

import pytest

from ddp_runner.kernel.rules.divergence import (
    Comparison,
    compare_replicas,
    disagreement,
    first_difference,
    unlike_option,
)


@pytest.mark.parametrize(
    ("hashes", "odd", "has_majority"),
    [
        (["a"], (), True),
        (["a", "a", "a"], (), True),
        (["a", "b", "a"], (1,), True),
        (["b", "a", "a", "c", "a"], (0, 3), True),
        (["a", "b"], (0, 1), False),
        (["a", "a", "b", "b"], (0, 1, 2, 3), False),
        (["a", "b", "c"], (0, 1, 2), False),
    ],
)
def test_more_than_half_is_a_majority(hashes, odd, has_majority):
    """A minority is named; half against half convicts nobody."""
    assert compare_replicas(hashes) == Comparison(odd=odd, has_majority=has_majority)


def test_the_first_tensor_that_differs_is_named():
    """People look at a name, not at a hash."""
    assert first_difference(["1", "2", "3"], ["1", "9", "8"], ["a", "b", "c"]) == "b"


@pytest.mark.parametrize(
    ("begun", "words"),
    [
        ({}, ""),
        ({0: 7, 1: 7, 2: 7}, ""),
        ({0: 7, 1: -1}, ""),
        ({0: 7, 1: 8, 2: 7}, "rank 1 8, every other 7"),
        ({0: 7, 1: 8, 2: 7, 3: -1}, "rank 1 8, every other 7"),
        ({0: 7, 2: 8}, "rank 0 7, rank 2 8"),
    ],
)
def test_ranks_that_are_in_different_collectives_are_named(begun, words):
    """By how many each has begun; who could not be asked is left out."""
    assert disagreement(begun) == words


def test_the_first_option_that_ranks_do_not_share_is_named():
    """With two values; nothing where all are alike, or a rank has more of them."""
    alike = {"lr": "0.1", "momentum": "0.9"}
    assert unlike_option([alike, dict(alike), {**alike, "own": "1"}]) == ""
    said = unlike_option([alike, alike, {**alike, "momentum": "0.8"}])
    assert said.startswith("momentum is 0.9 on rank 0 and 0.8 on rank 2: set it ")
