"""When a fire drill is due, of whom, when it begins and when it is ended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddp_runner.features.proof.rules import (
    DrillFacts,
    RepairLedger,
    drilled_rank,
    failed_reason,
    may_begin,
    must_end,
    number_of_drill,
    pause_s,
    step_to_drill,
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
    ("owed_from", "due"), [(996, [998]), (997, [999]), (998, [999]), (999, [999])]
)
def test_an_owed_drill_is_due_with_the_last_step_at_the_latest(owed_from, due):
    """If need be with the only step of the generation."""
    plan = {"begun_step": 100, "total_steps": 1000, "drill_at": (2, 50), "owed_from": owed_from}
    assert [n for n in range(990, 1001) if number_of_drill(n, **plan) is not None] == due


def test_random_drills_take_their_share_of_the_time():
    """On average; each pause is between half and one and a half of that."""
    pauses = [pause_s(2.0, share=0.005, drawn=drawn / 100) for drawn in range(101)]
    assert sum(pauses) / len(pauses) == pytest.approx(400.0)
    assert (min(pauses), max(pauses)) == (200.0, 600.0)


def test_a_step_at_random_lies_far_enough_ahead():
    """By time where steps are short, by steps where they are long; near the end there is none."""
    assert step_to_drill(100, step_s=0.01, total_steps=1000) == 153
    assert step_to_drill(100, step_s=20.0, total_steps=1000) == 104
    assert step_to_drill(100, step_s=0.0, total_steps=1000) == 103
    assert step_to_drill(996, step_s=20.0, total_steps=1000) is None


def test_a_repair_is_proved_by_a_rank_that_has_lived_through_it():
    """By none that was replaced in it, or since, and by no drill from before it. Control: one without a repair."""
    ledger = RepairLedger(ranks=(0, 1, 2))
    assert (ledger.proved, ledger.count, ledger.witness((0, 1, 2))) == (0, 0, 0)
    ledger.repaired({0}, step=10)
    ledger.passed(0, step=12)
    ledger.passed(1, step=9)
    assert (ledger.proved, ledger.count, ledger.witness((0, 1, 2))) == (0, 1, 1)
    ledger.repaired({1}, step=20)
    ledger.passed(1, step=22)
    assert ledger.proved == 0
    ledger.passed(
        0, step=22
    )  # which lives since the first repair, and has lived through the second
    assert ledger.proved == 1
    ledger.passed(2, step=22)
    assert ledger.proved == 2


def test_a_drill_of_steps_done_again_proves_both_repairs():
    """All ranks were lost soon after a repair, and continued from an earlier step."""
    ledger = RepairLedger(ranks=(0, 1))
    ledger.repaired([0], step=24)
    ledger.passed(1, step=22)
    assert ledger.proved == 0, "a drill from before the repair"
    ledger.repaired([0, 1], step=20)
    ledger.passed(1, step=22)
    assert ledger.proved == ledger.count == 2


def test_a_repair_without_a_witness_is_proved_by_any_drill_after_it():
    """All were replaced at once, or one by one before a drill came to its end."""
    ledger = RepairLedger(ranks=(0, 1))
    ledger.repaired({0, 1}, step=10)
    ledger.passed(1, step=9)
    assert ledger.proved == 0
    ledger.passed(1, step=10)
    assert ledger.proved == 1
    ledger.repaired({0}, step=20)
    ledger.repaired({1}, step=30)
    ledger.passed(1, step=30)  # of the first of these two nobody is left who has lived through it
    assert ledger.proved == 2
    ledger.passed(0, step=30)
    assert ledger.proved == 3
