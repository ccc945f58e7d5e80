"""Fire drills in the life of a run, as scripts on simulated processes."""

from __future__ import annotations

import pytest

from ddp_runner.features.proof.parent import DrillKeeper
from ddp_runner.features.proof.rules import DRILL as DRILL_ROLE
from ddp_runner.features.spare.rules import SPARE as SPARE_ROLE
from ddp_runner.kernel.processes.children import Ended
from ddp_runner.kernel.rules.exits import ExitCode, RunStatus, StopReason
from ddp_runner.kernel.wire.events import Drill
from ddp_runner.kernel.wire.messages import DrillPart, NotKept
from tests.supervisor.judging import assert_done, lost, plans
from tests.supervisor.simulated import DRILL, SAVER, SPARE


def keeper_of(run):
    """Who looks after the drills of a simulated run."""
    return next(one for one in run.run.features if isinstance(one, DrillKeeper))


def give(run, step, rank=1, parts=("state", "share")):
    """The ranks have written what a drill of ``step`` needs."""
    for part in parts:
        writer = 0 if part == "state" else rank
        run.send(run.rank(writer), DrillPart(rank=writer, step=step, part=part))


def drilling(simulate, **changes):
    """A run with a drill of rank 1 under way."""
    run = simulate(steps=300, **changes)
    run.to_step(10)
    give(run, 10)
    run.run_until(lambda: run.rank(DRILL))
    return run


def answer(run, step=10, rank=1, **found):
    """The drill reports, and ends."""
    process = run.rank(DRILL)
    run.send(process, Drill(rank=rank, step=step, **found))
    run._end(process, exit_code=0)


def proof(run):
    return run.supervisor.recorder.findings.proved.get("drilled", set())


def reasons(run):
    return run.supervisor.facts.inexact_reasons


def test_a_drill_that_finds_no_difference_is_a_proof(simulate):
    """Reported by the process that ended at once; it is reaped, and there may be another one."""
    run = drilling(simulate)
    answer(run)
    run.run_until(lambda: proof(run) == {10})
    run.run_until(lambda: run.helper(DRILL_ROLE) is None)
    give(run, 50, rank=2)
    run.run_until(lambda: len(run.drills_asked) == 2)
    answer(run, 50, 2)
    assert_done(run)
    assert run.drills_asked == [(10, 1), (50, 2)]
    assert proof(run) == {10, 50}
    assert reasons(run) == lost(run) == []


def test_a_drill_needs_state_and_share(simulate):
    """Whichever comes last; one alone is never enough."""
    run = simulate(steps=100)
    run.to_step(10)
    give(run, 10, parts=("state",))
    run.to_step(30)
    assert run.drills_asked == []
    give(run, 10, rank=2, parts=("share",))
    assert_done(run)
    assert run.drills_asked == [(10, 2)]


def test_a_part_that_could_not_be_written_ends_that_drill(simulate):
    """Its cause is reported."""
    run = simulate(steps=100)
    run.to_step(10)
    problem = DrillPart(rank=0, step=10, part="state", problem="no room")
    run.send(run.rank(0), problem)
    run.pass_time(0.1)
    give(run, 10, parts=("share",))
    assert_done(run)
    assert run.drills_asked == []
    assert [event["text"] for event in run.events("drill_skipped")] == ["no room"]


def test_that_memory_is_short_is_said_once(simulate):
    """It will be at the next drill, too."""
    run = simulate(steps=100)
    for step in (10, 20):
        run.to_step(step)
        problem = "memory is short (9.0 GB wanted, 1.0 free)"
        run.send(run.rank(0), DrillPart(rank=0, step=step, part="state", problem=problem))
    assert_done(run)
    assert len(run.events("drill_skipped")) == 2
    assert sum("memory is short" in line for _, line in run.outputs.said) == 1


