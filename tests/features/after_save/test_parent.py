"""The command of ``checkpoint.after_save``: real processes, driven as the loop drives them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from ddp_runner.features.after_save import parent as after_save
from ddp_runner.features.after_save.parent import LOG_NAME, AfterSave
from ddp_runner.supervisor.processes.children import Ended

LIMIT_S = 20.0


class Driven(AfterSave):
    """With what it says, and the loop's part of reaping."""

    def __init__(self, command, folder):
        self.said = []
        environment = {"PATH": os.environ["PATH"]}
        super().__init__(
            command, log_dir=folder, environment=environment, grace_s=0.0, say=self.hear
        )

    def finish(self, *, is_cut_short, grace_s):
        self._grace_s = grace_s
        super().finish(is_cut_short=is_cut_short)

    def hear(self, text, *, level="INFO"):
        self.said.append((level, text))

    def reap(self):
        """Wait for the command, as the loop's turns do."""
        pid = self.pid
        assert pid is not None
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        ended = Ended(
            pid=pid,
            exit_code=code if code >= 0 else None,
            signal_number=-code if code < 0 else None,
            at_ns=time.monotonic_ns(),
        )
        assert self.took(ended)
        self.look_first()


def never():
    return False


def wait_until(holds):
    deadline_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_without_a_command_nothing_is_ever_started(tmp_path):
    """As without the setting."""
    driven = Driven("", tmp_path)
    driven.saved("step_1.pt")
    driven.look_first()
    assert driven.pid is None
    driven.finish(is_cut_short=never, grace_s=0.0)
    assert (driven.said, list(tmp_path.iterdir())) == ([], [])


def test_one_command_at_a_time_and_the_newest_is_next(tmp_path):
    """Those that are left out are named; a path with a space is one word."""
    gate, done = tmp_path / "gate", tmp_path / "done"
    os.mkfifo(gate)
    driven = Driven(f"cat {gate}; echo {{path}} >> {done}", tmp_path)
    paths = [str(tmp_path / f"a b {number}.pt") for number in range(4)]
    for path in paths:
        driven.saved(path)
        driven.look_first()
    first = driven.pid
    assert len(psutil.Process().children()) >= 1
    gate.write_text("")
    driven.reap()
    assert driven.pid not in (None, first)
    gate.write_text("")
    driven.reap()
    assert driven.pid is None
    assert done.read_text().splitlines() == [paths[0], paths[3]]
    assert [text.split(":")[1].strip() for _, text in driven.said] == [
        "not run for a b 1.pt",
        "not run for a b 2.pt",
    ]


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("echo begun; echo no such remote >&2; exit 3; : {path}", "exit code 3: no such remote"),
        ("kill -9 $$; : {path}", "signal 9"),
        ("no_such_command_anywhere {path}", "exit code 127"),
    ],
)
def test_a_command_that_fails_is_a_warning_with_its_last_line(tmp_path, command, reason):
    """Each time, and of this very command; all that it wrote is in the log."""
    (tmp_path / LOG_NAME).write_text("of before\n")
    driven = Driven(command, tmp_path)
    driven.saved("x/step_1.pt")
    driven.look_first()
    driven.reap()
    ((level, text),) = driven.said
    assert level == "WARNING"
    assert text.startswith(f"checkpoint.after_save for step_1.pt: {reason}")
    assert "of before" not in text


def test_a_child_that_is_another_is_not_taken_for_the_command(tmp_path):
    """The ranks' ends are none of its business."""
    driven = Driven("true {path}", tmp_path)
    other = Ended(pid=1, exit_code=0, signal_number=None, at_ns=0)
    assert not driven.took(other)
    driven.saved("step_1.pt")
    driven.look_first()
    assert not driven.took(other)
    driven.reap()


def test_the_last_checkpoints_command_is_waited_for(tmp_path):
    """Also where it was not begun when the run ended."""
    driven = Driven(f"sleep 0.2; echo {{path}} >> {tmp_path}/done", tmp_path)
    driven.saved("step_1.pt")
    driven.look_first()
    driven.saved("step_2.pt")
    driven.finish(is_cut_short=never, grace_s=LIMIT_S)
    assert (tmp_path / "done").read_text().split() == ["step_1.pt", "step_2.pt"]
    assert driven.said == []


@pytest.mark.parametrize("is_stubborn", [False, True], ids=["hangs", "ignores SIGTERM"])
def test_what_hangs_is_killed_after_the_grace_with_all_its_processes(tmp_path, is_stubborn):
    """And what was still to come is named."""
    trap = "trap '' TERM; " if is_stubborn else ""
    driven = Driven(f"{trap}echo $$ >> {tmp_path}/pids; sleep 600 & wait; : {{path}}", tmp_path)
    driven.saved("step_1.pt")
    driven.look_first()
    wait_until((tmp_path / "pids").exists)
    wait_until(lambda: len(psutil.Process(driven.pid).children()) == 1)
    everybody = [psutil.Process(driven.pid), *psutil.Process(driven.pid).children()]
    driven.saved("step_2.pt")
    driven.finish(is_cut_short=never, grace_s=0.1)
    # A sleep that has lost its parent is reaped by whoever adopts it.
    wait_until(
        lambda: all(
            not one.is_running() or one.status() == psutil.STATUS_ZOMBIE for one in everybody
        )
    )
    assert [level for level, _ in driven.said] == ["WARNING", "WARNING"]
    ended, left_out = (text for _, text in driven.said)
    assert ended.startswith("checkpoint.after_save for step_1.pt: killed: the run has ended")
    assert left_out == "checkpoint.after_save: not run for step_2.pt"


def test_a_second_signal_cuts_the_grace_short(tmp_path):
    """Whoever presses Ctrl-C again does not wait for an upload."""
    driven = Driven("sleep 600; : {path}", tmp_path)
    driven.saved("step_1.pt")
    driven.look_first()
    began_s = time.monotonic()
    driven.finish(is_cut_short=lambda: True, grace_s=600.0)
    assert time.monotonic() - began_s < LIMIT_S
    assert driven.said[0][0] == "WARNING"


def test_a_command_that_no_signal_ends_does_not_hold_up_the_run(tmp_path, monkeypatch):
    """As one that waits for a disk that is gone: it is named, and what follows the run's end goes on."""
    driven = Driven("sleep 600; : {path}", tmp_path)
    driven.saved("step_1.pt")
    driven.look_first()
    driven.saved("step_2.pt")
    # A process in a sleep that nothing interrupts.
    stays = psutil.Process(driven.pid)
    monkeypatch.setattr(after_save, "_TERM_S", 0.05)
    with monkeypatch.context() as patched:
        patched.setattr(after_save.os, "killpg", lambda pid, number: None)
        driven.finish(is_cut_short=never, grace_s=0.0)
    os.killpg(stays.pid, signal.SIGKILL)
    os.waitpid(stays.pid, 0)
    texts = [text for level, text in driven.said if level == "WARNING"]
    assert texts[1] == f"checkpoint.after_save for step_1.pt: process {stays.pid} would not end"
    assert texts[2] == "checkpoint.after_save: not run for step_2.pt"
    assert driven.pid is None


def test_a_log_that_cannot_be_written_stops_no_command(tmp_path):
    """The disk may be full, or somebody has put a folder there."""
    (tmp_path / LOG_NAME).mkdir()
    driven = Driven(f"echo {{path}} > {tmp_path}/done", tmp_path)
    driven.saved("step_1.pt")
    driven.look_first()
    driven.reap()
    assert Path(tmp_path, "done").read_text() == "step_1.pt\n"
    assert driven.said == []
