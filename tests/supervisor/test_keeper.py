"""The keeper that all helper processes share, over a host that only notes what it is asked for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ddp_runner.kernel.processes.keeper import Keeper, Stuck
from ddp_runner.kernel.rules.helper_roles import Role

ROLE = Role(
    name="one", module="", ready_s=10.0, silent_s=30.0, pauses_s=(2.0,), tries=2, refused_s=5.0
)


class Host:
    """Has at most one process, and ends none by itself."""

    can_fork = True

    def __init__(self):
        self.started, self.killed = [], []
        self.process = None
        self.stopped_s = 0.0

    def helper(self, role):
        assert role.name == "one"
        return self.process

    def start_helper(self, role, spec, *inherited):
        self.started.append((role.name, spec, *inherited))
        self.process = SimpleNamespace(pid=None, since_s=0.0, is_ready=False)
        return self.process

    def kill(self, process):
        self.killed.append(process)

    def helper_stopped_s(self, process, now_s):
        del process, now_s
        return self.stopped_s


@pytest.fixture
def kept():
    """(keeper, host) with a process that was asked for at 0 s, and is there."""
    host = Host()
    keeper = Keeper(ROLE, host, stopped_max_s=3.0)
    assert keeper.is_due(0.0)
    keeper.start(0.0, "what it needs", 7).pid = 5
    return keeper, host


def look_until(keeper, until_s, *, from_s=0.0):
    """What was found at the ticks of this time."""
    ticks = [from_s + 0.5 * number for number in range(int((until_s - from_s) / 0.5) + 1)]
    return [found for now_s in ticks if (found := keeper.look(now_s)) is not None]


def test_one_process_at_a_time(kept):
    """With what it needs."""
    keeper, host = kept
    assert host.started == [("one", "what it needs", 7)]
    assert not keeper.is_due(100.0)
    host.process, host.can_fork = None, False
    assert not keeper.is_due(100.0)
    host.can_fork = True
    assert keeper.is_due(100.0)


@pytest.mark.parametrize(
    ("why", "at_s"), [(Stuck.LATE, 10.5), (Stuck.SILENT, 30.5), (Stuck.STOPPED, 3.5)]
)
def test_one_that_does_not_do_its_work_is_ended_once(kept, why, at_s):
    """Control: not before, and not without a pid."""
    keeper, host = kept
    host.process.is_ready = why is not Stuck.LATE
    host.process.pid = None
    assert look_until(keeper, 100.0) == []
    host.process.pid = 5
    assert look_until(keeper, at_s - 0.5) == []
    host.stopped_s = 3.5 if why is Stuck.STOPPED else 3.0
    assert look_until(keeper, at_s + 20.0, from_s=at_s) == [why]
    assert host.killed == [host.process]


def test_what_is_heard_of_it_keeps_it_alive(kept):
    """And forgets those that failed before it."""
    keeper, host = kept
    host.process.is_ready = True
    keeper.tries.failures = 1
    keeper.heard(25.0)
    assert look_until(keeper, 55.0) == []
    assert keeper.tries.failures == 0
    assert look_until(keeper, 56.0, from_s=55.5) == [Stuck.SILENT]


def test_a_pause_of_this_process_is_held_against_nobody(kept):
    """The machine slept, perhaps: the process has its whole time again."""
    keeper, _ = kept
    keeper.look(0.5)
    assert keeper.look(1000.0) is None
    assert look_until(keeper, 1010.0, from_s=1000.5) == []
    assert keeper.look(1010.5) is Stuck.LATE


def test_after_so_many_in_a_row_none_follows(kept):
    """After a pause each; one for which there was no room is in no row."""
    keeper, host = kept
    host.process = None
    keeper.ended(1.0)
    assert not keeper.is_due(2.9)
    assert keeper.is_due(3.0)
    keeper.refused(3.0)
    assert not keeper.is_due(7.9)
    assert keeper.is_due(8.0)
    keeper.ended(8.0)
    assert not keeper.is_due(1e9)