def test_each_rank_that_differs_is_a_reason(simulate):
    """Once: a second drill of the same rank that finds one says nothing new."""
    run = drilling(simulate)
    answer(run, differs="layer.weight")
    for step, rank in ((50, 2), (70, 1)):
        run.run_until(lambda: run.helper(DRILL_ROLE) is None)
        give(run, step, rank=rank)
        run.run_until(lambda: run.rank(DRILL))
        answer(run, step, rank, differs="layer.weight")
    assert_done(run)
    first, second = reasons(run)
    assert "rank 1 would not compute the same at step 10: first in layer.weight" in first
    assert "rank 2 would not compute the same at step 50" in second
    assert proof(run) == set()


def test_an_update_that_differs_blames_no_rank(simulate, monkeypatch):
    """It is said once, and each rank hears of it, also after a repair, which it does not prove."""
    run = drilling(simulate)
    world, heard = keeper_of(run)._world, []
    send = type(world).send

    def sends(world, handle, message):
        if isinstance(message, NotKept):
            heard.append(handle.rank)
        send(world, handle, message)

    monkeypatch.setattr(type(world), "send", sends)
    answer(run, differs="lr", updated=True)
    run.run_until(lambda: run.helper(DRILL_ROLE) is None)
    give(run, 50, rank=2)
    run.run_until(lambda: run.rank(DRILL))
    answer(run, 50, 2, differs="lr", updated=True)
    run.run_until(lambda: len(run.events("drill")) == 2)
    everybody = [one.rank for one in world.ranks]
    assert heard == everybody * 2
    assert len(everybody) > 1
    assert reasons(run) == lost(run) == plans(run) == []
    assert proof(run) == set()
    assert (
        sum("the same update at step 10: first in lr" in line for _, line in run.outputs.said) == 1
    )
    assert not any("update at step 50" in line for _, line in run.outputs.said)
    run.kill(1)
    run.run_until(lambda: run.events("repaired"), within_s=10.0)
    run.pass_time(0.5)
    assert heard == everybody * 3
    assert_done(run)


@pytest.mark.parametrize("number", [1, SPARE])
def test_a_drill_is_ended_for_a_dead_rank_and_no_spare(simulate, number):
    """And what it would have said is not heard any more."""
    run = drilling(simulate)
    drill = run.rank(DRILL)
    run.kill(number)
    run.pass_time(0.05)
    assert drill.dead == (number == 1)
    if number == SPARE:
        answer(run)
    assert_done(run)
    assert proof(run) == (set() if number == 1 else {10})
    assert len(plans(run)) == (number == 1)
    assert run.supervisor.recorder.accounting.faults_total == (number == 1)


def test_a_drill_forked_after_a_rank_died_is_ended_at_once(simulate):
    """Nobody else would end it, and no other drill could begin."""
    run = simulate(steps=300)
    run.answers_s = 0.3
    run.to_step(10)
    give(run, 10)
    run.run_until(lambda: run.rank(DRILL))
    drill = run.rank(DRILL)
    run.kill(1)
    run.run_until(lambda: drill.dead, within_s=5.0)
    run.run_until(lambda: run.events("repaired"), within_s=10.0)
    run.pass_time(0.5)
    give(run, run.best)
    run.run_until(lambda: len(run.drills_asked) == 2, within_s=10.0)
    assert_done(run)


@pytest.mark.parametrize("kills_zygote", [False, True])
def test_a_drill_that_cannot_be_forked_is_no_fault(simulate, kills_zygote):
    """Nor a lost spare; there may be another drill."""
    run = simulate(steps=300)
    run.to_step(15)
    spares = len(run.spares_asked)
    if kills_zygote:
        run.zygote.stopped = True
    else:
        run.drills_refused = 1
    give(run, 15)
    run.pass_time(0.1)
    if kills_zygote:
        run.kill(-2)
    run.run_until(lambda: run.events("drill_skipped"))
    run.run_until(lambda: run.world.can_fork)
    give(run, run.best)
    run.run_until(lambda: len(run.drills_asked) == 1)
    answer(run, *run.drills_asked[0])
    assert_done(run)
    assert len(proof(run)) == 1
    assert lost(run) == []
    assert len(run.spares_asked) == spares


def test_a_drill_that_takes_too_long_is_ended(simulate):
    """As long as a rank may take to start; ranks are never slower for it."""
    run = drilling(simulate, startup_timeout_s=5.0)
    drill = run.rank(DRILL)
    run.run_until(lambda: drill.dead, within_s=6.0)
    assert_done(run)
    [event] = run.events("drill_skipped")
    assert "longer than 5 s" in event["text"]


