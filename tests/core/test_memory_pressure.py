"""Rules of the memory pressure levels."""

from itertools import product

import pytest

from ddp_runner.memory.manager import Level, may_collect_fully, next_level

OK, WARN, REACT, LIMIT = Level
#          share: at each current level (OK, WARN, REACT, LIMIT) -> next
TABLE = {
    0.00: (OK, OK, OK, OK),
    0.74: (OK, OK, OK, OK),
    0.76: (OK, WARN, WARN, WARN),
    0.80: (WARN, WARN, WARN, WARN),
    0.86: (WARN, WARN, REACT, REACT),
    0.90: (REACT, REACT, REACT, REACT),
    0.94: (REACT, REACT, REACT, LIMIT),
    0.98: (LIMIT, LIMIT, LIMIT, LIMIT),
    1.70: (LIMIT, LIMIT, LIMIT, LIMIT),
}


def step(current: Level, share: float) -> Level:
    return next_level(current, share, warn=0.80, react=0.90, limit=0.98)


def test_every_level_and_share_gives_the_level_of_the_table():
    """Levels rise at their threshold and fall only 0.05 below it, one row per share."""
    for current, share in product(Level, TABLE):
        assert step(current, share) is TABLE[share][current]


def test_a_share_that_swings_around_a_threshold_is_one_event():
    """Hysteresis: swings smaller than it change the level once."""
    level, changes = OK, 0
    for share in (0.89, 0.91, 0.88, 0.92, 0.87, 0.90, 0.86):
        after = step(level, share)
        changes += after is not level
        level = after
    assert (level, changes) == (REACT, 2)  # OK -> WARN -> REACT


@pytest.mark.parametrize("bad", [(0.9, 0.8, 0.98, 0.05), (0.8, 0.9, 0.85, 0.05), (0.8, 0.9, 1, -1)])
def test_thresholds_out_of_order_are_refused(bad):
    """Thresholds must rise and hysteresis must not be negative."""
    with pytest.raises(ValueError, match="thresholds must rise"):
        next_level(OK, 0.5, warn=bad[0], react=bad[1], limit=bad[2], hysteresis=bad[3])


def test_a_full_collection_takes_a_thousandth_of_the_time():
    """A clean-up of 50 ms is allowed after 50 s, not after 49 s."""
    assert may_collect_fully(since_last_s=50.0, cost_s=0.05)
    assert not may_collect_fully(since_last_s=49.0, cost_s=0.05)
    assert may_collect_fully(since_last_s=0.0, cost_s=0.0)
