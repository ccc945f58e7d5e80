"""A rank that is slow again and again is named; everything else is not."""

from __future__ import annotations

from ddp_runner.kernel.recovery.hang_detector import WINDOWS, StragglerWatch


def feed(rows):
    watch = StragglerWatch()
    return [watch.observe(dict(enumerate(row))) for row in rows]


def test_a_persistently_slow_rank_is_named_once_with_its_factor():
    """Three windows in a row name it; later ones do not repeat it."""
    found = feed([(1.0, 1.0, 3.0)] * 6)
    assert found[WINDOWS - 1] == {2: 3.0}
    assert [item for item in found if item] == [{2: 3.0}]


def test_of_two_ranks_the_slower_one_is_named():
    """There is no median of two worth having: the faster one is the measure."""
    assert feed([(2.0, 1.0)] * 3)[-1] == {0: 2.0}


def test_slowness_that_wanders_is_nobodys():
    """Control: each window another rank is slow."""
    rows = [(3.0, 1.0, 1.0), (1.0, 3.0, 1.0), (1.0, 1.0, 3.0)] * 4
    assert not any(feed(rows))


def test_when_all_are_slow_nobody_is():
    """Control: a slow machine is no slow rank."""
    assert not any(feed([(1.0, 1.0, 1.0), (5.0, 5.0, 5.2)] + [(9.0, 9.0, 9.1)] * 4))


def test_a_rank_alone_has_no_measure():
    """Control: world size 1."""
    assert not any(feed([(1.0,)] * 5))
