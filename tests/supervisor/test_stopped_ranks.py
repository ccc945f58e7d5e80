"""Ranks that are stopped while others repair, and those that were forked ahead of an answer."""

from __future__ import annotations

import pytest

from ddp_runner.kernel.rules.lifecycle import RankState
from tests.supervisor.judging import assert_done, lost, plans


@pytest.mark.parametrize("state", [RankState.STARTING, RankState.FORMING])
def test_a_replacement_that_is_stopped_before_it_trains_is_replaced_at_once(simulate, state):
    """The deadlines of starting and forming are for slow ones; the system says that it is stopped."""
    run = simulate(hang_min_s=1.0)
    run.to_step(15)
    run.kill(1)
    run.run_until(lambda: run.rank(1) is not None and run.world.ranks[1].state is state)
    run.freeze(1)
    since_s = run.clock.now_s
    run.run_until(lambda: len(plans(run)) == 2)
    assert run.clock.now_s - since_s < 2.0
    assert_done(run)
    assert [plan[:2] for plan in plans(run)] == [(1, "rank_killed"), (1, "rank_hung")]
    assert sum(lost(run)) == 0


@pytest.mark.parametrize("state", [RankState.READY, RankState.FORMING])
def test_a_stopped_rank_that_holds_the_only_state_is_woken(simulate, state):
    """Its end would cost steps; nobody needs to be replaced for it."""
    run = simulate(hang_min_s=1.0, ranks=2)
    run.to_step(15)
    run.kill(1)
    run.run_until(lambda: run.world.ranks[0].state is state)
    run.freeze(0)
    assert_done(run)
    assert plans(run) == [(1, "rank_killed", (1,))]
    assert ("WARNING", "rank 0 was stopped; resuming it") in run.outputs.said


@pytest.mark.parametrize("frozen", [(2,), (0, 2)], ids=["one", "all that are left"])
def test_a_stopped_rank_that_is_asked_to_leave_holds_no_repair(simulate, frozen):
    """However patient the run is otherwise; of all that have a state one is woken, and nothing is lost."""
    run = simulate(hang_min_s=20.0)
    run.to_step(15)
    for rank in frozen:
        run.freeze(rank)
    run.kill(1)
    run.run_until(lambda: run.events("repaired"), within_s=2.5)
    assert_done(run)
    reported = [fault["text"] for fault in run.events("fault") if fault["kind"] == "rank_hung"]
    assert len(reported) == 1
    assert reported[0].endswith(" hung: stopped by a signal")
    (replaced,) = [ranks for _, _, ranks in plans(run)]
    assert len(replaced) == 2
    assert sum(lost(run)) == 0
    assert any("resuming it" in text for _, text in run.outputs.said) == (len(frozen) == 2)


def test_a_rank_stopped_while_an_answer_is_awaited_is_replaced(simulate):
    """It has left its generation and is waited for by nobody; in a storm the others die meanwhile."""
    run = simulate(hang_min_s=1.0, first_step_timeout_s=1.0)
    run.to_step(15)
    run.sleep(0)  # in its own code; it answers late
    run.kill(1)
    run.run_until(lambda: run.world.ranks[2].state is RankState.READY)
    run.freeze(2)
    run.run_until(lambda: len(run.events("fault")) > 2, within_s=2.0)
    assert "rank 2 hung: stopped by a signal" in [fault["text"] for fault in run.events("fault")]
    run.rouse(0)
    run._listen(run.rank(0))
    assert_done(run)
    assert plans(run) == [(1, "rank_killed", (1, 2))]
    assert sum(lost(run)) == 0


def test_a_replacement_is_forked_while_the_last_answer_is_awaited(simulate):
    """It builds its model meanwhile, and is there when the last rank leaves; nobody is forked twice."""
    run = simulate()
    run.to_step(15)
    run.sleep(0)
    first = run.rank(2)
    run.kill(2)
    run.run_until(lambda: run.world.ranks[2].state is RankState.READY, within_s=2.0)
    assert first.dead
    assert not run.events("plan")
    ahead = run.rank(2)
    run.rouse(0)
    run._listen(run.rank(0))
    assert_done(run)
    assert plans(run) == [(2, "rank_killed", (2,))]
    assert run.rank(2) is ahead or ahead.dead  # it has finished
    assert len([one for one in run.processes.values() if one.rank == 2]) == 2
    assert [event["ranks"] for event in run.events("forked_ahead")] == [[2]]


def test_where_the_last_state_dies_an_early_fork_is_no_source(simulate):
    """It was not told to read the checkpoint: somebody is forked who is."""
    run = simulate()
    run.to_step(15)
    run.sleep(0, 1)
    run.kill(2)
    run.run_until(lambda: run.world.ranks[2].state is RankState.READY, within_s=2.0)
    run.kill(0, 1)
    assert_done(run)
    assert plans(run) == [(2, "rank_killed", (0, 1, 2))]
    assert len(run.resumed) == 2
    assert sum(lost(run)) == 5
    assert [fault.all_ranks_dead for fault in run.supervisor.recorder.accounting.faults] == [True]


def test_what_was_forked_ahead_and_dies_is_forked_again(simulate):
    """Once more, with the plan: no more of them than the plans, which are counted."""
    run = simulate()
    run.to_step(15)
    run.sleep(0)
    run.kill(2)
    for _ in range(2):
        run.run_until(lambda: run.world.ranks[2].state is not RankState.DEAD or run.events("plan"))
        run.kill(2)
        run.pass_time(0.3)
    run.rouse(0)
    run._listen(run.rank(0))
    assert_done(run)
    assert len(run.events("forked_ahead")) == 1
    assert sum(lost(run)) == 0
