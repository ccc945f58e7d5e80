"""What the recovery benchmarks train: a model of a chosen state size, at a chosen pace.

Used by ``ddp_runner`` as ``--task benchmarks/paced.py:Paced`` and by ``plain_restart.py``. A step
computes next to nothing and then sleeps, so that a recovery is all that differs between the two.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from ddp_runner.training.task import Datasets

LAYERS = 8
BYTES_PER_PARAMETER = 12  # float32 weight and the two moments of AdamW
FEATURES = 16
SAMPLES = 4096
# A file of this name and a process's number, in the working folder: a drill computes a rank's share as well.
TROUBLE_NAME = "raise_in_process_"


class Samples(torch.utils.data.Dataset):
    """Drawn once; nothing is read from disk."""

    deterministic = True

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self._inputs = torch.randn(SAMPLES, FEATURES, generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return self._inputs[index]


class Beside(nn.Module):
    """The sum of many small layers, which lie beside each other."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(FEATURES, width) for _ in range(count))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.stack([part(inputs) for part in self.parts]).sum(dim=(0, 2)).unsqueeze(1)


def build_model(state_mb: float, tensors: int = 0) -> nn.Module:
    """A model whose weights and AdamW moments take about ``state_mb`` megabytes; of so many ``tensors``, if not 0."""
    if tensors:
        layer_bytes = BYTES_PER_PARAMETER * (FEATURES + 1)
        return Beside(tensors // 2, max(1, int(state_mb * 1e6 / (tensors // 2) / layer_bytes)))
    width = math.isqrt(int(state_mb * 1e6 / BYTES_PER_PARAMETER / LAYERS))
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(FEATURES, width), *layers, nn.Linear(width, 1))


def paced_loss(model: nn.Module, batch: Tensor, pace_s: float) -> Tensor:
    """Mean squared error against the inputs' sum; raises, once, if a trouble file says so."""
    time.sleep(pace_s)
    trouble = Path(f"{TROUBLE_NAME}{os.getpid()}")
    if trouble.exists():
        trouble.unlink()
        raise ValueError("the benchmark asked for this")
    return nn.functional.mse_loss(model(batch), batch.sum(dim=1, keepdim=True))


class Paced:
    """The task for ``ddp_runner``."""

    def __init__(self, state_mb: float = 2.0, pace_s: float = 0.016, tensors: int = 0) -> None:
        self._state_mb = state_mb
        self._tensors = tensors
        self._pace_s = pace_s

    def build_model(self) -> nn.Module:
        return build_model(self._state_mb, self._tensors)

    def build_datasets(self) -> Datasets:
        return Datasets(train=Samples(), validation=None)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return paced_loss(model, batch, self._pace_s)
