"""What the supervisor decides, as scripts on simulated processes: every pair of events that matters."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from ddp_runner.core.exits import ExitCode, RunStatus, StopReason
from ddp_runner.core.faults import FaultKind
from ddp_runner.core.lifecycle import RankState, RunState
from ddp_runner.core.messages import MendedInPlace
from ddp_runner.core.phases import Phase
from ddp_runner.memory.kernel_kills import KernelKills
from ddp_runner.supervisor import stopped
from tests.supervisor.simulated import EXIT_S, Simulation


@pytest.fixture
def simulate(monkeypatch):
    made = []

    def simulation(**changes):
        made.append(Simulation(monkeypatch, **changes))
        return made[-1]

    yield simulation
    for one in made:
        one.close()


def plans(run):
    return [(plan["culprit"], plan["kind"], tuple(plan["replaced"])) for plan in run.events("plan")]


def assert_done(run):
    ending = run.run_to_end()
    assert (ending.status, ending.exit_code) == (RunStatus.COMPLETED, ExitCode.DONE), ending
    assert run.best == run.steps


def lost(run):
    return [fault.steps_lost for fault in run.supervisor.ledger.faults]


def test_a_run_in_peace_forms_once(simulate):
    """Control: no incident, one generation."""
    run = simulate()
    assert_done(run)
    assert len(run.events("form")) == 1
    assert plans(run) == []


@pytest.mark.parametrize("apart_s", [0.0, 0.001, 0.01, 0.03, 0.2])
def test_two_deaths_in_a_row_are_repaired_in_one_or_two_incidents(simulate, apart_s):
    """However the second one falls: both are replaced, and the survivor is the source."""
    run = simulate()
    run.to_step(15)
    run.kill(1)
    run.pass_time(apart_s)
    run.kill(2)
    assert_done(run)
    replaced = [rank for _, _, ranks in plans(run) for rank in ranks]
    assert sorted(replaced) == [1, 2]
    assert sum(lost(run)) == 0


@pytest.mark.parametrize(("told", "kind"), [(3, "rank_killed"), (1, "out_of_memory")])
def test_kills_of_loader_workers_are_not_taken_for_that_of_a_rank(simulate, tmp_path, told, kind):
    """Three of one search; control: of two of them nobody says whose they were."""
    events = tmp_path / "sys/fs/cgroup/memory.events"
    for path, text in ((events, "oom_kill 0\n"), (tmp_path / "proc/self/cgroup", "0::/\n")):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    run = simulate()
    run.supervisor._kernel_kills = KernelKills(tmp_path)
    run.to_step(15)
    events.write_text("oom_kill 3\n")
    fault = run.fault(run.rank(1), FaultKind.BAD_SAMPLE, "no worker survives it")
    mended = MendedInPlace(rank=1, fault=fault, remedy="", seconds=1.0, kernel_kills=told)
    run.send(run.rank(1), mended)
    run.pass_time(0.1)
    run.kill(2)
    assert_done(run)
    assert plans(run) == [(2, kind, (2,))]


def test_a_death_while_forming_starts_the_next_generation(simulate):
    """Nothing waits for the old one, whichever rank it is."""
    run = simulate()
    run.to_step(15)
    run.kill(1)
    run.run_until(lambda: len(run.events("form")) == 2)
    run.kill(0)
    assert_done(run)
    assert plans(run) == [(1, "rank_killed", (1,)), (0, "rank_killed", (0,))]
    assert [record["generation"] for record in run.events("form")] == [1, 2, 3]
    assert lost(run) == [0, 0]


def test_the_replacement_dies_while_it_starts(simulate):
    """The joiner is forked again; the survivors are not touched."""
    run = simulate()
    run.to_step(15)
    before = {rank: run.rank(rank).pid for rank in (0, 2)}
    run.kill(1)
    run.run_until(lambda: run.rank(1) is not None)
    run.kill(1)
    assert_done(run)
    assert [ranks for _, _, ranks in plans(run)] == [(1,), (1,)]
    assert {handle.rank for handle in run.world.ranks if handle.rank in before} == set(before)
    assert all(p.pid in before.values() for p in run.processes.values() if p.rank in before)


def test_exit_zero_before_the_end_is_a_fault(simulate):
    """Its peers wait for it."""
    run = simulate()
    run.to_step(15)
    run.leave(2, code=0)
    assert_done(run)
    assert plans(run) == [(2, "rank_exited", (2,))]


@pytest.mark.parametrize("first", [-1, -2], ids=["store", "zygote"])
@pytest.mark.parametrize("second", [-1, -2, 1], ids=["store", "zygote", "rank 1"])
@pytest.mark.parametrize("apart_s", [0.0, 0.004, 0.008, 0.011, 0.02, 0.05, 0.09, 0.12])
def test_store_and_zygote_may_die_during_a_repair(simulate, first, second, apart_s):
    """What they owed is asked for again; the run ends as if nothing had happened."""
    run = simulate(no_progress_generations=9)
    run.to_step(15)
    run.kill(0)
    run.pass_time(apart_s)
    run.kill(first)
    run.pass_time(apart_s)
    run.kill(second)
    assert_done(run)
    assert sum(lost(run)) == 0


def test_a_rank_hangs_while_another_one_dies(simulate):
    """The dead one does not hide the stopped one: both are replaced."""
    run = simulate()
    run.to_step(15)
    run.freeze(2)
    run.kill(1)
    assert_done(run)
    assert sorted(rank for _, _, ranks in plans(run) for rank in ranks) == [1, 2]
    assert sum(lost(run)) == 0


def test_a_stopped_rank_that_wakes_up_is_fenced_out(simulate):
    """Declared dead, it is killed before its number is given out again."""
    run = simulate()
    run.to_step(15)
    run.freeze(1)
    zombie = run.rank(1)
    run.run_until(lambda: run.events("fault"))
    zombie.stopped = False
    assert_done(run)
    assert zombie.dead
    assert zombie.seen == [1]
    assert plans(run) == [(1, "rank_hung", (1,))]


def test_the_budget_ends_the_run_with_its_first_cause(simulate):
    """Exit 3; what is named is what began it."""
    run = simulate(max_restarts=3)
    for number, rank in enumerate((2, 1, 0, 1)):
        run.to_step(10 + 10 * number)
        run.kill(rank)
        if number < 3:
            run.run_until(lambda count=number: len(run.events("repaired")) > count)
    ending = run.run_to_end()
    assert (ending.status, ending.exit_code) == (RunStatus.GAVE_UP, ExitCode.GAVE_UP)
    assert "rank 2 killed" in ending.reason
    assert "budget" in ending.reason


def test_a_crash_loop_backs_off_and_ends_with_its_first_cause(simulate):
    """No step is committed: three generations, each later than the one before, then exit 3."""
    run = simulate(max_restarts=100, no_progress_generations=4)
    run.to_step(15)
    run.leave(1, code=7)
    forks = []
    while run.ending is None:
        run.run_until(lambda: run.rank(1) is not None or run.ending)
        if run.ending is None:
            forks.append(run.clock.now_s)
            run.kill(1)
            run.pass_time(0.2)
    assert run.ending.exit_code == ExitCode.GAVE_UP
    assert "rank 1 exited with code 7" in run.ending.reason
    waits = [later - earlier for earlier, later in itertools.pairwise(forks)]
    assert len(forks) == 3
    assert waits == sorted(waits)
    assert waits[0] >= 0.5


def test_the_same_error_at_the_same_step_is_the_users(simulate):
    """Exit 1 with the text, at the second time; the first is retried."""
    run = simulate()
    run.to_step(15)
    run.fail(1)
    run.run_until(lambda: run.events("repaired"))
    run.best = 0
    step = run.supervisor.ledger.faults[0].incident.culprit.step
    for process in run.processes.values():
        process.committed = min(process.committed, step)
    run.fail(1)
    ending = run.run_to_end()
    assert (ending.status, ending.exit_code) == (RunStatus.FAILED, ExitCode.FAILED)
    assert "ValueError: no" in ending.reason


def test_a_rank_that_raised_is_ended_and_replaced_where_another_one_has_a_state(simulate):
    """It waits with its state, is not asked to form with it, and gets a new process."""
    run = simulate()
    run.to_step(15)
    parked = run.rank(1)
    run.fail(1)
    assert_done(run)
    assert plans(run) == [(1, "rank_raised", (1,))]
    assert parked.dead
    assert parked.seen == [1]
    assert run.rank(1) is not parked
    assert lost(run) == [0]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_of_ranks_that_all_raised_one_is_kept_as_the_source(simulate, ranks):
    """Its state is committed: going back to a checkpoint would cost steps for nothing."""
    run = simulate(ranks=ranks)
    run.to_step(17)
    first = {rank: run.rank(rank).pid for rank in range(ranks)}
    for rank in range(ranks):
        run.fail(rank)
    run.run_until(lambda: len(run.events("form")) == 2)
    assert [run.rank(rank).pid == first[rank] for rank in range(ranks)].count(True) == 1
    assert_done(run)
    assert [len(replaced) for _, _, replaced in plans(run)] == [ranks - 1]
    assert lost(run) == [0]


def test_a_rank_that_raised_one_step_ahead_of_the_others_is_kept(simulate):
    """With its process the newest committed step would be lost."""
    run = simulate(ranks=2)
    run.to_step(17)
    run.random.random = lambda: 1.0  # nobody commits any more on losing the peer
    run._commit(run.rank(0))
    ahead = run.rank(0)
    assert ahead.committed == run.rank(1).committed + 1
    run.fail(0)
    assert_done(run)
    assert plans(run) == [(0, "rank_raised", ())]
    assert ahead.seen == [1, 2]
    assert lost(run) == [0]


def test_a_rank_that_is_killed_but_not_reaped_has_no_state_to_give(simulate):
    """Nobody else lives: one of both loads the checkpoint."""
    run = simulate(ranks=2)
    run.to_step(15)
    reaped_after = iter([EXIT_S])  # rank 1 that raised; all others at once
    run.random.uniform = lambda low, high: next(reaped_after, low) if high == EXIT_S else low
    run.fail(1)
    run.run_until(lambda: run.events("plan"))
    assert run.world.ranks[1].state is RankState.READY
    run.kill(0)
    assert_done(run)
    assert plans(run) == [(1, "rank_raised", (1,)), (0, "rank_killed", (0, 1))]


def test_all_dead_go_back_and_a_later_fault_loses_nothing(simulate):
    """Steps that are lost are counted once: a second fault finds the run where it stands."""
    run = simulate(steps=60)
    run.to_step(17)
    run.kill(0, 1, 2)
    run.run_until(lambda: run.events("repaired"))
    assert lost(run) == [7]
    run.pass_time(0.12)
    assert 10 < run.supervisor.facts.committed_step < 17
    run.kill(1)
    assert_done(run)
    assert lost(run) == [7, 0]


def test_the_pace_is_kept_after_going_back(simulate):
    """A hang before the lost steps are redone is found as soon as any other."""
    run = simulate(steps=60, hang_min_s=1.0)
    run.to_step(19)
    run.freeze(1)
    run.run_until(lambda: run.events("repaired"))
    run.kill(0, 1, 2)
    run.run_until(lambda: len(run.events("repaired")) == 2)
    run.pass_time(0.3)
    frozen_s = run.clock.now_s
    run.freeze(2)
    run.run_until(lambda: len(run.events("plan")) == 3)
    assert run.clock.now_s - frozen_s < 2.0
    assert_done(run)


def test_a_stop_during_a_repair_is_kept(simulate):
    """The save is still owed: the world forms again, then stops after a step."""
    run = simulate()
    run.to_step(15)
    run.kill(1)
    run.pass_time(0.02)
    run.supervisor.ask_stop(StopReason.PREEMPTED)
    ending = run.run_to_end()
    assert ending.exit_code == ExitCode.PREEMPTED
    assert run.best < 25


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


@pytest.mark.parametrize("apart_s", [0.01, 0.15, 0.8])
def test_a_pause_that_ends_for_one_rank_after_the_other_is_no_hang(simulate, apart_s):
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


def test_redoing_lost_steps_is_no_progress(simulate):
    """What hangs again and again at one step meets growing patience, though a checkpoint lies between."""
    run = simulate(steps=60, hang_min_s=1.0, max_restarts=100, no_progress_generations=100)
    waited = []
    for _ in range(3):
        run.to_step(17)
        run.run_until(lambda: run.rank(0).committed >= 17)
        run.sleep(1)
        since_s, known = run.clock.now_s, len(run.events("fault"))
        run.run_until(lambda known=known: len(run.events("fault")) > known)
        waited.append(run.clock.now_s - since_s)
        run.run_until(lambda: run.rank(1) is not None and not run.rank(1).asleep)
        run.best = 0
        run.kill(0, 1, 2)
        run.run_until(lambda: run.rank(0) is not None and run.best > 0)
    assert [round(seconds) for seconds in waited] == [1, 4, 16]
    assert_done(run)


def test_a_process_that_went_back_has_still_settled(simulate):
    """After a roll-back below the step at which it joined, its own steps count, not the run's."""
    run = simulate(hang_min_s=1.0, first_step_timeout_s=100.0)
    run.to_step(30)
    run.kill(1)
    run.run_until(lambda: run.events("repaired"))
    run.to_step(36)
    for process in run.processes.values():
        process.committed = min(process.committed, 20)
    run.pass_time(0.3)
    assert run.rank(1).committed < 30
    run.sleep(1)
    run.run_until(lambda: len(plans(run)) == 2, within_s=2.0)
    assert_done(run)


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
    assert ("WARNING", "rank 0 was stopped; it is woken") in run.records.said


