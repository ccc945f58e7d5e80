"""Each row of what is noticed and done about several machines, on a network that does as a test says."""

from __future__ import annotations

import signal
from dataclasses import replace
from functools import partial

import pytest

from ddp_runner.features.machines.parent import admission
from ddp_runner.kernel.recovery.zygote_keeper import ZYGOTES_LOST_MAX
from ddp_runner.kernel.rules.exits import ExitCode, StopReason
from ddp_runner.kernel.system.folder_owner import FolderOwner
from tests.features.machines.simulated_nodes import NodesSimulation
from tests.supervisor.judging import assert_generations_grow, lost, plans

SILENT_S, LEASE_S = 3.0, 2.4  # of the settings that all of these have


@pytest.fixture
def simulate(tmp_path):
    """``simulate(nodes=2, ...)``: machines of two ranks each that have begun to train."""
    made = []

    def simulation(**changes):
        run = NodesSimulation(tmp_path, **changes)
        made.append(run)
        run.to_step(10)
        return run

    yield simulation
    for one in made:
        one.close()


def pids(run, *ranks):
    return [run.world.ranks[rank].pid for rank in ranks]


def faults(run):
    return [(kind, culprit) for culprit, kind, _ in plans(run)]


def assert_done(run):
    """All have come to the end, on all machines; each generation was one, of one process a rank."""
    ending = run.run_to_end()
    assert ending.exit_code is ExitCode.DONE, run.where()
    codes = run.exit_codes()
    assert set(codes) == {0}, run.where()
    assert_generations_grow(run)


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("how", ["kill", "freeze", "leave", "fail"])
def test_a_rank_lost_anywhere_is_replaced_alone(simulate, how, rank):
    """By the zygote or spare of its own machine; the others keep their processes."""
    run = simulate()
    others = [one for one in range(4) if one != rank]
    before, began_s = pids(run, *others), run.clock.now_s
    getattr(run, how)(rank)
    run.run_until(lambda: 2 in run.formed)
    assert pids(run, *others) == before
    assert lost(run) == [0]
    assert run.clock.now_s - began_s < (6.0 if how == "freeze" else 0.5)
    assert {one.machine.number for one in run.formed[2] if one.rank == rank} == {rank // 2}
    assert_done(run)


def test_an_abort_reaches_other_machines_within_half_a_round_trip(simulate):
    """A rank of the coordinator's fails; who waits for it elsewhere hears of it at once."""
    run = simulate(nodes=3)
    run.delay_s = 0.05
    run.pass_time(1.0)
    run.fail(0)
    run.down |= {(0, 1), (1, 0)} - {(0, 1)}  # nobody learns of it by a broken connection
    at_s = run.clock.now_s
    run.run_until(lambda: run.rank(2).generation == 0)
    assert run.clock.now_s - at_s < 0.3
    run.heal()
    assert_done(run)


def test_a_supervisor_that_is_killed_loses_its_machine_at_once(simulate):
    """Its connection ends. Started again by whoever places machines, it gets its ranks again."""
    run = simulate()
    stay, at_s = pids(run, 0, 1), run.clock.now_s
    machine = run.followers[0]
    machine.kill()
    run.run_until(lambda: run.said("is lost: it has closed the connection"))
    assert run.clock.now_s - at_s < 0.2
    run.pass_time(5.0)
    run.start(machine)
    assert_done(run)
    assert [one.pid for one in run.formed[2][:2]] == stay
    assert [kind for kind, _ in faults(run)] == ["node_lost"]
    assert lost(run) == [0]


def test_a_machine_without_power_is_lost_by_its_silence(simulate):
    """Nothing ends: only its looks do not come. Its ranks are not called hung."""
    run = simulate()
    at_s = run.clock.now_s
    run.followers[0].lose_power()
    run.run_until(lambda: run.said("is lost: nothing was heard"))
    assert SILENT_S - 0.6 < run.clock.now_s - at_s < SILENT_S + 0.5
    run.start(run.followers[0])
    assert_done(run)
    assert {kind for kind, _ in faults(run)} == {"node_lost"}
    assert lost(run) == [0]


@pytest.mark.parametrize(("out", "back"), [(True, True), (True, False), (False, True)])
def test_a_link_that_heals_in_time_costs_no_step(simulate, out, back):
    """Cut both ways or one way, a machine is waited for; its ranks keep their processes and memory."""
    run = simulate(steps=300)
    before = pids(run, 0, 1, 2, 3)
    run.cut(1, out=out, back=back)
    run.run_until(lambda: run.said("is lost"))
    assert not run.said("going on without")
    run.pass_time(5.0)
    run.heal()
    run.run_until(lambda: 2 in run.formed)
    assert pids(run, 0, 1, 2, 3) == before
    assert lost(run) == [0]
    assert_done(run)
    assert not run.said("going on without")


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL])
def test_a_zygote_lost_while_its_machine_is_cut_off_costs_nothing(simulate, number):
    """Its ranks wait with their memory, and another zygote is started; the machine ended instead."""
    run = simulate(steps=300)
    before = pids(run, 0, 1, 2, 3)
    run.cut(1)
    run.run_until(lambda: run.said("is lost"))
    run.signal(run.followers[0].zygote.pid, number)
    run.pass_time(2.0)
    run.heal()
    run.run_until(lambda: 2 in run.formed)
    assert pids(run, 0, 1, 2, 3) == before
    run.kill(2)
    assert_done(run)
    assert lost(run) == [0, 0]


