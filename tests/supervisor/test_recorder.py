"""What happened is recorded once: journal, console, accounting and facts have it from there."""

from __future__ import annotations

import re

import pytest

from ddp_runner.checkpoint.unreported import Published
from ddp_runner.kernel.parent.run_facts import RunFacts
from ddp_runner.kernel.rules.faults import Fault, FaultKind
from ddp_runner.kernel.wire import events
from ddp_runner.kernel.wire.messages import Metrics
from ddp_runner.supervisor.reporting.recorder import Evaluated, Recorder
from tests.supervisor.judging import assert_done, lost
from tests.supervisor.simulated import Clock, Outputs


@pytest.fixture
def recorder(tmp_path):
    return Recorder(
        Outputs(),
        name="r",
        facts=RunFacts(generation=3),
        published=Published(tmp_path),
        clock=Clock(),
    )


def test_one_event_reaches_every_sink(recorder):
    """A checkpoint that nobody reported: a line in the journal, one for people, and in the account."""
    recorder.record(events.CheckpointSaved(step=7, path="p", blocked_s=None, size_bytes=1))
    (line,) = recorder.outputs.written
    assert line == {"event": "checkpoint_saved", "cause": None, "step": 7, "path": "p",
                    "blocked_s": None, "size_bytes": 1}  # fmt: skip
    assert recorder.outputs.said == [("INFO", "p is on disk; its rank has not reported it")]
    assert (recorder.accounting.checkpoint_step, recorder.accounting.checkpoint) == (7, "p")
    assert recorder.facts.saved_any


def test_a_repair_in_place_is_a_fault_and_what_followed_from_it(recorder):
    """Both are in the journal; the account has one fault, and the run is not exact any more."""
    fault = Fault(kind=FaultKind.NON_FINITE, rank=1, step=9, cause="loss is nan")
    for _ in range(2):  # the same reason twice is one reason
        recorder.reported(
            events.RepairedInPlace(
                rank=1,
                fault=fault,
                action="skipped",
                seconds=0.1,
                inexact_reason="a step was skipped",
            )
        )
    first, second = recorder.outputs.written[:2]
    assert (first["event"], first["generation"]) == ("fault", 3)
    assert (second["event"], second["cause"]) == ("repaired_in_place", 1)
    assert recorder.accounting.faults_total == 2
    assert recorder.facts.inexact_reasons == ["a step was skipped"]


def test_a_stop_that_was_asked_for_is_known(recorder):
    """The display calls such a run stopped, and not done."""
    assert not recorder.findings.is_stopped
    recorder.record(events.StopAsked(reason="interrupted"))
    assert recorder.findings.is_stopped


def test_the_report_of_an_evaluation_leaves_the_logged_step(simulate):
    """It has figures of its own, and neither the loss nor the number of a step."""
    run = simulate()
    run.to_step(5)
    step = {"epoch": 0, "loss": 1.5, "step_s": 0.1}
    for number, values in ((4, step), (5, {"validation_loss": 2.0})):
        run.send(run.rank(0), Metrics(rank=0, step=number, values=values))
        run.pass_time(0.2)
    found = run.world.ranks[0].metrics
    assert (found["step"], found["loss"], found["validation_loss"]) == (4, 1.5, 2.0)
    run.send(run.rank(0), Metrics(rank=0, step=6, values={**step, "loss": 1.25}))
    run.pass_time(0.2)
    found = run.world.ranks[0].metrics
    assert (found["step"], found["loss"], found["validation_loss"]) == (6, 1.25, 2.0)


def test_a_fault_that_is_tolerated_is_in_no_account(recorder):
    """Control: it is in the journal only."""
    fault = Fault(kind=FaultKind.STORAGE_FAILED, rank=0, step=9, cause="no space left")
    recorder.reported(events.FaultTolerated(rank=0, fault=fault, action="goes on"))
    assert [line["event"] for line in recorder.outputs.written] == ["fault_tolerated"]
    assert (recorder.accounting.faults_total, recorder.facts.inexact_reasons) == (0, [])


def test_a_failed_save_is_said_without_the_log_of_its_rank(recorder):
    """That log may be on the disk that is full. Control: the line of another fault is in the rank's log."""
    for kind in (FaultKind.STORAGE_FAILED, FaultKind.NON_FINITE):
        fault = Fault(kind=kind, rank=0, step=9, cause="no space left")
        recorder.reported(events.FaultTolerated(rank=0, fault=fault, action="goes on"))
    recorder.reported(events.LogOutage(rank=0, text="rank_0.log cannot be written"))
    said = [("WARNING", "no space left; goes on"), ("WARNING", "rank_0.log cannot be written")]
    assert recorder.outputs.said == said


def test_the_newest_evaluation_is_that_of_the_stage(recorder):
    """A step's own figures are none, and another stage has other data."""
    recorder.metrics(8, 0, {"loss": 2.0, "step_s": 0.1})
    assert recorder.evaluated is None
    for step, loss in ((8, 2.5), (16, 2.25)):
        recorder.metrics(step, 0, {"validation_loss": loss})
    recorder.metrics(17, 0, {"loss": 2.0, "step_s": 0.1})
    assert recorder.evaluated == Evaluated(step=16, figures={"validation_loss": 2.25})
    begins = {"stage": "b", "number": 1, "of": 2, "first_step": 17, "step": 0, "total_steps": 9}
    recorder.record(events.StageBegins(**begins))
    assert recorder.evaluated is None


def test_a_line_says_which_steps_were_lost(simulate):
    """Of incidents that end together the last one has them, and the line of no other denies them."""
    run = simulate(steps=30)
    run.to_step(17)
    run.kill(0)
    run.run_until(lambda: run.events("plan"))
    run.kill(1, 2)
    assert_done(run)
    *others, last = (text for _, text in run.outputs.said if " -> replaced" in text)
    assert [re.fullmatch(r"rank (\d) .* -> replaced \(\d\.\d\d s\)", one)[1] for one in others] == [
        "0",
        "1",
    ]
    assert re.fullmatch(r".* -> replaced, 7 steps done again from step 10 \(\d\.\d\d s\)", last)
    assert lost(run) == [0, 0, 7]
