"""Which injection each fault of the summary belongs to, and what is listed that opens no incident."""

from __future__ import annotations

import json

import pytest

from ddp_runner.kernel.rules.classify import attribute
from ddp_runner.kernel.rules.faults import Fault, FaultKind
from ddp_runner.kernel.rules.recovery import Incident
from ddp_runner.kernel.wire import events
from ddp_runner.observe.accounting import TOLERATED_KEPT, RunAccounting
from ddp_runner.observe.summary import read_summary, write_summary
from tests.observe.test_accounting import summary


@pytest.fixture
def account():
    return RunAccounting(began_s=100.0)


def inject(account, kind, rank, *, at_s):
    account.take(
        events.Injected(kind=kind, rank=rank, number=0, step=7, phase="data"), now_s=100.0 + at_s
    )


def fault(kind, rank, *, at_s=0.0):
    return Fault(
        kind=kind, rank=rank, step=7, cause="a cause", phase="reduce", at_ns=int(at_s * 1e9)
    )


def plan(account, *faults, at_s, action="respawned"):
    made = Incident(
        attribution=attribute(faults), at_s=100.0 + at_s, committed_step=7, ever_formed=True
    )
    planned = events.Plan(
        plan="ReplaceRanks", culprit=made.culprit.rank, kind=made.culprit.kind.value, replaced=(),
        dropped=(), kept=None, all_ranks_dead=False, victims=(), incident=made, began_s=made.at_s,
        generation=1, since_s=made.at_s, detect_s=0.0, action=action,
    )  # fmt: skip
    account.take(planned, now_s=made.at_s)


def tolerate(account, kind, *, at_s, rank=0, step=9):
    fault = Fault(kind=kind, rank=rank, step=step, cause="a cause", phase="checkpoint")
    event = events.FaultTolerated(rank=rank, fault=fault, generation=1, action="goes on")
    account.take(event, now_s=100.0 + at_s)


def save(account, *, at_s):
    saved = events.CheckpointSaved(step=20, path="p", blocked_s=0.0, size_bytes=1)
    account.take(saved, now_s=100.0 + at_s)


def brought_about(record):
    return [(one.kind, one.rank, one.at_s) for one in record.injected]


def test_an_injection_belongs_to_the_culprit_not_to_its_victim(account):
    """Its record has what was done to whom, where it was noticed, and what was done about it."""
    inject(account, "exit", 0, at_s=1.0)
    lost, gone = fault(FaultKind.COLLECTIVE_FAILED, 1), fault(FaultKind.RANK_EXITED, 0, at_s=1)
    plan(account, lost, gone, at_s=2.0)
    (record,) = summary(account).faults
    assert brought_about(record) == [("exit", 0, 1.0)]
    assert (record.rank, record.phase, record.action) == (0, "reduce", "respawned")


def test_each_injection_belongs_to_one_fault(account):
    """A real fault takes none; of two into one rank the older one comes first."""
    plan(account, fault(FaultKind.RANK_KILLED, 1), at_s=1.0)
    inject(account, "kill", 1, at_s=2.0)
    inject(account, "kill", 1, at_s=3.0)
    plan(account, fault(FaultKind.RANK_RAISED, 1), at_s=4.0)
    for at_s in (5.0, 6.0, 7.0):
        plan(account, fault(FaultKind.RANK_KILLED, 1), at_s=at_s)
    found = [brought_about(record) for record in summary(account).faults]
    assert found == [[], [], [("kill", 1, 2.0)], [("kill", 1, 3.0)], []]


def test_ranks_that_are_lost_together_share_a_record(account):
    """Each injection is in it, the culprit's first; none of them is left over for a later fault."""
    inject(account, "kill", 0, at_s=1.0)
    inject(account, "raise", 1, at_s=1.0)
    raised, killed = (
        fault(FaultKind.RANK_RAISED, 1, at_s=1),
        fault(FaultKind.RANK_KILLED, 0, at_s=2),
    )
    plan(account, raised, killed, at_s=3.0)
    plan(account, fault(FaultKind.RANK_KILLED, 0), at_s=9.0)
    together, real = summary(account).faults
    assert brought_about(together) == [("raise", 1, 1.0), ("kill", 0, 1.0)]
    assert brought_about(real) == []


