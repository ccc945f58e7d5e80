"""Fire drills in the life of a run, as scripts on simulated processes."""

from __future__ import annotations

import pytest

from ddp_runner.core.messages import Drilled, DrillPart
from tests.supervisor.judging import assert_done, lost, plans
from tests.supervisor.simulated import DRILL, SPARE


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
    run.send(process, Drilled(rank=rank, step=step, **found))
    run._end(process, exit_code=0)


def proof(run):
    return run.supervisor.facts.proved.get("drilled", set())


def reasons(run):
    return run.supervisor.facts.inexact_reasons


def test_a_drill_that_finds_no_difference_is_a_proof(simulate):
    """Reported by the process that ended at once; it is reaped, and there may be another one."""
    run = drilling(simulate)
    answer(run)
    run.run_until(lambda: proof(run) == {10})
    run.run_until(lambda: run.node.drill is None)
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


def test_a_difference_makes_the_run_inexact_once(simulate):
    """A second drill that finds one says nothing new."""
    run = drilling(simulate)
    answer(run, differs="layer.weight")
    run.run_until(lambda: run.node.drill is None)
    give(run, 50, rank=2)
    run.run_until(lambda: run.rank(DRILL))
    answer(run, 50, 2, differs="layer.weight")
    assert_done(run)
    [reason] = reasons(run)
    assert "rank 1 would not compute the same at step 10: first in layer.weight" in reason
    assert proof(run) == set()


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
        run.run_until(lambda: run.supervisor.keeper.drills._parts)
    assert run.supervisor.keeper.drills.is_owed is False
    run.kill(2)
    run.run_until(lambda: run.events("repaired"))
    assert [one["step"] for one in run.events("drill_skipped")] == [10]
    assert run.supervisor.keeper.drills.is_owed is True
    run.run_until(lambda: run.node.drill is None)
    give(run, 50, rank=2)
    run.run_until(lambda: run.rank(DRILL))
    answer(run, 50, 2)
    run.run_until(lambda: proof(run) == {50})
    assert run.supervisor.keeper.drills.is_owed is False
    assert_done(run)
