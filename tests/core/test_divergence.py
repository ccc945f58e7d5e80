"""The odd replica out."""

from __future__ import annotations

import pytest

from ddp_runner.core.divergence import Comparison, compare_replicas, first_difference


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
