"""Limits that a user sets: reached, they are named."""

from __future__ import annotations

from tests.scenarios.conftest import LONG, LONG_STEPS
from tests.scenarios.conftest import WITHOUT_WORKERS as SETTINGS
from tests.scenarios.harness import Run


def test_a_reached_target_loss_is_a_completed_run(tmp_path):
    """The smoothed loss decides, so a full window of steps is trained at least; saved, exit 0."""
    with Run(tmp_path, *SETTINGS, *LONG, "target_loss=1000") as run:
        assert run.wait() == 0, run.console
    summary = run.summary()
    assert summary["status"] == "completed"
    assert summary["steps"] < LONG_STEPS
    assert summary["checkpoint"].endswith(f"step_{summary['steps']:08d}.pt")
    assert "target loss 1000 reached" in run.console


def test_a_rank_above_its_memory_limit_ends_the_run_by_name(tmp_path):
    """max_memory_gb is a hard limit: one clear error, no endless retries."""
    settings = ("max_memory_gb=0.01", "memory_check_interval=1")
    with Run(tmp_path, *SETTINGS, *settings) as run:
        assert run.wait() == 1, run.console
    reported = [line for line in run.console.splitlines() if line.startswith("ERROR:")]
    assert "max_memory_gb=0.01" in reported[-1]
    assert run.summary()["faults"][0]["kind"] == "out_of_memory"
