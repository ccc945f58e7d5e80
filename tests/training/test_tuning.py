"""What a run changes about itself: after a fault at once, without one with caution. Values only."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddp_runner.config import from_flat
from ddp_runner.kernel.rules.faults import Fault, FaultKind
from ddp_runner.training.components.tuning import AdaptRules, Tuning, adapt, repair_tuning

TUNING = Tuning(micro_batch_size=8, evaluation_batch_size=8, find_unused_parameters=True)
RULES = AdaptRules(relax_after_steps=50, regrow_after_steps=10, micro_batch_size_max=8)


def adapted(tuning, *, rules=RULES, step=0, all_used=0):
    change = adapt(tuning, rules, committed_step=step, all_used_steps=all_used)
    return None if change is None else change.tuning


def oom(step, phase="forward"):
    return Fault(kind=FaultKind.OUT_OF_MEMORY, rank=0, step=step, cause="", phase=phase)


def out_of_memory(tuning, step):
    return repair_tuning(oom(step), tuning, samples=8).tuning


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


def test_a_micro_batch_grows_back_by_doubling_to_what_it_was():
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


def test_a_single_sample_is_tried_again_at_each_step():
    """A shortage may pass; the third one at the same step is the end. No bit changes."""
    single = replace(TUNING, micro_batch_size=1)
    again = out_of_memory(single, 40)
    assert again == replace(single, retried_at_step=40, retries_there=1)
    assert repair_tuning(oom(40), single, samples=8).inexact_reason == ""
    twice = out_of_memory(again, 40)
    assert twice.retries_there == 2
    assert repair_tuning(oom(40), twice, samples=8) is None
    assert out_of_memory(twice, 41) == replace(single, retried_at_step=41, retries_there=1)


def test_ranks_agree_on_how_often_a_step_was_tried():
    """Those that were short together have tried once; what was tried at an earlier step is over."""
    single = replace(TUNING, micro_batch_size=1)
    once = out_of_memory(single, 41)
    before = out_of_memory(out_of_memory(single, 40), 40)
    assert once.agreed_with([once, once]).retries_there == 1
    assert once.agreed_with([before, once, single]).retries_there == 1


def test_a_sample_that_never_fits_ends_the_run():
    """Control: eight, four, two, one, one twice more, and the end."""
    tuning, sizes = TUNING, []
    while (change := repair_tuning(oom(40), tuning, samples=8)) is not None:
        tuning = change.tuning
        sizes.append(tuning.micro_batch_size)
    assert sizes == [4, 2, 1, 1, 1]


def test_an_evaluation_of_single_samples_is_tried_again():
    """What halving cannot help, a second look may."""
    single = replace(TUNING, evaluation_batch_size=1)
    again = repair_tuning(oom(40, phase="evaluate"), single, samples=8).tuning
    assert again == replace(single, retried_at_step=40, retries_there=1)
    twice = repair_tuning(oom(40, phase="evaluate"), again, samples=8).tuning
    assert repair_tuning(oom(40, phase="evaluate"), twice, samples=8) is None


def test_a_rate_that_was_lowered_is_agreed_on():
    """A fault amid a roll-back may leave one rank with it and one without."""
    lowered = replace(TUNING, rate_factor=0.5)
    assert TUNING.agreed_with([TUNING, lowered]).rate_factor == 0.5
    assert lowered.agreed_with([TUNING, lowered]).rate_factor == 0.5


def ready_twice(step):
    return Fault(
        kind=FaultKind.REDUCTION_UNFINISHED, rank=0, step=step, phase="backward",
        cause="RuntimeError: Expected to mark a variable ready only once. This error is caused by",
    )  # fmt: skip


def test_reentrant_checkpoints_turn_the_search_off_for_good():
    """One rank that has met them is enough; looking again would only fail again."""
    change = repair_tuning(ready_twice(0), TUNING, samples=8)
    assert not change.tuning.find_unused_parameters
    assert change.inexact_reason == "", "sums are the same with and without the search"
    assert TUNING.agreed_with([TUNING, change.tuning]) == change.tuning
    assert repair_tuning(ready_twice(1), change.tuning, samples=8) is None
    unused = replace(ready_twice(1), cause="Expected to have finished reduction")
    assert repair_tuning(unused, change.tuning, samples=8) is None


def test_a_failed_compilation_is_turned_off_once_and_for_all():
    """From the first step on nothing was compiled, so no bit is another one than without the fault."""
    failed = Fault(
        kind=FaultKind.COMPILATION_FAILED, rank=1, step=0, phase="compile", cause="no compiler"
    )
    change = repair_tuning(failed, TUNING, samples=8)
    assert not change.tuning.may_compile
    assert change.inexact_reason == ""
    assert repair_tuning(replace(failed, step=7), TUNING, samples=8).inexact_reason
    assert repair_tuning(failed, change.tuning, samples=8) is None
    assert not TUNING.agreed_with([TUNING, change.tuning]).may_compile


def test_ranks_agree_on_the_most_cautious():
    """Whoever ran out of memory, all wait as long."""
    mine, other = out_of_memory(TUNING, 30), replace(TUNING, resized_at_step=12)
    assert mine.agreed_with([mine, other]) == other.agreed_with([mine, other]) == mine
