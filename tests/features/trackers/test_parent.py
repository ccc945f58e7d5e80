"""Who keeps the trackers waits for none: they hang, die, have no disk, and what they missed comes later."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import replace

import pytest

from ddp_runner.features.trackers.parent import TRACKER, TrackerKeeper
from ddp_runner.kernel.processes.children import Ended
from ddp_runner.kernel.system.clock import SYSTEM_CLOCK
from tests.disks import small_disk
from tests.features.trackers.test_trackers import (
    Files,
    needs_tensorboard,
    read_back,
    rows,
    scalars,
    stands,
)
from tests.processes import poll
from tests.supervisor.simulated import Clock


class Kept:
    """A keeper of one tracker over the files of a run in ``folder``; ``said`` is what it has shown."""

    def __init__(self, folder, clock=None, *, name="csv", role=TRACKER, **patience):
        self.said = []
        self.keeper = TrackerKeeper(
            [name],
            folder,
            clock=clock or SYSTEM_CLOCK,
            say=lambda text, **_: self.said.append(text),
            role=role,
            **patience,
        )

    def end(self, *, exit_code=0, is_cut_short=lambda: False):
        """The run has ended."""
        self.keeper.end(exit_code, is_cut_short=is_cut_short)

    def ended(self, pid):
        """Reap it, as the supervisor does, and say so."""
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        exit_code, number = (None, -code) if code < 0 else (code, None)
        ended = Ended(pid=pid, exit_code=exit_code, signal_number=number, at_ns=0)
        assert self.keeper.took(ended)


@pytest.fixture
def files(tmp_path):
    made = Files(tmp_path / "logs")
    made.event("run_begins", run_id="abc", resumed_step=0)
    made.steps(1, 3)
    return made


def test_a_tracker_that_hangs_is_waited_for_only_at_the_end(files):
    """And there for a while; a resume writes what it has missed."""
    kept = Kept(files.folder, role=replace(TRACKER, end_s=0.2))
    kept.keeper.look()
    (pid,) = kept.keeper.outlasts()
    poll(kept.keeper.links, what="its file", timeout_s=30.0)
    os.kill(pid, signal.SIGSTOP)
    files.steps(4, 6)
    began_s = time.monotonic()
    for _ in range(100):
        kept.keeper.look()
        assert kept.keeper.links() == {"csv": str(files.folder / "metrics.csv")}
    kept.end(exit_code=130)
    assert time.monotonic() - began_s < 5.0
    assert kept.said[-1] == "csv was not done within 0.2 s: a resume continues there"
    assert kept.keeper.outlasts() == set()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert rows(files.folder) != stands(files.folder)
    again = Kept(files.folder)
    again.keeper.look()
    (pid,) = again.keeper.outlasts()
    again.end()
    os.waitpid(pid, 0)
    assert rows(files.folder) == stands(files.folder)


def test_a_complete_run_waits_longer_for_its_trackers(files):
    """Run again it is complete at once, so nothing would write what is missing. Ctrl-C skips the wait."""
    kept = Kept(files.folder, role=replace(TRACKER, end_s=0.1), complete_end_s=30.0)
    kept.keeper.look()
    (pid,) = kept.keeper.outlasts()
    poll(kept.keeper.links, what="its file", timeout_s=30.0)
    os.kill(pid, signal.SIGSTOP)
    files.steps(4, 6)

    def is_cut_short():
        if kept.said[-1].startswith("waiting"):
            os.kill(pid, signal.SIGCONT)
        return False

    kept.end(is_cut_short=is_cut_short)
    os.waitpid(pid, 0)
    assert kept.said[-1] == "waiting for csv, 30 s at most; Ctrl-C skips it"
    assert rows(files.folder) == stands(files.folder)


def test_a_tracker_that_fails_at_the_end_is_a_line(files):
    """It was taken for one that had written all."""
    kept = Kept(files.folder, role=replace(TRACKER, end_s=0.1))
    kept.keeper.look()
    (pid,) = kept.keeper.outlasts()
    os.kill(pid, signal.SIGSTOP)

    def is_cut_short():
        os.kill(pid, signal.SIGKILL)
        return False

    kept.end(is_cut_short=is_cut_short)
    os.waitpid(pid, 0)
    log = files.folder / "tracker_csv.log"
    rest = "the rest is only in metrics.jsonl"
    assert kept.said[-1] == f"the tracker csv has ended: signal 9, see {log}; {rest}"


@pytest.mark.parametrize(
    ("name", "read", "expected"),
    [
        ("csv", rows, stands),
        pytest.param("tensorboard", read_back, scalars, marks=needs_tensorboard),
    ],
)
def test_a_tracker_on_a_full_disk_goes_on_once_there_is_room(tmp_path, name, read, expected):
    """It ends with the reason, another one is started later, and no point is missing or twice."""
    with small_disk(tmp_path / "disk", size_kb=96):
        files = Files(tmp_path / "disk" / "logs")
        files.event("run_begins", run_id="abc", resumed_step=0)
        files.steps(1, 100)
        filler = tmp_path / "disk" / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(512)):
                pass
        kept = Kept(files.folder, clock=(clock := Clock()), name=name)
        kept.keeper.look()
        kept.ended(*kept.keeper.outlasts())
        assert f"the tracker {name} has ended: exit code 1" in kept.said[-1]
        kept.keeper.look()
        assert kept.keeper.outlasts() == set()  # not due yet
        filler.unlink()
        clock.now_s += TRACKER.pauses_s[0]
        kept.keeper.look()
        (pid,) = kept.keeper.outlasts()
        kept.end()
        os.waitpid(pid, 0)
        assert read(files.folder) == expected(files.folder)


def test_a_tracker_that_cannot_start_is_given_up(tmp_path):
    """Each time after twice as long; a resume tries again."""
    (tmp_path / "logs").write_text("a file in the place of the folder")
    clock = Clock()
    kept = Kept(tmp_path / "logs", clock=clock)
    for number in range(1, int(TRACKER.tries) + 1):
        pause_s = TRACKER.pauses_s[min(number, len(TRACKER.pauses_s)) - 1]
        kept.keeper.look()
        assert len(kept.said) == number
        clock.now_s += pause_s * 0.9
        kept.keeper.look()
        assert len(kept.said) == number
        clock.now_s += pause_s * 0.2
    assert "is restarted" in kept.said[-2]
    assert "the run continues without it" in kept.said[-1]
    clock.now_s += 1_000_000.0
    kept.keeper.look()
    kept.end()
    assert len(kept.said) == int(TRACKER.tries)
    again = Kept(tmp_path / "logs", clock=clock)
    again.keeper.look()
    assert "is restarted" in again.said[-1]