def test_a_machine_with_living_ranks_outlasts_its_zygotes(simulate):
    """However many are lost: its ranks train on, another is tried a minute later, and replaces a rank."""
    run = simulate(steps=10**6, warm_spare=False)
    (machine,) = run.followers
    before = pids(run, 2, 3)
    for _ in range(ZYGOTES_LOST_MAX + 1):
        run.pass_time(1.5)
        run.signal(machine.zygote.pid, signal.SIGSEGV)
    run.run_until(lambda: run.said("it is tried again in 60 s"))
    at_s = run.clock.now_s
    run.run_until(lambda: not run.links.nodes[0].can_fork)
    run.run_until(lambda: run.links.nodes[0].can_fork)
    assert 59.0 < run.clock.now_s - at_s < 63.0
    assert pids(run, 2, 3) == before
    run.kill(2)
    run.run_until(lambda: 2 in run.formed)
    assert lost(run) == [0]
    run.steps = run.best + 20
    assert_done(run)


def test_a_short_cut_is_nothing_at_all(simulate):
    """Control: what is shorter than the silence that counts costs time only."""
    run = simulate(steps=200)
    before = pids(run, 0, 1, 2, 3)
    run.cut(1)
    run.pass_time(1.5)
    run.heal()
    run.pass_time(3.0)
    assert pids(run, 0, 1, 2, 3) == before
    assert_done(run)
    assert not faults(run)


def _crash(run, machine, *, wait_s):
    """Its supervisor comes again after so long, and is lost before its ranks train."""
    run.pass_time(wait_s)
    joined = sum("node 1" in line and "is there" in line for _, line in run.outputs.said)
    run.start(machine)
    run.run_until(
        lambda: (
            sum("node 1" in line and "is there" in line for _, line in run.outputs.said) > joined
        )
    )
    machine.kill()


def test_a_machine_that_is_lost_while_it_starts_gets_no_new_patience(simulate):
    """The others wait from its first loss; each loss began the wait again, for as long as it crashed."""
    run = simulate(nodes=2, least=1, steps=400, node_patience_s=10.0)
    run.followers[0].kill()
    at_s = run.clock.now_s
    _crash(run, run.followers[0], wait_s=8.0)
    assert not run.said("going on without")
    run.run_until(lambda: run.said("going on without node 1"))
    assert 9.9 < run.clock.now_s - at_s < 11.0
    run.run_until(lambda: len(run.world.present) == 2 and run.supervisor._is_fault_free)
    run.start(run.followers[0])
    assert_done(run)


