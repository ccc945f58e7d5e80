"""Events as values: their names and fields in the journal."""

from __future__ import annotations

import json

import pytest

from ddp_runner.core import events
from ddp_runner.core.faults import Fault, FaultKind

FAULT = Fault(kind=FaultKind.NON_FINITE, rank=1, step=3, cause="loss is nan", detail="trace")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (events.Forming, "forming"),
        (events.FaultTolerated, "fault_tolerated"),
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
    """What other sinks need is no JSON, and no line grows by it."""
    event = events.RepairedInPlace(
        action="skipped", seconds=0.5, steps_lost=1, fault=FAULT, generation=2, inexact_reason="x"
    )
    assert event.written() == {"action": "skipped", "seconds": 0.5, "steps_lost": 1}
    ahead = events.ForkedAhead(ranks=(1, 2)).written()
    assert json.loads(json.dumps(ahead)) == ahead == {"ranks": [1, 2]}


@pytest.mark.parametrize(
    ("kind", "detail"), [(FaultKind.NON_FINITE, "trace"), (FaultKind.COLLECTIVE_FAILED, "")]
)
def test_the_traceback_of_a_lost_peer_is_left_out(kind, detail):
    """It explains nothing; that of any other fault is kept."""
    fault = Fault(kind=kind, rank=1, step=3, cause="it", detail="trace")
    assert events.Fault(**events.of_fault(fault, generation=1)).written()["detail"] == detail
