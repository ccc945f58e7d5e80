"""The interval that is chosen by itself: Young's rule, its bounds, and when it makes a save due."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_runner.core.checkpoint_interval import (
    FIRST_INTERVAL_S,
    INTERVAL_MAX_S,
    INTERVAL_MIN_S,
    PRIOR_FAULT_S,
    STEPS_MIN,
    CheckpointInterval,
    mean_time_between_faults_s,
    save_interval_s,
)

HOUR = 3600.0


def test_the_interval_is_young_s():
    """W = sqrt(2 C M): half a second each, a fault an hour -> once a minute."""
    interval_s = save_interval_s(cost_s=0.5, write_s=1.0, step_s=0.1, between_faults_s=HOUR)
    assert interval_s == pytest.approx(60.0)


@given(cost_s=st.floats(0.01, 10.0), between_s=st.floats(1000.0, 1e5), other=st.floats(0.3, 3.0))
def test_no_other_interval_loses_less(cost_s, between_s, other):
    """Time lost per second: the save, and half an interval per fault. Ours is its minimum."""

    def lost(interval_s):
        return cost_s / interval_s + interval_s / 2 / between_s

    chosen = save_interval_s(cost_s=cost_s, write_s=0.0, step_s=0.0, between_faults_s=between_s)
    if chosen < INTERVAL_MAX_S:
        assert lost(chosen) <= lost(chosen * other) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("figures", "expected_s"),
    [
        ({"cost_s": 0.0}, INTERVAL_MIN_S),
        ({"cost_s": 1e6}, INTERVAL_MAX_S),
        ({"step_s": 20.0}, STEPS_MIN * 20.0),
        ({"step_s": 600.0}, STEPS_MIN * 600.0),
        ({"write_s": 100.0}, 200.0),
    ],
    ids=["free", "dear", "slow steps", "steps of ten minutes", "slow disk"],
)
def test_the_interval_stays_within_bounds(figures, expected_s):
    """A second to half an hour; never under ten steps, nor so short that the disk is always busy."""
    usual = {"cost_s": 0.01, "write_s": 0.1, "step_s": 0.1}
    interval_s = save_interval_s(**{**usual, **figures}, between_faults_s=HOUR)
    assert interval_s == pytest.approx(expected_s)


def test_without_a_fault_one_is_assumed_and_each_one_seen_counts():
    """No fault yet does not mean never; a bad day shortens the interval, a calm week lengthens it."""
    assert mean_time_between_faults_s(faults=0, observed_s=0.0) == PRIOR_FAULT_S
    assert mean_time_between_faults_s(faults=3, observed_s=4 * HOUR) == 2 * HOUR
    calm = mean_time_between_faults_s(faults=0, observed_s=100 * HOUR)
    assert calm > PRIOR_FAULT_S


def due_times(pace, *, until_s, step_s=1.0, begins=True):
    """When saves come due in a run of steps, each begun at once."""
    found = []
    for tick in range(int(until_s / step_s)):
        now_s = tick * step_s
        if pace.is_due(now_s=now_s, step_s=step_s):
            found.append(now_s)
            if begins:
                pace.began(now_s=now_s)
    return found


def test_before_a_save_is_measured_one_comes_each_minute():
    """The first is soon, so that its cost is known."""
    pace = CheckpointInterval(now_s=0.0)
    assert due_times(pace, until_s=200.0) == [FIRST_INTERVAL_S, 2 * FIRST_INTERVAL_S, 180.0]


def test_the_measured_cost_sets_the_pace():
    """Cheap saves come often, dear ones seldom; the newest cost counts half."""
    cheap, dear = CheckpointInterval(now_s=0.0), CheckpointInterval(now_s=0.0)
    cheap.measured(blocked_s=0.01, write_s=0.1)
    dear.measured(blocked_s=4.0, write_s=8.0)
    cheap_s = cheap.interval_s(now_s=0.0, step_s=1.0)
    assert cheap_s == pytest.approx(math.sqrt(2 * 0.01 * PRIOR_FAULT_S))
    assert dear.interval_s(now_s=0.0, step_s=1.0) == pytest.approx(20 * cheap_s)
    dear.measured(blocked_s=0.0, write_s=0.0)
    assert dear.interval_s(now_s=0.0, step_s=1.0) == pytest.approx(math.sqrt(200) * cheap_s)


def test_another_save_starts_the_interval_again():
    """A save at an epoch's end makes the next one by time wait."""
    pace = CheckpointInterval(now_s=0.0)
    pace.began(now_s=59.0)
    assert not pace.is_due(now_s=100.0, step_s=1.0)
    assert pace.is_due(now_s=119.0, step_s=1.0)


