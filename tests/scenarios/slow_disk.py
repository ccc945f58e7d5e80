"""A task whose checkpoints are written when a test says so, by whichever process writes them.

That one is forked before any rank builds its task: what it does otherwise it has from this import, which no
test may do.
"""

from __future__ import annotations

import time
from pathlib import Path

from ddp_runner.system.disk import RealDisk
from tests.scenarios.workload import SLOW_DISK_NAME, PacedTask

_write = RealDisk.write


def _later(disk, handle, data):
    while Path(SLOW_DISK_NAME).exists():
        time.sleep(0.01)
    _write(disk, handle, data)


RealDisk.write = _later


class WritesSlowly(PacedTask):
    """As any other."""