def test_a_drill_that_is_stopped_is_ended(simulate):
    """Nobody knows when it would go on."""
    run = drilling(simulate, hang_min_s=1.0)
    drill = run.rank(DRILL)
    run.freeze(DRILL)
    run.run_until(lambda: drill.dead, within_s=2.0)
    assert_done(run)
    assert [event["text"] for event in run.events("drill_skipped")] == ["its process was stopped"]


def test_of_drills_that_wait_the_newest_is_done(simulate):
    """While one is running."""
    run = drilling(simulate)
    give(run, 11)
    run.pass_time(0.05)
    give(run, 12, rank=2)
    run.pass_time(0.05)
    answer(run)
    run.run_until(lambda: len(run.drills_asked) == 2)
    answer(run, 12, 2)
    assert_done(run)
    assert run.drills_asked == [(10, 1), (12, 2)]
    assert proof(run) == {10, 12}


def test_no_drill_is_running_when_a_run_has_ended(simulate):
    """It is ended as soon as the first rank has finished."""
    run = simulate(steps=100)
    run.to_step(90)
    give(run, 90)
    run.run_until(lambda: run.rank(DRILL))
    drill = run.rank(DRILL)
    assert_done(run)
    assert drill.dead
    assert proof(run) == set()


@pytest.mark.parametrize("is_running", [True, False], ids=["running", "waiting"])
def test_a_drill_that_a_repair_cuts_short_is_made_up_for(simulate, is_running):
    """The next generation is asked for one, and the one after that which passed is not."""
    run = simulate(steps=300)
    run.to_step(10)
    if is_running:
        give(run, 10)
        run.run_until(lambda: run.rank(DRILL))
    else:
        give(run, 10, parts=("state",))
        run.run_until(lambda: keeper_of(run)._parts)
    assert keeper_of(run).is_owed is False
    run.kill(2)
    run.run_until(lambda: run.events("repaired"))
    assert [one["step"] for one in run.events("drill_skipped")] == [10]
    assert keeper_of(run).is_owed is True
    run.run_until(lambda: run.helper(DRILL_ROLE) is None)
    give(run, 50, rank=2)
    run.run_until(lambda: run.rank(DRILL))
    answer(run, 50, 2)
    run.run_until(lambda: proof(run) == {50})
    assert keeper_of(run).is_owed is False
    assert_done(run)


def replaced(simulate, *, steps=100, **changes):
    """A run in which rank 2 was replaced."""
    run = simulate(steps=steps, **changes)
    run.to_step(10)
    run.kill(2)
    run.run_until(lambda: run.events("repaired"))
    return run


def finishing(run):
    """All ranks have finished, and a drill has been under way since before that."""
    run.to_step(90)
    give(run, 90)
    run.run_until(lambda: run.rank(DRILL))
    run.run_until(lambda: run.supervisor._finished_at_s is not None)
    run.pass_time(2.0)
    assert run.ending is None
    return run


def waits(run):
    return [line for _, line in run.outputs.said if "is waited for" in line]


def test_the_end_waits_for_a_drill_where_a_rank_was_replaced(simulate):
    """It says so once, and ends as soon as the drill has passed."""
    run = finishing(replaced(simulate))
    answer(run, 90)
    began_s = run.clock.now_s
    assert_done(run)
    assert run.clock.now_s - began_s < 1.0
    assert (proof(run), reasons(run)) == ({90}, [])
    assert len(waits(run)) == 1
    assert "the drill of step 90 is waited for" in waits(run)[0]


def test_a_loop_that_fails_behind_its_training_says_what_is_not_proved(simulate):
    """No step is left to prove it; control: a loop that had proved its repair."""
    for proved in (False, True):
        run = drilling(simulate)
        answer(run)
        run.kill(2)
        run.run_until(lambda run=run: run.events("repaired"))
        if proved:
            run.to_step(50)
            give(run, 50)
            run.run_until(lambda run=run: run.rank(DRILL))
            answer(run, 50)
        run.supervisor._goes_on_behind = True
        run.run_until(lambda run=run: run.world.ranks[0].has_finished)
        run.leave(0, code=1)
        run.run_to_end()
        assert run.ending.status is RunStatus.FAILED
        assert [one.startswith("not proved") for one in reasons(run)] == [True] * (not proved)


