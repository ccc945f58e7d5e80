"""What becomes of a script on several machines when ranks, machines or links are lost, in simulated time."""

from __future__ import annotations

import signal
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ddp_runner.features.machines.ballot_file import BallotFile
from ddp_runner.features.machines.parent.successor import Succession
from ddp_runner.features.machines.rules.majority import Peer, Record
from ddp_runner.features.machines.rules.node_messages import Elected
from ddp_runner.features.script.rules import GRACE_AFTER_FAULT_S
from ddp_runner.kernel.rules.exits import ExitCode, RunStatus, StopReason
from ddp_runner.kernel.rules.faults import FaultKind
from ddp_runner.kernel.system.clock import SYSTEM_CLOCK
from ddp_runner.kernel.wire.events import Faulted
from tests.features.script.simulated_script import ScriptNodesSimulation


@pytest.fixture
def simulate(tmp_path):
    """``simulate(nodes=2, ...)``: a script on machines of two ranks each, some steps on."""
    made = []

    def simulation(*, to_step=9, **changes):
        made.append(ScriptNodesSimulation(tmp_path, **changes))
        if to_step:
            made[-1].to_step(to_step)
        return made[-1]

    yield simulation
    for one in made:
        one.close()


def sizes(run):
    """What each generation was sent: its ranks as they were numbered, and on how many a machine."""
    return [
        [(one.rank, one.local_rank, one.world_size, one.local_world_size) for one in forms.values()]
        for forms in (dict(sorted(forms.items())) for forms in run.forms.values())
    ]


def world(*, machines, ranks=2):
    of_all = machines * ranks
    return [(rank, rank % ranks, of_all, ranks) for rank in range(of_all)]


def assert_done(run, *, attempts):
    ending = run.run_to_end()
    assert (ending.status, ending.exit_code) == (RunStatus.COMPLETED, ExitCode.DONE), run.where()
    assert set(run.exit_codes()) == {0}
    assert len(run.attempts) == attempts, run.attempts


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("how", ["kill", "fail", "leave"])
def test_a_rank_lost_anywhere_has_all_start_again_everywhere(simulate, how, rank):
    """One attempt of all, whose record names the machine; within a second for those that are asked."""
    run = simulate()
    began_s = run.clock.now_s
    {"kill": run.kill, "leave": lambda one: run.leave(one, 3), "fail": lambda one: fail(run, one)}[
        how
    ](rank)
    run.run_until(lambda: len(run.forms.get(2, {})) == 4)
    assert run.clock.now_s - began_s < 6.0
    assert_done(run, attempts=2)
    assert sizes(run) == [world(machines=2)] * 2
    assert run.attempts[0].rank == rank
    assert run.attempts[0].host == run.world.host_of(rank)
    assert run.said(f"node {rank // 2} (")
    assert run.stores == 2
    # Nothing of the attempt before counts as one of the next: it has done its steps once more.
    assert run.attempts[1].steps == run.steps


def fail(run, rank):
    fault = run.fault(run.rank(rank), FaultKind.RANK_RAISED, "ValueError: no")
    run.send(run.rank(rank), Faulted(generation=1, fault=fault))
    run._end(run.rank(rank), exit_code=1)


@pytest.mark.parametrize("how", ["kill", "lose_power", "cut"])
def test_a_lost_machine_is_waited_for_and_then_done_without(simulate, how):
    """Whoever is cut off ends its ranks before others start; the first cause is the machine."""
    run = simulate(nodes=3, least=2, node_patience_s=5.0, steps=400)
    lost_at_s = run.clock.now_s
    if how == "cut":
        run.cut(1)
    else:
        getattr(run.followers[0], how)()
    run.run_until(lambda: len(run.forms.get(2, {})) == 4)
    waited_s = run.clock.now_s - lost_at_s
    assert 5.0 < waited_s < (7.0 if how == "kill" else 11.0)
    assert not [p for p in run.processes.values() if p.rank in (2, 3) and not p.dead]
    run.heal()
    ending = run.run_to_end()
    assert ending.exit_code == 0, ending
    assert sizes(run)[1] == world(machines=2)
    assert sorted(run.forms[2]) == [0, 1, 4, 5]
    assert "node 1 (" in run.attempts[0].cause
    assert run.supervisor.summary(ending).world_size == 4


