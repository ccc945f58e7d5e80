"""Real terminals, keys and schedulers: what they repeat is one request, and it is kept."""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path

import pytest

from tests import ready
from tests.scenarios.conftest import PATIENT
from tests.scenarios.harness import Run, poll

HERE = Path(__file__).parent
SETTINGS = (
    *("-b", 8, "--max-steps", 2000, "save_every_steps=1000", "save_interval=0", "num_workers=0"),
    *("--audit", "recovery.warm_spare=false", *PATIENT),
)


def stranger(folder, **options):
    return Run(folder, *SETTINGS, task=f"{HERE / 'stumbling.py'}:Stumbling", **options)


def in_terminal(folder):
    """The run, typed into a shell in a terminal of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    train = (sys.executable, "-m", "ddp_runner", "train")
    command = (sys.executable, str(HERE / "terminal.py"), str(folder), *train)
    return stranger(folder, command=command)


def assert_stopped_and_saved(run, status):
    """As after one quiet request: the newest step is in a file, and is said to be."""
    summary = run.summary()
    assert (summary["status"], summary["faults"]) == (status, [])
    assert 5 <= summary["steps"] < 2000
    assert summary["checkpoint"] == str(run.checkpoints / f"step_{summary['steps']:08d}.pt")
    assert Path(summary["checkpoint"]).is_file()


def test_a_closed_terminal_loses_no_step(tmp_path):
    """The kernel sends SIGHUP, and the shell does at its end: the step is finished and saved."""
    with in_terminal(tmp_path) as run:
        run.wait_for_step(5)
        (tmp_path / "close").touch()
        assert run.wait() == 75, run.console
    assert_stopped_and_saved(run, "preempted")


def test_a_key_that_is_held_down_is_one_interrupt(tmp_path):
    """Ctrl-C in a terminal, as it repeats: saved; the shell gets the exit code."""
    with in_terminal(tmp_path) as run:
        run.wait_for_step(5)
        (tmp_path / "typed").write_bytes(b"\x03" * 12)
        (tmp_path / "typed").rename(tmp_path / "keys")  # whole, or not there
        assert run.wait() == 130, run.console
    assert_stopped_and_saved(run, "interrupted")
    assert "interrupted and saved" in run.console


def test_a_program_that_is_ended_has_its_run_saved_first(tmp_path):
    """It has called launch(), and would take the run along; it ends of the signal all the same."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nimport ddp_runner\n"
        "if __name__ == '__main__':\n    ddp_runner.launch(arguments=sys.argv[1:])\n"
    )
    command = (sys.executable, str(program))
    with stranger(tmp_path, command=command, environment=ready.environment()) as run:
        run.wait_for_step(5)
        run.signal(signal.SIGHUP)
        run.signal(signal.SIGHUP)
        assert run.wait() == -signal.SIGHUP, run.console
    assert_stopped_and_saved(run, "preempted")


def test_what_schedulers_repeat_is_one_stop(tmp_path):
    """Slurm, systemd and wrappers send several in a row, and while the save is made."""
    with stranger(tmp_path) as run:
        run.wait_for_step(5)
        for number in (
            signal.SIGTERM,
            signal.SIGHUP,
            signal.SIGTERM,
            signal.SIGUSR1,
            signal.SIGHUP,
        ):
            run.signal(number)
        with contextlib.suppress(ProcessLookupError):
            while run.process.poll() is None:
                run.signal(signal.SIGHUP)
                run.signal(signal.SIGUSR1)
                with contextlib.suppress(AssertionError):
                    poll(lambda: run.process.poll() is not None, timeout_s=0.05, what="the end")
        assert run.wait() == 75, run.console
    assert_stopped_and_saved(run, "preempted")


@pytest.mark.parametrize(
    ("number", "after_s", "code"), [(signal.SIGINT, 0.5, 130), (signal.SIGTERM, 3.5, 75)]
)
def test_who_asks_again_ends_the_run_at_once_and_learns_why(tmp_path, number, after_s, code):
    """Twice at the same moment is once; again later is meant: the newest file is an old one."""
    (tmp_path / "stuck").touch()
    with stranger(tmp_path) as run:
        poll((tmp_path / "stuck_now").exists, what="a step that takes minutes")
        run.signal(number)
        run.wait_for_event("stop_asked")
        run.signal(number)
        with pytest.raises(AssertionError, match="still running"):
            run.wait(after_s)
        run.signal(number)
        assert run.wait(30.0) == code, run.console
    assert "again: ended at once" in run.console
    assert "ended at once: there is no checkpoint" in " ".join(run.console.split())
    assert "and saved" not in run.console
    assert run.summary()["checkpoint"] is None
