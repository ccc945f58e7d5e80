"""What outlives a restart under an outside launcher, and what the summary makes of it."""

from __future__ import annotations

import json

import pytest

from ddp_runner.config import from_flat
from ddp_runner.features.launchers import launched as outside
from ddp_runner.features.launchers.restart_log import RestartLog, read_restart_log, restart_log_path
from ddp_runner.kernel.rules.exits import RunStatus, StopReason
from ddp_runner.kernel.rules.faults import Fault, FaultKind
from ddp_runner.kernel.step.runtime import RankInfo
from ddp_runner.kernel.wire.events import (
    CheckpointSaved,
    Faulted,
    FaultTolerated,
    Proved,
    RepairedInPlace,
    TuningChanged,
)
from ddp_runner.kernel.wire.messages import Metrics, RestartProgress
from ddp_runner.training.figures.train_report import TrainReport

HALVED = TuningChanged(
    rank=1, step=7, action="half", inexact_reason="half from 7", tuning={"micro_batch_size": 4}
)
SAVED = CheckpointSaved(rank=0, step=10, path="p", blocked_s=0.0, size_bytes=1, sha256="0")
BEGUN = RestartProgress(rank=1, generation=1, run_id="r", clock="", began_ns=1, at_ns=1)
FAULT_FREE = TuningChanged(rank=0, step=9, action="relaxed", inexact_reason="", fault_free=True)


def restart_log(folder, *, is_restart, rank=0):
    return RestartLog(folder, rank=rank, is_restart=is_restart, warn=pytest.fail)


def fault(kind, rank=1, step=6):
    return Fault(kind=kind, rank=rank, step=step, cause="a cause", detail="a traceback", at_ns=1)


def test_a_restart_goes_on_with_its_log_and_a_launch_begins_one(tmp_path):
    """Another launch in the same folder may be of another job, where nothing of this one is true."""
    first = restart_log(tmp_path, is_restart=False)
    assert (first.learnt, first.has_saved) == (None, False)
    for message in (HALVED, SAVED, FAULT_FREE, Metrics(rank=0, step=1, values={})):
        first.keep(message)
    with restart_log_path(tmp_path, 0).open("ab") as file:
        file.write(b'{"v": 1, "type": "Adj')  # torn by the end of the process
    again = restart_log(tmp_path, is_restart=True)
    assert (again.learnt, again.has_saved) == (HALVED, True)
    again.keep(HALVED)
    assert list(read_restart_log(restart_log_path(tmp_path, 0))) == [
        HALVED,
        SAVED,
        FAULT_FREE,
        HALVED,
    ]
    other = restart_log(tmp_path, is_restart=False)
    assert (other.learnt, other.has_saved) == (None, False)
    assert list(read_restart_log(restart_log_path(tmp_path, 0))) == []
    assert restart_log(tmp_path, is_restart=True, rank=1).learnt is None


def test_a_restart_reads_the_log_that_an_older_version_named(tmp_path):
    """What a job reported before it was updated counts for it afterwards."""
    restart_log(tmp_path, is_restart=False).keep(HALVED)
    log = restart_log_path(tmp_path, 0)
    words = log.read_text(encoding="utf-8").replace("TuningChanged", "Adjusted")
    older = tmp_path / "told_rank_0.jsonl"
    older.write_text(words.replace('"action"', '"remedy"'), encoding="utf-8")
    log.unlink()
    assert restart_log(tmp_path, is_restart=True).learnt == HALVED
    assert list(read_restart_log(log)) == [HALVED]


