"""What the scenarios share: fault-free runs, made once, whose weights are everybody's measure."""

from __future__ import annotations

import fcntl
import hashlib
from pathlib import Path

import pytest

from tests.scenarios.harness import TRAIN, Outputs, Run

# Two epochs of two ranks: most of what is tested comes in the first half of that.
STEPS = 24
# For tests in which much happens, one thing after the other: ``(*SETTINGS, *LONG)``.
LONG_STEPS = 48
LONG = ("--max-steps", LONG_STEPS)
# No test of what is not about hangs fails because a busy machine did not run a rank for two seconds.
PATIENT = ("recovery.hang_min_s=20",)
SETTINGS = (
    *("-b", 8, "--max-steps", STEPS, "num_workers=1", "save_every_steps=10", "--audit"),
    *("evaluate_interval=3", *PATIENT),
)
# For runs in which nobody is replaced; a spare takes a tenth of what such a run takes.
NO_SPARE = "recovery.warm_spare=false"
# For tests that are not about loading: a worker costs a rank a fork of itself, and as much time as its steps.
WITHOUT_WORKERS = (*SETTINGS, "num_workers=0")


def pytest_collection_modifyitems(items):
    """Everything in this folder is a whole run."""
    folder = f"{Path(__file__).parent}/"
    for item in items:  # a text of each: all parents of eight thousand paths are a second
        if str(item.path).startswith(folder):
            item.add_marker(pytest.mark.whole_run)


def filled_once(tmp_path_factory, worker_id, make, key):
    """The folder that ``make(folder)`` has filled, once for all test processes."""
    own = tmp_path_factory.getbasetemp()
    shared = own if worker_id == "master" else own.parent
    folder = shared / f"once_{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        is_made = folder.with_suffix(".made")
        if not is_made.exists():
            make(folder)
            is_made.touch()
    return folder


@pytest.fixture(scope="session")
def made_once(tmp_path_factory, worker_id):
    """``made_once(*settings, world=2)``: that run to its end, made once for all test processes. ``hurries``: see Run.wait."""

    def made(*settings, hurries=True, **how):
        def make(folder):
            with Run(folder, NO_SPARE, *settings, **how) as run:
                assert run.wait(hurries=hurries) == 0, run.console

        key = (settings, sorted(how.items()))
        return Outputs(filled_once(tmp_path_factory, worker_id, make, key))

    return made


@pytest.fixture(scope="session")
def fault_free(made_once):
    """``fault_free(world)``: the undisturbed run of that world size; ``fault_free(world, *LONG)``: the long one.

    Its weights are those of any run with its seed, batch size and steps, whatever else is set. That of two
    ranks starts as a person's does, with loader workers, and all that are held against it as forks; it
    evaluates after each epoch, and they after every third one.
    """

    def made(world, *length):
        is_whole = world == 2 and not length
        settings = SETTINGS if is_whole else WITHOUT_WORKERS
        how = {"command": TRAIN} if is_whole else {}
        how["hurries"] = bool(length)  # the pace of the short ones is that of its steps
        return made_once(*settings, "evaluate_interval=1", *length, world=world, **how)

    return made
