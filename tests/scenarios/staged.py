"""A task whose stages a test can hold where their ranks build the model: the change of stage."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.scenarios.workload import PacedTask, is_beside


def hold(folder, stage):
    """No rank of ``stage`` gets beyond its build before the file that this gives is gone."""
    path = Path(folder, f"hold_{stage}")
    path.touch()
    return path


def held(folder, stage):
    """``(rank, pid)`` of each process that has come there."""
    found = [path.name.split("_") for path in Path(folder).glob(f"held_{stage}_*")]
    return sorted((int(rank), int(pid)) for _, _, rank, pid in found)


class StagedTask(PacedTask):
    """``at``: the stage that it is trained in."""

    def __init__(self, *, at="", **options):
        super().__init__(**options)
        self._at = at

    def build_model(self):
        place = Path(f"hold_{self._at}")
        if place.exists() and not is_beside():
            Path(f"held_{self._at}_{os.environ['RANK']}_{os.getpid()}").touch()
            while place.exists():
                time.sleep(0.01)
        return super().build_model()
