"""What is saved before a run ends, by whom, and faults while ranks finish."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddp_runner.kernel.rules.exits import ExitCode, RunStatus, StopReason
from ddp_runner.kernel.rules.faults import FaultKind
from ddp_runner.kernel.rules.stopping import StopSignal
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.kernel.wire.events import Faulted, Proved, TuningChanged
from tests.supervisor.judging import assert_done, plans
from tests.supervisor.simulated import SAVE_EVERY


@pytest.mark.parametrize("seed", range(4))
def test_who_has_waited_for_the_last_save_is_not_hung(simulate, seed):
    """Of two ranks that wake up, one is later: it has not waited for a collective that nobody joins."""
    run = simulate(hang_min_s=1.0, steps=20, seed=seed)
    run.last_save_s = 5.0
    assert_done(run)
    assert plans(run) == []


@pytest.mark.parametrize("harm", ["kill", "freeze", "leave"])
@pytest.mark.parametrize("after_s", [0.0, 0.004, 0.008, 0.012, 0.016])
def test_a_fault_while_the_ranks_finish_is_repaired(simulate, after_s, harm):
    """Some have ended in order by then: the rest end from the checkpoint that was just saved."""
    run = simulate(hang_min_s=0.5)
    run.to_step(run.steps)
    run.pass_time(after_s)
    if run.ending is None:
        getattr(run, harm)(1)
    assert_done(run)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_death_while_stopping_is_repaired(simulate, rank):
    """As above, the other way round."""
    run = simulate()
    run.to_step(15)
    run.supervisor.ask_stop(StopReason.PREEMPTED)
    run.kill(rank)
    assert run.run_to_end().exit_code == ExitCode.PREEMPTED


def assert_saved_before_end(run, *, status, rank=None):
    """The run has ended so, and the newest step that any rank has is on disk."""
    ending = run.run_to_end()
    assert ending.status is status, ending
    assert run.checkpoint == run.best
    assert [step for _, step in run.saved_alone] == [run.best]
    if rank is not None:
        assert run.saved_alone[0][0] == rank
    assert f"step {run.best} is saved in p" in run.supervisor.run_end.closing_words()
    assert run.supervisor.recorder.accounting.checkpoint_step == run.best


@pytest.mark.parametrize("seed", range(3))
def test_a_run_that_is_given_up_saves_what_survivors_hold(simulate, seed):
    """Its budget is spent: the rank with the newest step writes it, and nobody else may write."""
    run = simulate(seed=seed, max_restarts=1)
    run.to_step(12)
    run.kill(1)
    run.to_step(17)
    run.kill(2)
    assert_saved_before_end(run, status=RunStatus.GAVE_UP)


def test_the_only_rank_that_is_left_saves(simulate):
    """Below --min-ranks; it waits outside any generation."""
    run = simulate(max_restarts=0, min_ranks=2, slot_failures_max=1)
    run.to_step(17)
    run.kill(0, 2)
    assert_saved_before_end(run, status=RunStatus.GAVE_UP, rank=1)


def test_only_the_rank_that_saves_before_the_end_may_write(simulate):
    """The rank that is fenced out may itself be asked if the first one dies; then that one may."""
    run = simulate(max_restarts=0)
    run.to_step(17)
    run.kill(2)
    run.run_until(lambda: run.events("last_save_asked"))
    first = run.events("last_save_asked")[0]["rank"]
    run.kill(first)
    assert run.run_to_end().exit_code == ExitCode.GAVE_UP
    assert [rank for rank, _ in run.saved_alone] == [1 - first]
    assert run.checkpoint >= 17


@pytest.mark.parametrize("times", [1, 3])
def test_a_rank_stopped_in_its_save_before_the_end_is_woken(simulate, times):
    """However often somebody stops it: otherwise all would wait for the whole checkpoint_timeout_s."""
    run = simulate(max_restarts=0)
    run.alone_save_s = 50.0  # longer than all of it
    run.to_step(17)
    run.kill(2)
    run.run_until(lambda: run.events("last_save_asked"))
    first = run.events("last_save_asked")[0]["rank"]
    for _ in range(times):
        run.freeze(first)
        run.run_until(lambda: not run.rank(first).stopped)
    assert_saved_before_end(run, status=RunStatus.GAVE_UP, rank=first)
    assert sum("resuming it" in text for _, text in run.outputs.said) == times


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_came_before_an_error_of_the_user_is_saved(simulate, ranks):
    """At the second time, by a rank that raised itself where there is no other."""
    run = simulate(ranks=ranks)
    for tries in range(1, 4 if ranks == 1 else 3):  # one rank alone is tried as it is, and again
        run.run_until(lambda count=tries: len(run.events("forming")) == count)
        run.run_until(lambda: run.rank(0).trains and run.rank(0).committed >= 15)
        for rank in range(ranks):
            run.rank(rank).committed = 15
            run.world.ranks[rank].slot.set(Cell.COMMITTED_STEP, 15)
        run.best = 15
        for rank in range(ranks):
            run.fail(rank)
    assert_saved_before_end(run, status=RunStatus.FAILED)
    assert "the same error at the same step" in run.ending.reason


def test_a_bug_in_the_supervisor_costs_no_step(simulate):
    """The ranks leave their generation first; a second bug ends the run as it is."""
    run = simulate()
    run.to_step(15)
    run.supervisor.fail("Traceback\nValueError: a bug")
    assert_saved_before_end(run, status=RunStatus.FAILED)
    again = simulate()
    again.to_step(15)
    again.supervisor.fail("Traceback\nValueError: a bug")
    again.supervisor.fail("Traceback\nValueError: another")
    assert "a bug" in again.ending.reason
    assert not again.saved_alone


def test_without_a_zygote_the_newest_state_is_saved(simulate):
    """There will be no other process that imports torch: nothing can be repaired any more."""
    run = simulate(steps=10_000, warm_spare=False)
    run.run_until(lambda: run.best >= 12)
    while not run.supervisor.run_end.is_known:
        run.kill(-2)
        run.pass_time(0.1)
    assert run.run_to_end().status is RunStatus.FAILED
    assert run.checkpoint == run.best, "in a file of its own, where none has that step yet"
    assert [step for _, step in run.saved_alone] == ([run.best] if run.best % SAVE_EVERY else [])


def test_a_stop_that_takes_too_long_is_saved_by_one_rank(simulate):
    """One rank hangs in its code; another one leaves it: what was asked for is done, and said."""
    run = simulate(stop_timeout_s=5.0, hang_min_s=50.0)
    run.to_step(15)
    run.sleep(1)
    run.supervisor.ask_stop(StopReason.PREEMPTED, by=StopSignal.TERMINATE)
    assert_saved_before_end(run, status=RunStatus.PREEMPTED)
    assert run.ending.exit_code == ExitCode.PREEMPTED
    assert "did not stop within 5 s" in run.ending.reason


def test_a_stop_that_did_not_save_ends_with_1(simulate):
    """Asked to save, and no rank answers."""
    run = simulate(ranks=2, stop_timeout_s=5.0, hang_min_s=500.0, checkpoint_timeout_s=20.0)
    run.to_step(15)
    run.sleep(0, 1)
    monkeypatched = run.wake
    run.wake = lambda: None
    run.supervisor.ask_stop(StopReason.PREEMPTED)
    ending = run.run_to_end(within_s=60.0)
    run.wake = monkeypatched
    assert (ending.status, ending.exit_code) == (RunStatus.FAILED, ExitCode.FAILED)
    words = run.supervisor.run_end.closing_words()
    assert f"step {run.best} could not be saved: not within 20 s" in words
    assert "newest checkpoint: step 10" in words


@pytest.mark.parametrize("is_its_own", [False, True])
def test_a_last_save_that_fails_is_reported_with_its_reason(simulate, is_its_own):
    """Where it is the rank's own fault the next one is asked; where the disk's, nobody else."""
    run = simulate(max_restarts=0)
    run.alone_refusal = ("because", is_its_own)
    run.to_step(15)
    run.kill(2)
    assert run.run_to_end().exit_code == ExitCode.GAVE_UP
    assert f"step {run.best} could not be saved: because" in run.supervisor.run_end.closing_words()
    assert len(run.events("last_save_asked")) == (2 if is_its_own else 1)


def test_a_checkpoint_that_has_the_newest_step_is_not_written_again(simulate):
    """Every rank is dead but for one, at the very step of the newest file."""
    run = simulate(max_restarts=0, steps=10_000)
    run.to_step(10)
    for process in run.processes.values():
        process.committed = min(process.committed, 10)
    for handle in run.world.ranks:
        handle.slot.set(Cell.COMMITTED_STEP, 10)
    run.checkpoint = run.best = 10
    run.sleep(0, 1, 2)
    run.kill(0)
    run.wake()
    run.random.random = lambda: 1.0  # nobody commits another step as it leaves
    assert run.run_to_end().exit_code == ExitCode.GAVE_UP
    assert not run.saved_alone
    assert "step 10 is saved in p" in run.supervisor.run_end.closing_words()


def test_a_state_that_nobody_knows_to_be_right_is_not_saved(simulate):
    """All ranks differ: none of them is asked, and the run is not exact."""
    run = simulate(ranks=2, steps=10_000)
    run.to_step(15)
    for rank in (0, 1):
        process = run.rank(rank)
        differ = run.fault(process, FaultKind.REPLICA_DIVERGED, "the replicas differ")
        run.supervisor.on_message(
            Faulted(generation=1, fault=replace(differ, may_retry=False)), rank
        )
    ending = run.run_to_end()
    assert ending.status is RunStatus.FAILED
    assert not run.saved_alone
    assert "could not be saved: the ranks' states differ" in run.supervisor.run_end.closing_words()
    (reason,) = run.supervisor.facts.inexact_reasons
    assert reason == "the ranks' states differed by step 15, and none is known to be right"


def not_exact(run, rank=1):
    """A rank reports something that makes the run inexact."""
    changed = TuningChanged(
        rank=rank, step=run.best, action="", inexact_reason="half from 7", fault_free=True
    )
    run.send(run.rank(rank), changed)


def test_a_run_that_must_be_exact_saves_and_ends_when_not(simulate):
    """With exit 1, and the reason on the last line."""
    run = simulate(require_exact=True)
    run.to_step(20)
    not_exact(run)
    ending = run.run_to_end()
    assert (ending.status, ending.exit_code) == (RunStatus.FAILED, ExitCode.FAILED)
    assert "half from 7" in ending.reason
    assert run.checkpoint >= 20
    assert run.best < run.steps


def test_a_run_that_is_not_exact_goes_on_without_the_setting(simulate):
    """Control."""
    run = simulate()
    run.to_step(20)
    not_exact(run)
    assert_done(run)
    assert run.supervisor.facts.inexact_reasons == ["half from 7"]


def test_a_step_that_several_ranks_have_computed_twice_counts_once(simulate):
    """Each rank reports its own."""
    run = simulate()
    run.to_step(5)
    for rank in range(3):
        run.send(run.rank(rank), Proved(rank=rank, step=0, what="repeated"))
    assert_done(run)
    assert run.supervisor.recorder.findings.proved == {"repeated": {0}}
    assert [event["rank"] for event in run.events("proved")] == [0, 1, 2]
