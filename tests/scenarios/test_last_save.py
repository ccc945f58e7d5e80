"""Runs that end before their time: what the ranks that are left have committed is saved first."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.scenarios.conftest import PATIENT
from tests.scenarios.harness import Run, poll

STRANGER = f"{Path(__file__).with_name('stumbling.py')}:Stumbling"
STEPS = 40
SETTINGS = (
    *("-b", 8, "--max-steps", STEPS, "save_every_steps=1000", "save_interval=0", "num_workers=0"),
    *("--audit", "recovery.warm_spare=false"),
)


def stranger(folder, *arguments, world, **options):
    return Run(folder, *SETTINGS, *arguments, world=world, task=STRANGER, **options)


def assert_same_command_goes_on(folder, fault_free, *, step, world):
    """To the end, from that very step, with the weights of a run that nothing has happened to."""
    with stranger(folder, *PATIENT, world=world) as run:
        assert run.wait() == 0, run.console
    assert f"resumed at step {step}" in run.console
    undisturbed = fault_free(*SETTINGS, *PATIENT, world=world, task=STRANGER)
    assert run.digest == undisturbed.digest


def assert_saved_last(run, step):
    """Its last lines and its summary name the file of that step, which is the only one."""
    path = run.checkpoints / f"step_{step:08d}.pt"
    words = f"step {step} is saved in {path}: run the same command again to resume"
    assert run.console.count(words) == 1, run.console
    assert run.console.index("ERROR" if "ERROR" in run.console else "stop") < run.console.index(
        words
    )
    summary = run.summary()
    assert (summary["checkpoint"], summary["checkpoint_step"]) == (str(path), step)
    assert list(run.checkpoints.glob("*.pt")) == [path]


def test_the_one_rank_that_is_left_saves_before_the_run_gives_up(made_once, tmp_path):
    """Two of three are killed, no restart is left: every step that was committed is in the file."""
    kills = [f"kill:rank={rank},step=17" for rank in (0, 2)]
    inject = [word for kill in kills for word in ("--inject", kill)]
    with stranger(tmp_path, *PATIENT, "--max-restarts", 0, *inject, world=3) as run:
        assert run.wait() == 3, run.console
    assert run.summary()["status"] == "gave_up"
    assert_saved_last(run, 17)
    assert_same_command_goes_on(tmp_path, made_once, step=17, world=3)


def test_what_came_before_a_mistake_of_the_user_is_saved(made_once, tmp_path):
    """By the very rank that raised it, since there is no other; once that is fixed, the same command goes on."""
    (tmp_path / "bug").touch()
    with stranger(tmp_path, *PATIENT, world=1) as run:
        assert run.wait() == 1, run.console
    last = run.summary()["faults"][-1]
    assert last["kind"] == "rank_raised"
    assert "the same error at the same step" in run.console
    assert_saved_last(run, last["step"])
    (tmp_path / "bug").unlink()
    assert_same_command_goes_on(tmp_path, made_once, step=last["step"], world=1)


def test_a_stop_that_one_rank_keeps_from_ending_is_saved_by_another(tmp_path):
    """A step that takes ten minutes, and a scheduler that grants one second: 75 is true."""
    (tmp_path / "stuck").touch()
    slow = ("recovery.hang_min_s=500", "recovery.stop_timeout_s=1")
    with stranger(tmp_path, *slow, world=2) as run:
        poll((tmp_path / "stuck_now").exists, what="a rank that is stuck")
        run.signal(signal.SIGTERM)
        assert run.wait() == 75, run.console
    assert "the ranks did not stop within 1 s" in run.console
    assert run.summary()["status"] == "preempted"
    assert_saved_last(run, run.committed())
    assert "preempted and saved: run the same command again" in run.console


def test_a_stop_that_could_not_save_ends_with_1(tmp_path):
    """The only rank is stuck in the user's code: nothing is said to be saved."""
    (tmp_path / "stuck").touch()
    slow = (
        "recovery.hang_min_s=500",
        "recovery.stop_timeout_s=1",
        "recovery.checkpoint_timeout_s=1",
    )
    with stranger(tmp_path, *slow, world=1) as run:
        poll((tmp_path / "stuck_now").exists, what="a rank that is stuck")
        run.signal(signal.SIGTERM)
        assert run.wait() == 1, run.console
    step = run.committed()
    assert f"step {step} could not be saved: not within 1 s; there is no checkpoint" in run.console
    assert "and saved" not in run.console
    assert run.summary()["status"] == "failed"
    assert run.summary()["checkpoint"] is None