def test_a_restart_reads_what_the_version_before_this_one_wrote(tmp_path):
    """Messages that are events now: under their old names, with the fields of then."""
    fault = (
        '{"kind": "non_finite", "rank": 0, "step": 3, "cause": "nan", "phase": "", "detail": "", "at_ns": 5,'
        ' "may_retry": true, "is_disagreement": false, "origin": "own", "host": ""}'
    )
    lines = (
        (
            '"Saved", "rank": 0, "step": 10, "path": "p", "blocked_s": 0.0, "size_bytes": 1, "sha256": "0",'
            ' "is_rescued": false'
        ),
        f'"Faulted", "generation": 1, "fault": {fault}',
        f'"FaultTolerated", "rank": 0, "fault": {fault}, "action": "goes on"',
        (
            f'"RepairedInPlace", "rank": 0, "fault": {fault}, "action": "again", "seconds": 0.5,'
            ' "steps_lost": 1, "inexact_reason": "", "kernel_kills": 0'
        ),
        '"Proved", "rank": 0, "step": 4, "what": "repeated"',
    )
    path = restart_log_path(tmp_path, 0)
    path.write_text("".join(f'{{"v": 1, "type": {line}}}\n' for line in lines), encoding="utf-8")
    nan = Fault(kind=FaultKind.NON_FINITE, rank=0, step=3, cause="nan", at_ns=5)
    assert list(read_restart_log(path)) == [
        SAVED,
        Faulted(generation=1, fault=nan),
        FaultTolerated(rank=0, fault=nan, action="goes on"),
        RepairedInPlace(rank=0, fault=nan, action="again", seconds=0.5, steps_lost=1),
        Proved(rank=0, step=4, what="repeated"),
    ]


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    """Rank 0 of two after a restart; rank 1 has its file."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setattr(outside.signal, "signal", lambda *_: None)
    rank_info = RankInfo(
        rank=0, local_rank=0, world_size=2, local_world_size=2, device="cpu", loads=True
    )
    settings = from_flat({"task": "synthetic", "log_dir": str(tmp_path), "device": "cpu"})
    return outside.OutsideRuntime(rank_info=rank_info, settings=settings), settings


def summary_of(runtime, tmp_path):
    made, settings = runtime
    report = TrainReport(
        reason=StopReason.COMPLETED, steps=9, epochs=1, samples=72, tokens=None, loss=0.5, figures={},
        weights_sha256="0", checkpoint="", peaks={}, leaks=(), sample="",
    )  # fmt: skip
    outside._write_summary(settings, made, report, status=RunStatus.COMPLETED)
    return json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))


REPAIRED = RepairedInPlace(
    rank=1, fault=fault(FaultKind.BAD_SAMPLE), action="replaced", seconds=0.5,
    inexact_reason="bad samples were replaced",
)  # fmt: skip


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (HALVED, "half from 7"),
        (REPAIRED, "bad samples were replaced"),
        (
            Faulted(generation=1, fault=fault(FaultKind.REPLICA_DIVERGED)),
            "rank 1's replica had diverged by step 6",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_any_rank_reported_makes_the_summary_inexact(runtime, tmp_path, message, reason):
    """As in a supervised run: also where another process, before a restart, reported it, and once."""
    restart_log(tmp_path, is_restart=True, rank=1).keep(BEGUN)  # as every process does at first
    for _ in range(2):
        restart_log(tmp_path, is_restart=True, rank=1).keep(message)
    summary = summary_of(runtime, tmp_path)
    assert (summary["exact"], summary["inexact_reasons"]) == (False, [reason])


def test_what_changes_no_bit_leaves_the_summary_exact(runtime, tmp_path):
    """Control: a worker that was replaced, a lost peer, saves that failed and did not, a change by itself."""
    runtime[0].report(RepairedInPlace(rank=0, fault=fault(FaultKind.LOADER_WORKER_DIED, rank=0),
                                  action="new workers", seconds=0.5))  # fmt: skip
    runtime[0].report(Faulted(generation=1, fault=fault(FaultKind.COLLECTIVE_FAILED)))
    full = fault(FaultKind.STORAGE_FAILED, rank=0)
    runtime[0].report(FaultTolerated(rank=0, fault=full, action="training continues"))
    runtime[0].report(SAVED)
    runtime[0].report(FAULT_FREE)
    summary = summary_of(runtime, tmp_path)
    assert (summary["exact"], summary["inexact_reasons"]) == (True, [])
    (record,) = summary["faults"]
    assert (record["kind"], record["detail"]) == ("loader_worker_died", "a traceback")
    assert (record["action"], record["seconds"]) == ("new workers", {"total": 0.5})
    (failed,) = summary["tolerated"]
    assert (failed["kind"], failed["action"]) == ("storage_failed", "training continues")
    assert failed["recovered_s"] is not None, "the next save succeeded"
    assert (summary["checkpoint"], summary["checkpoint_step"]) == ("p", 10)


def test_steps_that_were_computed_twice_are_counted_over_restarts(runtime, tmp_path):
    """Once each, whichever ranks report them."""
    for rank, step in ((1, 0), (1, 40)):
        proved = Proved(rank=rank, step=step, what="repeated")
        restart_log(tmp_path, is_restart=True, rank=rank).keep(proved)
    runtime[0].report(Proved(rank=0, step=40, what="repeated"))
    assert summary_of(runtime, tmp_path)["exact_proof"] == {
        "repeated": 2,
        "drilled": [],
        "repairs_proved": "",
        "differences": [],
    }


def test_a_restart_resumes_what_this_launch_has_saved(runtime):
    """Not what the user named at first: ``none`` would set our own checkpoints aside."""
    made, _ = runtime
    assert made.resume_word("none") == "none"
    made.report(SAVED)
    restarted = outside.OutsideRuntime(rank_info=made.rank_info, settings=runtime[1])
    assert restarted.resume_word("none") == "auto"
