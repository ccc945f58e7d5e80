"""When a fire drill is due, of whom, when it begins and when it is ended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddp_runner.features.proof.rules import (
    DrillFacts,
    drilled_rank,
    failed_reason,
    may_begin,
    must_end,
    number_of_drill,
)

WAITS = DrillFacts(
    fault_free=True,
    can_fork=True,
    waits=True,
    is_running=False,
    is_wanted=True,
    is_stopped=False,
    is_late=False,
    limit_s=60.0,
)
RUNS = replace(WAITS, waits=False, is_running=True)


def due(begun_step, drill_at, *, total_steps=100):
    """Step -> number, of all steps that a run takes."""
    numbers = {
        step: number_of_drill(
            step, begun_step=begun_step, total_steps=total_steps, drill_at=drill_at
        )
        for step in range(begun_step, total_steps + 1)
    }
    return {step: number for step, number in numbers.items() if number is not None}


def test_steps_are_counted_from_where_the_launch_began():
    """In order, each once; the step after the last one is none."""
    assert due(0, (50, 2, 2, 1000)) == {2: 0, 50: 1}
    assert due(30, (2, 50)) == {32: 0, 80: 1}
    assert due(0, (2, 99)) == {2: 0, 99: 1}
    assert due(0, (100,)) == {}
    assert due(0, None) == due(0, ()) == {}


def test_each_rank_has_its_turn():
    """However many there are."""
    assert [drilled_rank(number, 3) for number in range(5)] == [0, 1, 2, 0, 1]
    assert [drilled_rank(number, 1) for number in range(3)] == [0, 0, 0]


def test_a_drill_begins_without_faults_and_alone():
    """Where a process can be forked at once."""
    assert may_begin(WAITS)
    for change in (
        {"fault_free": False},
        {"can_fork": False},
        {"waits": False},
        {"is_running": True},
    ):
        assert not may_begin(replace(WAITS, **change)), change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, ""),
        ({"fault_free": False}, "something is being repaired"),
        ({"is_wanted": False}, "something is being repaired"),
        ({"is_stopped": True}, "was stopped"),
        ({"is_late": True}, "longer than 60 s"),
        ({"is_running": False, "is_stopped": True, "fault_free": False}, ""),
    ],
)
def test_a_drill_is_ended_for_a_reason_only(change, why):
    """One that does not run cannot be."""
    found = must_end(replace(RUNS, **change))
    assert (why in found) if why else found == ""


def test_who_is_suspected_depends_on_what_differs():
    """Samples are not made by kernels, and on a CPU kernels repeat."""
    asked = {"rank": 1, "step": 50, "on_cpu": True}
    assert failed_reason(**asked, differs="layer2.weight") == (
        "a replacement of rank 1 would not compute the same at step 50: first in layer2.weight"
        " (state in a global, a closure, a file or C++?)"
    )
    assert "data that" in failed_reason(**asked, differs="the samples")
    gpu = failed_reason(**{**asked, "on_cpu": False}, differs="layer2.weight")
    assert "kernels that do not repeat, or state in a global" in gpu


def test_a_drill_that_is_owed_is_due_soon_after_forming():
    """Counted from where the generation formed. Control: others are due as without it, and none where there are none."""
    plan = {"begun_step": 100, "total_steps": 1000, "drill_at": (2, 50)}
    assert [n for n in range(100, 300) if number_of_drill(n, **plan) is not None] == [102, 150]
    owed = [n for n in range(100, 300) if number_of_drill(n, **plan, owed_from=130) is not None]
    assert owed == [102, 132, 150]
    assert number_of_drill(132, **{**plan, "drill_at": None}, owed_from=130) is None


@pytest.mark.parametrize(
    ("owed_from", "due"), [(996, [998]), (997, [999]), (998, [999]), (999, [])]
)
def test_an_owed_drill_is_due_with_the_last_step_at_the_latest(owed_from, due):
    """But not with the first step of the generation."""
    plan = {"begun_step": 100, "total_steps": 1000, "drill_at": (2, 50), "owed_from": owed_from}
    assert [n for n in range(990, 1001) if number_of_drill(n, **plan) is not None] == due
