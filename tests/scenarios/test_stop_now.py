"""Runs that are stopped before they train."""

from __future__ import annotations

import signal

import pytest

from tests.scenarios.conftest import WITHOUT_WORKERS as SETTINGS
from tests.scenarios.harness import Run, poll
from tests.scenarios.workload import TROUBLE_NAME


@pytest.mark.parametrize(
    ("name", "number", "code"),
    [
        ("ddp:zygote", signal.SIGTERM, 75),
        ("ddp:rank1", signal.SIGINT, 130),
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
