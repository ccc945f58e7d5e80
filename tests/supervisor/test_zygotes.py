"""Zygote and store are lost, stopped or do not answer: what takes their place, and when a run gives up."""

from __future__ import annotations

import signal

import pytest

from ddp_runner.kernel.recovery.zygote_keeper import ZYGOTES_LOST_MAX
from ddp_runner.kernel.rules.exits import ExitCode, StopReason
from ddp_runner.kernel.rules.helper_roles import STANDBY as STANDBY_ROLE
from ddp_runner.kernel.rules.lifecycle import Membership, RankState
from tests.supervisor.judging import assert_done, lost, plans
from tests.supervisor.simulated import SPARE, STANDBY


def test_a_stopped_zygote_is_replaced(simulate):
    """Else a rank that dies later would be waited for until its start is overdue."""
    run = simulate(hang_min_s=1.0, steps=300, warm_spare=False)
    run.to_step(15)
    run.freeze(-2)
    run.kill(1)
    run.run_until(lambda: run.events("repaired"), within_s=3.0)
    assert_done(run)
    assert run.zygotes == 2


@pytest.mark.parametrize("startup_timeout_s", [600.0, 2.0], ids=["usual", "short"])
def test_a_zygote_that_never_forks_is_replaced(simulate, startup_timeout_s):
    """A hook of the user's that hangs, a disk that does not answer: the system calls it running."""
    run = simulate(startup_timeout_s=startup_timeout_s, steps=300, warm_spare=False)
    run.to_step(15)
    run.sleep(-2)
    run.kill(1)
    run.run_until(lambda: run.events("repaired"), within_s=30.0)
    assert_done(run)
    assert run.zygotes == 2
    assert sum(lost(run)) == 0


def test_a_stop_while_a_fork_never_comes_ends_as_usual(simulate):
    """The rank that is given up on has no process that could hear it, and no open line."""
    run = simulate(startup_timeout_s=2.0, steps=300, warm_spare=False)
    run.to_step(15)
    run.sleep(-2)
    run.kill(1)
    run.pass_time(5.0)
    run.supervisor.ask_stop(StopReason.PREEMPTED)
    assert run.run_to_end().exit_code == ExitCode.PREEMPTED, run.ending


def test_a_zygote_that_never_forks_at_all_ends_the_run(simulate):
    """The next one would run the same hook."""
    run = simulate()
    run.run_until(lambda: run.events("zygote_ready"))
    run.sleep(-2)
    ending = run.run_to_end(within_s=30.0)
    assert ending.exit_code == ExitCode.FAILED
    assert ending.reason == "the process that imports torch did not fork within 20 s"


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL])
def test_a_zygote_that_crashes_once_it_was_ready_is_replaced(simulate, number):
    """Before the first generation too: its import had worked."""
    run = simulate()
    run.run_until(lambda: run.events("zygote_ready"))
    run.signal(run.zygote.pid, number)
    assert_done(run)
    assert run.zygotes == 2
    said = f"the zygote died of {number.name}; starting another one"
    assert said in [text for _, text in run.outputs.said]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT, signal.SIGINT])
def test_a_zygote_that_somebody_ends_while_it_imports_is_replaced(simulate, number):
    """Its import did nothing wrong. Control: one that crashes there is in the next test."""
    run = simulate()
    run.pass_time(0.05)
    assert run.events("zygote_ready") == []
    run.signal(run.zygote.pid, number)
    assert_done(run)
    assert run.zygotes == 2


def test_a_zygote_that_crashes_at_each_fork_ends_the_run(simulate):
    """Control: three of them, and the signal is named. So does one whose import crashes, at once."""
    run = simulate()
    for count in (1, 2, 3):
        run.run_until(lambda count=count: len(run.events("zygote_ready")) == count)
        run.signal(run.zygote.pid, signal.SIGSEGV)
    assert run.run_to_end(within_s=5.0).exit_code == ExitCode.FAILED
    said = "the process that imports torch died of SIGSEGV: "
    assert run.ending.reason.startswith(said), run.ending
    run = simulate()
    run.pass_time(0.05)
    run.signal(run.zygote.pid, signal.SIGSEGV)
    assert run.run_to_end(within_s=5.0).reason.startswith(said), run.ending


