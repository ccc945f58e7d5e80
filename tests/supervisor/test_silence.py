"""Who hangs and who only waits or pauses, as scripts: ranks that get on no further."""

from __future__ import annotations

import pytest

from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.kernel.wire.board import Cell
from tests.supervisor.judging import assert_done, lost, plans
from tests.supervisor.simulated import STEP_S


@pytest.mark.parametrize(
    ("phase", "cell", "said"),
    [
        (Phase.DATA, 18, "rank 1 hung: silent, loading sample 17"),
        (Phase.EVALUATE, -18, "rank 1 hung: silent, loading validation sample 17"),
        (Phase.DATA, 0, "rank 1 hung: silent"),
        (Phase.FORWARD, 18, "rank 1 hung: silent"),
    ],
)
def test_a_rank_that_hangs_over_a_sample_is_reported_with_it(simulate, phase, cell, said):
    """As far as it is known; control: elsewhere it would be an old one."""
    run = simulate()
    run.to_step(5)
    handle = run.world.ranks[1]
    handle.slot.stamp(phase, 1)
    handle.slot.set(Cell.SAMPLE, cell)
    fault = run.supervisor._repair._hangs.hung(handle, "silent")
    assert (fault.cause, fault.phase) == (said, phase.label)


@pytest.mark.parametrize(("stamps", "hangs"), [(60, False), (0, True)])
def test_a_start_may_take_as_long_as_samples_are_read(simulate, stamps, hangs):
    """It has its full time again with each sample; control: without one it hangs."""
    run = simulate(startup_timeout_s=5.0, steps=20)
    run.preload_s, run.preload_stamps = 60.0, stamps
    run.run_until(lambda: plans(run) or run.world.ranks[0].slot.get(Cell.COMMITTED_STEP) > 5)
    assert bool(plans(run)) is hangs
    if hangs:
        run.preload_s = 0.0
    assert_done(run)


def test_a_rank_hangs_while_another_one_dies(simulate):
    """The dead one does not hide the stopped one: both are replaced."""
    run = simulate()
    run.to_step(15)
    run.freeze(2)
    run.kill(1)
    assert_done(run)
    assert sorted(rank for _, _, ranks in plans(run) for rank in ranks) == [1, 2]
    assert sum(lost(run)) == 0


@pytest.mark.parametrize("pause_s", [1.1, 3.9])
def test_a_pause_of_all_ranks_is_no_hang(simulate, pause_s):
    """Slow storage, swapping, a busy machine: nobody is killed for what happens to everybody."""
    run = simulate(hang_min_s=1.0)
    run.to_step(15)
    run.sleep(0, 1, 2)
    run.pass_time(pause_s)
    run.wake()
    assert_done(run)
    assert plans(run) == []


def test_a_rank_that_never_finishes_is_found(simulate):
    """Control: however many others have."""
    run = simulate(hang_min_s=1.0, steps=20)
    run.run_until(lambda: any(handle.has_finished for handle in run.world.present))
    (late, *_) = [handle.rank for handle in run.world.present if not handle.has_finished]
    run.sleep(late)
    assert_done(run)
    assert [plan[:2] for plan in plans(run)] == [(late, "rank_hung")]


@pytest.mark.parametrize("apart_s", [0.01, 0.15, 0.8])
def test_a_pause_that_ends_rank_by_rank_is_no_hang(simulate, apart_s):
    """The last one is late alone for as long as it takes to wake up."""
    run = simulate(hang_min_s=1.0)
    run.to_step(15)
    run.sleep(0, 1, 2)
    run.pass_time(3.0)
    for rank in (0, 2):
        run.rouse(rank)
        run.pass_time(apart_s)
    run.wake()
    assert_done(run)
    assert plans(run) == []


def test_a_rank_slow_now_and_then_is_killed_once_at_most(simulate):
    """Nothing foretells the first slow step among fast ones; redone, it shows that it was no hang."""
    run = simulate(hang_min_s=1.0, first_step_timeout_s=60.0, steps=120)
    for step in (30, 60, 90):
        run.to_step(step)
        run.sleep(1)
        slow, until_s = run.rank(1), run.clock.now_s + 3.0
        while not slow.dead and run.clock.now_s < until_s:
            run._turn()
        if slow.dead:  # its successor does the same step
            run.run_until(lambda: run.rank(1) is not None and run.rank(1).trains, within_s=5.0)
            run.sleep(1)
            run.pass_time(3.0)
        run.rouse(1)
    assert_done(run)
    assert [plan[:2] for plan in plans(run)] == [(1, "rank_hung")]


