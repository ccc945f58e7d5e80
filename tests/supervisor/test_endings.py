"""How a rank ended, by real processes and their real logs."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ddp_runner
from ddp_runner.kernel.processes.children import Ended
from ddp_runner.kernel.processes.rank_process import RankProcess, exit_of, place_in, store_died
from ddp_runner.kernel.rules.classify import classify_exit
from ddp_runner.kernel.wire.board import SLOT_BYTES, Board

PACKAGE = Path(ddp_runner.__file__).parent
CRASH = "import faulthandler, os\nfaulthandler.enable()\ndef f(): os.abort()\nf()\n"
SILENT = "import os\nos.abort()\n"


@pytest.fixture
def process(tmp_path):
    made = RankProcess(0, log_dir=tmp_path)
    made.open_lines(token=1, now_s=0.0)
    yield made
    made.close_lines()


def reported(process, ended, *, was_asked=False):
    """What its end shows, where its log can be read."""
    slot = Board(memoryview(bytearray(SLOT_BYTES)), 1).slot(0)
    return exit_of(
        ended,
        process.what_it_wrote(),
        rank=0,
        reading=slot.read(),
        killed_for_memory=False,
        was_asked=was_asked,
        keeps_all=False,
    )


def run_as(process, tmp_path, code):
    """A process of the rank that runs ``code`` and writes to its log; how it ended."""
    script = tmp_path / "task.py"
    script.write_text(code, encoding="utf-8")
    with (tmp_path / "rank_0.log").open("ab") as log:
        code = subprocess.run([sys.executable, str(script)], stderr=log, check=False).returncode
    ended = Ended(pid=1, exit_code=None, signal_number=-code, at_ns=time.monotonic_ns())
    return reported(process, ended)


def test_a_place_in_the_user_s_code_is_never_one_of_ours():
    """The innermost frame may be in any folder of the package; a task of ours is an example of a user's."""
    from_ours = f'  File "{PACKAGE}/training/step.py", line 364 in compute\n'
    from_user = '  File "/home/me/task.py", line 31 in loss\n'
    example = f'  File "{PACKAGE}/tasks/synthetic.py", line 7 in loss\n'
    head = "Current thread 0x00007f26 (most recent call first):\n"
    assert place_in(head + from_ours + from_user) == "in loss, task.py:31"
    assert place_in(head + from_ours) == ""
    assert place_in(head + example) == "in loss, synthetic.py:7"


def test_a_process_that_aborts_says_where(process, tmp_path):
    """Its own stack, from its own log."""
    fault = classify_exit(run_as(process, tmp_path, CRASH))
    assert fault.cause == "rank 0 killed (SIGABRT in f, task.py:3)"
    assert fault.detail.startswith("Fatal Python error: Aborted")


def test_what_a_predecessor_said_is_not_this_process_s(process, tmp_path):
    """Control: both write to one log, and the second one dies without a word."""
    run_as(process, tmp_path, CRASH)
    process.close_lines()
    process.open_lines(token=2, now_s=1.0)
    fault = classify_exit(run_as(process, tmp_path, SILENT))
    assert (fault.cause, fault.detail) == ("rank 0 killed (SIGABRT)", "")


def test_a_log_that_cannot_be_read_takes_nothing_but_the_place(process, tmp_path):
    """No log is worth a run."""
    (tmp_path / "rank_0.log").mkdir()
    ended = Ended(pid=1, exit_code=None, signal_number=signal.SIGSEGV, at_ns=1)
    end = reported(process, ended, was_asked=True)
    assert classify_exit(end).cause == "rank 0 killed (SIGSEGV)"


@pytest.mark.parametrize(
    ("exit_code", "signal_number", "how"), [(1, None, "exit code 1"), (None, 9, "SIGKILL")]
)
def test_the_end_of_the_store_is_reported_with_its_output(exit_code, signal_number, how):
    """Nobody else could know: its output is gone with it."""
    ended = Ended(pid=1, exit_code=exit_code, signal_number=signal_number, at_ns=0)
    fault = store_died(ended, output="Traceback: no", step=3)
    assert fault.cause == f"the store process died ({how})"
    assert (fault.detail, fault.step) == ("Traceback: no", 3)
