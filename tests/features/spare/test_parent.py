"""The spare in the life of a run, as scripts on simulated processes."""

from __future__ import annotations

import pytest

from ddp_runner.core.faults import FaultKind
from ddp_runner.features.spare.rules import BEGIN_TIMEOUT_S
from ddp_runner.features.spare.rules import SPARE as SPARE_ROLE
from tests.supervisor.judging import assert_done, lost, plans
from tests.supervisor.simulated import FORK_S, SPARE, TICK_S, WARM_S


def with_spare(simulate, **changes):
    run = simulate(steps=300, **changes)
    run.to_step(15)
    run.run_until(lambda: run.helper(SPARE_ROLE) is not None and run.helper(SPARE_ROLE).is_ready)
    return run


def repaired_s(run):
    run.run_until(lambda: run.events("repaired"), within_s=10.0)
    return run.supervisor.recorder.accounting.faults[0].seconds["total"]


def test_a_dead_rank_is_replaced_by_the_spare_and_another_follows(simulate):
    """No fork is waited for; the process that was there is the rank."""
    run = with_spare(simulate)
    spare = run.rank(SPARE)
    run.kill(1)
    run.run_until(lambda: run.events("repaired"))
    assert run.rank(1) is spare
    run.run_until(lambda: run.rank(SPARE))
    assert_done(run)
    assert plans(run) == [(1, "rank_killed", (1,))]
    assert [(event["rank"], event["pid"]) for event in run.events("spare_taken")] == [
        (1, spare.pid)
    ]
    assert lost(run) == [0]


def test_without_the_setting_there_is_none(simulate):
    """Control: every replacement is forked."""
    run = simulate(warm_spare=False)
    run.to_step(15)
    run.kill(1)
    assert_done(run)
    assert run.spares_asked == []


def test_a_spare_ready_before_its_zygote_answers_has_its_pid(simulate):
    """The zygote may be held up between the fork and its word; until then nobody knows whose it is."""
    run = simulate(steps=300)
    run.answers_s = 5 * WARM_S
    run.run_until(lambda: run.events("spare_ready"))
    assert [event["pid"] for event in run.events("spare_ready")] == [run.rank(SPARE).pid]
    assert_done(run)
    assert len(run.events("spare_ready")) == 1


@pytest.mark.parametrize("apart_s", [0.0, 0.002, 0.01, 0.05])
def test_of_two_that_die_together_one_gets_the_spare(simulate, apart_s):
    """And the other a fork."""
    run = with_spare(simulate)
    spare = run.rank(SPARE).pid
    run.kill(1)
    run.pass_time(apart_s)
    run.kill(2)
    assert_done(run)
    assert sorted(rank for _, _, ranks in plans(run) for rank in ranks) == [1, 2]
    assert [event["pid"] for event in run.events("spare_taken")][:1] == [spare]
    assert sum(lost(run)) == 0


def test_a_spare_is_forked_without_faults_only(simulate):
    """Every rank trains, and has done a step since the world was formed."""
    run = with_spare(simulate, max_restarts=100)
    for rank in (1, 2, 0, 1):
        run.kill(rank)
        run.pass_time(0.4)
    assert_done(run)
    assert len(run.spares_asked) >= 3
    assert all(states == ["TRAINING"] * 3 for states in run.spares_asked), run.spares_asked


@pytest.mark.parametrize("apart_s", [None, -0.02, -0.004, -0.001, 0.0, 0.001, 0.004, 0.008, 0.02])
def test_a_spare_that_is_killed_is_no_fault_whenever_it_is(simulate, apart_s):
    """Alone, shortly before it is needed, or while it is made a rank; the rank is forked then."""
    run = with_spare(simulate)
    spare = run.rank(SPARE)
    if apart_s is None or apart_s <= 0:
        run.signal(spare.pid)
        run.pass_time(-(apart_s or -1.0))
    if apart_s is not None:
        run.kill(1)
        run.pass_time(max(0.0, apart_s))
        if spare.rank == SPARE:
            run.signal(spare.pid)
    assert_done(run)
    assert plans(run) == ([] if apart_s is None else [(1, "rank_killed", (1,))])
    assert run.supervisor.recorder.accounting.faults_total == (0 if apart_s is None else 1)
    assert sum(lost(run)) == 0


