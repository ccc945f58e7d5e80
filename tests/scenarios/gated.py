"""A task one of whose ranks comes late to a step, however late the test wants it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.scenarios.workload import Calls, PacedTask

# In the folder where the run was started.
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