def test_a_machine_that_crashes_while_it_starts_does_not_delay_the_end(simulate):
    """Where the run cannot do without it, the limit counts from its first loss as well."""
    run = simulate(nodes=2, conf={"join_timeout_s": 20.0}, node_patience_s=5.0)
    run.followers[0].kill()
    at_s = run.clock.now_s
    for _ in range(4):
        _crash(run, run.followers[0], wait_s=5.0)
    assert run.run_to_end().exit_code is ExitCode.PREEMPTED, run.where()
    assert 24.9 < run.clock.now_s - at_s < 27.0


def test_a_machine_lost_three_times_is_left_out(simulate, monkeypatch):
    """The run continues at once without it, says so, and takes it in five minutes later, or here one."""
    assert admission.LEFT_OUT_S == 300.0
    monkeypatch.setattr(admission, "LEFT_OUT_S", 60.0)
    run = simulate(nodes=3, least=2, steps=9000, node_patience_s=30.0)
    machine = run.followers[1]
    machine.start = partial(machine.start, run._plan)
    meeting = replace(run.meeting, options=replace(run.meeting.options, node_rank=2))
    for times in (0, 1, 2, 3):  # first as a machine without a number
        machine.kill()
        if times < 3:
            run.pass_time(2.0)
            machine.start(meeting)
            run.run_until(lambda: run.supervisor._is_fault_free and len(run.world.present) == 6)
            run.pass_time(1.0)
    at_s = run.clock.now_s
    run.run_until(lambda: run.said("going on without node 2"))
    assert run.clock.now_s - at_s < 1.0
    machine.start(meeting)
    run.run_until(lambda: run.said("and waits: it was lost 3 times"))
    (view,) = (one for one in run.links.views() if one.number == 2)
    assert (view.losses, 50.0 < view.left_out_s <= 60.0) == (3, True)
    run.step_s = 2.0  # a minute has few of them
    run.run_until(lambda: len(run.world.present) == 6)
    assert 60.0 < run.clock.now_s - at_s < 80.0
    assert list(run.supervisor.recorder.findings.machines_lost.values()) == [1, 3]


def test_with_enough_machines_it_goes_on_with_fewer_and_takes_them_back(simulate):
    """After the patience; who comes later is taken in between two committed steps."""
    run = simulate(nodes=3, least=2, steps=1500, node_patience_s=5.0)
    run.followers[1].kill()
    at_s = run.clock.now_s
    run.run_until(lambda: run.said("going on without node 2"))
    assert 4.9 < run.clock.now_s - at_s < 6.0
    run.run_until(lambda: len(run.world.present) == 4 and run.supervisor._is_fault_free)
    run.start(run.followers[1])
    run.run_until(lambda: len(run.world.present) == 6)
    assert_done(run)
    reasons = run.supervisor.facts.inexact_reasons
    assert any("of 6 ranks from step" in one for one in reasons), reasons


def test_with_too_few_machines_it_saves_and_ends_with_75(simulate):
    """Nobody comes for the patience and the time to join; what is committed is saved."""
    run = simulate(node_patience_s=5.0, conf={"join_timeout_s": 20.0})
    run.followers[0].kill()
    at_s = run.clock.now_s
    ending = run.run_to_end()
    assert ending.exit_code is ExitCode.PREEMPTED
    assert 24.0 < run.clock.now_s - at_s < 32.0
    assert "of at least 2 nodes are there" in ending.reason
    assert run.checkpoint == max(one.committed for one in run.processes.values())


def test_a_machine_that_comes_late_is_taken_in(simulate):
    """The run has begun with the least; no step is cut short for the one that comes."""
    run = simulate(nodes=2, least=2, most=3, steps=400, conf={"last_call_s": 1.0})
    assert len(run.world.present) == 4
    run.add_machine()
    run.run_until(lambda: len(run.world.present) == 6 and run.supervisor._is_fault_free)
    assert_done(run)
    assert not faults(run)