@pytest.mark.parametrize("ranks", [(1,), (1, 2), (0, 1, 2)])
def test_a_stopped_spare_is_passed_over_at_once(simulate, ranks):
    """The replacement is forked as ever, and the spare itself replaced later."""
    run = with_spare(simulate, hang_min_s=1.0)
    spare = run.rank(SPARE)
    run.freeze(SPARE)
    run.kill(*ranks)
    assert repaired_s(run) < 0.5
    assert run.events("spare_taken") == []
    run.run_until(lambda: spare.dead, within_s=2.0)
    assert_done(run)
    assert len(run.events("spare_ready")) >= 2
    assert len(plans(run)) == 1


def test_a_spare_that_never_becomes_the_rank_costs_a_moment(simulate):
    """Stopped between the look at it and its waking up: a fork takes its place; one fault, not two."""
    run = with_spare(simulate, hang_min_s=5.0)
    spare = run.rank(SPARE)
    run.sleep(SPARE)
    run.kill(1)
    run.run_until(lambda: run.events("spare_taken"))
    spare.asleep = False  # and the system says so now
    assert repaired_s(run) < BEGIN_TIMEOUT_S + 0.5
    assert spare.dead
    assert run.rank(1) is not spare
    assert_done(run)
    assert plans(run) == [(1, "rank_killed", (1,))]
    assert run.supervisor.recorder.accounting.faults_total == 1


def test_a_spare_that_a_busy_machine_lets_wait_is_given_its_time(simulate):
    """Control: it is not stopped, and the machine would not fork any sooner."""
    run = with_spare(simulate, hang_min_s=5.0)
    spare = run.rank(SPARE)
    run.sleep(SPARE)
    run.kill(1)
    run.pass_time(3 * BEGIN_TIMEOUT_S)
    run.wake()
    run.run_until(lambda: run.events("repaired"))
    assert run.rank(1) is spare
    assert_done(run)
    assert plans(run) == [(1, "rank_killed", (1,))]


def test_spares_that_keep_dying_end_without_harm(simulate):
    """There are a few more, each later, and the run goes on without."""
    run = simulate(steps=2000)
    run.to_step(15)
    while run.ending is None:
        if run.rank(SPARE) is not None and run.helper(SPARE_ROLE).is_ready:
            run.kill(SPARE)
        run.pass_time(TICK_S / 2)
    assert len(run.spares_asked) == SPARE_ROLE.tries
    assert run.supervisor.recorder.accounting.faults_total == 0


def test_spares_that_die_between_used_ones_are_in_no_row(simulate):
    """Each of those shows that one is worth having; there is always another."""
    run = simulate(steps=3000, max_restarts=1000)
    for number in range(1, SPARE_ROLE.tries + 2):
        first = another(run, None)
        run.kill(SPARE)
        second = another(run, first)
        run.kill(1)
        run.run_until(lambda number=number: len(run.events("repaired")) == number)
        assert run.rank(1) is second
    another(run, second)
    assert_done(run)


def test_no_room_for_a_spare_is_no_fault(simulate):
    """The zygote says so and lives; a later try succeeds."""
    run = simulate(steps=300)
    run.spares_refused = 2
    run.run_until(lambda: run.events("spare_ready"), within_s=30.0)
    run.kill(1)
    assert_done(run)
    assert len(run.events("spare_ended")) == 2
    assert run.zygotes == 1
    assert plans(run) == [(1, "rank_killed", (1,))]


@pytest.mark.parametrize("harm", ["kill", "sleep"])
def test_a_zygote_that_owes_a_spare_may_die_or_hang(simulate, harm):
    """No rank is touched, and the next zygote gives the spare."""
    run = simulate(steps=2000)
    run.run_until(lambda: run.spares_asked)
    assert run.helper(SPARE_ROLE).pid is None
    getattr(run, harm)(-2)
    run.run_until(lambda: run.events("spare_ready"), within_s=40.0)
    assert run.zygotes == 2
    assert run.supervisor.recorder.accounting.faults_total == 0
    assert_done(run)