def test_a_stopped_zygote_is_replaced(simulate):
    """Else a rank that dies later would be waited for until its start is overdue."""
    run = simulate(hang_min_s=1.0, steps=300)
    run.to_step(15)
    run.freeze(-2)
    run.kill(1)
    run.run_until(lambda: run.events("repaired"), within_s=3.0)
    assert_done(run)
    assert run.zygotes == 2


@pytest.mark.parametrize("startup_timeout_s", [600.0, 2.0], ids=["usual", "short"])
def test_a_zygote_that_never_forks_is_replaced(simulate, startup_timeout_s):
    """A hook of the user's that hangs, a disk that does not answer: the system calls it running."""
    run = simulate(startup_timeout_s=startup_timeout_s, steps=300)
    run.to_step(15)
    run.sleep(-2)
    run.kill(1)
    run.run_until(lambda: run.events("repaired"), within_s=30.0)
    assert_done(run)
    assert run.zygotes == 2
    assert sum(lost(run)) == 0


def test_a_stop_while_a_fork_is_owed_for_ever_ends_the_run_as_usual(simulate):
    """The rank that is given up on has no process to tell, and no open line."""
    run = simulate(startup_timeout_s=2.0, steps=300)
    run.to_step(15)
    run.sleep(-2)
    run.kill(1)
    run.pass_time(5.0)
    run.supervisor.ask_stop(StopReason.PREEMPTED)
    assert run.run_to_end().exit_code == ExitCode.PREEMPTED, run.ending