def test_a_machine_that_is_evicted_leaves_the_others(simulate):
    """SIGTERM to one follower, where enough others remain: it ends with 75 and they go on."""
    run = simulate(nodes=3, least=2, steps=400)
    run.followers[1].signals.send(signal.SIGTERM)
    run.run_until(lambda: not run.followers[1].is_running)
    assert run.followers[1].exit_code == ExitCode.PREEMPTED
    assert run.run_to_end().exit_code is ExitCode.DONE
    assert run.exit_codes() == [0, 75]


def test_where_each_is_needed_an_eviction_ends_the_run(simulate):
    """All save and end with 75."""
    run = simulate(nodes=2, steps=400)
    run.followers[0].signals.send(signal.SIGTERM)
    ending = run.run_to_end()
    assert ending.exit_code is ExitCode.PREEMPTED
    assert run.checkpoint == run.best
    assert run.exit_codes() == [75]


def test_a_machine_that_is_cut_off_stops_before_it_counts_as_lost(simulate):
    """Its lease ends first: none of its ranks commits once another may have its place. It dials, then ends."""
    run = simulate(steps=300, coordinator_wait_s=20.0)
    run.cut(1)
    at_s = run.clock.now_s
    run.run_until(lambda: run.said("is lost"))
    there = [p for p in run.processes.values() if p.machine is run.followers[0] and p.rank >= 0]
    assert all(p.dead or p.generation == 0 for p in there)
    run.run_until(lambda: not run.followers[0].is_running)
    assert 20.0 < run.clock.now_s - at_s < 25.0
    assert run.followers[0].exit_code == ExitCode.PREEMPTED


@pytest.mark.parametrize("is_silent", [False, True], ids=["killed", "without power"])
def test_without_the_coordinator_all_end_with_75(simulate, is_silent):
    """Nobody is elected: ranks stop, supervisors dial for a while, and the same command resumes."""
    run = simulate(nodes=3, coordinator_wait_s=20.0)
    at_s = run.clock.now_s
    run.kill_coordinator(is_silent=is_silent)
    assert run.exit_codes() == [75, 75]
    assert 20.0 < run.clock.now_s - at_s < 26.0
    assert not [p for p in run.processes.values() if p.rank >= 0 and not p.dead]


@pytest.mark.parametrize("is_asked", [False, True], ids=["alone", "asked to stop"])
def test_a_coordinator_that_nobody_joins_saves_what_others_have_kept(simulate, is_asked):
    """Started again, it has the memory of one machine of the two that it needs: that is on disk before it ends."""
    run = simulate(nodes=3, steps=300, node_patience_s=5.0, conf={"join_timeout_s": 20.0})
    run.to_step(15)
    run.kill_coordinator()
    run.followers[1].kill()
    run.pass_time(2.0)
    reached, held = run.checkpoint, max(p.committed for p in run.who_counts())
    assert held > reached
    before = run.supervisor._owner
    run.restart_coordinator()
    run.run_until(lambda: run.said("its ranks have kept their memory"))
    at_s = run.clock.now_s
    if is_asked:
        run.pass_time(0.5)
        run.supervisor.ask_stop(StopReason.PREEMPTED)
    ending = run.run_to_end()
    assert ending.exit_code is ExitCode.PREEMPTED, ending
    assert run.clock.now_s - at_s < (10.0 if is_asked else 32.0)
    assert run.saved_alone[-1] == (2, held)
    assert run.checkpoint == held
    owner = run.supervisor._owner.read()
    assert (owner.term, owner.after, owner.without) == (
        run.supervisor._owner.term,
        before.term,
        (0,),
    )
    assert run.exit_codes() == [75, None]