def test_a_fault_that_blames_nobody_has_the_injection_of_any_rank(account):
    """Two replicas differ, and neither can be believed; this one was repaired within the generation."""
    inject(account, "diverge", 1, at_s=1.0)
    rolled_back = events.RepairedInPlace(
        rank=0, action="rolled back to step 5", seconds=0.5, steps_lost=2, generation=1,
        fault=fault(FaultKind.REPLICA_DIVERGED, -1),
    )  # fmt: skip
    account.take(rolled_back, now_s=103.0)
    (record,) = summary(account).faults
    assert brought_about(record) == [("diverge", 1, 1.0)]
    assert (record.action, record.phase) == ("rolled back to step 5", "reduce")
    assert (record.detected_s, record.recovered_s, record.steps_lost) == (2.5, 3.0, 2)


def test_what_needs_no_repair_is_listed_and_not_counted(account, tmp_path):
    """A skipped step is over at once; the file has it as it is here."""
    inject(account, "nan", 1, at_s=1.0)
    tolerate(account, FaultKind.NON_FINITE, rank=1, at_s=2.0)
    made = summary(account)
    (record,) = made.tolerated
    assert brought_about(record) == [("nan", 1, 1.0)]
    assert (record.kind, record.rank, record.step, record.phase) == (
        "non_finite",
        1,
        9,
        "checkpoint",
    )
    assert (record.detected_s, record.recovered_s, record.action) == (2.0, None, "goes on")
    assert (made.faults, account.faults_total) == ((), 0)
    write_summary(tmp_path / "summary.json", made)
    assert read_summary(tmp_path / "summary.json") == made


def test_a_disk_that_refuses_several_saves_is_one_trouble(account):
    """Over with the next save that succeeds; the one after that is another."""
    inject(account, "disk_full", 0, at_s=1.0)
    save(account, at_s=1.5)  # control: it was not in trouble yet
    tolerate(account, FaultKind.STORAGE_FAILED, at_s=2.0, step=9)
    tolerate(account, FaultKind.STORAGE_FAILED, at_s=3.0, step=19)
    save(account, at_s=5.0)
    save(account, at_s=6.0)
    tolerate(account, FaultKind.STORAGE_FAILED, at_s=7.0, step=29)
    full, real = summary(account).tolerated
    assert (full.step, full.times, full.detected_s, full.recovered_s) == (9, 2, 2.0, 5.0)
    assert brought_about(full) == [("disk_full", 0, 1.0)]
    assert (real.step, real.times, real.recovered_s, real.injected) == (29, 1, None, ())


def test_of_thousands_of_tolerated_faults_the_newest_are_listed(account):
    """A run of months with a bad disk does not grow for ever."""
    for step in range(TOLERATED_KEPT + 5):
        tolerate(account, FaultKind.NON_FINITE, at_s=1.0, step=step)
    steps = [record.step for record in summary(account).tolerated]
    assert steps == [*range(5, TOLERATED_KEPT + 5)]


def test_a_summary_of_before_is_read(account, tmp_path):
    """Its faults lack what is new since."""
    plan(account, fault(FaultKind.RANK_KILLED, 1), at_s=1.0)
    made = summary(account).to_record()
    del made["tolerated"]
    made["faults"] = [
        {name: value for name, value in made["faults"][0].items()
         if name not in ("phase", "action", "injected", "times")}
    ]  # fmt: skip
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(made), encoding="utf-8")
    old = read_summary(path)
    assert (old.tolerated, old.faults[0].injected, old.faults[0].phase) == ((), (), "")
