"""A rank that a signal finds where Python's handlers are not called: in torch's wait for a rank that has ended."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from ddp_runner.kernel.rules.exits import ExitCode

WAITS = """
import sys
from datetime import timedelta
import torch.distributed as dist
from ddp_runner.features.launchers import launched
from ddp_runner.kernel.rank.signals import take_signals
take_signals(launched._STOP_SIGNALS, lambda number: None)
unformed = launched._EndsUnformed()
if sys.argv[1] == "formed":
    unformed.formed()
store = dist.TCPStore("127.0.0.1", 0, 2, True, timedelta(seconds=8), wait_for_workers=False)
print("waits", flush=True)
store.get("what no rank sets")
"""


@pytest.mark.parametrize(("state", "code"), [("unformed", ExitCode.PREEMPTED), ("formed", 1)])
def test_a_signal_ends_a_rank_that_forms_no_group(state, code):
    """Control: once a group has formed, what waits is left to the step and to its own time limit."""
    command = [sys.executable, "-c", WAITS, state]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as rank:
        try:
            assert rank.stdout.readline() == "waits\n"
            rank.send_signal(signal.SIGTERM)
            assert rank.wait(60) == code
        finally:
            rank.kill()
