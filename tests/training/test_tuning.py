"""What a run changes about itself: after a fault at once, in peace with caution. Values only."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddp_runner.config import from_flat
from ddp_runner.core.faults import Fault, FaultKind
from ddp_runner.training.tuning import AdaptRules, Tuning, adapt, mend

TUNING = Tuning(micro_batch_size=8, evaluation_batch_size=8, find_unused_parameters=True)
RULES = AdaptRules(relax_after_steps=50, regrow_after_steps=10, micro_batch_size_max=8)


def adapted(tuning, *, rules=RULES, step=0, all_used=0):
    change = adapt(tuning, rules, committed_step=step, all_used_steps=all_used)
    return None if change is None else change.tuning


def out_of_memory(tuning, step):
    fault = Fault(kind=FaultKind.OUT_OF_MEMORY, rank=0, step=step, cause="", phase="forward")
    return mend(fault, tuning, samples=8).tuning


def test_the_search_for_unused_parameters_ends_after_enough_equal_steps():
    """Not a step before."""
    assert adapted(TUNING, all_used=49) is None
    assert adapted(TUNING, all_used=50) == replace(TUNING, find_unused_parameters=False)


@pytest.mark.parametrize(
    ("tuning", "relax_after_steps"),
    [
        (TUNING, 0),
        (replace(TUNING, find_unused_parameters=False), 50),
        (replace(TUNING, found_unused=True), 50),
    ],
    ids=["not asked for", "done already", "was a mistake once"],
)
def test_the_search_is_kept_or_off_for_good(tuning, relax_after_steps):
    """Control: it is tried at most once in a run."""
    rules = replace(RULES, relax_after_steps=relax_after_steps)
    assert adapted(tuning, rules=rules, all_used=10_000) is None


def test_auto_alone_asks_for_it():
    """True and False are the user's word."""
    for value, steps in (("auto", 200), (True, 0), (False, 0)):
        rules = AdaptRules.of(from_flat({"find_unused_parameters": value}))
        assert rules.relax_after_steps == steps


def test_a_micro_batch_grows_back_in_doublings_and_no_further_than_it_was():
    """From 2: 4 after ten steps, 8 after ten more."""
    tuning = replace(TUNING, micro_batch_size=2, reductions=1, resized_at_step=100)
    assert adapted(tuning, step=109) is None
    grown = adapted(tuning, step=110)
    assert grown.micro_batch_size == 4
    assert adapted(grown, step=119) is None
    whole = adapted(grown, step=120)
    assert whole.micro_batch_size == 8
    assert adapted(whole, step=10_000) is None


def test_each_time_that_memory_did_not_suffice_doubles_the_wait():
    """Ten steps, then twenty, then forty."""
    tuning, step, waits = TUNING, 0, []
    for _ in range(4):
        tuning = out_of_memory(tuning, step)
        began = step
        while adapted(tuning, step=step) is None:
            step += 1
        tuning = adapted(tuning, step=step)
        waits.append(step - began)
    assert waits == [10, 20, 40, 80]


def test_a_micro_batch_stays_small_where_growing_was_not_asked_for():
    """Control: 0 is never."""
    tuning = out_of_memory(TUNING, 5)
    rules = replace(RULES, regrow_after_steps=0)
    assert adapted(tuning, rules=rules, step=10**9) is None


def test_ranks_agree_on_the_most_cautious():
    """Whoever ran out of memory, all wait as long."""
    mine, other = out_of_memory(TUNING, 30), replace(TUNING, resized_at_step=12)
    assert mine.agreed_with([mine, other]) == other.agreed_with([mine, other]) == mine
