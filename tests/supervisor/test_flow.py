"""What the supervisor decides, as scripts on simulated processes: every pair of events that matters."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest

from ddp_runner.core.board import Cell
from ddp_runner.core.exits import ExitCode, RunStatus, StopReason
from ddp_runner.core.faults import Fault, FaultKind
from ddp_runner.core.lifecycle import RankState, RunState
from ddp_runner.core.messages import Adjusted, Faulted, MendedInPlace, Proved, Saved
from ddp_runner.core.phases import Phase
from ddp_runner.core.stopping import PRESS_GAP_S, StopSignal
from ddp_runner.memory.kernel_kills import KernelKills
from ddp_runner.supervisor.recovery import repair
from ddp_runner.supervisor.recovery.hang_detector import hung
from ddp_runner.supervisor.recovery.zygote_keeper import ZYGOTES_LOST_MAX
from ddp_runner.system import proc_state
from tests.supervisor.simulated import EXIT_S, SAVE_EVERY, SPARE, STANDBY, STEP_S


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


@pytest.mark.parametrize(
    ("phase", "cell", "said"),
    [
        (Phase.DATA, 18, "rank 1 hung: silent, loading sample 17"),
        (Phase.EVALUATE, -18, "rank 1 hung: silent, loading validation sample 17"),
        (Phase.DATA, 0, "rank 1 hung: silent"),
        (Phase.FORWARD, 18, "rank 1 hung: silent"),
    ],
)
def test_a_rank_that_hangs_over_a_sample_is_told_with_it(simulate, phase, cell, said):
    """As far as it is known; control: elsewhere it would be an old one."""
    run = simulate()
    run.to_step(5)
    handle = run.world.ranks[1]
    handle.slot.stamp(phase, 1)
    handle.slot.set(Cell.SAMPLE, cell)
    fault = hung(handle, "silent")
    assert (fault.cause, fault.phase) == (said, phase.label)


def made_container(root):
    """A made control group that has killed nobody; returns the file that counts."""
    events = root / "sys/fs/cgroup/memory.events"
    for path, text in ((events, "oom_kill 0\n"), (root / "proc/self/cgroup", "0::/\n")):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return events


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kills", [0, 1, 2])
def test_of_two_ranks_killed_at_once_the_larger_was_killed_for_memory(
    simulate, tmp_path, kills, seed
):
    """Whichever is reaped first; no more of them than the kernel has counted."""
    run, events = simulate(seed=seed), made_container(tmp_path)
    run.supervisor._kernel_kills = KernelKills(tmp_path)
    run.to_step(15)
    for rank, size in ((0, 10), (1, 1), (2, 2)):
        run.world.ranks[rank].rss_bytes = size
    events.write_text(f"oom_kill {kills}\n")
    run.kill(1, 2)
    assert_done(run)
    kinds = {fault["rank"]: fault["kind"] for fault in run.events("fault") if fault["rank"] > 0}
    assert kinds == {
        1: "out_of_memory" if kills == 2 else "rank_killed",
        2: "out_of_memory" if kills else "rank_killed",
    }


@pytest.mark.parametrize(("told", "kind"), [(3, "rank_killed"), (1, "out_of_memory")])
def test_kills_of_loader_workers_are_not_taken_for_that_of_a_rank(simulate, tmp_path, told, kind):
    """Three of one search; control: of two of them nobody says whose they were."""
    run, events = simulate(), made_container(tmp_path)
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


@pytest.mark.parametrize("once_more", [True, False])
def test_kernel_kills_at_every_step_end_a_run_that_cannot_ask_for_less(
    simulate, tmp_path, once_more
):
    """The budget counts them; control: not while each successor has halved something."""
    events = tmp_path / "sys/fs/cgroup/memory.events"
    for path, text in ((events, "oom_kill 0\n"), (tmp_path / "proc/self/cgroup", "0::/\n")):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    run = simulate(max_restarts=3)
    run.supervisor._kernel_kills = KernelKills(tmp_path)
    for number in range(1, 6):
        run.to_step(10 * number)
        events.write_text(f"oom_kill {number}\n")
        run.kill(1)
        repaired = len(run.events("repaired"))
        run.run_until(lambda count=repaired: run.ending or len(run.events("repaired")) > count)
        if run.ending is not None:
            break
        adjusted = Adjusted(
            rank=1, step=run.best, remedy="x", inexact_reason="", in_peace=True, once_more=once_more
        )
        run.send(run.rank(1), adjusted)
    if not once_more:
        assert_done(run)
        assert len(lost(run)) == 5
        return
    assert (run.ending.status, run.ending.exit_code) == (RunStatus.GAVE_UP, ExitCode.GAVE_UP)
    assert "rank 1 killed by the kernel: out of memory" in run.ending.reason
    assert "restart budget spent: 3 in" in run.ending.reason
    assert len(lost(run)) == 4


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


def test_each_generation_is_handed_a_secret_of_its_own(simulate):
    """The same for all its ranks, known from no earlier one, and nowhere in the journal."""
    run = simulate()
    run.to_step(15)
    run.kill(1)
    assert_done(run)
    assert list(run.secrets) == [1, 2]
    (first,), (second,) = run.secrets.values()
    assert first != second
    assert len(first) == len(second) == 64
    assert not any(secret in str(run.records.written) for secret in (first, second))


def test_each_of_two_faults_that_are_repaired_together_is_told(simulate):
    """One line and one event for each when the world trains again, with its own outcome and time."""
    run = simulate()
    run.to_step(15)
    run.kill(1)
    run.run_until(lambda: len(run.events("form")) == 2)
    run.kill(0)
    assert_done(run)
    told = [text for _, text in run.records.said if "steps lost" in text]
    assert [text.split(" at ")[0] for text in told] == [
        f"rank {rank} killed (SIGKILL)" for rank in (1, 0)
    ]
    repaired = run.events("repaired")
    assert [event["cause"] for event in repaired] == [plan["cause"] for plan in run.events("plan")]
    assert repaired[0]["seconds"] > repaired[1]["seconds"] > 0
    assert all(
        f"{event['seconds']:.2f} s" in text for event, text in zip(repaired, told, strict=True)
    )


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
            run.leave(1, code=7)
            run.pass_time(0.2)
    assert run.ending.exit_code == ExitCode.GAVE_UP
    assert "rank 1 exited with code 7" in run.ending.reason
    waits = [later - earlier for earlier, later in itertools.pairwise(forks)]
    assert len(forks) == 3
    assert waits == sorted(waits)
    assert waits[0] >= 0.5


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("apart_s", [0.02, 0.1, 0.3])
def test_ranks_that_are_killed_one_by_one_between_two_steps_are_repaired(simulate, ranks, apart_s):
    """Nothing repeats: nobody waits, and nobody gives up."""
    run = simulate(ranks=ranks)
    run.to_step(15)
    run.random.random = lambda: 1.0  # nobody commits any more on losing a peer
    run.step_s = 60.0  # the step in hand takes as long as it does
    for rank in range(ranks):
        run.pass_time(apart_s)
        run.kill(rank)
    run.step_s = STEP_S
    assert len({fault.incident.committed_step for fault in run.supervisor.ledger.faults}) <= 1
    assert_done(run)
    assert not [t for level, t in run.records.said if level == "WARNING" and t.endswith(" s")]


@pytest.mark.parametrize("order", [(1, -1, 2), (-1, -1, -1), (-1, 0, -1)])
def test_a_rank_the_store_and_a_rank_within_a_step_are_repaired(simulate, order):
    """Each in a generation of its own, none of which commits a step: still a storm, and no loop."""
    run = simulate()
    run.to_step(15)
    run.is_held = True
    for number, rank in enumerate(order, start=2):
        run.kill(rank)
        run.run_until(lambda wanted=number: len(run.events("form")) == wanted)
    run.is_held = False
    assert_done(run)
    assert sum(lost(run)) == 0


def test_a_rank_that_is_killed_at_one_step_again_and_again_ends_the_run_by_the_budget(simulate):
    """Each time a little later, and not for ever: nobody can tell who kills it."""
    run = simulate(max_restarts=5)
    run.to_step(15)
    run.is_held = True
    run.kill(1)
    while run.ending is None:
        run.run_until(lambda: run.ending or run.world.ranks[1].state is RankState.FORMING)
        run.kill(1)
        run.pass_time(0.1)
    assert run.ending.exit_code == ExitCode.GAVE_UP
    assert "restart budget spent: 5 in" in run.ending.reason
    waits = [text.rpartition(" in ")[2] for level, text in run.records.said if level == "WARNING"]
    assert waits[2:] == ["0.5 s", "1 s", "2 s"]


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
    [stayed] = [rank for rank in range(ranks) if run.rank(rank).pid == first[rank]]
    assert_done(run)
    assert [len(replaced) for _, _, replaced in plans(run)] == [ranks - 1]
    assert lost(run) == [0]
    [told] = [
        text for level, text in run.records.said if level == "WARNING" and "ValueError: no" in text
    ]
    assert told.startswith(f"all {ranks} ranks raised, first rank " if ranks > 1 else "rank 0: ")
    assert f"rank {stayed} stays, with the newest state" in told


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
    assert [fault.all_ranks_dead for fault in run.supervisor.ledger.faults] == [True]
    run.pass_time(0.12)
    assert 10 < run.supervisor.facts.committed_step < 17
    run.kill(1)
    assert_done(run)
    assert lost(run) == [7, 0]
    assert [fault.all_ranks_dead for fault in run.supervisor.ledger.faults] == [True, False]


@pytest.mark.parametrize("word", ["best", "checkpoints/step_00000010.pt"])
@pytest.mark.parametrize("published", [True, False])
def test_a_checkpoint_that_nobody_could_tell_of_is_not_passed_over(
    simulate, tmp_path, published, word
):
    """All die between its publication and the word of it; control: with none, it is as at the start."""
    (tmp_path / "step_00000010.json").write_text("{}")
    run = simulate(run_options={"resume": word, "checkpoint_dir": str(tmp_path)})
    run._save = lambda process: setattr(run, "checkpoint", process.committed)
    run.to_step(15)
    if published:
        (tmp_path / "step_00000015.json").write_text("{}")
    run.kill(0, 1, 2)
    run.run_until(lambda: run.events("repaired"))
    assert run.resumed == [word, "auto" if published else word]


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


@pytest.mark.parametrize("is_lost", [False, True], ids=["in peace", "with its rank"])
def test_a_checkpoint_that_is_asked_for_is_made_once(simulate, is_lost):
    """Also where the rank that was told dies before it makes it; then nobody is told of it again."""
    run = simulate()
    run.to_step(13)
    run.supervisor.ask_save()
    if is_lost:
        run.kill(0)
    run.to_step(22)
    run.kill(1)
    run.to_step(29)
    saved = [event["step"] for event in run.events("checkpoint_saved")]
    (asked_for,) = (step for step in saved if step % SAVE_EVERY)
    assert 13 < asked_for < 20
    assert_done(run)


def test_a_checkpoint_of_before_what_was_rolled_back_is_the_one_asked_for(simulate):
    """It is all there is of the course that is followed: nobody is told of the wish again."""
    run = simulate()
    run.to_step(13)
    run.supervisor.ask_save()
    rank_0 = run.supervisor.world.ranks[0]
    fault = Fault(kind=FaultKind.NON_FINITE, rank=-1, step=13, cause="too many", at_ns=0)
    run.supervisor.on_message(
        MendedInPlace(rank=0, fault=fault, remedy="rolled back", seconds=0.1, steps_lost=9), rank_0
    )
    run.supervisor.on_message(
        Saved(rank=0, step=5, path="5.pt", blocked_s=0.0, size_bytes=1, sha256="5"), rank_0
    )
    run.kill(0)
    run.to_step(29)
    saved = [event["step"] for event in run.events("checkpoint_saved")]
    assert [step for step in saved if step % SAVE_EVERY] == [5]
    assert_done(run)


def test_a_checkpoint_asked_for_before_training_comes_with_its_first_step(simulate):
    """It waits for the ranks; one asked for with a stop is the one that the stop makes."""
    run = simulate()
    run.supervisor.ask_save()
    run.run_until(lambda: run.events("checkpoint_saved"))
    assert [event["step"] for event in run.events("checkpoint_saved")] == [1]
    run.to_step(13)
    run.supervisor.ask_stop(StopReason.PREEMPTED)
    run.supervisor.ask_save()
    assert run.run_to_end().exit_code == ExitCode.PREEMPTED
    assert len(run.events("save_asked")) == 1


@pytest.mark.parametrize("signals", [1, 2], ids=["before training", "again"])
def test_what_arrives_after_the_end_changes_nothing(simulate, signals):
    """A stop that ends at once may be in one batch with the last word of a world that forms."""
    run = simulate()
    if signals == 2:
        run.to_step(15)
        run.kill(1)
        run.run_until(lambda: len(run.events("form")) == 2)
    run.run_until(lambda: run.world.ranks[1].state is RankState.FORMING)
    for _ in range(signals):
        run.supervisor.ask_stop(StopReason.INTERRUPTED, by=StopSignal.INTERRUPT)
        run.clock.now_s += 2 * PRESS_GAP_S
    run.supervisor.advance()
    ended = run.ending
    assert ended.exit_code == ExitCode.INTERRUPTED
    for _ in range(10):
        run._turn()
    assert all(rank.trains for rank in run.processes.values() if rank.rank >= 0 and not rank.dead)
    run.supervisor.fail("ValueError: a bug on the way out")
    assert run.ending is ended
    assert ("ERROR", "ValueError: a bug on the way out") in run.records.said


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


@pytest.mark.parametrize("seed", range(4))
def test_who_has_waited_for_the_last_save_is_not_hung_when_the_first_rank_has_finished(
    simulate, seed
):
    """Of two ranks that wake up, one is later: it has not waited for a collective that nobody joins."""
    run = simulate(hang_min_s=1.0, steps=20, seed=seed)
    run.last_save_s = 5.0
    assert_done(run)
    assert plans(run) == []


def test_a_rank_that_never_finishes_is_found(simulate):
    """Control: however many others have."""
    run = simulate(hang_min_s=1.0, steps=20)
    run.run_until(lambda: any(handle.finished for handle in run.world.present))
    (late, *_) = [handle.rank for handle in run.world.present if handle.finished is None]
    run.sleep(late)
    assert_done(run)
    assert [plan[:2] for plan in plans(run)] == [(late, "rank_hung")]


@pytest.mark.parametrize(
    "harm", [None, 1, -2], ids=["in peace", "and is killed", "with its zygote"]
)
def test_a_rank_that_is_ready_before_it_is_known_who_it_is_does_not_train(simulate, harm):
    """The zygote was held up just after the fork: nobody could end such a rank, or find it stopped."""
    run = simulate(warm_spare=False)
    run.to_step(10)
    run.answers_s = 1.0
    run.kill(1)
    run.run_until(lambda: run.world.ranks[1].state is RankState.READY)
    assert run.world.ranks[1].pid is None
    if harm is not None:
        run.kill(harm)
    assert_done(run)
    assert all(formed["pid"] is not None for formed in run.events("rank_formed"))
    assert {plan[:2] for plan in plans(run)} == {(1, "rank_killed")}


def test_a_random_plan_strikes_nobody_while_a_rank_is_dying(simulate):
    """On a busy machine that takes a while, and what strikes it then would never be noticed."""
    spec = "random:mtbf_s=0.01,times=3,kinds=kill"
    run = simulate(ranks=2, run_options={"inject": (spec,)})
    run.run_until(lambda: run.events("world_formed"))
    for process in run.processes.values():
        process.unending = True
    run.run_until(lambda: run.events("injected"))
    run.pass_time(0.5)
    assert len(run.events("injected")) == 1
    for process in list(run.processes.values()):
        process.unending = False
        if process.pid == run.world.ranks[run.events("injected")[0]["rank"]].pid:
            run.signal(process.pid)
    assert_done(run)
    assert len(run.events("injected")) == len(plans(run)) == 3


def test_a_random_plan_goes_on_when_the_rank_that_it_killed_is_given_up(simulate):
    """Control: that process dies, but nobody takes its place."""
    spec = "random:mtbf_s=0.01,times=2,kinds=kill"
    run = simulate(min_ranks=1, slot_failures_max=1, run_options={"inject": (spec,)})
    assert_done(run)
    assert [len(plan["dropped"]) for plan in run.events("plan")] == [1, 1]
    assert len(run.events("injected")) == 2


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


def test_a_rank_that_is_slow_now_and_then_is_killed_once_at_most(simulate):
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


def test_a_rank_that_is_stopped_for_a_moment_in_a_long_phase_stays(simulate):
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
    told = [fault["text"] for fault in run.events("fault") if fault["kind"] == "rank_hung"]
    assert len(told) == 1
    assert told[0].endswith(" hung: stopped by a signal")
    (replaced,) = [ranks for _, _, ranks in plans(run)]
    assert len(replaced) == 2
    assert sum(lost(run)) == 0
    assert any("it is woken" in text for _, text in run.records.said) == (len(frozen) == 2)


def test_a_rank_that_is_stopped_while_an_answer_is_awaited_is_replaced_with_the_others(simulate):
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


def test_where_the_last_state_dies_too_what_was_forked_ahead_is_no_source(simulate):
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
    assert [fault.all_ranks_dead for fault in run.supervisor.ledger.faults] == [True]


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


def test_a_stop_while_a_fork_is_owed_for_ever_ends_the_run_as_usual(simulate):
    """The rank that is given up on has no process to tell, and no open line."""
    run = simulate(startup_timeout_s=2.0, steps=300, warm_spare=False)
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
def test_a_zygote_that_stands_by_and_is_lost_is_followed_by_another_one(simulate, harm):
    """One that is stopped is found to be, and ended."""
    run = simulate(steps=1000, hang_min_s=1.0)
    lose_zygote(run)
    first = run.rank(STANDBY)
    getattr(run, harm)(STANDBY)
    run.run_until(lambda: first.dead and run.rank(STANDBY) is not None, within_s=5.0)
    run.steps = run.best + 20
    assert_done(run)
    assert plans(run) == []


@pytest.mark.parametrize("harm", ["kill", "freeze"])
def test_a_zygote_that_is_lost_together_with_who_stands_by_is_imported_again(simulate, harm):
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
    [overdue] = [event for event in run.events("fault") if event["kind"] == "collective_stuck"]
    assert overdue["text"] == "the ranks did not form within 5 s"
    assert overdue["phase"] == "forming"
    run.is_held = False
    assert_done(run)
    assert len(run.events("form")) == 3


@pytest.mark.parametrize(
    ("phase", "deadlines"),
    [
        (Phase.FORWARD, {"hang_min_s": 8.0}),  # five times that: the first steps before were short
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
    monkeypatch.setattr(proc_state, "is_stopped", lambda _pid: False)  # it hangs by itself
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
    run.run_until(lambda: run.world.ranks[1].is_returning and run.rank(1) is not None)
    getattr(run, harm)(1)
    run.run_until(lambda: len(run.world.present) == 3)
    assert_done(run)
    assert len(plans(run)) == 1


@pytest.mark.parametrize("after_s", [0.1, 1.0, 4.9])
def test_a_slot_that_dies_after_each_return_does_not_keep_the_others_from_their_steps(
    simulate, after_s
):
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
    faults = [fault.began_s for fault in run.supervisor.ledger.faults]
    apart_s = [later - earlier for earlier, later in itertools.pairwise(faults)]
    assert apart_s[-1] > 50.0


def test_a_rank_comes_back_between_two_steps(simulate):
    """The step that the others are in when it gets ready is not cut short."""
    run = simulate(min_ranks=2, slot_failures_max=1, regrow_after=2.0, steps=20)
    run.to_step(5)
    run.step_s = 5.0
    run.kill(1)
    run.run_until(lambda: run.world.ranks[1].is_returning)
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
def test_a_killed_rank_that_does_not_end_is_given_up_where_it_may_be(simulate, rank):
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


def test_a_killed_rank_that_does_not_end_ends_the_run_where_no_other_may_take_its_place(simulate):
    """The pid is named, because somebody has to see to it."""
    run = simulate(hang_min_s=1.0)
    run.to_step(12)
    stuck = hang_in_the_kernel(run, 1)
    ending = run.run_to_end(within_s=repair.REAP_TIMEOUT_S + 5.0)
    assert ending.exit_code == ExitCode.GAVE_UP
    assert "rank 1 hung" in ending.reason
    assert f"process {stuck.pid} does not end" in ending.reason


@pytest.mark.parametrize("min_ranks", [0, 2])
def test_a_rank_that_raised_and_does_not_end_is_no_endless_wait_either(simulate, min_ranks):
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
    "spare": lambda run, rank: run.kill(SPARE),
    "spare stops": lambda run, rank: run.freeze(SPARE),
    "spare hangs": lambda run, rank: run.rank(SPARE) and run.sleep(SPARE),
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


def assert_saved_before_end(run, *, status, rank=None):
    """The run has ended so, and the newest step that any rank has is on disk."""
    ending = run.run_to_end()
    assert ending.status is status, ending
    assert run.checkpoint == run.best
    assert [step for _, step in run.saved_alone] == [run.best]
    if rank is not None:
        assert run.saved_alone[0][0] == rank
    assert f"step {run.best} is saved in p" in run.supervisor.run_end.closing_words()
    assert run.supervisor.ledger.checkpoint_step == run.best


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
def test_a_rank_that_is_stopped_while_it_saves_before_the_end_is_woken(simulate, times):
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
    assert sum("it is woken" in text for _, text in run.records.said) == times


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_came_before_an_error_of_the_user_is_saved(simulate, ranks):
    """At the second time, by a rank that raised itself where there is no other."""
    run = simulate(ranks=ranks)
    for tries in range(1, 4 if ranks == 1 else 3):  # one rank alone is tried as it is, and anew
        run.run_until(lambda count=tries: len(run.events("form")) == count)
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


def test_a_stop_that_takes_too_long_is_kept_by_a_rank_that_saves_alone(simulate):
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
def test_a_last_save_that_fails_is_told_with_its_reason(simulate, is_its_own):
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
    """All ranks differ: none of them is asked."""
    run = simulate(ranks=2, steps=10_000)
    run.to_step(15)
    for rank in (0, 1):
        process = run.rank(rank)
        differ = run.fault(process, FaultKind.REPLICA_DIVERGED, "the replicas differ")
        run.supervisor.on_message(
            Faulted(generation=1, fault=replace(differ, may_retry=False)), run.world.ranks[rank]
        )
    ending = run.run_to_end()
    assert ending.status is RunStatus.FAILED
    assert not run.saved_alone
    assert "could not be saved: the ranks' states differ" in run.supervisor.run_end.closing_words()


@pytest.mark.parametrize("number", [StopSignal.INTERRUPT, StopSignal.TERMINATE, StopSignal.OTHER])
def test_a_stop_that_is_asked_for_again_at_once_is_one_stop(simulate, number):
    """Kernel, shell and scheduler repeat themselves; what was asked for is done."""
    run = simulate()
    run.to_step(15)
    reason = StopReason.PREEMPTED
    for _ in range(3):
        run.supervisor.ask_stop(reason, by=number)
        run.clock.now_s += 0.02
    ending = run.run_to_end()
    assert ending.exit_code == ExitCode.PREEMPTED
    assert run.checkpoint == run.best > 15
    assert "at once" not in ending.reason


@pytest.mark.parametrize(
    ("number", "after_s"), [(StopSignal.INTERRUPT, 0.4), (StopSignal.TERMINATE, 3.1)]
)
def test_a_person_who_asks_again_ends_a_run_at_once(simulate, number, after_s):
    """Also one whose last save is being made; the last line says what there is."""
    for is_given_up in (False, True):
        run = simulate(max_restarts=0 if is_given_up else 10, hang_min_s=500.0)
        run.alone_save_s = 50.0
        run.to_step(15)
        run.sleep(*((1,) if not is_given_up else ()))
        run.supervisor.ask_stop(StopReason.INTERRUPTED, by=number)
        if is_given_up:
            run.kill(2)
            run.run_until(lambda one=run: one.events("last_save_asked"))
        run.pass_time(after_s)
        assert run.ending is None
        run.supervisor.ask_stop(StopReason.INTERRUPTED, by=number)
        ending = run.run_to_end(within_s=1.0)
        assert ending.exit_code == (ExitCode.GAVE_UP if is_given_up else ExitCode.INTERRUPTED)
        assert "newest checkpoint: step 10" in run.supervisor.run_end.closing_words()


def not_exact(run, rank=1):
    """A rank tells of something that makes the run inexact."""
    changed = Adjusted(
        rank=rank, step=run.best, remedy="", inexact_reason="half from 7", in_peace=True
    )
    run.send(run.rank(rank), changed)


def test_a_run_that_must_be_exact_ends_when_it_is_not_and_saves_before(simulate):
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
    """Each rank tells of its own."""
    run = simulate()
    run.to_step(5)
    for rank in range(3):
        run.send(run.rank(rank), Proved(rank=rank, step=0, what="repeated"))
    assert_done(run)
    assert run.supervisor.facts.proved == {"repeated": {0}}
    assert [event["rank"] for event in run.events("proved")] == [0, 1, 2]


@pytest.mark.parametrize("silent", [False, True])
def test_a_rank_that_is_stopped_inside_the_reduction_is_the_one_that_hangs(simulate, silent):
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
