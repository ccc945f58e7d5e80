"""What becomes of a script whose ranks, store or zygote are lost, on simulated processes."""

from __future__ import annotations

import signal

import pytest

from ddp_runner.kernel.rules.exits import ExitCode, RunStatus, StopReason
from ddp_runner.kernel.rules.stopping import StopSignal
from tests.features.script.simulated_script import ScriptSimulation
from tests.supervisor.simulated import STEP_S


@pytest.fixture
def simulate(tmp_path):
    """``simulate(**settings)``: a run of a script."""
    made = []

    def simulation(**changes):
        made.append(ScriptSimulation(tmp_path, **changes))
        return made[-1]

    yield simulation
    for one in made:
        one.close()


def assert_done(run, *, attempts):
    ending = run.run_to_end()
    assert (ending.status, ending.exit_code) == (RunStatus.COMPLETED, ExitCode.DONE), ending
    assert len(run.attempts) == attempts, run.attempts
    ranks = range(len(run.world.ranks))
    assert sorted(set(run.started)) == [(one, rank) for one in range(attempts) for rank in ranks]
    forming = [record["generation"] for record in run.events("forming")]
    assert forming == list(range(1, attempts + 1))
    assert len(run.secrets) == len(forming)


def test_a_killed_rank_ends_all_and_all_begin_again(simulate):
    """With another store, since torch keeps what is in it for a run; the record says whose end it was."""
    run = simulate()
    run.to_step(9)
    run.kill(1)
    assert_done(run, attempts=2)
    first, second = run.attempts
    assert (first.rank, first.exit_code, second.exit_code) == (1, 137, None)
    assert "killed" in first.cause
    assert run.stores == 2


def test_a_rank_that_runs_on_when_others_have_ended_is_named(simulate):
    """And waited for: it may be at work on something of its own. Control: one that follows the others within 10 s."""
    for more_s, is_named in ((11, True), (8, False)):
        run = simulate()
        run.more_steps = {1: int(more_s / STEP_S)}
        assert_done(run, attempts=1)
        late = ("WARNING", "not ended, 10 s after others have: rank 1")
        assert run.outputs.said.count(late) == int(is_named), run.outputs.said


def test_more_restarts_than_were_asked_for_end_the_run(simulate):
    """With the exit code of a run that gave up; each attempt is in the record."""
    run = simulate(max_restarts=2)
    for generation in (1, 2, 3):
        run.run_until(lambda one=generation: len(run.events("rank_formed")) == 3 * one)
        run.pass_time(0.5)
        run.kill(0)
    ending = run.run_to_end()
    assert (ending.status, ending.exit_code) == (RunStatus.GAVE_UP, ExitCode.GAVE_UP)
    assert len(run.attempts) == 3


def test_a_lost_store_has_all_begin_again(simulate):
    """No process group of theirs may outlive it."""
    run = simulate()
    run.to_step(9)
    run.kill(-1)
    assert_done(run, attempts=2)
    assert "the store process died" in run.attempts[0].cause


def test_a_store_lost_together_with_a_rank_is_replaced_once(simulate):
    """The end of the old one is no fault of the attempt that follows."""
    run = simulate()
    run.to_step(9)
    run.kill(1, -1)
    assert_done(run, attempts=2)
    assert run.stores == 2


@pytest.mark.parametrize("with_rank", [False, True])
def test_a_script_outlives_its_zygote(simulate, with_rank):
    """The ranks go on without; who is to begin again waits for the next one."""
    run = simulate()
    run.to_step(9)
    run.kill(-2, *([0] if with_rank else []))
    assert_done(run, attempts=1 + with_rank)
    assert run.zygotes == 2


def test_ranks_that_a_dying_zygote_still_owed_are_asked_for_again(simulate):
    """In the same attempt: none of them has begun."""
    run = simulate()
    run.run_until(lambda: run.node.fork_owed_since_s is not None)
    run.kill(-2)
    assert_done(run, attempts=1)
    assert run.zygotes == 2


@pytest.mark.parametrize("is_deaf", [False, True])
def test_a_stop_ends_all_within_the_grace_period(simulate, is_deaf):
    """By SIGTERM, or by SIGKILL where that is not heard; the code is that of the signal."""
    run = simulate(steps=10_000, is_deaf=is_deaf, script={"grace_period_s": 5.0})
    run.to_step(9)
    asked_s = run.clock.now_s
    run.supervisor.ask_stop(StopReason.PREEMPTED, by=StopSignal.TERMINATE)
    ending = run.run_to_end()
    assert (ending.status, ending.exit_code) == (RunStatus.PREEMPTED, 128 + signal.SIGTERM)
    assert (run.clock.now_s - asked_s >= 5.0) == is_deaf
    assert run.clock.now_s - asked_s < 6.0


def test_a_stop_asked_twice_waits_for_nobody(simulate):
    """A scheduler that asks again after some seconds has no more time."""
    run = simulate(steps=10_000, is_deaf=True, script={"grace_period_s": 60.0})
    run.to_step(9)
    for _ in range(2):
        run.supervisor.ask_stop(StopReason.PREEMPTED, by=StopSignal.TERMINATE)
        run.pass_time(4.0)
    run.run_to_end(within_s=5.0)


def test_a_stop_before_the_ranks_are_there_ends_at_once(simulate):
    """There is nobody who could save."""
    run = simulate()
    run.supervisor.ask_stop(StopReason.INTERRUPTED)
    assert run.ending.reason == "interrupted before training began"
    assert run.ending.exit_code == ExitCode.INTERRUPTED


def test_a_stop_between_two_attempts_ends_the_run(simulate):
    """The attempt that was due is in the record, without any time of its own."""
    run = simulate()
    run.to_step(9)
    run.kill(1)
    run.run_until(lambda: run.supervisor._attempt.number == 1)
    run.supervisor.ask_stop(StopReason.PREEMPTED)
    assert run.run_to_end().status is RunStatus.PREEMPTED
    assert run.attempts[1].seconds < 1.0


def test_a_bug_of_the_agent_ends_a_script_at_once(simulate):
    """Nobody waits for a last save, which no script makes by order."""
    run = simulate()
    run.to_step(9)
    run.supervisor.fail("Traceback\nKeyError: 7")
    assert (run.ending.status, run.ending.exit_code) == (RunStatus.FAILED, ExitCode.FAILED)
    assert run.ending.reason == "a bug in the supervisor: KeyError: 7"


def test_a_stopped_rank_counts_as_lost(simulate):
    """Nobody may wake it, and all others wait for it."""
    run = simulate()
    run.to_step(9)
    run.freeze(2)
    assert_done(run, attempts=2)
    assert "rank 2 hung: stopped by a signal" in run.attempts[0].cause


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_killed_a_script_comes_to_its_end(simulate, seed):
    """Ranks, store and zygote, at any moment of a start too, until nobody harms it any more."""
    run = simulate(seed=seed, max_restarts=100)
    for _ in range(12):
        run.pass_time(run.random.uniform(0.0, 1.5))
        if run.ending is not None:
            break
        run.kill(*run.random.sample([0, 1, 2, -1, -2], run.random.choice([1, 1, 2])))
    ending = run.ending or run.run_to_end()
    is_before_all = "before the first optimizer step" in ending.reason
    assert ending.status is RunStatus.COMPLETED or is_before_all, ending
