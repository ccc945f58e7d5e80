"""Whether a script that has failed is started again."""

from __future__ import annotations

import pytest

from ddp_runner.core.settings import RecoverySettings
from ddp_runner.features.script.rules import (
    Attempt,
    StartAgain,
    does_not_resume,
    first_cause,
    plan_restart,
)
from ddp_runner.kernel.rules.exits import RunStatus, exit_code_of
from ddp_runner.kernel.rules.faults import Fault, FaultKind

SETTINGS = RecoverySettings(max_restarts=2, restart_window_s=100.0)


def attempt(
    *, kind=FaultKind.RANK_KILLED, steps=10, at_s=0.0, exit_code=137, cause="killed", rank=1
):
    fault = Fault(kind=kind, rank=rank, step=steps, cause=cause, at_ns=0)
    return Attempt(fault=fault, exit_code=exit_code, steps=steps, at_s=at_s)


def raised(text="ValueError: no", **how):
    return attempt(kind=FaultKind.RANK_RAISED, cause=text, exit_code=1, **how)


def plan(*attempts, restarts=True):
    return plan_restart(attempts, restarts=restarts, settings=SETTINGS)


def test_a_lost_rank_has_all_start_again():
    """Killed from outside, or of an error that was not seen before."""
    assert plan(attempt()) == StartAgain(delay_s=0.0)
    assert plan(attempt(), attempt(at_s=1.0)) == StartAgain(delay_s=0.0)
    assert plan(raised("a"), raised("b")) == StartAgain(delay_s=0.0)
    assert plan(raised(steps=10), raised(steps=11)) == StartAgain(delay_s=0.0)


@pytest.mark.parametrize(
    ("attempts", "restarts", "exit_code", "reason"),
    [
        ([attempt()], False, 137, "restarted only with --max-restarts"),
        ([attempt(steps=0)], True, 137, "before the first optimizer step"),
        ([raised(), raised()], True, 1, "the same error after as many steps again"),
        (
            [attempt(kind=FaultKind.RANK_EXITED, exit_code=2, steps=0)],
            True,
            2,
            "its arguments are wrong",
        ),
    ],
)
def test_what_would_fail_again_ends_the_run(attempts, restarts, exit_code, reason):
    """With the code of the rank that failed."""
    end = plan(*attempts, restarts=restarts)
    assert (end.status, end.exit_code) == (RunStatus.FAILED, exit_code)
    assert reason in end.reason


def test_steps_of_an_earlier_attempt_show_that_the_script_can_train():
    """One that is killed while it starts again is started once more."""
    assert plan(attempt(steps=5), attempt(steps=0, at_s=1.0)) == StartAgain(delay_s=0.0)


def test_the_budget_counts_within_its_window():
    """Two restarts within a hundred seconds; later ones are counted from zero."""
    soon = [attempt(at_s=float(at)) for at in (0, 1, 2)]
    end = plan(*soon)
    assert (end.status, end.exit_code) == (RunStatus.GAVE_UP, 3)
    assert end.reason == "3 restarts within 100 s (--max-restarts 2)"
    assert plan(*soon[:2], attempt(at_s=102.0)) == StartAgain(delay_s=0.0)


def test_where_nobody_counts_steps_the_budget_alone_ends_it():
    """As of a program that is no Python: whether it trains, and gets on, is not known."""
    failed = [attempt(kind=FaultKind.RANK_EXITED, steps=0, exit_code=1, at_s=i) for i in range(3)]
    how = {"restarts": True, "settings": SETTINGS, "counts_steps": False}
    assert plan_restart(failed[:2], **how) == StartAgain(delay_s=0.0)
    assert plan_restart(failed, **how).exit_code == 3


@pytest.mark.parametrize(
    ("exit_code", "signal_number", "seen"), [(7, None, 7), (None, 9, 137), (0, None, 1)]
)
def test_the_exit_code_is_that_of_the_failed_rank(exit_code, signal_number, seen):
    """As a shell has it; one that leaves with 0 before the others has failed all the same."""
    assert exit_code_of(exit_code=exit_code, signal_number=signal_number) == seen


@pytest.mark.parametrize(
    ("changes", "ends"),
    [
        ({}, True),
        ({"attempt": 0}, False),
        ({"saved_before": False}, False),
        ({"loads": 1}, False),
        ({"steps": 0}, False),
    ],
)
def test_who_saves_and_does_not_read_does_not_resume(changes, ends):
    """Known at the first step of a later attempt, and not before."""
    facts = {"attempt": 1, "saved_before": True, "steps": 1, "loads": 0, **changes}
    assert does_not_resume(**facts) == ends


def test_a_rank_that_lost_its_peer_lost_the_one_that_ended_first():
    """Controls: with another cause, or where nobody has ended, it is as :func:`attribute` says."""
    lost = Fault(kind=FaultKind.COLLECTIVE_FAILED, rank=0, step=3, cause="closed by peer", at_ns=5)
    own = Fault(kind=FaultKind.RANK_RAISED, rank=0, step=3, cause="ValueError", at_ns=6)
    ended = [
        Fault(kind=FaultKind.RANK_EXITED, rank=rank, step=3, cause="0", at_ns=at_ns)
        for rank, at_ns in ((2, 4), (1, 3))
    ]
    assert first_cause([lost], ended).rank == 1
    assert first_cause([lost], []) == lost
    assert first_cause([own], ended) == own