def test_a_machine_that_comes_later_is_used_at_the_next_start(simulate):
    """Until then it waits with its number; one that comes within the patience is missed by nobody."""
    run = simulate(nodes=1, least=1, most=2, conf={"last_call_s": 2.0}, steps=300)
    assert sizes(run) == [world(machines=1)]
    run.add_machine()
    run.run_until(lambda: run.said("is there: 2 of 2"))
    run.pass_time(5.0)
    assert len(run.forms) == 1
    run.kill(0)
    run.run_until(lambda: len(run.forms.get(2, {})) == 4)
    assert sizes(run)[1] == world(machines=2)
    run.followers[0].kill()
    run.run_until(lambda: run.said("is lost"))
    run.start(run.followers[0])
    run.run_until(lambda: len(run.forms.get(3, {})) == 4)
    assert_done(run, attempts=3)


def test_a_spare_machine_takes_the_place_of_a_lost_one_at_once(simulate):
    """It waits beyond MAX; nobody is waited for then."""
    run = simulate(nodes=3, least=2, most=2, steps=200)
    run.run_until(lambda: run.said("waits: all nodes are there"))
    lost_at_s = run.clock.now_s
    run.followers[0].kill()
    run.run_until(lambda: len(run.forms.get(2, {})) == 4)
    assert run.clock.now_s - lost_at_s < 5.0
    assert {
        p.machine.number for p in run.processes.values() if not p.dead and p.rank in (2, 3)
    } == {2}
    run.run_to_end()
    assert sizes(run) == [world(machines=2)] * 2


def test_fewer_machines_than_the_script_needs_end_it(simulate):
    """With 75, after the time to come; what it has saved is its own."""
    run = simulate(conf={"join_timeout_s": 20.0}, node_patience_s=5.0)
    run.followers[0].lose_power()
    ending = run.run_to_end()
    assert (ending.exit_code, ending.status) == (ExitCode.PREEMPTED, RunStatus.PREEMPTED)
    assert "1 of at least 2 nodes" in ending.reason


def test_one_budget_counts_restarts_of_all_machines(simulate):
    """Ranks of either and a machine: the third restart is one too many."""
    run = simulate(max_restarts=2, is_deaf=False)
    for generation, harm in ((2, lambda: run.kill(3)), (3, run.followers[0].kill)):
        harm()
        if generation == 3:
            run.run_until(lambda: run.said("is lost"))
            run.start(run.followers[0])
        run.run_until(lambda one=generation: len(run.forms.get(one, {})) == 4)
        run.pass_time(0.5)
    run.kill(0)
    ending = run.run_to_end()
    assert (ending.status, ending.exit_code) == (RunStatus.GAVE_UP, ExitCode.GAVE_UP)
    assert set(run.exit_codes()) == {ExitCode.GAVE_UP}


def test_without_restarts_a_lost_machine_ends_the_run(simulate):
    """As a lost rank does; the line names the machine and the option."""
    run = simulate(script={"restarts": False})
    run.followers[0].kill()
    ending = run.run_to_end()
    assert (ending.status, ending.exit_code) == (RunStatus.FAILED, 1)
    assert "node 1 (" in ending.reason
    assert "--max-restarts" in ending.reason


def test_a_machine_that_is_asked_to_stop_leaves_in_order(simulate):
    """All ranks hear SIGTERM and have the grace period; the others start again without it."""
    run = simulate(nodes=3, least=2, steps=200)
    run.followers[0].signals.send(signal.SIGTERM)
    run.run_until(lambda: len(run.forms.get(2, {})) == 4)
    assert run.followers[0].exit_code == ExitCode.PREEMPTED
    assert sizes(run)[1] == world(machines=2)
    run.run_to_end()
    assert "was asked to stop" in run.attempts[0].cause


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_on_any_machine_ends_all_ranks_in_order(simulate, number):
    """Where none may be missed; the code is that of one machine."""
    run = simulate()
    run.followers[0].signals.send(number)
    ending = run.run_to_end()
    assert ending.exit_code == {signal.SIGTERM: 143, signal.SIGINT: 130}[number]
    assert all(p.dead for p in run.processes.values() if p.rank >= 0)


def test_a_stop_on_the_coordinator_signals_ranks_elsewhere(simulate):
    """Each gets SIGTERM by its machine; who hears nothing gets SIGKILL after the grace period."""
    run = simulate(is_deaf=True, script={"grace_period_s": 4.0}, steps=2000)
    began_s = run.clock.now_s
    run.supervisor.ask_stop(StopReason.INTERRUPTED)
    ending = run.run_to_end()
    assert ending.exit_code == 130
    assert 4.0 <= run.clock.now_s - began_s < 6.0