def test_the_choice_is_reported_once_until_it_doubles_or_halves():
    """With its reasons, in one line."""
    pace = CheckpointInterval(now_s=0.0)
    assert pace.news(now_s=1.0, step_s=0.1) == ""
    pace.measured(blocked_s=0.5, write_s=2.0)
    reported = pace.news(now_s=1.0, step_s=0.1)
    assert "saving every 120 s" in reported
    assert "a save costs training 500 ms" in reported
    assert "2.00 s in all" in reported
    assert pace.news(now_s=2.0, step_s=0.1) == ""
    assert "no fault needed one yet" in reported
    pace.faults += 20
    assert "20 faults" in pace.news(now_s=3.0, step_s=0.1)


def steps(pace, count, step_s, *, beside_save):
    for _ in range(count):
        pace.stepped(step_s, beside_save=beside_save)


def test_slower_steps_beside_the_write_count_as_its_cost():
    """Ten steps of 0.13 s where 0.1 s is usual: 0.3 s, beside the 0.2 s that training waited."""
    pace, blind = CheckpointInterval(now_s=0.0), CheckpointInterval(now_s=0.0)
    steps(pace, 20, 0.1, beside_save=False)
    pace.began(now_s=2.0)
    steps(pace, 10, 0.13, beside_save=True)
    pace.measured(blocked_s=0.2, write_s=1.3)
    blind.measured(blocked_s=0.5, write_s=1.3)
    interval_s = pace.interval_s(now_s=0.0, step_s=0.1)
    assert interval_s == pytest.approx(blind.interval_s(now_s=0.0, step_s=0.1))
    assert "costs training 500 ms (waiting 200, slower steps 300," in pace.news(
        now_s=0.0, step_s=0.1
    )


@pytest.mark.parametrize(
    ("usual_steps", "beside_s", "write_s", "slowed"),
    [(20, 0.1, 1.0, "0"), (20, 0.05, 1.0, "0"), (2, 0.5, 9.0, "0"), (20, 9.0, 1.0, "1000")],
    ids=["as fast", "faster", "too little known", "longer than the write"],
)  # fmt: skip
def test_steps_that_are_not_slower_cost_nothing(usual_steps, beside_s, write_s, slowed):
    """Control; and noise cannot make a write cost more than its own time."""
    pace = CheckpointInterval(now_s=0.0)
    steps(pace, usual_steps, 0.1, beside_save=False)
    steps(pace, 5, beside_s, beside_save=True)
    pace.measured(blocked_s=0.2, write_s=write_s)
    assert f"slower steps {slowed}," in pace.news(now_s=0.0, step_s=0.1)


def test_comparing_the_replicas_is_part_of_the_cost():
    """Every rank waits for it."""
    pace, dear = CheckpointInterval(now_s=0.0), CheckpointInterval(now_s=0.0)
    dear.compared(0.6)
    for each in (pace, dear):
        each.measured(blocked_s=0.2, write_s=1.0)
    ratio = dear.interval_s(now_s=0.0, step_s=0.1) / pace.interval_s(now_s=0.0, step_s=0.1)
    assert ratio == pytest.approx(2.0)
