"""The command where an outside launcher has made it a rank."""

from __future__ import annotations

import gc

import pytest

from ddp_runner.__main__ import main
from ddp_runner.cli import train


@pytest.fixture
def unfrozen():
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("unfrozen")
def test_nobody_looks_for_garbage_while_a_rank_imports_torch(monkeypatch):
    """Nor later in what was imported; from then on as ever."""
    seen = []

    class Module:
        @staticmethod
        def main(*words, **how):
            seen.append(("main", gc.isenabled()))
            return 7

    def imported(name):
        seen.append((name, gc.isenabled()))
        return Module

    monkeypatch.setattr(train, "import_module", imported)
    monkeypatch.setattr(train, "launched_part", lambda rank: imported(rank.rank))
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a launch")
    assert main(["train", "--cpu"]) == 7
    launcher, compiler, then = seen
    assert launcher == (0, False)
    assert compiler == ("torch._dynamo", False)
    assert then == ("main", True)
    assert gc.get_freeze_count() > 0
