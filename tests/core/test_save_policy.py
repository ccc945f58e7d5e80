"""Which boundaries are saved: by steps, by time, asked for, made up for, and left out after a failure."""

from __future__ import annotations

import pytest

from ddp_runner.core.save_policy import Due, SavePolicy
from ddp_runner.core.settings import CheckpointSettings
from ddp_runner.core.step_schedule import RunLength, saves_to_skip

LENGTH = RunLength(steps_per_epoch=10, total_steps=100)


def policy_of(**settings):
    made = {"save_every_steps": 0, "save_interval": 0, **settings}
    return SavePolicy(CheckpointSettings(**made), now_s=0.0, copy_age_s=None)


def makes_up(policy, step, *, saved_step=0, under_way_step=0):
    return policy.must_make_up(
        step, LENGTH, at_least=0, saved_step=saved_step, under_way_step=under_way_step
    )


def refuse(policy, now_s=0.0):
    policy.began(is_file=True, now_s=now_s)
    policy.failed()


@pytest.mark.parametrize(
    ("under_way_step", "expected"), [(5, True), (10, False), (11, False), (0, True)]
)
def test_a_save_due_after_a_repair_follows_the_one_under_way(under_way_step, expected):
    """Only an older one stands in its way; controls: the one due is itself under way, or a newer one."""
    policy = policy_of(save_every_steps=5)
    assert makes_up(policy, 12, under_way_step=under_way_step) == expected
    assert not makes_up(policy, 12, saved_step=10)


def repaired_each_step(every, asked):
    """Saves fail, and after each step but those that one is due after there is a repair."""
    policy, tried = policy_of(save_every_steps=every), []
    policy.take_over(age_s=100.0, now_s=0.0)
    for step in range(1, 31):
        now_s = step / 100
        is_due = every == 5 and step % every == 0
        if asked and step == 13:
            policy.ask()
        is_wanted = is_due or makes_up(policy, step) or wants(policy, now_s)
        if is_wanted and policy.comes_due(is_busy=False) is Due.NOW:
            tried.append(step)
            refuse(policy, now_s)
    return tried


def wants(policy, now_s):
    return policy.wants_file(now_s=now_s, step_s=0.01, is_busy=False)


@pytest.mark.parametrize(
    ("every", "asked", "expected"),
    [(5, False, [5, 15]), (5, True, [5, 13, 30]), ("auto", False, [1])],
    ids=["by steps", "asked for", "by time"],
)
def test_repairs_do_not_shorten_the_pause_after_a_failed_save(every, asked, expected):
    """Nothing is made up for within it; control: what a person asks for."""
    assert repaired_each_step(every, asked) == expected


def test_a_save_put_off_within_a_pause_is_left_out_once():
    """It does not use the pause up, step by step."""
    policy, tried = policy_of(), []
    for step in range(1, 11):
        if step == 4:
            policy.put_off()
        is_due = step <= 3 or (step != 4 and step % 2)
        if (is_due or wants(policy, step)) and policy.comes_due(is_busy=False) is Due.NOW:
            tried.append(step)
            refuse(policy)
    assert tried == [1, 3, 9]


@pytest.mark.parametrize(("failures", "skips"), [(0, 0), (1, 1), (2, 3), (3, 7), (4, 15), (50, 15)])
def test_the_pause_after_failed_saves_is_bounded(failures, skips):
    """Sixteen intervals at most."""
    assert saves_to_skip(failures) == skips


@pytest.mark.parametrize(("age_s", "is_due"), [(100.0, True), (1e9, True), (1.0, False)])
def test_ranks_0_that_die_one_after_the_other_put_no_save_off(age_s, is_due):
    """The interval counts from the newest file, whoever wrote it; control: a new launch begins it again."""
    policy = policy_of(save_every_steps="auto")
    assert not wants(policy, 5.0)
    policy.take_over(age_s=age_s, now_s=5.0)
    assert wants(policy, 5.0) == is_due


def test_one_that_is_under_way_has_the_next_wait():
    """Then the newest state is saved."""
    policy = policy_of()
    assert policy.comes_due(is_busy=True) is Due.LATER
    assert policy.comes_due(is_busy=True) is Due.STILL_LATER
    assert not policy.wants_file(now_s=0.0, step_s=1.0, is_busy=True)
    assert wants(policy, 0.0)


def test_what_a_person_asks_for_stays_until_it_is_answered():
    """A file, or a disk's refusal, of a save that was begun after it."""
    policy = policy_of()
    policy.began(is_file=True, now_s=0.0)
    policy.ask()
    policy.saved(blocked_s=0.0, write_s=0.0)
    assert policy.is_asked
    assert wants(policy, 0.0)
    policy.began(is_file=True, now_s=0.0)
    assert not policy.wants_file(now_s=0.0, step_s=1.0, is_busy=True)
    policy.failed()
    assert not policy.is_asked