def test_a_zygote_that_never_forks_at_all_ends_the_run_with_a_clear_error(simulate):
    """The next one would run the same hook."""
    run = simulate()
    run.run_until(lambda: run.events("zygote_ready"))
    run.sleep(-2)
    ending = run.run_to_end(within_s=30.0)
    assert ending.exit_code == ExitCode.FAILED
    assert ending.reason == "the process that imports torch did not fork within 20 s"


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


@pytest.mark.parametrize("harm", ["kill", "freeze", "leave"])
@pytest.mark.parametrize("after_s", [0.0, 0.004, 0.008, 0.012, 0.016])
def test_a_fault_while_the_ranks_finish_is_repaired(simulate, after_s, harm):
    """Some have gone in peace by then: the rest end from the checkpoint that was just saved."""
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


def test_a_rank_that_loads_while_the_world_forms_is_waited_for(simulate):
    """Its loader may have to be mended; control: one that no longer shows that it waits is not."""
    run = simulate(form_timeout_s=5.0)
    run.to_step(12)
    run.is_held = True
    run.kill(1)
    run.run_until(lambda: len(run.events("form")) == 2)
    for _ in range(60):
        run.pass_time(0.5)
        run.stamp(run.rank(0), Phase.DATA)
    assert len(run.events("form")) == 2
    run.pass_time(8.0)
    run.is_held = False
    assert_done(run)
    assert len(run.events("form")) == 3


