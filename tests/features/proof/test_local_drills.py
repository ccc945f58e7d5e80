"""Drills of ranks of another machine: run there, judged by the coordinator; none is left out without a word."""

from __future__ import annotations

import signal

import pytest

from ddp_runner.features.proof.local_drills import LocalDrills
from ddp_runner.features.proof.rules import folder_name
from ddp_runner.kernel.wire.events import Drill
from ddp_runner.kernel.wire.messages import DrillPart
from tests.features.machines.simulated_nodes import NodesSimulation
from tests.features.machines.test_several_machines import assert_done
from tests.supervisor.simulated import DRILL

THERE = 2  # the first of the other machine's ranks
STEP = 12


@pytest.fixture
def drilling(tmp_path):
    """A run of two machines, with a drill of the second rank of the other one under way there."""
    run = NodesSimulation(tmp_path, nodes=2, steps=400)
    run.to_step(10)
    give(run, STEP)
    run.run_until(lambda: run.rank(DRILL))
    yield run
    run.close()


def give(run, step):
    """The ranks there have written what a drill of ``step`` needs."""
    for rank, part in ((THERE, "state"), (THERE + 1, "share")):
        run.send(run.rank(rank), DrillPart(rank=rank, step=step, part=part))


def skipped(run):
    return [(one["rank"], one["step"], one["text"]) for one in run.events("drill_skipped")]


@pytest.mark.parametrize("differs", ["", "layer.weight"])
def test_a_drill_runs_on_the_machine_of_its_rank(drilling, differs):
    """Its result counts as that of a drill here, and says which machine it is from."""
    run = drilling
    process = run.rank(DRILL)
    assert process.machine is run.followers[0]
    run.send(process, Drill(rank=THERE + 1, step=STEP, differs=differs))
    run._end(process, exit_code=0)
    run.run_until(lambda: run.events("drill"))
    [drill] = run.events("drill")
    host = run.world.host_of(THERE + 1)
    assert (drill["rank"], drill["step"], drill["host"]) == (THERE + 1, STEP, host)
    assert host
    proved = run.supervisor.recorder.findings.proved.get("drilled", set())
    assert proved == ({STEP} if not differs else set())
    reasons = run.supervisor.facts.inexact_reasons
    words = "node 1: a replacement of rank 3 would not compute the same at step 12: first in layer"
    assert [one.startswith(words) for one in reasons] == [True] * bool(differs)
    assert skipped(run) == []
    assert_done(run)


def test_a_drill_that_ends_without_a_result_there_is_skipped(drilling):
    """With the reason, and another one is run after it."""
    run = drilling
    run._end(run.rank(DRILL), signal_number=signal.SIGKILL)
    run.run_until(lambda: skipped(run))
    assert skipped(run) == [(THERE + 1, STEP, "its process ended (signal 9)")]
    give(run, 40)
    run.run_until(lambda: len(run.drills_asked) == 2)
    assert run.drills_asked[1] == (40, THERE + 1)


def test_a_drill_there_is_ended_by_a_repair(drilling, tmp_path):
    """Nothing is left of it, a result that comes late is of no use, and the next generation makes up for it."""
    run = drilling
    folder = tmp_path / "kept" / folder_name(STEP)
    folder.mkdir(parents=True)
    process = run.rank(DRILL)
    run.kill(0)
    run.run_until(lambda: process.dead)
    run.run_until(lambda: skipped(run))
    assert [one[:2] for one in skipped(run)] == [(THERE + 1, STEP)]
    assert not folder.exists()
    run.run_until(lambda: run.supervisor.facts.generation == 2)
    assert run.events("drill") == []


def test_a_drill_of_a_machine_that_is_lost_is_skipped(drilling):
    """Nobody is there who could report it."""
    run = drilling
    run.followers[0].kill()
    run.run_until(lambda: skipped(run))
    assert [one[:2] for one in skipped(run)] == [(THERE + 1, STEP)]


@pytest.mark.parametrize("is_begun", [True, False])
def test_a_drill_that_another_machine_never_ends_is_skipped(tmp_path, monkeypatch, is_begun):
    """Its supervisor ends one that takes too long; of one that it never begins the coordinator waits for no result."""
    if not is_begun:
        monkeypatch.setattr(LocalDrills, "look_after_repair", lambda *_: None)
    run = NodesSimulation(tmp_path, nodes=2, steps=400, startup_timeout_s=3)
    run.to_step(10)
    give(run, STEP)
    run.run_until(lambda: skipped(run))
    [(rank, step, text)] = skipped(run)
    assert (rank, step) == (THERE + 1, STEP)
    assert text == ("it took longer than 3 s" if is_begun else "its machine has reported no result")
    run.close()
