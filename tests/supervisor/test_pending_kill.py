"""When a rank that hangs has written its stacks, so that it may be killed."""

from __future__ import annotations

import os

import pytest

from ddp_runner.kernel.processes.rank_process import STACKS_QUIET_S, RankProcess

BEFORE = b"Current thread 0x00007f02 (most recent call first):\n  an older dump, of another fault\n"
OTHERS = b'Thread 0x00007f01 (most recent call first):\n  File "pool.py", line 7 in run\n\n'
MAIN = b'Current thread 0x00007f02 (most recent call first):\n  File "task.py", line 3 in loss\n'


@pytest.fixture
def process(tmp_path):
    """Asked where it hangs, when its log had something in it already."""
    made = RankProcess(0, log_dir=tmp_path)
    theirs, _ = made.open_lines(token=1, now_s=0.0)
    os.close(theirs)
    write(tmp_path, BEFORE)
    made.mark_asked()
    yield made
    made.close_lines()


def write(folder, text):
    with (folder / "rank_0.log").open("ab") as log:
        log.write(text)


def test_one_that_has_written_is_done_when_nothing_more_comes(process, tmp_path):
    """Never in the middle of its stacks, however the machine holds it up between two lines."""
    write(tmp_path, OTHERS)
    assert not process.has_answered(10.01)
    write(tmp_path, MAIN)
    assert not process.has_answered(10.01 + STACKS_QUIET_S)
    assert not process.has_answered(10.0 + 2 * STACKS_QUIET_S)
    assert process.has_answered(10.02 + 2 * STACKS_QUIET_S)


def test_one_that_is_held_up_before_its_main_thread_is_waited_for(process, tmp_path):
    """Where it hangs is what is written last; its other threads say nothing of that."""
    write(tmp_path, OTHERS)
    assert not process.has_answered(10.01)
    held_up_s = 10.01 + 3 * STACKS_QUIET_S
    assert not process.has_answered(held_up_s)
    write(tmp_path, MAIN)
    assert not process.has_answered(held_up_s + 0.01)
    assert process.has_answered(held_up_s + 0.02 + STACKS_QUIET_S)


def test_one_that_writes_nothing_has_not_answered(process):
    """What it had written before it was asked are not its stacks."""
    assert not process.has_answered(10.01)
    assert not process.has_answered(10.01 + 4 * STACKS_QUIET_S)


def test_one_that_was_asked_of_another_fault_is_asked_again(process, tmp_path):
    """What it answered then says nothing of where it hangs now."""
    write(tmp_path, OTHERS + MAIN)
    process.forget_asked()
    assert not process.has_answered(10.0)
    process.mark_asked()
    assert not process.has_answered(10.1)
    assert not process.has_answered(10.2 + STACKS_QUIET_S)
