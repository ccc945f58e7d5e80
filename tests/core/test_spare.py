"""When a spare is forked ahead, and when one that was made a rank is taken back."""

from __future__ import annotations

import pytest

from ddp_runner.core.spare import (
    BEGIN_TIMEOUT_S,
    BUILDS_MIN_S,
    LOST_BUILDING_MAX,
    LOST_MAX,
    LOST_WAIT_S,
    SLOW_BEGIN_TIMEOUT_S,
    YOUNG_S,
    SpareFacts,
    builds_ahead,
    lost_after,
    must_give_back,
    wants_spare,
)


def facts(**changes):
    known = {
        "fault_free": True,
        "stepped": True,
        "exists": False,
        "lost_in_a_row": 0,
        "since_lost_s": 1000.0,
    }
    return SpareFacts(**{**known, **changes})


def test_a_run_without_faults_wants_one():
    """The ordinary case."""
    assert wants_spare(facts())


@pytest.mark.parametrize(
    "change",
    [{"fault_free": False}, {"stepped": False}, {"exists": True}],
    ids=lambda c: next(iter(c)),
)
def test_no_spare_beside_a_repair_a_first_step_or_another_spare(change):
    """It would take time from what matters, or be one too many."""
    assert not wants_spare(facts(**change))


def test_spares_that_keep_dying_come_later_and_later_and_then_no_more():
    """Bounded, whatever ends them."""
    lost = 0
    while wants_spare(facts(lost_in_a_row=lost)):
        assert wants_spare(facts(lost_in_a_row=lost, since_lost_s=lost * LOST_WAIT_S))
        if lost:
            assert not wants_spare(facts(lost_in_a_row=lost, since_lost_s=lost * LOST_WAIT_S - 0.1))
        lost = lost_after(lost, lived_s=YOUNG_S - 1)
    assert lost == LOST_MAX


def test_a_spare_that_has_lived_for_long_was_none_of_a_row():
    """A machine that takes one process an hour is not to end what is useful."""
    assert lost_after(LOST_MAX - 1, lived_s=YOUNG_S) == 1


def test_who_has_not_begun_in_time_is_taken_back():
    """A spare that was stopped just then; control: in time, or once it has begun."""
    for is_stopped, limit_s in ((True, BEGIN_TIMEOUT_S), (False, SLOW_BEGIN_TIMEOUT_S)):
        late, just = (
            must_give_back(has_begun=False, is_stopped=is_stopped, since_s=since_s)
            for since_s in (limit_s + 0.01, limit_s)
        )
        assert (late, just) == (True, False)
        assert not must_give_back(has_begun=True, is_stopped=is_stopped, since_s=1000.0)


@pytest.mark.parametrize(
    ("setting", "changes", "expected"),
    [
        (True, {}, True),
        (True, {"build_s": BUILDS_MIN_S}, False),
        (True, {"rank_bytes": 251}, False),
        (True, {"rank_bytes": 0}, False),
        (True, {"lost_in_a_row": LOST_BUILDING_MAX}, False),
        (True, {"lost_in_a_row": LOST_BUILDING_MAX - 1}, True),
        ("process", {}, False),
        (False, {}, False),
        ("model", {"build_s": 0.0, "rank_bytes": 2000}, True),
        ("model", {"lost_in_a_row": LOST_BUILDING_MAX}, False),
    ],
)
def test_a_spare_builds_ahead_what_takes_long_and_fits(setting, changes, expected):
    """By itself only in a quarter of the memory that is free, where a rank's building takes a moment."""
    known = {
        "build_s": BUILDS_MIN_S * 1.01,
        "rank_bytes": 250,
        "free_bytes": 1000,
        "lost_in_a_row": 0,
    }
    assert builds_ahead(setting, **{**known, **changes}) is expected
