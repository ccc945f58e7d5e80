"""Fixtures that tests of several folders ask for."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture
def clean_imports(monkeypatch):
    """Nothing that a test imports as a user's task, or puts on the path, outlives it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("ddp_runner_task_", "loading_")):
            del sys.modules[name]
