"""The account of a run, as scripts: incidents and saves in, lost work and seconds out."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ddp_runner.kernel.rules.classify import attribute
from ddp_runner.kernel.rules.exits import ExitCode, RunStatus, StopReason
from ddp_runner.kernel.rules.faults import Fault, FaultKind
from ddp_runner.kernel.rules.recovery import Incident
from ddp_runner.kernel.wire import events
from ddp_runner.kernel.wire.board import SLOT_BYTES, Board, Cell
from ddp_runner.kernel.wire.messages import Finished
from ddp_runner.observe.accounting import INJECTED_KEPT, REPAIRED_KEPT, RunAccounting
from ddp_runner.observe.summary import (
    Difference,
    EndOfRun,
    ExactProof,
    RunFindings,
    read_summary,
    write_summary,
)

SECOND_NS = 1_000_000_000


def incident(step, *, kind=FaultKind.RANK_KILLED, at_s=110.0, rank=1):
    fault = Fault(kind=kind, rank=rank, step=step, cause=f"rank {rank} killed (SIGKILL)")
    return Incident(
        attribution=attribute([fault]), at_s=at_s, committed_step=step, ever_formed=True
    )


def reading(**cells):
    """A slot with these cells; ``loss`` besides."""
    slot = Board(memoryview(bytearray(SLOT_BYTES)), 1).slot(0)
    slot.set_loss(cells.pop("loss", 0.0))
    for name, value in cells.items():
        slot.set(Cell[name.upper()], value)
    return slot.read()


def summary(account, **changes):
    """The summary of a run that completed, unless changed."""
    end = {
        "status": RunStatus.COMPLETED,
        "exit_code": ExitCode.DONE,
        "reading": reading(committed_step=20, samples=160, loss=0.5),
        "finished": [],
        "now_s": 200.0,
    }
    others = {
        "world_size": 2,
        "steps_per_epoch": 8,
        "facts": RunFindings(run_id="a run", name="mine"),
        "own_step_s": {0: 0.25, 1: 0.75, 2: None},
    }
    assert changes.keys() <= end.keys() | others.keys()
    for name, value in changes.items():
        (end if name in end else others)[name] = value
    return account.summary(EndOfRun(**end), **others)


def finished(**report):
    return Finished(rank=0, reason=StopReason.COMPLETED, step=20, report=report)


def save(account, step, productive_s):
    """A checkpoint is on disk."""
    account.take(
        events.CheckpointSaved(
            step=step,
            path=f"step_{step}.pt",
            blocked_s=0.0,
            size_bytes=1,
            productive_ns=productive_s * SECOND_NS,
        ),
        now_s=0.0,
    )


def note(account, made, *, began_s, since_s=None, detect_s=0.0, generation=1):
    """An incident is closed."""
    plan = events.Plan(
        plan="ReplaceRanks",
        culprit=made.culprit.rank,
        kind=made.culprit.kind.value,
        replaced=(1,),
        dropped=(),
        kept=None,
        all_ranks_dead=False,
        victims=(),
        incident=made,
        began_s=began_s,
        since_s=began_s if since_s is None else since_s,
        detect_s=detect_s,
        generation=generation,
        outcome="replaced",
    )
    account.take(plan, now_s=made.at_s, cause=5)


def repair(account, *, now_s, committed_step, productive_s=0.0, parts=None):
    """The world trains again."""
    if parts:
        seconds = {f"{name}_s": value for name, value in parts.items()}
        for rank in range(2):  # the slowest counts
            formed = events.RankFormed(
                rank=rank,
                pid=1,
                generation=2,
                committed_step=committed_step,
                source=0,
                **{name: value / (1 + rank) for name, value in seconds.items()},
            )
            account.take(formed, now_s=now_s)
    made = account.repairs_at(
        now_s,
        generation=2,
        step=committed_step,
        productive_ns=round(productive_s * SECOND_NS),
    )
    for repaired, _ in made:
        account.take(repaired, now_s=now_s)
    if not made:
        account.take(events.WorldFormed(generation=1, step=committed_step), now_s=now_s)
    return made


def test_a_run_without_faults_has_no_faults_and_nothing_lost():
    """Control: every second is startup, productive or accounted for by the ranks."""
    account = RunAccounting(began_s=100.0)
    account.first_step_s = 104.0
    made = summary(
        account,
        reading=reading(
            productive_ns=80 * SECOND_NS,
            data_wait_ns=2 * SECOND_NS,
            checkpoint_ns=3 * SECOND_NS,
            evaluation_ns=4 * SECOND_NS,
        ),
    )
    assert made.faults == ()
    shares = made.time_s
    assert (shares.startup, shares.productive, shares.data_wait) == (4.0, 80.0, 2.0)
    assert (shares.checkpoint, shares.evaluation) == (3.0, 4.0)
    assert (shares.recovery, shares.lost) == (0.0, 0.0)
    assert made.wall_s == 100.0
    assert made.goodput == pytest.approx(80 / 96, rel=1e-5)


def test_a_fault_repaired_in_place_loses_the_unfinished_step_only():
    """Survivors keep what they committed: recovery time, and the time since the last commit."""
    account = RunAccounting(began_s=100.0)
    note(account, incident(7), began_s=110.0, since_s=109.5, generation=2)
    [(repaired, cause)] = repair(account, now_s=111.25, committed_step=7, productive_s=9)
    assert (cause, repaired.steps_lost) == (5, 0)
    made = summary(account, reading=reading(productive_ns=9 * SECOND_NS))
    (record,) = made.faults
    assert (record.kind, record.rank, record.step) == ("rank_killed", 1, 7)
    assert (record.detected_s, record.recovered_s, record.generation) == (10.0, 11.25, 2)
    assert made.time_s.recovery == 1.25
    assert made.time_s.lost == 0.5
    assert made.time_s.productive == 9.0


def test_a_last_save_that_fails_loses_no_step():
    """The time since the last commit is what the save was tried for. Control: the test before."""
    account = RunAccounting(began_s=100.0)
    note(account, incident(7, kind=FaultKind.STORAGE_FAILED), began_s=140.0, since_s=109.5)
    assert summary(account, reading=reading(productive_ns=9 * SECOND_NS)).time_s.lost == 0.0


def test_work_since_the_checkpoint_is_lost_by_a_rollback():
    """It moves from productive to lost."""
    account = RunAccounting(began_s=100.0)
    save(account, 10, 10)
    note(account, incident(15), began_s=120.0)
    [(repaired, _)] = repair(account, now_s=121.0, committed_step=10, productive_s=16)
    assert repaired.steps_lost == 5
    made = summary(account, reading=reading(productive_ns=16 * SECOND_NS))
    assert (made.time_s.lost, made.time_s.productive) == (6.0, 10.0)
    assert made.faults[0].steps_lost == 5


def test_each_rollback_counts_its_own_work_once():
    """Twice to the same checkpoint, then to a later one: what was lost before is not lost again."""
    account = RunAccounting(began_s=100.0)
    save(account, 10, 10)
    for productive_s, lost_s in ((15, 5), (18, 8)):
        note(account, incident(12), began_s=120.0)
        repair(account, now_s=120.0, committed_step=10, productive_s=productive_s)
        shares = summary(account, reading=reading(productive_ns=productive_s * SECOND_NS)).time_s
        assert (shares.lost, shares.productive) == (lost_s, 10.0)
    save(account, 15, 23)
    note(account, incident(17), began_s=140.0)
    repair(account, now_s=140.0, committed_step=15, productive_s=26)
    shares = summary(account, reading=reading(productive_ns=26 * SECOND_NS)).time_s
    assert (shares.lost, shares.productive) == (11.0, 15.0)


def test_a_rollback_to_the_very_start_loses_everything():
    """No checkpoint was made yet."""
    account = RunAccounting(began_s=100.0)
    note(account, incident(4), began_s=110.0)
    [(repaired, _)] = repair(account, now_s=111.0, committed_step=0, productive_s=1)
    assert repaired.steps_lost == 4
    assert summary(account, reading=reading(productive_ns=SECOND_NS)).time_s.productive == 0.0


def test_one_lost_step_is_not_all_of_the_work():
    """It lies between two saves: as much of the time since the one before as of the steps."""
    account = RunAccounting(began_s=0.0)
    save(account, 300, 290)
    save(account, 500, 500)
    note(account, incident(800), began_s=900.0)
    [(repaired, _)] = repair(account, now_s=901.0, committed_step=799, productive_s=800)
    assert repaired.steps_lost == 1
    shares = summary(account, reading=reading(productive_ns=800 * SECOND_NS)).time_s
    assert (shares.lost, shares.productive) == (1.0, 799.0)


def test_without_a_save_the_work_since_the_launch_is_shared_out():
    """A resumed run stood at its first step before it had worked at all; lost twice, counted once."""
    account = RunAccounting(began_s=0.0)
    assert repair(account, now_s=5.0, committed_step=1000) == []
    for productive_s in (100, 101):
        note(account, incident(1100), began_s=110.0)
        repair(account, now_s=111.0, committed_step=1099, productive_s=productive_s)
    shares = summary(account, reading=reading(productive_ns=101 * SECOND_NS)).time_s
    assert (shares.lost, shares.productive) == (2.0, 99.0)


def test_incidents_of_one_outage_are_one_recovery():
    """A second fault while repairing: time counts from the first, and both end together."""
    account = RunAccounting(began_s=100.0)
    note(account, incident(3), began_s=110.0, since_s=109.0)
    note(account, incident(3, rank=0), began_s=112.0, since_s=109.0)
    repair(account, now_s=115.0, committed_step=3)
    made = summary(account)
    assert [record.recovered_s for record in made.faults] == [15.0, 15.0]
    assert made.time_s.recovery == 5.0
    assert made.time_s.lost == 1.0
    assert len(account.history) == 2


def test_a_generation_that_forms_without_a_fault_repairs_nothing():
    """Control: the first one of a run."""
    account = RunAccounting(began_s=100.0)
    assert repair(account, now_s=103.0, committed_step=0) == []
    assert summary(account).time_s.recovery == 0.0


def test_a_fault_that_ended_the_run_was_never_recovered():
    """Its record says so by None."""
    account = RunAccounting(began_s=100.0)
    note(account, incident(3), began_s=110.0)
    made = summary(account, status=RunStatus.FAILED, exit_code=ExitCode.FAILED)
    assert made.faults[0].recovered_s is None
    assert (made.status, made.exit_code) == (RunStatus.FAILED, 1)


def test_what_the_ranks_reported_wins_over_the_board():
    """A complete run is described by its own words, peaks by the highest of all ranks."""
    account = RunAccounting(began_s=100.0)
    save(account, 16, 0)
    reports = [
        finished(
            epochs=2,
            samples=160,
            loss=0.25,
            figures={"validation_loss": 0.3},
            weights_sha256="ab",
            checkpoint="step_20.pt",
            peaks={"peak_rss_bytes": 5, "peak_device_bytes": 0},
        ),
        finished(peaks={"peak_rss_bytes": 9, "peak_device_bytes": 0}),
    ]
    made = summary(account, finished=reports)
    assert (made.run_id, made.name) == ("a run", "mine")
    assert (made.steps, made.epochs, made.samples, made.final_loss) == (20, 2, 160, 0.25)
    assert (made.weights_sha256, made.checkpoint) == ("ab", "step_20.pt")
    assert made.figures == {"validation_loss": 0.3}
    assert (made.peak_rss_bytes, made.peak_device_bytes) == (9, None)


def test_a_repair_is_reported_by_its_parts():
    """Noticing, aborting, forking and each part of the re-forming, in seconds, and the sum."""
    account = RunAccounting(began_s=100.0)
    note(account, incident(7, at_s=110.25), began_s=110.0, detect_s=2.0)
    account.forming(110.75)
    parts = {"group": 0.1, "transfer": 0.2, "rebuild": 0.3}
    repair(account, now_s=111.5, committed_step=7, parts=parts)
    (record,) = summary(account).faults
    assert record.seconds == {"detect": 2.0, "abort": 0.25, "fork": 0.5, **parts, "total": 1.5}


def test_a_later_forming_does_not_touch_a_repair_that_is_done():
    """Control: its figures are final."""
    account = RunAccounting(began_s=100.0)
    note(account, incident(7, at_s=110.25), began_s=110.0)
    account.forming(110.75)
    repair(account, now_s=111.5, committed_step=7)
    account.forming(190.0)
    assert summary(account).faults[0].seconds["fork"] == 0.5


def test_a_run_that_broke_off_is_described_by_the_board():
    """Steps, samples and loss of the last commit, and the last checkpoint that was published."""
    account = RunAccounting(began_s=100.0)
    save(account, 16, 0)
    made = summary(account, status=RunStatus.GAVE_UP, exit_code=ExitCode.GAVE_UP)
    assert (made.steps, made.epochs, made.samples, made.final_loss) == (20, 2, 160, 0.5)
    assert (made.weights_sha256, made.checkpoint, made.peak_rss_bytes) == (None, "step_16.pt", None)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_not_reported_as_one(loss):
    """summary.json must stay readable by everybody."""
    assert summary(RunAccounting(began_s=0.0), finished=[finished(loss=loss)]).final_loss is None


def test_what_lies_between_two_stages_is_startup():
    """Of a fault there the repair begins with the fault, and no step was cut short."""
    ended = events.StageEnds(stage="pre", step=10, loss=None, stop_reason="end")
    account = RunAccounting(began_s=100.0)
    account.first_step_s = 104.0
    account.take(ended, now_s=120.0)
    account.take(events.WorldFormed(generation=2, step=10), now_s=123.0)
    account.take(ended, now_s=140.0)
    note(account, incident(20), began_s=142.0, since_s=139.0)
    repair(account, now_s=147.0, committed_step=20)
    shares = summary(account).time_s
    assert (shares.startup, shares.recovery, shares.lost) == (4.0 + 3.0 + 2.0, 5.0, 0.0)


def test_epochs_are_those_of_the_stage():
    """Of a run that ends without a report of its ranks."""
    facts = RunFindings(run_id="a run", name="mine")
    begins = {"number": 1, "of": 2, "step": 4, "total_steps": 20}
    facts.take(events.StageBegins(stage="tune", first_step=4, **begins))
    assert summary(RunAccounting(began_s=0.0), facts=facts).epochs == 2
    assert summary(RunAccounting(began_s=0.0), facts=facts).stage == "tune"


def test_a_run_that_never_made_a_step_was_startup_only():
    """And has no loss."""
    made = summary(RunAccounting(began_s=100.0), reading=reading(), now_s=130.0)
    assert made.time_s.startup == 30.0
    assert made.final_loss is None
    assert made.goodput == 0.0
    assert made.exact is None, "nothing was computed"


def test_reasons_for_inexact_weights_are_passed_on():
    """Exact means that no reason is known."""
    account = RunAccounting(began_s=0.0)
    assert summary(account).exact
    made = summary(account, facts=RunFindings(inexact_reasons=["fewer ranks"]))
    assert (made.exact, made.inexact_reasons) == (False, ("fewer ranks",))


def test_what_was_proved_stands_in_the_summary_always():
    """Steps are counted once, however many ranks report them, and come in order."""
    assert summary(RunAccounting(began_s=0.0)).to_record()["exact_proof"] == {
        "repeated": 0,
        "drilled": (),
        "repairs_proved": "",
        "differences": (),
    }
    facts = RunFindings(proved={"repeated": {0}, "drilled": {50, 2}})
    made = summary(RunAccounting(began_s=0.0), facts=facts)
    assert made.exact_proof == ExactProof(repeated=1, drilled=(2, 50))


def test_a_drill_that_failed_stands_in_the_summary(tmp_path):
    """Where it was undone its reason is withdrawn, and no other one; a file is read back as it was."""
    facts = RunFindings()
    for step in (4, 9):
        reason = f"differs at {step}"
        facts.take(events.Drill(rank=1, step=step, differs="w", inexact_reason=reason))
    facts.take(events.Diagnosed(rank=1, step=12, of_step=4, source="once"))
    facts.take(events.Undone(rank=1, of_step=4, step=2, withdrawn="differs at 4"))
    assert facts.inexact_reasons == ["differs at 9"]
    made = summary(RunAccounting(began_s=0.0), facts=facts)
    write_summary(tmp_path / "summary.json", made)
    first, second = read_summary(tmp_path / "summary.json").exact_proof.differences
    assert first == Difference(rank=1, step=4, first_in="w", cause="once", undone=True)
    assert (second.step, second.cause, second.undone) == (9, "", False)


def test_each_rank_s_own_time_is_reported():
    """Where nobody is slow for long enough to be named, too; control: one without a step has none."""
    made = summary(RunAccounting(began_s=0.0))
    assert made.to_record()["own_step_s"] == {"0": 0.25, "1": 0.75}


def test_very_many_checkpoints_do_not_pile_up():
    """A run of months saves thousands; the newest are what a rollback can reach."""
    account = RunAccounting(began_s=0.0)
    for step in range(5000):
        save(account, step, step)
    assert len(account._productive_at_save) <= 64
    note(account, replace(incident(5000)), began_s=10.0)
    repair(account, now_s=10.0, committed_step=4999, productive_s=5003)
    assert summary(account, reading=reading(productive_ns=5003 * SECOND_NS)).time_s.lost == 4.0


@pytest.mark.parametrize("count", [2 * REPAIRED_KEPT, 2 * REPAIRED_KEPT + 7])
def test_of_thousands_of_repaired_faults_the_first_and_the_last_are_listed(count):
    """A long run with a bad disk or loader does not grow for ever; the rest is counted."""
    account = RunAccounting(began_s=0.0)
    for step in range(count):
        fault = Fault(kind=FaultKind.LOADER_WORKER_DIED, rank=0, step=step, cause="it died")
        account.take(
            events.RepairedInPlace(rank=0, action="", seconds=0.1, fault=fault, generation=1),
            now_s=1.0,
        )
    made = summary(account)
    steps = sorted(record.step for record in made.faults)
    assert steps == [*range(REPAIRED_KEPT), *range(count - REPAIRED_KEPT, count)]
    assert made.faults_left_out == count - 2 * REPAIRED_KEPT
    assert made.to_record()["faults_left_out"] == made.faults_left_out
    assert account.faults_total == count
    note(account, incident(3), began_s=100.0)
    assert account.faults_total == count + 1


def test_the_summary_says_which_faults_were_injected(tmp_path):
    """What, where and when, on the clock of the faults that came of it; also read back from the file."""
    account = RunAccounting(began_s=100.0)
    injected = events.Injected(kind="kill", rank=1, number=2, step=7, phase="forward")
    account.take(injected, now_s=109.5)
    note(account, incident(7), began_s=110.0)
    made = summary(account)
    (record,) = made.injected
    assert (record.kind, record.rank, record.number) == ("kill", 1, 2)
    assert (record.step, record.phase, record.at_s) == (7, "forward", 9.5)
    assert made.faults[0].detected_s == 10.0
    write_summary(tmp_path / "summary.json", made)
    assert read_summary(tmp_path / "summary.json") == made


def test_of_thousands_of_injections_the_newest_are_listed():
    """A soak of days does not grow for ever."""
    account = RunAccounting(began_s=0.0)
    for step in range(INJECTED_KEPT + 5):
        account.take(events.Injected(kind="stop", rank=0, step=step, phase="data"), now_s=1.0)
    assert [one.step for one in summary(account).injected] == [*range(5, INJECTED_KEPT + 5)]


def test_rates_are_those_of_this_launch_over_all_its_time():
    """Steps of before a resume are none of it; tokens and peak come from the ranks, or there is no rate."""
    account = RunAccounting(began_s=90.0)
    account.take(events.WorldFormed(generation=1, step=10), now_s=100.0)
    account.first_step_s = 100.0
    assert summary(account).samples_per_s == pytest.approx(10 * 8 / 100)
    assert summary(account).tokens_per_s is None
    report = {"samples": 160, "all_tokens": 3200.0, "flops_per_token": 6.0, "peak_flops": 96.0}
    known = summary(account, finished=[finished(**report)])
    assert known.tokens_per_s == pytest.approx(10 * 160 / 100)
    assert known.flops_utilization == pytest.approx(16 * 6 / (96 * 2))
    assert summary(account, reading=reading(committed_step=10)).samples_per_s is None
