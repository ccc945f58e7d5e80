"""Storms from outside: processes that are killed one after the other within one step, on real runs."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.scenarios.conftest import PATIENT
from tests.scenarios.harness import Run, poll

TASK = f"{Path(__file__).with_name('stranger.py')}:Classifier"
SETTINGS = (
    *("--max-steps", 5, "-b", 24, "num_workers=0", "evaluate_interval=0", "save_interval=0"),
    *PATIENT,
)


@pytest.fixture
def calm(made_once):
    """``calm(*settings, world=3)``: the same run without a fault."""
    return lambda *settings, world: made_once(
        *SETTINGS, *settings, "warm_spare=false", world=world, task=TASK
    )


def kill_one_by_one(run, *names):
    """Each by its name, once what was killed before it is repaired: the step in hand is never done."""
    for number, name in enumerate(names):
        if number:
            wait_for_repairs(run, number)
        run.signal(signal.SIGKILL, run.named(name).pid)
    wait_for_repairs(run, len(names))


def wait_for_repairs(run, count):
    poll(lambda: len(run.events("repaired")) >= count, what=f"{count} repairs: {run.console}")


@pytest.mark.parametrize(
    ("world", "names"),
    [
        (8, [f"ddp:rank{rank}" for rank in range(8)]),
        (3, ["ddp:rank1", "ddp:store", "ddp:rank2", "ddp:rank0"]),
    ],
    ids=["eight ranks", "ranks and the store"],
)
def test_a_storm_within_one_step_is_repaired(calm, tmp_path, world, names):
    """Nothing repeats, so nothing is a loop: nobody waits, no step is lost, and no bit differs."""
    with Run(tmp_path, *SETTINGS, "--audit", "task.pace_s=0.6", world=world, task=TASK) as run:
        run.wait_for_step(1)
        kill_one_by_one(run, *names)
        assert run.wait() == 0, run.console
    if world == 3:  # eight ranks take their time to start
        assert run.digest == calm(world=world).digest
    summary = run.summary()
    assert (summary["exact"], summary["steps"]) == (True, 5)
    assert [fault["steps_lost"] for fault in summary["faults"]] == [0] * len(names)
    assert " in 0.5 s" not in run.console
