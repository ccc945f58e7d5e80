"""The kinds of helper process as values, and how often in a row one may fail."""

from __future__ import annotations

import importlib
import inspect
import math

import pytest

from ddp_runner.core.fork_specs import ForkKind
from ddp_runner.core.helper_roles import (
    DOUBLED_S,
    FORKED,
    SPEC_OF,
    STANDBY,
    Role,
    Tries,
)

FIVE = Role(name="five", module="", pauses_s=(1.0, 2.0, 3.0, 4.0), lived_s=60.0, tries=5)


@pytest.mark.parametrize("role", FORKED, ids=lambda role: role.name)
def test_the_module_of_a_role_has_the_process(role):
    """Its ``main`` takes what the zygote was asked for, and descriptors; who stands by is the zygote itself."""
    main = importlib.import_module(role.module).main
    expected = ["arguments"] if role is STANDBY else ["request", "descriptors"]
    assert list(inspect.signature(main).parameters) == expected


def test_each_kind_of_fork_has_a_spec_and_at_most_one_role():
    """A kind without one cannot be decoded."""
    assert set(SPEC_OF) == set(ForkKind)
    kinds, names = {role.fork for role in FORKED}, {role.name for role in FORKED}
    assert len(kinds) == len(names) == len(FORKED)


def test_helpers_that_keep_dying_come_later_and_then_not_at_all():
    """Bounded, whatever ends them; the first one is due at once."""
    tries, now_s = Tries(), 100.0
    for lost in range(1, int(FIVE.tries)):
        assert tries.allow(FIVE, now_s)
        tries.ended(FIVE, now_s, lived_s=FIVE.lived_s - 1)
        assert not tries.allow(FIVE, now_s + lost - 0.1)
        now_s += lost
    assert tries.allow(FIVE, now_s)
    tries.ended(FIVE, now_s, lived_s=0.0)
    assert not tries.allow(FIVE, math.inf)


def test_the_wait_before_a_start_doubles_up_to_a_limit():
    """The first is short."""
    role = Role(name="doubled", module="", pauses_s=DOUBLED_S, lived_s=60.0, tries=10)
    tries, waits = Tries(), []
    for _ in range(int(role.tries)):
        assert tries.allow(role, tries.not_before_s)
        tries.ended(role, 100.0, lived_s=1.0)
        waits.append(tries.not_before_s - 100.0)
    assert waits[:5] == [0.5, 1.0, 2.0, 4.0, 8.0]
    assert waits[6:] == [30.0] * len(waits[6:])
    assert not tries.allow(role, 1e9)


def test_one_that_has_lived_for_long_was_none_of_a_row():
    """A machine that takes one process an hour is not to end what is useful."""
    tries = Tries(failures=int(FIVE.tries) - 1)
    tries.ended(FIVE, 100.0, lived_s=FIVE.lived_s)
    assert (tries.failures, tries.not_before_s) == (1, 101.0)


def test_one_that_was_of_use_ends_a_row():
    """Another one may follow at once."""
    tries = Tries()
    tries.ended(FIVE, 100.0, lived_s=0.0)
    tries.was_of_use()
    assert tries.allow(FIVE, 100.0)


def test_where_there_was_no_room_for_one_nothing_has_failed():
    """It is asked for again after its own pause, and as often as that takes."""
    tries = Tries()
    tries.refused(STANDBY, 100.0)
    assert tries.failures == 0
    assert not tries.allow(STANDBY, 159.9)
    assert tries.allow(STANDBY, 160.0)