def test_a_rank_that_is_stopped_elsewhere_is_a_fault(simulate):
    """By its machine's looks, as all ranks wait for it."""
    run = simulate(steps=200)
    run.freeze(3)
    run.run_until(lambda: len(run.forms.get(2, {})) == 4, within_s=30.0)
    run.run_to_end()
    assert "stopped by a signal" in run.attempts[0].cause
    assert run.attempts[0].rank == 3


def _heir(*, restarts, ballot=0):
    """What a machine has of a coordinator on machine 1 that is lost in an attempt, after so many restarts.

    ``ballot``: that in which it was elected.
    """
    taken = SimpleNamespace(lost=1, ballot=ballot)
    return SimpleNamespace(
        run_id="theirs",
        generation=restarts + 1,
        restarts=restarts,
        stop=None,
        taken=taken,
        lost_host="there",
    )


@pytest.mark.parametrize("restarts", [1, 2])
def test_a_script_has_one_budget_under_all_its_coordinators(simulate, restarts):
    """The loss of one is a restart; those before it count, too."""
    run = simulate(to_step=0, max_restarts=2)
    run.supervisor.succeed(_heir(restarts=restarts))
    if restarts == 2:
        assert run.supervisor.ending.exit_code == ExitCode.GAVE_UP
        assert "gave up" in run.supervisor.ending.reason
        return
    assert run.supervisor.beat(1).restarts == restarts + 1
    run.run_until(lambda: len(run.forms.get(restarts + 2, {})) == 4)
    assert {attempt for attempt, _ in run.started} == {restarts + 1}
    run.pass_time(0.5)
    run.kill(2)
    ending = run.run_to_end()
    assert (ending.exit_code, run.supervisor._run_id) == (ExitCode.GAVE_UP, "theirs")


def test_an_elected_coordinator_waits_until_the_old_ones_ranks_have_ended(simulate):
    """It may be cut off only, and knows that after the time of silence; the first cause is its machine."""
    run = simulate(to_step=0, steps=2)
    began_s = run.clock.now_s
    run.supervisor.succeed(_heir(restarts=0, ballot=2))
    run.run_until(lambda: run.started)
    silent_s = run.supervisor.plan.settings.recovery.node_silent_s
    assert run.clock.now_s - began_s >= silent_s + GRACE_AFTER_FAULT_S
    assert_done(run, attempts=2)
    assert run.attempts[0].cause == "the coordinator, node 1 (there), is lost"


def _with_votes(run):
    """A majority decides in this run."""
    place = SimpleNamespace(meeting=run.meeting, address="127.0.0.1", number=0, votes=None)
    machines = run.supervisor.machines
    return machines.quorum.open(place, term=machines.owner.term)


def test_a_scripts_coordinator_ends_where_another_one_was_elected(simulate):
    """With 75, and the other machines are left to the new one."""
    run = simulate(steps=2000)
    with closing(_with_votes(run)) as keeper:
        keeper.trains()
        older = Elected(ballot=0, term="b", host="h", port=1)
        for elected in (older, replace(older, ballot=9)):
            run.supervisor.machines.quorum.hear_elected(elected)
            run.pass_time(1.0)
            assert run.supervisor.machines.has_successor == (elected is not older)
    assert run.ending.exit_code == ExitCode.PREEMPTED
    assert "a majority has elected another coordinator, at h:1" in run.ending.reason


def test_a_script_starts_only_with_a_majority(simulate, tmp_path):
    """Those that came are not of the newest generation: nobody is started, and it ends with 75."""
    peers = [
        Peer(machine=name, number=number, host="h", port=1) for number, name in enumerate("zab")
    ]
    BallotFile(tmp_path / "kept").write(
        Record(machine="z", promised=1, ballot=1, term="t", generation=3, members=tuple(peers))
    )
    conf = {"join_timeout_s": 20.0}
    run = simulate(to_step=0, nodes=3, least=2, node_patience_s=5.0, conf=conf)
    with closing(_with_votes(run)):
        ending = run.run_to_end()
    assert run.started == []
    assert run.said("waiting for node 1, node 2")
    assert ending.exit_code == ExitCode.PREEMPTED
    assert "remove .votes in the log folder" in ending.reason


def test_a_script_that_is_not_started_again_has_no_successor(simulate):
    """Its loss ends the run with 75, which may be tried again as a whole; a new coordinator could only end it with 1."""
    plan = simulate(to_step=0)._plan
    for may_restart, why in ((False, "only with --max-restarts"), (True, "")):
        program = replace(plan.opaque, may_restart=may_restart)
        succession = Succession(replace(plan, opaque=program), clock=SYSTEM_CLOCK)
        line = succession.formed("a term", shares_folder=False, loses_memory=True)
        assert why in line if why else "does not share its log folder" in line