@pytest.mark.parametrize(
    ("phase", "deadlines"),
    [
        (Phase.FORWARD, {"first_step_timeout_s": 40.0}),
        (Phase.CHECKPOINT, {"checkpoint_timeout_s": 40.0}),
    ],
)
def test_forming_takes_as_long_as_the_phases_that_it_holds(simulate, phase, deadlines):
    """A first backward, a save of before: each has its own time. Control: and no more than that."""
    run = simulate(form_timeout_s=5.0, **deadlines)
    run.to_step(12)
    run.is_held = True
    run.kill(1)
    run.run_until(lambda: len(run.events("form")) == 2 and run.rank(1).generation == 2)
    run.stamp(run.rank(1), phase)
    run.stamp(run.rank(0), Phase.REDUCE)
    run.pass_time(38.0)
    assert len(run.events("form")) == 2
    run.pass_time(10.0)
    run.is_held = False
    assert_done(run)
    assert len(run.events("form")) == 3


def test_a_transfer_that_shows_progress_may_take_longer_than_forming(simulate):
    """Control: once it shows none any more, the world forms again."""
    run = simulate(form_timeout_s=5.0)
    run.to_step(12)
    run.is_held = True
    run.kill(1)
    run.run_until(lambda: len(run.events("form")) == 2 and run.rank(1).generation == 2)
    for _ in range(40):
        run.pass_time(0.5)
        run.stamp(run.rank(1), Phase.FORMING)
    assert len(run.events("form")) == 2
    run.pass_time(8.0)
    run.is_held = False
    assert_done(run)
    assert len(run.events("form")) == 3


