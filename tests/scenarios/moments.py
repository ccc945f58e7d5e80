"""Has a run's processes stay where a test wants one: in a phase of a step, amid a copy, or at a write of a save."""

from __future__ import annotations

import json
from pathlib import Path

# What the run's processes do is changed by the file of its task alone, which no test may import.
TASK = f"{Path(__file__).with_name('moments_task.py')}:MomentsTask"

# What is done to a disk in a save, in that order.
DISK = ("open_temporary", "write", "sync_file", "replace", "sync_directory", "remove")

# In the folder where the run was started.
WANTED_NAME = "wanted"  # what a process stays at, until the file is gone or is another
THERE_NAME = "there"  # written by who stays there: the number of what was wanted, and the step


def want(folder, number, place, *, step, nth, rank):
    """Have the process of that rank, or who writes, stay at ``place`` when it comes there for the ``nth`` time.

    Not before ``step`` steps are committed. ``number`` is another one each time.
    """
    wanted = {"number": number, "place": place, "step": step, "nth": nth, "rank": rank}
    written = Path(folder, f"{WANTED_NAME}.new")
    written.write_text(json.dumps(wanted), encoding="utf-8")
    written.replace(Path(folder, WANTED_NAME))


def reached(folder, number):
    """The step at which a process stays where it was wanted; None before it does."""
    try:
        at, step = Path(folder, THERE_NAME).read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return None
    return int(step) if int(at) == number else None