@pytest.mark.parametrize("step", [90, 92], ids=["running", "waiting"])
def test_a_drill_that_was_cut_short_is_done_at_the_end(simulate, step):
    """Where no step has made up for it: what it needs was kept, of two the newer one's."""
    run = simulate(steps=100)
    run.to_step(90)
    give(run, 90)
    run.run_until(lambda: run.rank(DRILL))
    if step > 90:
        give(run, step)
        run.run_until(lambda: keeper_of(run)._waiting)
    run.kill(2)
    run.run_until(lambda: run.events("repaired"))
    run.run_until(lambda: run.supervisor._finished_at_s is not None)
    run.run_until(lambda: run.rank(DRILL), within_s=10.0)
    assert run.drills_asked == [(90, 1), (step, 1)]
    answer(run, step)
    assert_done(run)
    assert (proof(run), reasons(run)) == ({step}, [])


@pytest.mark.parametrize("times", [1, 2])
def test_a_drill_that_is_killed_is_done_again_at_the_end(simulate, times):
    """Once, as it proves a repair: what has killed it may be gone by then."""
    run = replaced(simulate)
    run.to_step(50)
    give(run, 50)
    run.run_until(lambda: run.rank(DRILL))
    run.kill(DRILL)
    run.run_until(lambda: run.helper(DRILL_ROLE) is None)
    run.run_until(lambda: run.supervisor._finished_at_s is not None)
    run.run_until(lambda: run.rank(DRILL), within_s=10.0)
    assert run.drills_asked == [(50, 1), (50, 1)]
    if times == 1:
        answer(run, 50)
    else:
        run.kill(DRILL)
    began_s = run.clock.now_s
    assert_done(run)
    assert run.clock.now_s - began_s < 1.0
    assert (proof(run), bool(reasons(run))) == (({50}, False) if times == 1 else (set(), True))


def test_the_end_waits_for_a_drill_only_so_long(simulate):
    """Then the run is not exact: it was not proved."""
    run = finishing(replaced(simulate))
    began_s = run.clock.now_s
    assert_done(run)
    assert 25.0 < run.clock.now_s - began_s < 31.0
    [reason] = reasons(run)
    assert reason.startswith("not proved: a rank was replaced")
    assert "that of step 90: it had not ended 30 s after training" in reason
    assert [event["step"] for event in run.events("not_proved")] == [90]


def test_who_asks_for_a_stop_does_not_wait_for_a_drill(simulate):
    """The run is complete, and was not proved."""
    run = finishing(replaced(simulate))
    began_s = run.clock.now_s
    run.supervisor.ask_stop(StopReason.INTERRUPTED)
    assert_done(run)
    assert run.clock.now_s - began_s < 1.0
    assert "asked to stop" in reasons(run)[0]


@pytest.mark.parametrize("differs", ["layer.weight", ""])
def test_a_run_that_must_be_exact_fails_at_its_end(simulate, differs):
    """Of a drill that differs, and of one that does not end."""
    run = finishing(replaced(simulate, require_exact=True))
    if differs:
        answer(run, 90, differs=differs)
    ending = run.run_to_end()
    assert (ending.status, ending.exit_code) == (RunStatus.FAILED, ExitCode.FAILED)
    assert "recovery.require_exact is set: " in ending.reason
    assert ("not proved" in ending.reason) == (not differs)


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_drill_that_came_to_nothing_is_no_proof(simulate, is_replaced):
    """Control: where no rank was replaced there is nothing to prove."""
    run = replaced(simulate) if is_replaced else simulate(steps=100)
    run.to_step(50)
    problem = DrillPart(rank=0, step=50, part="state", problem="memory is short")
    run.send(run.rank(0), problem)
    assert_done(run)
    assert waits(run) == []
    assert [("that of step 50: memory is short" in reason) for reason in reasons(run)] == (
        [True] * is_replaced
    )


