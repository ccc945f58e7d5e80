"""A task one of whose ranks comes late to a step, however late the test wants it."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path

from torch.autograd import Variable

from tests.scenarios.workload import Calls, PacedTask

# In the folder where the run was started.
LATE_CALL, LATE_S = 9, 0.4  # see LateTask
GATE_NAME = "gate"  # the number of the call of loss() at which rank 1 waits until the file is gone
WAITS_NAME = "waits"  # written by rank 1 when it is there


class GatedTask(PacedTask):
    """Rank 1 waits at the gate; the others wait for it in the sum of the gradients."""

    def __init__(self, **options):
        super().__init__(**options)
        self._calls = Calls()

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        self._calls.more(model.training)
        if os.environ.get("RANK") == "1" and self._stands_at_gate():
            Path(WAITS_NAME).touch()
            while Path(GATE_NAME).exists():
                time.sleep(0.01)
        return loss

    def _stands_at_gate(self):
        try:
            return int(Path(GATE_NAME).read_text(encoding="utf-8")) == self._calls.count
        except FileNotFoundError:
            return False


class LateTask(PacedTask):
    """Rank 1 is late once behind the sum of the gradients: the others may have all that a step needs, and it not."""

    def __init__(self, **options):
        super().__init__(**options)
        self._calls = Calls()

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        self._calls.more(model.training)
        if os.environ.get("RANK") == "1" and model.training and self._calls.count == LATE_CALL:
            loss.register_hook(_sleep_at_the_end_of_backward)
        return loss


def _sleep_at_the_end_of_backward(gradient):
    del gradient
    Variable._execution_engine.queue_callback(functools.partial(time.sleep, LATE_S))
