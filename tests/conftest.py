"""Fixtures that tests of several folders ask for."""

from __future__ import annotations

import signal
import sys

import pytest

# Started in the background (`&`, nohup), tests would hand ignored signals on to the runs they start.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)


@pytest.fixture
def clean_imports(monkeypatch):
    """Nothing that a test imports as a user's task, or puts on the path, outlives it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("ddp_runner_task_", "loading_")):
            del sys.modules[name]
