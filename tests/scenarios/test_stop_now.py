"""Runs that are told to end at once, and runs that are stopped before they train."""

from __future__ import annotations

import signal

import pytest

from tests.scenarios.conftest import SETTINGS
from tests.scenarios.harness import Run, poll
from tests.scenarios.test_stop import CODES
from tests.scenarios.workload import TROUBLE_NAME


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_at_once(tmp_path, number):
    """The first one waits for a step that takes half a minute, the second one does not."""
    code, status = CODES[number]
    with Run(tmp_path, *SETTINGS) as run:
        run.wait_for_step(5)
        (tmp_path / TROUBLE_NAME).write_text("loss 1 sleep30")
        poll(lambda: not (tmp_path / TROUBLE_NAME).exists(), what="the slow step")
        run.signal(number)
        run.wait_for_event("stop_asked")
        with pytest.raises(AssertionError, match="still running"):
            run.wait(1.0)
        run.signal(number)
        assert run.wait(10.0) == code, run.console
    assert run.summary()["status"] == status
    assert run.console.count("Traceback") == 0


@pytest.mark.parametrize(
    ("name", "number", "code"),
    [
        ("ddp:zygote", signal.SIGINT, 130),
        ("ddp:rank1", signal.SIGINT, 130),
        ("ddp:zygote", signal.SIGTERM, 75),
    ],
)
def test_a_stop_before_training_ends_at_once_and_leaves_no_file(tmp_path, name, number, code):
    """While processes start there is nothing to save, so nothing is waited for or written."""
    (tmp_path / TROUBLE_NAME).write_text("build any sleep30")
    with Run(tmp_path, *SETTINGS) as run:
        poll(lambda: name in {process.name for process in run.processes()}, every_s=0.002)
        run.signal(number)
        assert run.wait(10.0) == code, run.console  # of 30 s
    assert not run.logs.exists()
    assert not run.checkpoints.exists()
    assert "Traceback" not in run.console