@pytest.mark.parametrize(("stop", "within_s"), [("freeze", 2.0), ("sleep", 11.0)])
@pytest.mark.parametrize("when", ["at launch", "later"])
def test_a_store_that_never_gets_ready_is_replaced(simulate, stop, within_s, when):
    """Whoever would form waits for it."""
    run = simulate(hang_min_s=1.0)
    if when == "later":
        run.to_step(15)
        run.kill(-1)
    run.run_until(lambda: run.rank(-1) is not None)
    stuck = run.rank(-1)
    getattr(run, stop)(-1)
    run.run_until(lambda: stuck.dead, within_s=within_s)
    assert_done(run)
    assert sum(lost(run)) == 0


def test_what_a_fork_takes_is_not_held_against_the_store(simulate):
    """Control: a busy machine's zygote answers late; the store has its own time from then on."""
    run = simulate()
    run.run_until(lambda: run.events("zygote_ready"))
    run.sleep(-2)
    run.pass_time(12.0)
    run.wake()
    assert_done(run)
    assert plans(run) == []


def test_a_store_that_is_stopped_is_replaced_before_forming_is_overdue(simulate):
    """The system says so."""
    run = simulate(hang_min_s=1.0)
    run.to_step(15)
    run.kill(1)
    run.freeze(-1)
    run.run_until(lambda: run.events("repaired"), within_s=5.0)
    assert_done(run)
    assert sum(lost(run)) == 0


def test_a_store_that_is_stopped_for_a_moment_stays(simulate):
    """Control."""
    run = simulate(hang_min_s=1.0)
    run.to_step(15)
    store = run.rank(-1)
    run.freeze(-1)
    run.pass_time(0.8)
    run.wake()
    assert_done(run)
    assert run.rank(-1) is store
    assert plans(run) == []


def test_a_zygote_that_is_stopped_for_a_moment_stays(simulate):
    """Control."""
    run = simulate(hang_min_s=1.0, steps=300)
    run.to_step(15)
    for _ in range(3):
        run.freeze(-2)
        run.pass_time(0.8)
        run.wake()
        run.pass_time(0.3)
    assert_done(run)
    assert run.zygotes == 1


def lose_zygote(run):
    """The first one of a run; the next one has imported, and another one stands by."""
    run.to_step(15)
    assert run.rank(STANDBY) is None, "a run that loses none has none to spare"
    run.kill(-2)
    run.run_until(lambda: run.rank(STANDBY) is not None)
    run.import_s = 1e6  # another import would never end


def test_once_a_zygote_was_lost_the_next_one_stands_by(simulate):
    """Whoever kills one may kill a rank and the spare too: nobody waits for an import any more."""
    run = simulate(steps=1000, max_restarts=100)
    lose_zygote(run)
    for number in range(1, 5):
        run.to_step(run.best + 2)
        run.run_until(lambda: run.rank(STANDBY) is not None)
        run.kill(-2, 1, SPARE)
        run.run_until(lambda count=number: len(run.events("repaired")) == count, within_s=2.0)
    run.steps = run.best + 20
    assert_done(run)
    assert run.zygotes == 2
    assert sum(lost(run)) == 0


@pytest.mark.parametrize("harm", ["kill", "freeze"])
def test_a_standby_zygote_that_is_lost_is_followed_by_another(simulate, harm):
    """One that is stopped is found to be, and ended."""
    run = simulate(steps=1000, hang_min_s=1.0)
    lose_zygote(run)
    first = run.rank(STANDBY)
    getattr(run, harm)(STANDBY)
    run.run_until(lambda: first.dead, within_s=3.0)
    run.pass_time(0.8)
    assert run.rank(STANDBY) is None, "not at once: whoever ends one may end the next"
    run.run_until(lambda: first.dead and run.rank(STANDBY) is not None, within_s=5.0)
    run.steps = run.best + 20
    assert_done(run)
    assert plans(run) == []


