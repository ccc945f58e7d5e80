"""What tests of the loader share: hangs that show, and whether batches are pinned."""

from __future__ import annotations

import pytest
import torch

from tests.data.failing import HANGING, ShownWait


@pytest.fixture
def hangs_are_shown(monkeypatch):
    HANGING[:] = bytes(8)  # whoever hung in a former test has ended, and its pid may be another's
    monkeypatch.setattr("ddp_runner.data.workers.pool.Wait", ShownWait)


@pytest.fixture(params=[False, True], ids=["plain", "pinned"])
def pin(request, monkeypatch):
    """Batches received directly, or through the pinning thread, also without a device."""
    if request.param and not torch.cuda.is_available():
        monkeypatch.setattr("ddp_runner.data.workers.system_limits.can_pin", lambda: True)
        monkeypatch.setattr("ddp_runner.data.workers.pool.pin_memory", lambda batch: batch)
    return request.param
