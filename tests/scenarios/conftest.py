"""What the scenarios share: one run in peace per world size, whose weights are everybody's measure."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from tests.scenarios.harness import Outputs, Run

STEPS = 72
SETTINGS = ("-b", 8, "--max-steps", STEPS, "num_workers=1", "save_every_steps=10", "--audit")


def pytest_collection_modifyitems(items):
    """Everything in this folder is a whole run."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.whole_run)


@pytest.fixture(scope="session")
def peace(tmp_path_factory, worker_id):
    """``peace(world)``: the undisturbed run of that world size, made once for all test processes."""
    own = tmp_path_factory.getbasetemp()
    shared = own if worker_id == "master" else own.parent
    known = {}

    def of_world(world):
        if world not in known:
            folder = shared / f"peace_{world}"
            with (shared / f"peace_{world}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not (folder / "logs" / "summary.json").exists():
                    with Run(folder, *SETTINGS, world=world) as run:
                        assert run.wait() == 0, run.console
            known[world] = Outputs(folder)
        return known[world]

    return of_world