def test_a_newer_state_on_another_machine_is_saved(simulate):
    """A rank elsewhere may have ended the step in which a machine was lost: that step is on disk, not the one before."""
    was_elsewhere = False
    for seed in range(8):
        run = simulate(
            nodes=3,
            ranks=1,
            steps=10**6,
            seed=seed,
            node_patience_s=0.0,
            conf={"join_timeout_s": 1.0},
        )
        run.followers[1].kill()
        assert run.run_to_end().exit_code is ExitCode.PREEMPTED
        here, there = (p.committed for p in run.who_counts() if p.machine.number < 2)
        assert run.checkpoint == max(here, there)
        was_elsewhere |= there > here
    assert was_elsewhere


def test_a_superseded_coordinator_leaves_the_others_to_the_new_one(simulate):
    """Their ranks wait for it, with their memory; that none comes here is another matter."""
    run = simulate(coordinator_wait_s=20.0)
    run.outputs.may_write = True
    machine = run.followers[0]
    FolderOwner(run.supervisor._owner.folder, "another").take()
    assert run.run_to_end().exit_code is ExitCode.PREEMPTED
    at_s = run.clock.now_s
    assert run.exit_codes() == [75]
    assert run.clock.now_s - at_s > 20.0
    said = "it has closed the connection; the ranks here wait for it, with their memory"
    assert any(said in text for _, text in machine.display.said)


def test_a_coordinator_that_stood_still_blames_nobody(simulate):
    """It has not looked itself: nobody is hung. Whose lease ended meanwhile comes back by itself."""
    run = simulate(steps=400)
    before = pids(run, 0, 1, 2, 3)
    for pause_s in (1.5, 6.0):
        run.is_coordinator_stopped = True
        run.pass_time(pause_s)
        run.is_coordinator_stopped = False
        run.pass_time(4.0)
        is_short = pause_s < LEASE_S
        assert (pids(run, 0, 1, 2, 3) == before and not faults(run)) or not is_short
    assert {kind for kind, _ in faults(run)} == {"node_lost"}
    assert pids(run, 0, 1) == before[:2]
    assert_done(run)
    assert lost(run) == [0]


def test_a_machine_that_stood_still_hears_of_the_end(simulate):
    """Its lease is over and its ranks are, too: it stays for the answer, where it would look in vain."""
    run = simulate(steps=60)
    (machine,) = run.followers
    run.to_step(60)
    machine.is_stopped = True
    there = [one for one in run.processes.values() if one.machine is machine and one.rank >= 0]
    run.run_until(lambda: all(one.dead for one in there))
    run.pass_time((LEASE_S + SILENT_S) / 2)
    machine.is_stopped = False
    assert_done(run)
    assert not faults(run)


def test_a_look_that_is_old_makes_nobody_hang(simulate):
    """A deadline that is shorter than the time from one look to the next, on all machines alike."""
    run = simulate(steps=200, hang_min_s=0.4)
    assert_done(run)
    assert not faults(run)
    run = simulate(steps=200, hang_min_s=0.4)
    run.freeze(3)
    assert_done(run)
    assert faults(run) == [("rank_hung", 3)]


def test_a_slow_link_is_waited_for(simulate):
    """A quarter of a second each way: repairs take longer, and nothing is lost."""
    run = simulate(nodes=3, steps=300)
    run.delay_s = 0.25
    run.pass_time(10.0)
    assert not faults(run)
    run.kill(5)
    assert_done(run)
    assert (faults(run), lost(run)) == ([("rank_killed", 5)], [0])


def test_when_the_last_that_have_a_state_are_lost_one_loads(simulate):
    """Those that are being replaced have been promised the state of a machine that is lost meanwhile."""
    run = simulate(nodes=2, least=1, most=2, node_patience_s=0.0)
    run.checkpoint = 10
    run.kill(0, 1)
    run.run_until(lambda: run.events("plan"))
    run.followers[0].lose_power()
    for wire in run.followers[0].wires:
        wire.break_off()
    assert_done_alone(run)
    assert run.resumed[-1] == "auto"
    assert run.formed[2][0].committed == run.steps


def assert_done_alone(run):
    assert run.run_to_end().exit_code is ExitCode.DONE, run.where()
