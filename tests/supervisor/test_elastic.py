"""Slots that are given up and grow back, and killed ranks that do not end."""

from __future__ import annotations

import itertools

import pytest

from ddp_runner.kernel.recovery import repair
from ddp_runner.kernel.rules.exits import ExitCode
from ddp_runner.kernel.rules.lifecycle import Membership, RankState
from ddp_runner.kernel.wire.board import Cell
from tests.supervisor.judging import assert_done, lost, plans


def test_a_slot_is_given_up_and_comes_back(simulate):
    """Elastic, as a script: fewer, then all again, with no incident of its own for the return."""
    run = simulate(min_ranks=2, slot_failures_max=2, regrow_after=1.0)
    for step in (12, 16):
        run.to_step(step)
        run.kill(1)
    run.run_until(lambda: len(run.world.present) == 2)
    run.run_until(lambda: len(run.world.present) == 3)
    assert_done(run)
    assert len(plans(run)) == 2
    assert run.supervisor.facts.inexact_reasons


@pytest.mark.parametrize("harm", ["kill", "freeze", "leave"])
@pytest.mark.parametrize("rank", [1, 2], ids=["who returns", "who makes room"])
def test_a_fault_while_growing_again_is_repaired(simulate, rank, harm):
    """The ranks have left a healthy generation on purpose; whoever is lost just then is replaced."""
    run = simulate(min_ranks=2, slot_failures_max=1, regrow_after=1.0, form_timeout_s=5.0)
    run.to_step(12)
    run.kill(1)
    run.run_until(lambda: run.supervisor._repair.returning.is_regrouping)
    getattr(run, harm)(rank)
    assert_done(run)


@pytest.mark.parametrize("harm", ["kill", "freeze", "leave", "fail_to_start"])
def test_what_happens_to_a_returning_slot_is_no_incident(simulate, harm):
    """It is tried again later, and the world that trains is left alone."""
    run = simulate(
        min_ranks=2, slot_failures_max=1, regrow_after=1.0, startup_timeout_s=3.0, steps=300
    )
    run.to_step(12)
    run.kill(1)
    run.run_until(
        lambda: run.world.ranks[1].membership is Membership.REJOINING and run.rank(1) is not None
    )
    getattr(run, harm)(1)
    run.run_until(lambda: len(run.world.present) == 3)
    assert_done(run)
    assert len(plans(run)) == 1


@pytest.mark.parametrize("after_s", [0.1, 1.0, 4.9])
def test_a_slot_that_dies_after_each_return_stops_no_other(simulate, after_s):
    """Steps that last longer than its return: it waits for one to end, and ever longer for its turn."""
    run = simulate(min_ranks=2, slot_failures_max=1, regrow_after=2.0, steps=60, max_restarts=1000)
    run.to_step(5)
    run.step_s = 5.0
    run.kill(1)
    while run.ending is None:
        run.run_until(
            lambda: (run.rank(1) is not None and run.rank(1).trains) or run.best == run.steps,
            within_s=600.0,
        )
        if run.best == run.steps:
            break
        run.pass_time(after_s)
        run.kill(1)
    assert_done(run)
    assert 2 < len(plans(run)) < 10
    faults = [fault.began_s for fault in run.supervisor.recorder.accounting.faults]
    apart_s = [later - earlier for earlier, later in itertools.pairwise(faults)]
    assert apart_s[-1] > 50.0


def test_a_rank_comes_back_between_two_steps(simulate):
    """The step that the others are in when it gets ready is not cut short."""
    run = simulate(min_ranks=2, slot_failures_max=1, regrow_after=2.0, steps=20)
    run.to_step(5)
    run.step_s = 5.0
    run.kill(1)
    run.run_until(lambda: run.world.ranks[1].membership is Membership.REJOINING)
    run.run_until(lambda: run.world.ranks[1].state is RankState.READY)
    ready_step = run.best
    run.pass_time(1.0)
    assert len(run.world.present) == 2
    run.run_until(lambda: len(run.world.present) == 3)
    assert run.best == ready_step + 1
    last_commit_s = run.world.ranks[0].slot.get(Cell.LAST_COMMIT_NS) / 1e9
    assert run.clock.now_s - last_commit_s <= 0.11
    assert_done(run)
    assert len(plans(run)) == 1


