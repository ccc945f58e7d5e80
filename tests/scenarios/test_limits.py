"""Limits that a user sets, and those that a disk sets: reached, they are named."""

from __future__ import annotations

from tests.disks import small_disk
from tests.scenarios.conftest import LONG, LONG_STEPS, STEPS
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


def test_a_step_without_a_finite_gradient_is_skipped_with_a_warning(tmp_path):
    """One bad sample spoils one step an epoch; the run goes on and its weights stay finite."""
    with Run(tmp_path, *SETTINGS, "task.nan_at_sample=100") as run:
        assert run.wait() == 0, run.console
    summary = run.summary()
    assert summary["steps"] == STEPS
    assert "step skipped on all ranks" in run.console
    assert summary["faults"] == []
    log = (run.logs / "rank_0.log").read_text(encoding="utf-8")
    assert log.count("step skipped") == STEPS // 12  # sample 100 comes once an epoch


def test_more_skipped_steps_than_allowed_end_the_run_and_name_the_setting(tmp_path):
    """max_errors_per_epoch=0 allows none: exit 1, cause reported once."""
    with Run(tmp_path, *SETTINGS, "task.nan_at_sample=100", "max_errors_per_epoch=0") as run:
        assert run.wait() == 1, run.console
    assert "max_errors_per_epoch=0" in run.console
    assert run.summary()["status"] == "failed"
    assert run.summary()["faults"][0]["kind"] == "non_finite"


def test_a_disk_too_small_for_a_checkpoint_does_not_stop_the_training(tmp_path):
    """Saves fail with warnings while training goes on; without a final save the run has failed."""
    folder = tmp_path / "checkpoints"
    with small_disk(folder, size_kb=1024):
        asked = ("task.width=40000", "checkpoint_timeout_s=2")
        with Run(tmp_path, *SETTINGS, *LONG, *asked) as run:
            assert run.wait() == 1, run.console
        assert not list(folder.glob("step_*"))
    console = run.console
    assert console.count("training continues") >= 2, console
    reported = [line for line in console.splitlines() if line.startswith("ERROR:")]
    assert len(reported) <= 2, "once by the rank, once as the end of the run"
    assert str(folder) in reported[-1]
    summary = run.summary()
    assert (summary["status"], summary["exit_code"]) == ("failed", 1)
    assert run.audit(2)[0].keys() == set(range(1, LONG_STEPS + 1))