def test_a_replaced_rank_without_any_drill_changes_nothing(simulate):
    """Drills may be impossible, or off, which is said."""
    for drill_at, is_said in (((2,), False), (None, True)):
        run = replaced(simulate, drill_at=drill_at)
        assert_done(run)
        assert reasons(run) == waits(run) == []
        said = [line for _, line in run.outputs.said if "1 repair is not proved" in line]
        assert len(said) == is_said


def test_what_users_code_starts_in_a_helper_ends_with_it(simulate):
    """The guardian hears of spare and drill, as of ranks; store and saver run none of it."""
    run = drilling(simulate)
    run.run_until(lambda: run.helper(SPARE_ROLE) is not None and run.helper(SPARE_ROLE).is_ready)
    run.run_until(lambda: run.rank(SAVER) is not None)
    theirs = {run.rank(number).pid for number in (DRILL, SPARE)}
    ours = {run.rank(number).pid for number in (-1, SAVER)}
    assert theirs <= set(run.node.guardian.watched)
    assert not ours & set(run.node.guardian.watched)
    run.kill(DRILL, SPARE, SAVER)
    run.run_until(lambda: theirs <= set(run.node.guardian.ended))
    run.run_until(lambda: run.events("saver_ended"))
    assert not ours & set(run.node.guardian.ended)


def test_what_a_drill_said_before_it_was_reaped_is_heard(simulate):
    """Though nobody had read it: it may end in the turn in which it reports."""
    run = drilling(simulate)
    process = run.rank(DRILL)
    run.send(process, Drill(rank=1, step=10))
    run._end(process, exit_code=0)
    ended = Ended(pid=process.pid, exit_code=0, signal_number=None, at_ns=0)
    run.supervisor.on_ended(ended)
    assert proof(run) == {10}
    assert run.helper(DRILL_ROLE) is None


def asked(run):
    """Each step that ranks were asked to drill, with whose share, and who was asked."""
    return run.drills_at


def test_steps_at_random_are_drilled_for_the_whole_run(simulate):
    """So many that they take their share, each rank in its turn; all hear of each."""
    run = simulate(steps=8000, proof_share=1.0)
    for number in range(3):
        run.run_until(lambda count=number: len({one.step for one, _ in asked(run)}) > count)
        order = asked(run)[-1][0]
        assert {rank for one, rank in asked(run) if one == order} == set(
            range(len(run.world.ranks))
        )
        run.to_step(order.step)
        give(run, order.step, rank=order.rank)
        run.run_until(lambda: run.rank(DRILL))
        answer(run, order.step, order.rank)
        run.run_until(lambda: run.helper(DRILL_ROLE) is None)
    assert_done(run)
    assert len(proof(run)) == 3
    assert reasons(run) == lost(run) == []


@pytest.mark.parametrize("changes", [{"proof_share": 0}, {"proof_share": 0.5, "drill_at": None}])
def test_no_step_at_random_is_drilled_where_that_is_off(simulate, changes):
    """By either setting."""
    run = simulate(steps=1000, **changes)
    assert_done(run)
    assert asked(run) == []


def test_a_repair_is_proved_by_the_drill_of_a_survivor(simulate):
    """The generation that forms is asked for one; how many are proved is in the record."""
    run = simulate(steps=300)
    run.to_step(10)
    run.kill(0)
    run.run_until(lambda: run.events("repaired"))
    assert keeper_of(run).owes().rank == 1
    counted = [(one["proved"], one["repairs"]) for one in run.events("repairs_proved")]
    assert counted == [(0, 1)]
    give(run, 20, rank=1)
    run.run_until(lambda: run.rank(DRILL))
    answer(run, 20, 1)
    run.run_until(lambda: proof(run) == {20})
    assert keeper_of(run).owes() is None
    assert_done(run)
    counted = [(one["proved"], one["repairs"]) for one in run.events("repairs_proved")]
    assert counted == [(0, 1), (1, 1)]
    assert reasons(run) == []


