"""Aborts in two phases, where collectives end in silence: all hear first, then all abort."""

from __future__ import annotations

import itertools

import pytest

from ddp_runner.kernel.recovery.communicator_cut import ANSWER_TIMEOUT_S, SILENT_LEAVE_TIMEOUT_S
from ddp_runner.kernel.rules.exits import ExitCode, RunStatus
from ddp_runner.kernel.rules.lifecycle import RankState


def assert_done(run):
    ending = run.run_to_end()
    assert (ending.status, ending.exit_code) == (RunStatus.COMPLETED, ExitCode.DONE), ending
    assert run.best == run.steps


def blamed(run):
    return [plan["culprit"] for plan in run.events("plan")]


def _kill(run, rank):
    run.kill(rank)


def _fail(run, rank):
    run.fail(rank)


def _freeze(run, rank):
    run.freeze(rank)


@pytest.mark.parametrize("harm", [_kill, _fail, _freeze])
def test_communicators_are_aborted_only_when_all_have_heard(simulate, harm):
    """Once a fault, whatever it is; the simulated ranks refuse what comes sooner."""
    run = simulate(silent=True, ranks=4)
    run.to_step(10)
    harm(run, 2)
    assert_done(run)
    assert blamed(run) == [2]
    assert [event["generation"] for event in run.events("cut")] == [1]
    assert all(fault.steps_lost == 0 for fault in run.supervisor.recorder.accounting.faults)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_when_nobody_is_cut_too_early(simulate, seed):
    """Kills, exceptions and stops at random, several at once: no step is lost while a rank lives."""
    run = simulate(
        silent=True, ranks=5, steps=150, seed=seed, max_restarts=100, no_progress_generations=20
    )
    for _ in range(8):
        run.pass_time(run.random.uniform(0.0, 2.0))
        harm = run.random.choice([_kill, _fail, _freeze])
        for rank in run.random.sample(range(5), run.random.choice([1, 1, 2])):
            if run.ending is None and run.rank(rank) is not None:
                harm(run, rank)
    assert_done(run)
    cut = [event["generation"] for event in run.events("cut")]
    assert len(cut) == len(set(cut)) > 0


def test_where_collectives_raise_nothing_is_cut(simulate):
    """Control: gloo's ranks leave when they are told to."""
    run = simulate()
    run.to_step(10)
    run.kill(2)
    assert_done(run)
    assert run.events("cut") == []


@pytest.mark.parametrize("silent", [False, True])
def test_a_step_that_only_the_lost_rank_has_is_finished_by_others(simulate, silent):
    """Its sums ended there first, and it is lost before any other rank has read the last of them."""
    run = simulate(silent=silent, ranks=4)
    run.to_step(10)
    run._lose_peer = lambda process: None  # who waits for what is on its way
    run._commit(run.rank(2))
    run.kill(2)
    assert_done(run)
    assert [fault.steps_lost for fault in run.supervisor.recorder.accounting.faults] == [0]
    assert [event["committed_step"] for event in run.events("rank_formed")[4:]] == [11] * 4


def test_who_does_not_hear_is_killed_before_anybody_is_cut(simulate):
    """Its threads get no turn, so that it might still commit what an abort of others leaves."""
    run = simulate(silent=True, ranks=4)
    run.to_step(10)
    run.rank(1).is_deaf = True
    run.kill(3)
    began_s = run.clock.now_s
    run.run_until(lambda: run.events("cut"))
    assert run.clock.now_s - began_s >= ANSWER_TIMEOUT_S
    assert run.world.ranks[1].state not in (RankState.ABORTING, RankState.KILLING)
    assert_done(run)
    replaced = set(itertools.chain(*(plan["replaced"] for plan in run.events("plan"))))
    assert replaced == {1, 3}


def test_nobody_is_cut_before_who_was_killed_is_reaped(simulate):
    """SIGKILL may take its time, and until then nobody knows what it still commits."""
    run = simulate(silent=True, ranks=4)
    run.to_step(10)
    stuck = run.rank(1)
    stuck.is_deaf = stuck.unending = True
    run.kill(3)
    run.run_until(lambda: run.world.ranks[1].state is RankState.KILLING)
    run.pass_time(5.0)
    assert not run.events("cut")
    run._end(stuck, signal_number=9)
    run.run_until(lambda: run.events("cut"))
    assert run.world.ranks[1].state is not RankState.KILLING
    assert_done(run)


def test_a_rank_whose_device_holds_on_is_replaced_in_time(simulate):
    """The time of the second act begins when it is sent: half a minute, not five seconds."""
    run = simulate(silent=True)
    run.to_step(10)
    stuck = run.rank(0)
    run.kill(1)
    run.run_until(lambda: run.world.ranks[0].state is RankState.LEAVING)
    stuck.is_deaf = True
    began_s = run.clock.now_s
    run.run_until(lambda: stuck.dead, within_s=SILENT_LEAVE_TIMEOUT_S + 60)
    assert run.clock.now_s - began_s >= SILENT_LEAVE_TIMEOUT_S
    assert_done(run)


def test_ranks_make_room_for_a_returning_one_in_two_acts(simulate):
    """No fault is in that; everybody hears, everybody leaves, nobody is blamed."""
    run = simulate(
        silent=True, ranks=3, steps=400, min_ranks=2, regrow_after=1.0, slot_failures_max=1
    )
    run.to_step(10)
    run.kill(2)
    assert_done(run)
    assert blamed(run) == [2]
    assert [event["generation"] for event in run.events("cut")] == [1, 2]
    assert len(run.world.present) == 3


def test_the_last_save_is_made_by_a_rank_that_was_freed(simulate):
    """A run that gives up saves: its ranks wait for a dead one, and must get out of that first."""
    run = simulate(silent=True, max_restarts=1, restart_window_s=1000.0)
    run.to_step(10)
    run.kill(1)
    run.to_step(25)
    run.kill(1)
    ending = run.run_to_end()
    assert ending.status is RunStatus.GAVE_UP
    assert [step for _, step in run.saved_alone] == [run.best]
