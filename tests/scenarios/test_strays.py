"""What user code starts in a rank ends with it, with the run, and with a supervisor that is killed."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import psutil

from tests.scenarios.conftest import SETTINGS
from tests.scenarios.harness import Run, poll

TASK = f"{Path(__file__).with_name('strays.py')}:StartingTask"
STARTED = 4


def started_by(run, rank):
    """What the newest process of the rank has started, by number and start time."""
    numbers = (run.folder / f"started_by_{rank}").read_text(encoding="ascii").split()
    found = []
    for number in numbers:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(int(number)))
    return found


def living(processes):
    """Those that have not ended; who looks at a process by psutil asks for its start as well."""
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_what_a_rank_has_started_ends_when_the_rank_is_replaced(tmp_path):
    """Only what that one started; the rest when the run is complete, and the guardian with it."""
    settings = (*SETTINGS, "num_workers=0", "task.pace_s=0.1")
    with Run(tmp_path, *settings, task=TASK) as run:
        run.wait_for_step(3)
        assert run.named("ddp:guardian")
        of_first, of_second = started_by(run, 0), started_by(run, 1)
        assert len(living(of_first)) == len(living(of_second)) == STARTED
        (run.folder / "started_by_1").unlink()
        run.signal(signal.SIGKILL, run.rank_pid(1))
        run.wait_for_event("repaired")
        poll(lambda: not living(of_second), what=f"the end of {of_second}")
        assert len(living(of_first)) == STARTED, "another rank's"
        assert len(living(started_by(run, 1))) == STARTED, "its successor's"
        assert run.wait() == 0, run.console
    # Printed by the task, in the format of our records.
    assert "ERROR   rank 0 | the disk is on fire" in run.console
    assert "ERROR: the disk is on fire" not in run.console


def test_what_ranks_have_started_ends_with_a_killed_supervisor(tmp_path):
    """The guardian outlives it for as long as that takes, and no longer."""
    settings = (*SETTINGS, "--max-steps", 100_000, "num_workers=0", "task.pace_s=0.05")
    with Run(tmp_path, *settings, task=TASK) as run:
        run.wait_for_step(3)
        started = [*started_by(run, 0), *started_by(run, 1)]
        assert len(living(started)) == 2 * STARTED
        run.signal(signal.SIGKILL)
        run.assert_gone(within_s=30.0)
        assert not living(started)
        run.assert_machine_clean()