def hang_in_the_kernel(run, rank):
    """A rank gets stuck in a file system or a driver that does not answer; returns its process."""
    process = run.rank(rank)
    process.unending = True
    run.sleep(rank)
    return process


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_that_never_ends_is_given_up_where_allowed(simulate, rank):
    """Nobody waits for it for ever; it is tried again once the kernel has let go of it."""
    run = simulate(min_ranks=2, regrow_after=2.0, hang_min_s=1.0, steps=1500)
    run.to_step(12)
    stuck = hang_in_the_kernel(run, rank)
    run.run_until(lambda: len(run.world.present) == 2, within_s=repair.REAP_TIMEOUT_S + 5.0)
    run.pass_time(5.0)
    assert run.best > 50
    assert not stuck.dead
    run._end(stuck, signal_number=9)
    run.run_until(lambda: len(run.world.present) == 3)
    assert_done(run)
    assert [plan["dropped"] for plan in run.events("plan")] == [[rank]]
    assert sum(lost(run)) == 0


def test_a_killed_rank_that_never_ends_may_end_the_run(simulate):
    """The pid is named, because somebody has to see to it."""
    run = simulate(hang_min_s=1.0)
    run.to_step(12)
    stuck = hang_in_the_kernel(run, 1)
    ending = run.run_to_end(within_s=repair.REAP_TIMEOUT_S + 5.0)
    assert ending.exit_code == ExitCode.GAVE_UP
    assert "rank 1 hung" in ending.reason
    assert f"process {stuck.pid} does not end" in ending.reason


@pytest.mark.parametrize("min_ranks", [0, 2])
def test_a_rank_that_raised_and_never_ends_is_not_awaited_forever(simulate, min_ranks):
    """It is killed by a plan that is made already, while nothing hangs."""
    run = simulate(min_ranks=min_ranks)
    run.to_step(12)
    stuck = run.rank(1)
    stuck.unending = True
    run.fail(1)
    if min_ranks:
        assert_done(run)
        assert len(run.world.present) == 2
    else:
        ending = run.run_to_end(within_s=repair.REAP_TIMEOUT_S + 5.0)
        assert ending.exit_code == ExitCode.GAVE_UP
        assert f"process {stuck.pid} does not end" in ending.reason


def test_a_killed_rank_that_takes_its_time_to_end_is_waited_for(simulate):
    """Control: freeing much memory takes seconds."""
    run = simulate(min_ranks=2, hang_min_s=1.0)
    run.to_step(12)
    stuck = hang_in_the_kernel(run, 1)
    run.pass_time(repair.REAP_TIMEOUT_S - 5.0)
    run._end(stuck, signal_number=9)
    assert_done(run)
    assert plans(run) == [(1, "rank_hung", (1,))]


def hold_a_returning_rank(run):
    """Rank 1 is given up and comes back, but for its last word; returns its process."""
    run.to_step(12)
    run.kill(1)
    run.run_until(lambda: len(run.world.present) == 2)
    held = []
    run._built = lambda process, _loads: held.append(process)
    run.run_until(lambda: held)
    del run._built
    run.steps = run.best + 2
    return held[0]


@pytest.mark.parametrize("seed", range(4))
def test_a_rank_that_returns_while_others_finish_is_not_taken_back(simulate, seed):
    """Who has finished would never form with it: the run ends without it."""
    run = simulate(min_ranks=2, slot_failures_max=1, regrow_after=1.0, steps=300, seed=seed)
    back = hold_a_returning_rank(run)
    run.run_until(lambda: sum(h.has_finished for h in run.world.present) == 1)
    run.send(back, run._ready(back))
    run.loop._turn()
    assert_done(run)
    assert len(run.world.present) == 2


@pytest.mark.parametrize("finishing", [(2,), (0,), (0, 2)], ids=["last", "first", "both"])
def test_a_rank_that_finishes_while_asked_to_make_room_is_replaced(simulate, finishing):
    """The others have left for the one that is back by then: they form with a successor."""
    run = simulate(min_ranks=2, slot_failures_max=1, regrow_after=1.0, steps=300)
    back = hold_a_returning_rank(run)
    run.to_step(run.steps - 1)
    run.send(back, run._ready(back))
    run.loop._turn()
    for rank in (0, 2):
        run._commit(run.rank(rank))
    assert run.best == run.steps
    run.loop._turn()
    assert run.supervisor._repair.returning.is_regrouping
    for rank in finishing:
        process = run.rank(rank)
        run._finish(process, process.generation, None)
    assert_done(run)