def test_a_spare_outlives_its_zygote(simulate):
    """It is the supervisor's child."""
    run = with_spare(simulate)
    spare = run.rank(SPARE)
    run.kill(-2)
    run.run_until(lambda: len(run.events("zygote_ready")) == 2)
    run.kill(1)
    run.run_until(lambda: run.events("repaired"))
    assert run.rank(1) is spare
    assert_done(run)


@pytest.mark.parametrize("apart_s", [-0.02, 0.0, 0.02])
def test_a_rank_that_dies_with_the_zygote_gets_the_spare_at_once(simulate, apart_s):
    """The next zygote imports for seconds; who is lost meanwhile, with the spare gone, waits for it."""
    run = with_spare(simulate, import_s=8.0)
    spare = run.rank(SPARE)
    for number in (1, -2) if apart_s < 0 else (-2, 1):
        run.kill(number)
        run.pass_time(abs(apart_s))
    assert repaired_s(run) < 0.5
    assert run.rank(1) is spare
    assert len(run.events("zygote_ready")) == 1, "the first one's"
    run.kill(2)
    run.run_until(lambda: len(run.events("repaired")) == 2)
    assert len(run.events("zygote_ready")) == 2
    assert_done(run)
    assert sum(lost(run)) == 0


@pytest.mark.parametrize("ranks", [(1,), (1, 2)], ids=["one", "two"])
@pytest.mark.parametrize("harm", ["kill", "freeze", "nothing"])
def test_without_a_zygote_whom_the_spare_cannot_replace_waits_for_one(simulate, ranks, harm):
    """The spare dies or is stopped in the same moment, or there are two lost ranks and one spare."""
    run = with_spare(simulate, hang_min_s=5.0)
    if harm == "kill":
        run.kill(SPARE)
    elif harm == "freeze":
        run.rank(SPARE).stopped = True
    run.kill(-2, *ranks)
    assert_done(run)
    assert sorted(rank for _, _, replaced in plans(run) for rank in replaced) == list(ranks)
    assert len(run.events("spare_taken")) >= (harm == "nothing")
    assert len(run.events("zygote_ready")) == 2
    assert sum(lost(run)) == 0
    assert run.supervisor.recorder.accounting.faults_total == len(plans(run))


def test_a_spare_that_is_not_warm_yet_is_not_waited_for(simulate):
    """A fork costs less than to wonder; it serves the next one."""
    run = simulate(steps=300)
    run.run_until(lambda: run.spares_asked)
    run.kill(1)
    run.pass_time((FORK_S + WARM_S) / 4)
    run.run_until(lambda: run.events("repaired"))
    spare = run.rank(SPARE)
    assert spare is not None
    run.pass_time(0.3)
    run.kill(2)
    run.run_until(lambda: len(run.events("repaired")) == 2)
    assert run.rank(2) is spare
    assert_done(run)


GPUS = (0, 1, 2)


def said(run):
    return [line for _, line in run.outputs.said if "spare" in line]


def another(run, spare):
    """Wait until there is one that is not ``spare``."""
    before = None if spare is None else spare.pid
    run.run_until(
        lambda: (
            run.helper(SPARE_ROLE)
            and run.helper(SPARE_ROLE).is_ready
            and run.helper(SPARE_ROLE).pid not in {None, before}
        ),
        within_s=30.0,
    )
    return run.rank(SPARE)


@pytest.mark.parametrize("setting", [True, "process"])
@pytest.mark.parametrize("rank", GPUS)
def test_on_gpus_the_spare_holds_no_memory_and_serves_every_rank(simulate, setting, rank):
    """It is the rank that was lost, wherever that was."""
    run = with_spare(simulate, devices=GPUS, warm_spare=setting)
    spare = run.rank(SPARE)
    run.kill(rank)
    run.run_until(lambda: run.events("repaired"))
    assert run.rank(rank) is spare
    assert_done(run)
    assert set(run.spare_kinds) == {"libraries"}
    assert said(run) == []


def test_out_of_memory_says_nothing_of_a_spare_that_holds_none(simulate):
    """Control: nothing was held, and nothing is given up."""
    run = with_spare(simulate, devices=GPUS)
    spare = run.rank(SPARE)
    run.fail(2, "CUDA out of memory", kind=FaultKind.OUT_OF_MEMORY)
    run.run_until(lambda: run.events("repaired"))
    assert run.rank(SPARE) is spare
    assert_done(run)
    assert said(run) == []
