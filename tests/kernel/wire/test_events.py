"""Events as values: their names and fields in the journal."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ddp_runner.kernel.rules.faults import Fault, FaultKind
from ddp_runner.kernel.wire import events

FAULT = Fault(kind=FaultKind.NON_FINITE, rank=1, step=3, cause="loss is nan", detail="trace")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (events.Forming, "forming"),
        (events.FaultTolerated, "fault_tolerated"),
        (events.Faulted, "fault"),
        (events.RepairedInPlace, "repaired_in_place"),
        (events.StopSignalAtRank, "stop_signal_at_rank"),
    ],
)
def test_an_event_is_named_in_the_journal_as_its_class(kind, name):
    """Words are parted by underscores."""
    assert kind.name == name


def test_no_two_events_have_one_name():
    """Who reads the journal distinguishes them by it."""
    names = [kind.name for kind in vars(events).values() if isinstance(kind, type)
             and issubclass(kind, events.Event) and kind is not events.Event]  # fmt: skip
    assert len(names) == len(set(names)) > 30


def test_the_journal_gets_what_is_written_only():
    """What other sinks need is not JSON, and no line grows by it."""
    event = events.RepairedInPlace(
        rank=1, action="skipped", seconds=0.54321, steps_lost=1, fault=FAULT, inexact_reason="x"
    )
    assert event.written() == {"action": "skipped", "seconds": 0.5432, "steps_lost": 1}
    changed = events.TuningChanged(
        rank=0, step=3, action="a", inexact_reason="", tuning={"large": "x" * 9_000}
    )
    assert changed.written() == {"rank": 0, "step": 3, "action": "a", "inexact_reason": ""}
    ahead = events.ForkedAhead(ranks=(1, 2)).written()
    assert json.loads(json.dumps(ahead)) == ahead == {"ranks": [1, 2]}


@pytest.mark.parametrize(
    ("kind", "detail"), [(FaultKind.NON_FINITE, "trace"), (FaultKind.COLLECTIVE_FAILED, "")]
)
def test_the_traceback_of_a_lost_peer_is_left_out(kind, detail):
    """It explains nothing; that of any other fault is kept."""
    fault = Fault(kind=kind, rank=1, step=3, cause="it", detail="trace")
    assert events.Faulted(fault=fault).written()["detail"] == detail


@pytest.mark.parametrize("host", ["", "node1"])
def test_a_fault_stands_in_the_journal_field_by_field(host):
    """In this order; its machine only where there are several, and what the rank needs for itself not at all."""
    written = events.Faulted(fault=replace(FAULT, host=host, at_ns=5), generation=2).written()
    assert list(written.items()) == [
        ("kind", "non_finite"), ("rank", 1), ("step", 3), ("phase", ""), ("text", "loss is nan"),
        ("origin", "own"), ("generation", 2), ("detail", "trace"), *([("host", host)] if host else []),
    ]  # fmt: skip


def test_what_a_rank_formed_took_is_rounded_in_the_journal_alone():
    """The account has the slowest rank's count of all digits."""
    took = {"group_s": 0.123456, "transfer_s": 1 / 3, "rebuild_s": 2.0}
    formed = events.RankFormed(rank=1, pid=7, generation=2, committed_step=9, source=0, **took)
    assert formed.group_s == 0.123456
    assert list(formed.written().values()) == [1, 7, 2, 9, 0, 0.1235, 0.3333, 2.0]


def test_why_a_run_ends_is_for_people_of_other_machines():
    """The journal has how it ended."""
    ends = events.RunEnds(status="failed", exit_code=1, line="rank 0 raised")
    assert ends.written() == {"status": "failed", "exit_code": 1}


def test_each_report_is_a_message_and_an_event_with_one_name():
    """What is no report never comes from a rank."""
    assert {"Faulted", "Injected", "SpareReady"} <= set(events.REPORTS)
    assert all(issubclass(kind, events.Report) for kind in events.REPORTS.values())
    assert not {"Report", "OfFault", "RunEnds", "Plan"} & set(events.REPORTS)
    assert all(events.REPORTS[name] is vars(events)[name] for name in events.REPORTS)