@pytest.mark.parametrize("data_s", [0.0, 30.0])
def test_a_wait_for_data_delays_no_verdict_on_a_rank_that_hangs_later(
    simulate, monkeypatch, data_s
):
    """What a loader's repair took is no pace of the run: ten times that would be minutes."""
    run = simulate(hang_min_s=0.5)
    monkeypatch.setattr(stopped, "is_stopped", lambda _pid: False)  # it hangs by itself
    run.to_step(12)
    run.data_s = data_s
    run.to_step(14)
    run.freeze(1)
    began_s = run.clock.now_s
    run.run_until(lambda: len(run.events("fault")) == 1)
    assert run.clock.now_s - began_s < 2.0
    assert_done(run)


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
    run.run_until(lambda: run.supervisor._repair.is_regrouping)
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
    run.run_until(lambda: run.world.ranks[1].is_returning and run.rank(1) is not None)
    getattr(run, harm)(1)
    run.run_until(lambda: len(run.world.present) == 3)
    assert_done(run)
    assert len(plans(run)) == 1


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
def test_a_rank_that_comes_back_while_the_others_finish_is_not_taken_back(simulate, seed):
    """Who has finished would never form with it: the run ends without it."""
    run = simulate(min_ranks=2, slot_failures_max=1, regrow_after=1.0, steps=300, seed=seed)
    back = hold_a_returning_rank(run)
    run.run_until(lambda: sum(h.finished is not None for h in run.world.present) == 1)
    run.send(back, run._ready(back))
    run.loop._turn()
    assert_done(run)
    assert len(run.world.present) == 2


