"""Which GPU a rank takes, without one."""

from __future__ import annotations

import pytest

from ddp_runner.collective.device import visible_gpu


@pytest.mark.parametrize(
    ("local_rank", "visible", "expected"),
    [(0, 8, "cuda:0"), (7, 8, "cuda:7"), (3, 1, "cuda:0"), (5, 4, "cuda:1"), (2, 0, "cuda:2")],
)
def test_a_rank_takes_its_own_number_of_those_it_can_see(local_rank, visible, expected):
    """One that is shown a single GPU takes that one, whatever its own number is."""
    assert visible_gpu(local_rank, visible) == expected
