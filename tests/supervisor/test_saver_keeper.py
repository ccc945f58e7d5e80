"""The process that writes checkpoints, in the life of a run on simulated processes: there, replaced, never a fault."""

from __future__ import annotations

import signal

import pytest

from ddp_runner.kernel.rules import helper_roles as roles
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.kernel.wire.messages import CopyWritten, WriteCopy
from tests.supervisor.judging import assert_done, lost
from tests.supervisor.simulated import SAVER, SPARE


def with_saver(simulate, **changes):
    run = simulate(**{"steps": 2000, **changes})
    run.run_until(
        lambda: run.helper(roles.SAVER) is not None and run.helper(roles.SAVER).pid is not None
    )
    return run


def ordered(run, step, *, rank=0, sealed=None):
    """A rank has a copy of this step to be written."""
    order = WriteCopy(
        rank=rank, sealed=sealed or step, step=step, directory="c", keep_last=1, keep_every=0
    )
    run.supervisor.on_message(order, rank)
    run.supervisor.advance()
    return order


def answered(run, order):
    """The saver has done so."""
    run.supervisor.on_message(CopyWritten(sealed=order.sealed, step=order.step), None)


def heard_by_ranks(run, monkeypatch):
    """What ranks hear from here on of orders and answers, with their number."""
    heard, send = [], run.node.send

    def sent(rank, message):
        if isinstance(message, (WriteCopy, CopyWritten)):
            heard.append((rank, type(message).__name__, message.sealed))
        send(rank, message)

    monkeypatch.setattr(run.node, "send", sent)
    return heard


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
    assert any("continues with that of step 20" in text for _, text in run.outputs.said)
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
    said = [
        text
        for _, text in run.outputs.said
        if "no process to write checkpoints could be forked" in text
    ]
    assert len(said) == 1


def test_what_nobody_has_written_at_a_failure_is_said(simulate):
    """It is waited for as long as a save may take."""
    run = with_saver(simulate, checkpoint_timeout_s=20)
    ordered(run, 20)
    run.supervisor.fail("Traceback\nValueError: a bug")
    run.run_to_end(within_s=2000)
    assert any(
        "the copy of step 20 in memory is not written" in text for _, text in run.outputs.said
    )


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
    order = ordered(run, 20)
    if not is_owed:
        answered(run, order)
    run.pass_time(19)
    assert run.rank(SAVER) is first
    run.pass_time(3)
    assert (run.rank(SAVER) is first) == (not is_owed)
    said = [text for _, text in run.outputs.said if "made no progress for 20 s" in text]
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
    assert not run.node.shared.has_saver
    assert run.helper(roles.SAVER) is None
    assert run.events("saver_ended") == []


def test_an_order_is_answered_once_and_again_for_who_asks_again(simulate, monkeypatch):
    """An order or an answer may be lost on the way to a rank that is stopped."""
    run = with_saver(simulate)
    heard = heard_by_ranks(run, monkeypatch)
    order = ordered(run, 20)
    ordered(run, 20)
    assert list(run.run.savers.owed) == [order]
    answered(run, order)
    assert heard == [(0, "CopyWritten", 20)]
    ordered(run, 20)
    assert heard == [(0, "CopyWritten", 20)] * 2
    assert not run.run.savers.owed


def test_a_rank_that_is_declared_dead_orders_nothing(simulate, monkeypatch):
    """Whoever is asked to save meanwhile is the only one who writes."""
    run = with_saver(simulate)
    heard = heard_by_ranks(run, monkeypatch)
    run.world.ranks[0].slot.set(Cell.FENCED, 1)
    ordered(run, 20)
    assert not run.run.savers.owed
    assert heard == []


def test_who_saves_next_hears_of_what_is_owed_before_it_begins(simulate, monkeypatch):
    """Rank 0 dies over it: the next one waits for the answer, and hears of it ahead of its Form."""
    run = with_saver(simulate)
    run.to_step(30)
    order = ordered(run, 20)
    heard = heard_by_ranks(run, monkeypatch)
    generation = run.supervisor.facts.generation
    run.kill(0)
    run.run_until(lambda: run.supervisor.facts.generation > generation)
    assert heard == [(0, "WriteCopy", 20)]
    answered(run, order)
    assert heard[1:] == [(0, "CopyWritten", 20)]
    assert_done(run)


def test_an_order_that_ends_every_saver_is_given_up(simulate, monkeypatch):
    """And not left to the rank, which the same may end."""
    run = with_saver(simulate, steps=6000)
    heard = heard_by_ranks(run, monkeypatch)
    ordered(run, 20)
    for number in range(3):
        assert heard == []
        run.run_until(lambda: run.rank(SAVER) is not None and run.helper(roles.SAVER).is_ready)
        run.kill(SAVER)
        run.run_until(lambda: len(run.events("saver_ended")) == number + 1)  # noqa: B023 - at once
    assert heard == [(0, "CopyWritten", 20)]
    assert "3 processes in a row" in run.run.savers._answered.text


def test_where_nobody_writes_the_rank_hears_so(simulate, monkeypatch):
    """One that cannot start is no reason to give a save up; nor is it waited for all the time."""
    run = simulate(steps=6000)
    run.savers_start = False
    run.run_until(
        lambda: run.helper(roles.SAVER) is not None and run.helper(roles.SAVER).pid is not None
    )
    heard = heard_by_ranks(run, monkeypatch)
    ordered(run, 20)
    run.pass_time(18)
    assert heard == []
    run.pass_time(4)
    assert heard == [(0, "CopyWritten", 20)]
    assert run.run.savers._answered.problem == "nobody"


def test_savers_that_end_before_they_are_ready_fail_no_save(simulate, monkeypatch):
    """They have not had the order in hand: the next one, which starts, writes it."""
    run = simulate(steps=6000)
    run.savers_start = False
    heard = heard_by_ranks(run, monkeypatch)
    run.run_until(lambda: run.rank(SAVER) is not None)
    order = ordered(run, 20)
    for number in range(4):
        run.run_until(lambda: run.rank(SAVER) is not None)
        run.kill(SAVER)
        run.run_until(lambda: len(run.events("saver_ended")) == number + 1)  # noqa: B023 - at once
        run.savers_start = number == 3
    run.run_until(lambda: run.helper(roles.SAVER) is not None and run.helper(roles.SAVER).is_ready)
    run.supervisor.advance()
    assert heard == []
    answered(run, order)
    assert heard == [(0, "CopyWritten", 20)]


def test_no_rank_saves_alone_while_the_saver_writes(simulate, monkeypatch):
    """Before an end: what is under way is on disk first."""
    run = with_saver(simulate, max_restarts=0, steps=6000)
    run.to_step(17)
    order = ordered(run, 10)
    run.kill(1)
    run.pass_time(5)
    assert run.supervisor.run_end.is_open
    assert not run.events("last_save_asked")
    answered(run, order)
    run.run_to_end()
    assert run.saved_alone