def test_looks_that_are_a_tick_apart_are_no_pause(simulate):
    """However short hang_min_s is: else no rank would ever look late."""
    run = simulate(hang_min_s=0.05)  # the deadline is ten steps, half a second
    run.to_step(15)
    run.sleep(1)
    run.run_until(lambda: run.events("fault"), within_s=0.8)
    assert_done(run)
    assert plans(run) == [(1, "rank_hung", (1,))]


def test_ranks_that_are_late_together_are_judged_by_who_comes_back(simulate):
    """The pause ends for one of the two: the other one gets its time once more, and is hung then."""
    run = simulate(hang_min_s=1.0)
    run.to_step(15)
    run.sleep(1, 2)
    run.pass_time(1.5)
    assert not run.events("fault")
    run.rouse(2)
    run.pass_time(0.9)
    assert not run.events("fault")
    run.run_until(lambda: run.events("fault"), within_s=0.4)
    assert_done(run)
    assert plans(run) == [(1, "rank_hung", (1,))]


@pytest.mark.parametrize(
    ("late", "found_s"), [((1,), 1.0), ((1, 2), 4.0), ((0, 1, 2), 4.0)], ids=["one", "two", "all"]
)
def test_ranks_that_are_stuck_in_their_own_code_are_found(simulate, late, found_s):
    """One alone as soon as it is late; several after four times that. Steps are lost by all only."""
    run = simulate(hang_min_s=1.0)
    run.to_step(15)
    run.sleep(*late)
    since_s = run.clock.now_s
    run.run_until(lambda: run.events("fault"))
    assert found_s <= run.clock.now_s - since_s < found_s + 0.3
    assert_done(run)
    assert sorted(rank for _, _, ranks in plans(run) for rank in ranks) == list(late)
    assert (sum(lost(run)) > 0) == (len(late) == 3)


@pytest.mark.parametrize("late", [(1, 2), (0, 1, 2)], ids=["two", "all"])
def test_ranks_that_are_stopped_are_found_at_once(simulate, late):
    """The system says so. Of all ranks one is woken and spared, so that nothing is lost."""
    run = simulate(hang_min_s=1.0)
    run.to_step(15)
    for rank in late:
        run.freeze(rank)
    run.run_until(lambda: run.events("fault"), within_s=1.3)
    assert_done(run)
    assert sum(lost(run)) == 0
    replaced = [rank for _, _, ranks in plans(run) for rank in ranks]
    assert len(replaced) == 2
    assert set(replaced) <= set(late)


def test_a_rank_stopped_for_a_moment_in_a_long_phase_stays(simulate):
    """However long that has lasted. Control: one that stays stopped is found as soon as any other."""
    run = simulate(hang_min_s=2.0)
    run.to_step(15)
    run.step_s = 1000.0
    run.pass_time(0.1)
    for process in map(run.rank, range(3)):
        run.stamp(process, Phase.EVALUATE)
    run.pass_time(30.0)
    run.rank(1).stopped = True
    run.pass_time(1.2)
    run.rank(1).stopped = False
    run.pass_time(10.0)
    assert not run.events("fault")
    run.rank(1).stopped = True
    run.run_until(lambda: run.events("fault"), within_s=2.3)
    run.step_s = STEP_S
    assert_done(run)
    assert plans(run) == [(1, "rank_hung", (1,))]


@pytest.mark.parametrize("silent", [False, True])
def test_a_rank_stopped_inside_the_reduction_is_the_one_that_hangs(simulate, silent):
    """The board shows all ranks waiting for each other, as on GPUs it mostly does."""
    run = simulate(ranks=3, silent=silent)
    run.to_step(15)
    run.freeze(1)
    for rank in range(3):
        run.stamp(run.rank(rank), Phase.REDUCE)
    assert_done(run)
    assert plans(run) == [(1, "rank_hung", (1,))]
    assert sum(lost(run)) == 0


def test_ranks_that_are_stuck_in_the_reduction_together_are_nobody_s_fault(simulate):
    """Control: the system holds none of them."""
    run = simulate(ranks=3)
    run.to_step(15)
    run.sleep(1)
    for rank in range(3):
        run.stamp(run.rank(rank), Phase.REDUCE)
    run.run_until(lambda: run.events("fault"))
    assert run.events("fault")[0]["kind"] == "collective_stuck"
