"""The paced task on a group that is aborted as NCCL is, and a device beside the host; one rank hears of each abort late."""

from __future__ import annotations

import os
import time

from ddp_runner.kernel.group.abort import AbortSwitch
from ddp_runner.kernel.group.device import WrittenByDevice
from ddp_runner.training import prepare
from ddp_runner.training import workload as build
from tests.kernel.group import silent
from tests.scenarios.gated import LateTask
from tests.scenarios.workload import PacedTask, is_beside, make_trouble

SLOW_RANK = "1"
_LATE_S = 0.15  # as of a rank whose interpreter is held by a call into C for so long
_trip = AbortSwitch.trip


def _trip_late(switch):
    if os.environ.get("RANK") == SLOW_RANK:
        time.sleep(_LATE_S)
    _trip(switch)


class LaterProgress(WrittenByDevice):
    """Written when the device comes there, as a GPU does it."""

    def _write(self):
        silent.device.enqueue(self._cell.copy_, self._count.clone())


silent.register()
# What a GPU's run has instead of gloo; the task is imported before a group is made.
build.backend_of = lambda settings, device: silent.BACKEND
prepare.device_progress = lambda slot, device, warn: LaterProgress(slot, device)
AbortSwitch.trip = _trip_late


class SilencedTask(PacedTask):
    """As any task of a user's: it knows of nothing. What its device does is one more place for trouble."""

    def loss(self, model, batch):
        if not is_beside():
            silent.device.enqueue(make_trouble, "device" if model.training else "device_evaluating")
        return super().loss(model, batch)


class LateSilencedTask(LateTask, SilencedTask):
    """One rank is late behind the sums of a step."""
