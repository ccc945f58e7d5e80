"""When a rank that hangs has had its time to write its stacks."""

from __future__ import annotations

import pytest

from ddp_runner.supervisor.recovery.incident import STACKS_QUIET_S, STACKS_TIME_S, PendingKill

OTHERS = 'Thread 0x00007f01 (most recent call first):\n  File "pool.py", line 7 in run\n\n'
MAIN = 'Current thread 0x00007f02 (most recent call first):\n  File "task.py", line 3 in loss\n'


@pytest.fixture
def pending():
    """Asked at second 10, when its log had 500 bytes."""
    return PendingKill(10.0, 500)


def since_500(said):
    def said_since(written_bytes):
        assert written_bytes == 500, "what was there before is not its answer"
        return said

    return said_since


def test_one_that_has_written_is_due_when_nothing_more_comes(pending):
    """Never in the middle of its stacks, however the machine holds it up between two lines."""
    said = since_500(OTHERS + MAIN)
    assert not pending.is_due(900, 10.01, said_since=said)
    assert not pending.is_due(1200, 10.01 + STACKS_QUIET_S, said_since=said)
    assert not pending.is_due(1200, 10.0 + 2 * STACKS_QUIET_S, said_since=said)
    assert pending.is_due(1200, 10.02 + 2 * STACKS_QUIET_S, said_since=said)


def test_one_that_is_held_up_before_its_main_thread_is_waited_for(pending):
    """Where it hangs is what is written last; its other threads say nothing of that."""
    assert not pending.is_due(900, 10.01, said_since=since_500(OTHERS))
    held_up_s = 10.01 + 3 * STACKS_QUIET_S
    assert not pending.is_due(900, held_up_s, said_since=since_500(OTHERS))
    assert not pending.is_due(1200, held_up_s + 0.01, said_since=since_500(OTHERS + MAIN))
    told_s = held_up_s + 0.02 + STACKS_QUIET_S
    assert pending.is_due(1200, told_s, said_since=since_500(OTHERS + MAIN))


def test_one_that_writes_nothing_is_due_after_its_time(pending):
    """What it had written before it was asked are not its stacks."""
    nothing = since_500("")
    assert not pending.is_due(500, 10.01, said_since=nothing)
    assert not pending.is_due(500, 10.0 + STACKS_TIME_S - 0.01, said_since=nothing)
    assert pending.is_due(500, 10.0 + STACKS_TIME_S, said_since=nothing)


def test_one_that_never_stops_writing_is_due_after_its_time(pending):
    """It may fill its disk; nobody waits for that."""
    lines = since_500("again\n" * 1000)
    assert not pending.is_due(10_000, 10.5, said_since=lines)
    assert pending.is_due(20_000, 10.0 + STACKS_TIME_S, said_since=lines)