@pytest.mark.parametrize("finishing", [(2,), (0,), (0, 2)], ids=["last", "first", "both"])
def test_a_rank_that_finishes_while_it_is_asked_to_make_room_is_replaced(simulate, finishing):
    """The others have left for the one that is back by then: they form with a successor."""
    run = simulate(min_ranks=2, slot_failures_max=1, regrow_after=1.0, steps=300)
    back = hold_a_returning_rank(run)
    run.to_step(run.steps)
    run.send(back, run._ready(back))
    run.loop._turn()
    assert run.supervisor._repair.is_regrouping
    for rank in finishing:
        process = run.rank(rank)
        run._finish(process, process.generation, None)
    assert_done(run)


def assert_generations_grow(run):
    """Each has the next number, each rank of it is one process, and no process goes back to an old one."""
    generations = [record["generation"] for record in run.events("form")]
    assert generations == list(range(1, len(generations) + 1))
    ranks = [process for process in run.processes.values() if process.rank >= 0]
    joined = Counter((number, process.rank) for process in ranks for number in process.seen)
    assert set(joined.values()) == {1}
    assert {number for number, _ in joined} == set(generations)
    for process in ranks:
        assert process.seen == sorted(set(process.seen)), process


CHAOS = {
    "kill": lambda run, rank: run.kill(rank),
    "freeze": lambda run, rank: run.freeze(rank),
    "leave": lambda run, rank: run.leave(rank),
    "fail": lambda run, rank: run.fail(rank, cause=f"ValueError: {run.random.random()}"),
    "store": lambda run, rank: run.kill(-1),
    "zygote": lambda run, rank: run.kill(-2),
    "thaw": lambda run, rank: [setattr(p, "stopped", False) for p in run.processes.values()],
}


@pytest.mark.parametrize("elastic", [False, True], ids=["fixed", "elastic"])
@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_of_faults_ends_with_the_run_complete(simulate, seed, elastic):
    """Whatever happens whenever: no state is lost while a replica lives, and nothing waits for ever."""
    draw = random.Random(seed)
    options = {"min_ranks": 2, "slot_failures_max": 3, "regrow_after": 1.0} if elastic else {}
    run = simulate(
        ranks=draw.choice([2, 3, 4]),
        seed=seed,
        steps=150,
        max_restarts=10_000,
        no_progress_generations=1000,
        backoff_max_s=1.0,
        form_timeout_s=10.0,
        startup_timeout_s=20.0,
        hang_min_s=0.5,
        first_step_timeout_s=2.0,
        **options,
    )
    run.to_step(5)
    for _ in range(draw.randrange(3, 15)):
        run.pass_time(draw.choice([0.0, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0]) * draw.random())
        if run.ending is not None or run.supervisor._finished_at_s is not None:
            break
        CHAOS[draw.choice(sorted(CHAOS))](run, draw.randrange(len(run.world.ranks)))
    CHAOS["thaw"](run, 0)
    if run.ending is None:
        run.run_to_end(within_s=3000.0)
    assert run.ending.status is RunStatus.COMPLETED, (run.ending, run.where())
    assert run.supervisor.machine.state is RunState.DONE
    assert_generations_grow(run)