def test_a_standby_zygote_without_room_is_asked_for_a_minute_later(simulate):
    """The run can do without; control: it is no fault, and one comes."""
    run = simulate(steps=100_000)
    run.to_step(15)
    run.standbys_refused = 1
    run.kill(-2)
    run.run_until(lambda: run.standbys_refused == 0)
    run.pass_time(STANDBY_ROLE.refused_s - 1.0)
    assert run.rank(STANDBY) is None
    run.run_until(lambda: run.rank(STANDBY) is not None, within_s=2.0)
    run.steps = run.best + 20
    assert_done(run)
    assert plans(run) == []


@pytest.mark.parametrize("harm", ["kill", "freeze"])
def test_a_zygote_lost_together_with_its_standby_is_imported_again(simulate, harm):
    """Control: a stopped one takes nobody's place."""
    run = simulate(steps=1000, hang_min_s=1.0)
    lose_zygote(run)
    run.import_s = 1.0
    getattr(run, harm)(STANDBY)
    run.kill(-2, 1, SPARE)
    run.run_until(lambda: run.events("repaired"), within_s=5.0)
    run.steps = run.best + 20
    assert_done(run)
    assert run.zygotes == 3


@pytest.mark.parametrize("max_restarts", [10, 60])
def test_zygotes_that_are_killed_again_and_again_count_within_the_window_only(
    simulate, max_restarts
):
    """A run of weeks outlives any number of them; so many in a row as no budget allows end it."""
    run = simulate(max_restarts=max_restarts, restart_window_s=100.0, steps=10**9)
    run.step_s = 10.0
    run.to_step(2)
    allowed = max(ZYGOTES_LOST_MAX, max_restarts)
    for _ in range(2 * allowed):
        run.pass_time(120.0 / allowed)
        run.kill(-2)
    assert run.ending is None
    for _ in range(allowed):
        run.pass_time(1.2)
        run.kill(-2)
    run.pass_time(1.2)
    assert run.ending.exit_code == ExitCode.FAILED


def test_an_import_that_never_ends_ends_the_run_with_a_clear_error(simulate):
    """The next zygote would import the same."""
    run = simulate(startup_timeout_s=20.0, import_s=1e6)
    ending = run.run_to_end(within_s=22.0)
    assert ending.exit_code == ExitCode.FAILED
    assert ending.reason == "the process that imports torch was not ready within 20 s"


def test_an_import_that_never_ends_in_a_later_zygote_is_tried_again(simulate):
    """The run is well meanwhile, and the first import has worked."""
    run = simulate(startup_timeout_s=5.0, steps=300)
    run.to_step(15)
    run.import_s = 1e6
    run.kill(-2)
    run.run_until(lambda: run.zygotes == 2)
    run.import_s = 1.0
    run.run_until(lambda: run.zygotes == 3)
    run.pass_time(1.5)
    run.kill(1)
    assert_done(run)
    assert [ranks for _, _, ranks in plans(run)] == [(1,)]


def test_a_rank_that_hangs_before_its_zygote_has_named_it_is_replaced(simulate):
    """It is cut off, as nobody knows its pid; the zygote that owes the answer is ended, and another forks."""
    run = simulate(warm_spare=False, startup_timeout_s=2.0)
    run.to_step(15)
    run.answers_s = 1e6
    run.kill(1)
    run.run_until(lambda: run.rank(1) is not None)
    unnamed = run.rank(1)
    unnamed.is_deaf, unnamed.stopped, unnamed.asleep = True, True, True
    handle = run.world.ranks[1]
    run.run_until(lambda: handle.membership is Membership.HUNG)
    assert handle.pid is None
    run.run_until(lambda: handle.state is RankState.KILLING)
    run.answers_s = 0.0
    run.run_until(lambda: run.rank(1) not in (None, unnamed), within_s=60.0)
    assert_done(run)
    assert sum(lost(run)) == 0
