"""The process that writes checkpoints, in the life of a run on simulated processes: there, replaced, never a fault."""

from __future__ import annotations

import os
import signal

import pytest

from ddp_runner.checkpoint import save_orders
from ddp_runner.core import helper_roles as roles
from tests.supervisor.judging import assert_done, lost
from tests.supervisor.simulated import SAVER, SPARE


def with_saver(simulate, **changes):
    run = simulate(**{"steps": 2000, **changes})
    run.run_until(
        lambda: run.helper(roles.SAVER) is not None and run.helper(roles.SAVER).pid is not None
    )
    return run


def ordered(run, step):
    """A rank leaves a copy of this step to be written."""
    (descriptor, _) = run.node.shared._copies.descriptors
    header = save_orders.as_record({"sealed": step}, save_orders.HEADER_BYTES)
    os.pwrite(descriptor, header, 0)
    save_orders.place(descriptor, save_orders.SaveOrder(sealed=step, step=step, answer_at=4096))
    return descriptor


def test_it_comes_with_the_first_world(simulate):
    """A start that comes to nothing has none; a run has one."""
    run = simulate(steps=300)
    run.run_until(lambda: run.supervisor.facts.ever_formed)
    assert run.rank(SAVER) is None
    run.run_until(lambda: run.rank(SAVER) is not None)
    saver = run.rank(SAVER)
    assert_done(run)
    assert run.rank(SAVER) in (saver, None)
    assert run.events("saver_ended") == []


@pytest.mark.parametrize("others", [(), (0,), (0, 1, 2), (-2,), (-2, 0), (SPARE,)])
def test_one_that_is_killed_is_replaced(simulate, others):
    """Whatever is killed with it. It is no fault; what it had in hand is in the journal."""
    run = with_saver(simulate)
    run.to_step(30)
    run.run_until(lambda: run.rank(SPARE) is not None)
    ordered(run, 20)
    first = run.rank(SAVER)
    run.kill(SAVER, *others)
    run.run_until(lambda: run.rank(SAVER) not in (None, first), within_s=40.0)
    (event,) = run.events("saver_ended")
    assert (event["signal"], event["step"]) == (signal.SIGKILL, 20)
    assert any("goes on with that of step 20" in text for _, text in run.outputs.said)
    assert_done(run)
    assert bool(lost(run)) == (0 in others)


def test_one_that_cannot_be_forked_is_asked_for_again(simulate):
    """Now and then, and not all the time."""
    run = simulate(steps=2000)
    run.savers_refused = 3
    run.run_until(lambda: run.supervisor.facts.ever_formed)
    began_s = run.clock.now_s
    run.run_until(lambda: run.rank(SAVER) is not None)
    assert 2.5 < run.clock.now_s - began_s < 6
    assert run.savers_refused == 0
    assert run.events("spare_ended") == [], "which it is not taken for"
    assert_done(run)


def test_that_none_can_be_forked_is_said_once(simulate):
    """Ranks write the files then."""
    run = simulate(steps=2000)
    run.savers_refused = 3
    run.run_until(lambda: run.rank(SAVER) is not None)
    said = [text for _, text in run.outputs.said if "no process could be forked" in text]
    assert len(said) == 1


def test_what_nobody_has_written_at_a_failure_is_said(simulate):
    """Whoever would write it is asked for, and waited for a moment."""
    run = with_saver(simulate)
    ordered(run, 20)
    run.kill(SAVER)  # soon after it was forked: the next one comes a second later
    run.run_until(lambda: run.helper(roles.SAVER) is None)
    run.supervisor.keeper.savers.finish(is_cut_short=lambda: False)
    assert run.helper(roles.SAVER) is not None
    assert any("nobody has written the copy of step 20" in text for _, text in run.outputs.said)


def test_one_that_ends_at_once_is_not_forked_all_the_time(simulate):
    """A second apart, then two, four and so on; and said once until one has lived."""
    run = simulate(steps=2000)
    began_s, ends = None, 0
    while ends < 5:
        run.run_until(lambda: run.rank(SAVER) is not None)
        began_s = began_s or run.clock.now_s
        run.kill(SAVER)
        ends += 1
        run.run_until(lambda: len(run.events("saver_ended")) == ends)  # noqa: B023 - called at once
    assert run.clock.now_s - began_s > 1 + 2 + 4
    said = [text for _, text in run.outputs.said if "writes checkpoints ended" in text]
    assert len(said) == 1
    assert_done(run)


@pytest.mark.parametrize("is_owed", [True, False])
def test_one_that_does_not_come_on_is_ended(simulate, is_owed):
    """As long as a save may take; without anything to write it may sleep for ever."""
    run = with_saver(simulate, checkpoint_timeout_s=20, steps=3000)
    first = run.rank(SAVER)
    descriptor = ordered(run, 20)
    if not is_owed:
        save_orders.answer(descriptor, save_orders.read(descriptor), {"problem": "other"})
    run.pass_time(19)
    assert run.rank(SAVER) is first
    run.pass_time(3)
    assert (run.rank(SAVER) is first) == (not is_owed)
    said = [text for _, text in run.outputs.said if "has done nothing for 20 s" in text]
    assert len(said) == is_owed


@pytest.mark.parametrize("how", ["computes", "waits for the disk"])
def test_one_that_takes_long_is_not_ended(simulate, how):
    """A file may be large and its disk slow; once it does neither, it is."""
    run = with_saver(simulate, checkpoint_timeout_s=20, steps=6000)
    first = run.rank(SAVER)
    ordered(run, 20)
    for second in range(70):
        if how == "computes":
            run.ticks[first.pid] = second // 10
        else:
            run.waiting_for_disk.add(first.pid)
        run.pass_time(1)
    assert run.rank(SAVER) is first
    run.waiting_for_disk.clear()
    run.pass_time(45)
    assert run.rank(SAVER) is not first


def test_one_that_is_stopped_is_replaced(simulate):
    """By whatever: it would write nothing."""
    run = with_saver(simulate, hang_min_s=2)
    first = run.rank(SAVER)
    first.stopped = True
    run.run_until(lambda: run.rank(SAVER) not in (None, first), within_s=20.0)
    assert_done(run)


def test_without_copies_in_memory_there_is_none(simulate):
    """Control: who writes is rank 0 then."""
    run = simulate(steps=300, memory_every=0)
    assert_done(run)
    assert not run.node.shared.saver.is_used
    assert run.helper(roles.SAVER) is None
    assert run.events("saver_ended") == []
