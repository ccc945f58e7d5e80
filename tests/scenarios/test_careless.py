"""A task in which nothing is seeded and whose helpers break: its run is as exact as any other."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.scenarios.harness import Run

CARELESS = f"{Path(__file__).with_name('careless.py')}:CarelessTask"
SETTINGS = ("-b", 8, "--max-steps", 60, "num_workers=1", "evaluate_interval=1", "--audit")


def test_data_that_is_shuffled_where_it_is_made_is_the_same_everywhere(tmp_path):
    """On both ranks, in a replacement, at the next launch. Figures and sample that raise are a warning each."""
    with Run(tmp_path / "peace", *SETTINGS, task=CARELESS) as peace:
        assert peace.wait() == 0, peace.console
    with Run(tmp_path / "killed", *SETTINGS, task=CARELESS) as run:
        run.wait_for_step(10)
        run.signal(signal.SIGKILL, run.rank_pid(1))
        assert run.wait() == 0, run.console
    assert run.digest == peace.digest
    assert run.summary()["exact"] is True
    assert (
        run.summary()["figures"]["validation_loss"] == peace.summary()["figures"]["validation_loss"]
    )
    for line in (
        "the task's figures() raised OverflowError: math range error (careless.py:39); left out",
        "the task's sample() raised IndexError: list index out of range (careless.py:44); left out",
    ):
        assert peace.console.count(line) == 1, peace.console
    assert peace.summary()["checkpoint"].endswith("step_00000060.pt")
