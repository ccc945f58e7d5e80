"""Ranks, store and zygote die, raise and leave, one after the other and together, as scripts: who is replaced."""

from __future__ import annotations

import pytest

from ddp_runner.kernel.processes.children import Ended
from ddp_runner.kernel.processes.rank_process import WhatItWrote
from ddp_runner.kernel.rules.lifecycle import RankState
from ddp_runner.start import STACKS_SIGNAL
from tests.supervisor.judging import assert_done, lost, plans
from tests.supervisor.simulated import EXIT_S, STEP_S


def test_a_run_without_faults_forms_once(simulate):
    """Control: no incident, one generation."""
    run = simulate()
    assert_done(run)
    assert len(run.events("forming")) == 1
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


def test_a_death_while_forming_starts_the_next_generation(simulate):
    """Nothing waits for the old one, whichever rank it is."""
    run = simulate()
    run.to_step(15)
    run.kill(1)
    run.run_until(lambda: len(run.events("forming")) == 2)
    run.kill(0)
    assert_done(run)
    assert plans(run) == [(1, "rank_killed", (1,)), (0, "rank_killed", (0,))]
    assert [record["generation"] for record in run.events("forming")] == [1, 2, 3]
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
    assert not any(secret in str(run.outputs.written) for secret in (first, second))


def test_each_of_two_faults_that_are_repaired_together_is_reported(simulate):
    """One line and one event for each when the world trains again, with its own outcome and time."""
    run = simulate()
    run.to_step(15)
    run.kill(1)
    run.run_until(lambda: len(run.events("forming")) == 2)
    run.kill(0)
    assert_done(run)
    reported = [text for _, text in run.outputs.said if " -> " in text]
    assert [text.split(" at ")[0] for text in reported] == [
        f"rank {rank} killed (SIGKILL)" for rank in (1, 0)
    ]
    repaired = run.events("repaired")
    assert [event["cause"] for event in repaired] == [plan["cause"] for plan in run.events("plan")]
    assert repaired[0]["seconds"] > repaired[1]["seconds"] > 0
    assert all(
        f"{event['seconds']:.2f} s" in text for event, text in zip(repaired, reported, strict=True)
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


def test_only_a_rank_that_hangs_is_made_to_write_its_stacks(simulate, monkeypatch):
    """The handler walks the frames of threads that go on: in a healthy rank that may end the process."""
    run = simulate()
    run.to_step(15)
    sent, send = [], run.signal

    def signal(pid, number):
        sent.append((pid, number))
        send(pid, number)

    monkeypatch.setattr(run, "signal", signal)
    hung = run.rank(1).pid
    run.freeze(1)
    assert_done(run)
    assert {pid for pid, number in sent if number == STACKS_SIGNAL} == {hung}


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
    assert (
        len({fault.incident.committed_step for fault in run.supervisor.recorder.accounting.faults})
        <= 1
    )
    assert_done(run)
    assert not [t for level, t in run.outputs.said if level == "WARNING" and t.endswith(" s")]


@pytest.mark.parametrize("order", [(1, -1, 2), (-1, -1, -1), (-1, 0, -1)])
def test_a_rank_the_store_and_a_rank_within_a_step_are_repaired(simulate, order):
    """Each in a generation of its own, none of which commits a step: still a storm, and no loop."""
    run = simulate()
    run.to_step(15)
    run.is_held = True
    for number, rank in enumerate(order, start=2):
        run.kill(rank)
        run.run_until(lambda wanted=number: len(run.events("forming")) == wanted)
    run.is_held = False
    assert_done(run)
    assert sum(lost(run)) == 0


def test_a_rank_that_raised_is_replaced_where_another_has_a_state(simulate):
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
    run.run_until(lambda: len(run.events("forming")) == 2)
    [stayed] = [rank for rank in range(ranks) if run.rank(rank).pid == first[rank]]
    assert_done(run)
    assert [len(replaced) for _, _, replaced in plans(run)] == [ranks - 1]
    assert lost(run) == [0]
    [reported] = [
        text for level, text in run.outputs.said if level == "WARNING" and "ValueError: no" in text
    ]
    assert reported.startswith(
        f"all {ranks} ranks raised, first rank " if ranks > 1 else "rank 0: "
    )
    assert f"rank {stayed} stays, with the newest state" in reported


def test_a_rank_that_raised_one_step_ahead_of_the_others_is_kept(simulate):
    """With its process the newest committed step would be lost."""
    run = simulate(ranks=2)
    run.to_step(17)
    run.random.random = lambda: 1.0  # nobody commits any more on losing the peer
    run._finish_committed = lambda *_: (
        None
    )  # nor the step that the other has: something holds them up
    run._commit(run.rank(0))
    ahead = run.rank(0)
    assert ahead.committed == run.rank(1).committed + 1
    run.fail(0)
    assert_done(run)
    assert plans(run) == [(0, "rank_raised", ())]
    assert ahead.seen == [1, 2]
    assert lost(run) == [0]


def test_a_rank_killed_but_not_reaped_has_no_state_to_give(simulate):
    """Nobody else lives: one of both loads the checkpoint."""
    run = simulate(ranks=2)
    run.to_step(15)
    reaped_after = iter([EXIT_S])  # rank 1 that raised; all others at once
    run.random.uniform = lambda low, high: next(reaped_after, low) if high == EXIT_S else low
    run.fail(1)
    run.run_until(lambda: run.events("plan"))
    assert run.world.ranks[1].state is RankState.KILLING
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
    assert [fault.all_ranks_dead for fault in run.supervisor.recorder.accounting.faults] == [True]
    run.pass_time(0.12)
    assert 10 < run.supervisor.facts.committed_step < 17
    run.kill(1)
    assert_done(run)
    assert lost(run) == [7, 0]
    assert [fault.all_ranks_dead for fault in run.supervisor.recorder.accounting.faults] == [
        True,
        False,
    ]


def test_a_program_killed_for_a_repair_has_not_failed(simulate):
    """Its rank had finished, and the last rank that had the state is lost before it finishes: both begin again."""
    run = simulate(ranks=2, steps=20)
    run.supervisor._goes_on_behind = True
    run.run_until(lambda: any(handle.has_finished for handle in run.world.present))
    (late,) = [handle.rank for handle in run.world.present if not handle.has_finished]
    run.kill(late)
    assert_done(run)
    assert plans(run) == [(late, "rank_killed", (0, 1))]


@pytest.mark.parametrize(
    ("how", "shown"), [({"signal_number": 9}, ""), ({"exit_code": 1}, "its last words")]
)
def test_the_last_words_of_a_killed_program_are_not_shown(simulate, how, shown):
    """They are lines of training, not the cause; control: those of a program that ends by an error."""
    run = simulate(ranks=2, steps=20)
    run.run_until(lambda: any(handle.has_finished for handle in run.world.present))
    ended = Ended(**{"pid": 1, "exit_code": None, "signal_number": None, "at_ns": 0, **how})
    wrote = WhatItWrote(last="its last words", when_asked="", before_log="")
    run.supervisor.run_end.program_ended(run.world.ranks[0], ended, wrote)
    run.run_to_end()
    assert run.ending.detail == shown


@pytest.mark.parametrize("word", ["best", "checkpoints/step_00000010.pt"])
@pytest.mark.parametrize("published", [True, False])
def test_a_checkpoint_that_nobody_could_report_is_not_passed_over(
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
