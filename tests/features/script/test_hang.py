"""When no rank of a script shows a sign of life, and whom the others wait for."""

from __future__ import annotations

import pytest

from ddp_runner.features.script.hangs import (
    SignsOfLife,
    Silence,
    asked_every_s,
    hang_in_words,
    who_holds_up,
)


def signs(rank, **changed):
    found = {"steps": 5, "heartbeats": 0, "log_bytes": 10, "collectives": 7, "in_others": 0}
    return SignsOfLife(rank=rank, **{**found, **changed})


def test_silence_lasts_from_the_newest_sign_of_any_rank():
    """One rank that goes on is enough."""
    silence = Silence()
    assert silence.observe([signs(0), signs(1)], 10.0) == 0.0
    assert silence.observe([signs(0), signs(1)], 13.0) == 3.0
    assert silence.observe([signs(0), signs(1, steps=6)], 14.0) == 0.0
    assert silence.observe([signs(0), signs(1, steps=6)], 15.0) == 1.0


@pytest.mark.parametrize("name", ["steps", "heartbeats", "log_bytes", "collectives", "in_others"])
def test_each_sign_counts(name):
    """A step, a heartbeat, a line, a collective."""
    silence = Silence()
    silence.observe([signs(0)], 0.0)
    assert silence.observe([signs(0, **{name: 99})], 5.0) == 0.0


def test_silence_counts_before_the_first_step_too():
    """Where ranks meet, as much as elsewhere; a first step is a sign."""
    silence = Silence()
    silence.observe([signs(0, steps=0), signs(1, steps=0)], 0.0)
    assert silence.observe([signs(0, steps=0), signs(1, steps=0)], 500.0) == 500.0
    assert silence.observe([signs(0, steps=1), signs(1, steps=0)], 501.0) == 0.0


@pytest.mark.parametrize(
    ("ranks", "begun", "named"),
    [
        ([0, 1, 2], {0: 7, 1: 6, 2: 7}, 1),
        ([0, 1, 2], {0: 7, 2: 7}, 1),
        ([0, 1], {0: 7, 1: 7}, -1),
        ([0, 1], {}, -1),
        ([1], {1: 7}, 1),
        ([1], {}, 1),
    ],
    ids=["fewest", "no answer", "alike", "nobody answers", "alone", "alone, no answer"],
)
def test_the_one_that_holds_the_others_up_is_named(ranks, begun, named):
    """And nobody where all are alike."""
    assert who_holds_up(ranks, begun) == named


def test_the_line_says_who_where_and_how_they_differ():
    """All that is known, and no more."""
    places = {0: "in main, x.py:9", 1: "in f, x.py:3", 2: "in main, x.py:9"}
    line = hang_in_words(1, timeout_s=30.0, places=places, begun={0: 7, 1: 6, 2: 7})
    assert line == (
        "rank 1 hung in f, x.py:3; rank 0 waits in main, x.py:9"
        ": no step, collective, line or heartbeat of any rank for 30 s"
        "; collectives begun: rank 1 6, every other 7"
    )
    assert hang_in_words(1, timeout_s=2.5, places={}, begun={0: 7}).endswith("; it did not answer")


@pytest.mark.parametrize(
    ("places", "begins"),
    [
        ({}, "all ranks hung: no"),
        ({0: "", 1: ""}, "all ranks hung: no"),
        ({0: "in f, x.py:3", 1: "in f, x.py:3"}, "all ranks hung in f, x.py:3: no"),
        ({0: "in f, x.py:3", 1: "in g, x.py:9"}, "all ranks hung in f, x.py:3; rank 1 waits in g"),
    ],
)
def test_where_all_ranks_hang_their_lines_are_said(places, begins):
    """One for all that stand at the same."""
    line = hang_in_words(-1, timeout_s=2.0, places=places, begun={0: 7, 1: 7})
    assert line.startswith(begins)


def test_ranks_are_asked_a_few_times_within_the_limit():
    """And no more than twice a second."""
    assert asked_every_s(60.0) == 15.0
    assert asked_every_s(0.1) == 0.5
