"""Stages on simulated ranks: who is started when, and what a kill or a stop where they change leads to."""

from __future__ import annotations

import pytest

from ddp_runner.kernel.rules.exits import RunStatus, StopReason
from ddp_runner.kernel.rules.faults import FaultKind
from ddp_runner.kernel.rules.lifecycle import RankState
from ddp_runner.kernel.wire.events import StageBegins
from tests.supervisor.judging import assert_done, assert_generations_grow, lost, plans

ENDS = (20, 30, 50)


def begun(run):
    return [(one["stage"], one["first_step"], one["step"]) for one in run.events("stage_begins")]


def test_each_stage_has_new_ranks_and_the_run_one_journal(simulate):
    """No fault, no restart; the first rank of each stage reads what it begins with."""
    run = simulate(stage_ends=ENDS)
    assert_done(run)
    assert begun(run) == [("stage0", 0, 0), ("stage1", 20, 20), ("stage2", 30, 30)]
    assert [one["step"] for one in run.events("stage_ends")] == [20, 30]
    assert len(run.events("run_begins")) == len(run.events("run_ends")) + 1 == 1
    assert (plans(run), run.resumed) == ([], ["auto"] * 3)
    assert_generations_grow(run)
    ranks = [process for process in run.processes.values() if process.rank >= 0]
    assert [process.stage for process in ranks] == [0] * 3 + [1] * 3 + [2] * 3
    assert all(process.seen == [process.first_generation] for process in ranks)


def test_a_note_that_an_earlier_stage_has_shown_is_not_repeated(simulate, monkeypatch):
    """Such as the number of loader workers, where it has not changed."""
    run, recorded = simulate(stage_ends=ENDS), []
    run.notes = ("8 loader workers per rank", "9 loader workers per rank")
    recorder = run.supervisor.recorder
    record = recorder.record
    monkeypatch.setattr(recorder, "record", lambda one: [recorded.append(one), record(one)])
    assert_done(run)
    stages = [one for one in recorded if isinstance(one, StageBegins)]
    assert [one.lines for one in stages] == [(), ("9 loader workers per rank",), ()]


def test_without_stages_nothing_of_them_is_recorded(simulate):
    """Control."""
    run = simulate(steps=20)
    assert_done(run)
    assert not run.events("stage_begins")
    assert run.supervisor.recorder.findings.stage == ""


@pytest.mark.parametrize("who", [(0,), (2,), (0, 1, 2)], ids=["first", "last", "all"])
@pytest.mark.parametrize("state", [RankState.FINISHED, RankState.STARTING, RankState.READY])
def test_ranks_killed_where_stages_change_cost_no_step(simulate, who, state):
    """Having finished the stage before, or while the next one is built: it begins all the same."""
    run = simulate(stage_ends=ENDS)
    run.to_step(20)
    run.run_until(lambda: any(handle.state is state for handle in run.world.ranks))
    run.kill(*who)
    assert_done(run)
    assert lost(run) in ([], [0], [0, 0], [0, 0, 0])
    assert len(run.events("stage_ends")) == 2
    assert_generations_grow(run)


def test_a_rank_lost_in_a_later_stage_is_replaced_in_it(simulate):
    """By a process, or a spare, that is given the settings of that stage."""
    run = simulate(stage_ends=ENDS)
    run.to_step(37)
    run.kill(1)
    assert_done(run)
    assert run.rank(1) is None
    newest = max((p for p in run.processes.values() if p.rank == 1), key=lambda p: p.pid)
    assert newest.stage == 2
    assert lost(run) == [0]


def test_a_stop_where_a_stage_ends_ends_the_run(simulate):
    """All is saved: the next launch begins the next stage."""
    run = simulate(stage_ends=ENDS)
    run.to_step(20)
    run.run_until(lambda: any(one.state is RankState.FINISHED for one in run.world.ranks))
    run.supervisor.ask_stop(StopReason.PREEMPTED)
    assert run.run_to_end().status is RunStatus.PREEMPTED
    assert len(run.events("stage_begins")) == 1


def test_a_stop_while_a_stage_is_built_is_obeyed_there(simulate):
    """Its ranks form, are asked, and save."""
    run = simulate(stage_ends=ENDS)
    run.to_step(20)
    run.run_until(lambda: run.supervisor._stages.is_changing)
    run.supervisor.ask_stop(StopReason.PREEMPTED)
    assert run.run_to_end().status is RunStatus.PREEMPTED
    assert [one["stage"] for one in run.events("stage_begins")] == ["stage0", "stage1"]


def test_a_newest_checkpoint_of_another_stage_leads_there(simulate):
    """All ranks are lost, and the files of their stage with them: the one before is trained from what is left."""
    run = simulate(stage_ends=ENDS)
    run.to_step(24)
    run.checkpoint = 10
    run.best = 10
    run.kill(0, 1, 2)
    assert_done(run)
    assert begun(run)[1:] == [
        ("stage1", 20, 20),
        ("stage0", 0, 10),
        ("stage1", 20, 20),
        ("stage2", 30, 30),
    ]
    assert_generations_grow(run)


def test_what_a_stage_begins_with_is_not_tried_for_ever(simulate):
    """Each time its begin is damaged the stage before makes it again; then the run ends and says so."""
    run = simulate(stage_ends=ENDS)
    run.readable_max = 20
    ending = run.run_to_end()
    assert ending.status is RunStatus.FAILED
    assert "what stage stage2 begins with could not be read 4 times in a row" in ending.reason
    assert [one["stage"] for one in run.events("stage_ends")] == ["stage0"] + ["stage1"] * 4
    assert run.checkpoint == 30


def test_a_later_stage_that_is_refused_keeps_what_was_trained(simulate):
    """Something was touched, so it is no wrong usage: the line names the stage, and says how to go on."""
    run = simulate(stage_ends=ENDS)
    run.to_step(20)
    run.run_until(lambda: run.supervisor._stages.is_changing and run.rank(1) is not None)
    run.fail_to_start(1, "checkpoint.monitor=no: no such figure", kind=FaultKind.BAD_INPUT)
    ending = run.run_to_end()
    assert (ending.status, ending.exit_code, ending.error_line) == (RunStatus.FAILED, 1, "")
    assert ending.reason == (
        "stage stage1: checkpoint.monitor=no: no such figure; correct the stage and run the same command"
        " again to resume with it"
    )
    assert run.checkpoint == 20


def test_a_first_stage_that_is_refused_is_wrong_usage(simulate):
    """Control: nothing was touched."""
    run = simulate(stage_ends=ENDS)
    run.run_until(lambda: run.rank(1) is not None)
    run.fail_to_start(1, "checkpoint.monitor=no: no such figure", kind=FaultKind.BAD_INPUT)
    ending = run.run_to_end()
    assert ending.exit_code == 2
    assert ending.error_line == "stage stage0: checkpoint.monitor=no: no such figure"


def test_slow_first_steps_of_a_later_stage_are_no_hang(simulate):
    """What was learnt of the pace of the one before holds for it no more."""
    run = simulate(stage_ends=(20, 40), hang_min_s=1.0, first_step_timeout_s=60.0)
    run.run_until(lambda: len(run.events("stage_begins")) == 2)
    run.run_until(lambda: run.world.counts.are_all_present(RankState.TRAINING))
    run.sleep(1)
    run.pass_time(40.0)
    run.rouse(1)
    assert_done(run)
    assert plans(run) == []