def test_an_earlier_proof_is_none_of_a_later_repair(simulate):
    """A drill had passed before the rank was lost, and none has since: the run is not said to be exact."""
    run = drilling(simulate)
    answer(run)
    run.run_until(lambda: proof(run) == {10})
    run.kill(2)
    run.run_until(lambda: run.events("repaired"))
    assert_done(run)
    [reason] = reasons(run)
    assert reason.startswith("not proved: a rank was replaced")


@pytest.mark.parametrize("fact", ["took_over", "owes_proof"])
@pytest.mark.parametrize("is_proved", [True, False])
def test_a_run_that_was_taken_over_is_to_be_proved(simulate, is_proved, fact):
    """What the coordinator before has not proved is not known: the takeover is a repair, of the ranks without memory."""
    run = simulate(steps=100)
    setattr(run.supervisor.facts, fact, True)
    run.to_step(10)
    assert keeper_of(run).owes() is not None
    give(run, 20)
    run.run_until(lambda: run.rank(DRILL))
    if is_proved:
        answer(run, 20)
        run.run_until(lambda: proof(run) == {20})
    else:
        run._end(run.rank(DRILL), signal_number=9)
    assert_done(run)
    assert any("not proved" in one for one in reasons(run)) is not is_proved
    assert [one["proved"] for one in run.events("repairs_proved")] == [0, 1][: 1 + is_proved]


@pytest.mark.parametrize("owes_proof", [False, True])
def test_a_proof_owed_when_no_step_is_left_is_missing(simulate, owes_proof):
    """The supervisor was killed while the end waited for the drill; the next launch has nothing to drill."""
    run = simulate(steps=100)
    run.checkpoint = run.best = 100
    run.supervisor.facts.owes_proof = owes_proof
    assert_done(run)
    assert [one[:10] for one in reasons(run)] == ["not proved"] * owes_proof


def test_another_stage_is_no_repair(simulate):
    """All ranks are replaced by some that train something else."""
    run = simulate(stage_ends=(15, 30))
    assert_done(run)
    assert run.events("repairs_proved") == reasons(run) == []


def test_a_drill_of_which_one_part_never_comes_holds_up_no_other(simulate):
    """After a while it is given up, and steps at random are drilled again."""
    run = simulate(steps=60_000, proof_share=1.0)
    run.to_step(10)
    give(run, 10, parts=("state",))
    run.run_until(lambda: keeper_of(run)._parts)
    run.run_until(lambda: asked(run))
    assert not keeper_of(run)._parts


def of_loop(run):
    """Have the simulated run be one of a loop of the user's own, for its drills."""
    keeper = keeper_of(run)
    keeper._first_rank = 1
    keeper._repairs.ranks = [1, 2, 3]
    return keeper


def test_rank_0_of_a_loop_proves_no_repair(simulate):
    """Another survivor does; where only rank 0 is left of those that have lived through it, any drill does."""
    run = simulate(steps=300, ranks=4)
    keeper = of_loop(run)
    run.to_step(10)
    run.kill(1)
    run.run_until(lambda: len(run.events("forming")) == 2)
    assert keeper.owes().rank == 2
    assert keeper._drillable() == [1, 2, 3]


def test_a_step_that_is_drilled_again_keeps_its_new_files(simulate, tmp_path):
    """All ranks have gone back: what is written again is not removed with the old drill."""
    run = simulate(steps=300)
    run.to_step(10)
    keeper = keeper_of(run)
    keeper._folder, removed = tmp_path, []
    keeper._remove = removed.append
    keeper._kept = (20, 1)
    give(run, 20, parts=("share",))
    run.pass_time(0.1)
    keeper._keep(None)
    assert removed == []


def test_why_a_drill_cannot_be_done_is_said_once(simulate):
    """The program asks the others in each of its steps."""
    run = simulate(steps=100)
    for step in (10, 20):
        run.to_step(step)
        problem = "the loop asks the other ranks for something (allreduce)"
        run.send(run.rank(0), DrillPart(rank=0, step=step, part="state", problem=problem))
    assert_done(run)
    assert len(run.events("drill_skipped")) == 2
    assert sum("asks the other ranks" in line for _, line in run.outputs.said) == 1
