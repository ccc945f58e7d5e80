"""The paced task on a group that is aborted as NCCL is; one rank hears of each abort late."""

from __future__ import annotations

import os
import time

from ddp_runner.collective.abort import AbortSwitch
from ddp_runner.training import build
from tests.collective import silent
from tests.scenarios.workload import PacedTask

SLOW_RANK = "1"
_LATE_S = 0.15  # as of a rank whose interpreter is held by a call into C for so long
_trip = AbortSwitch.trip


def _trip_late(switch):
    if os.environ.get("RANK") == SLOW_RANK:
        time.sleep(_LATE_S)
    _trip(switch)


silent.register()
# What a GPU's run has instead of gloo; the task is imported before a group is made.
build.backend_of = lambda settings, device: silent.BACKEND
AbortSwitch.trip = _trip_late


class SilencedTask(PacedTask):
    """As any task of a user's: it knows of nothing."""
