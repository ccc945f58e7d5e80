"""What ``@record`` has written beside a rank's log, and what it says about the faults of an attempt."""

from __future__ import annotations

import json
import os
import time

import pytest
from torch.distributed.elastic.multiprocessing.errors import record

from ddp_runner.features.script.attempt_files import error_file, recorded_fault
from ddp_runner.features.script.rules import explained
from ddp_runner.kernel.rules.classify import attribute
from ddp_runner.kernel.rules.faults import Fault, FaultKind, Origin


def fault(rank, kind=FaultKind.RANK_EXITED, *, at_ns=100, origin=Origin.OWN, cause="exited"):
    return Fault(kind=kind, rank=rank, step=3, cause=cause, at_ns=at_ns, origin=origin)


def recorded(rank, cause="ValueError: no", *, kind=FaultKind.RANK_RAISED, at_ns=50):
    return fault(rank, kind, at_ns=at_ns, cause=cause)


@pytest.fixture
def written(tmp_path, monkeypatch):
    """By torch itself."""
    path = error_file(tmp_path / "rank_1.log")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


def test_what_torch_records_is_read_as_of_when_it_was_written(written):
    """Type, text and traceback; the time to a fraction of a second, which the file's text has not."""

    @record
    def fails():
        raise ValueError("row 17\nis bad")

    with pytest.raises(ValueError, match="row 17"):
        fails()
    os.utime(written, (time.time() - 5.0,) * 2)
    found = recorded_fault(written, rank=1, step=9)
    assert (found.kind, found.rank, found.step) == (FaultKind.RANK_RAISED, 1, 9)
    assert found.cause == "ValueError: row 17"
    assert 'raise ValueError("row 17' in found.detail
    assert 4.5 < (time.monotonic_ns() - found.at_ns) / 1e9 < 20.0


def test_a_lost_connection_is_known_as_one(written):
    """It is the consequence of another rank's end."""
    message = {"message": "RuntimeError: [pair.cc:553] Connection closed by peer", "extraInfo": {}}
    written.write_text(json.dumps({"message": message}))
    assert recorded_fault(written, rank=1, step=9).kind is FaultKind.COLLECTIVE_FAILED


@pytest.mark.parametrize("text", ["", "{", "[]", '{"other": 1}', "3"])
def test_a_file_of_another_form_says_nothing(written, text):
    """Half written, or by somebody else; and where there is none."""
    assert recorded_fault(written, rank=1, step=0) is None
    written.write_text(text)
    assert recorded_fault(written, rank=1, step=0) is None


def test_an_exit_is_explained_by_what_was_raised():
    """And so of two that have exited the one that raised is named, and not the one that lost its peer."""
    lost = recorded(0, "RuntimeError: lost", kind=FaultKind.COLLECTIVE_FAILED, at_ns=60)
    found = explained([fault(0), fault(1, at_ns=110)], [lost, recorded(1)])
    assert attribute(found).culprit == recorded(1)


def test_one_that_was_ended_because_of_others_had_raised_before():
    """It has no fault of its own: it was asked to end."""
    assert attribute(explained([fault(0)], [recorded(1)])).culprit.rank == 1


def test_a_kill_from_outside_is_no_consequence_of_what_was_raised():
    """A script may have got over that."""
    killed = fault(1, FaultKind.RANK_KILLED, origin=Origin.OUTSIDE)
    assert explained([killed], [recorded(1)]) == [killed]


def test_what_a_rank_has_said_itself_stays_with_the_earlier_time():
    """Its own report has the traceback of all that it had come through."""
    said = recorded(1, "TypeError: in the end", at_ns=100)
    (found,) = explained([said], [recorded(1, at_ns=50)])
    assert (found.cause, found.at_ns) == ("TypeError: in the end", 50)
