"""Layers whose gradients come in another order in each step, and one that some steps leave out on some ranks."""

from __future__ import annotations

import os
import signal

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddp_runner import Datasets

WIDTH = 256  # a layer is 256 kB: several buckets at bucket_cap_mb=1
ALL_USED_STEPS = 16


class Rotating(nn.Module):
    """Counts its steps, as a model may that changes its ways: ``stop_at`` asks for the end of the run."""

    def __init__(self, *, stop_at):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.side = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)
        self.register_buffer("turn", torch.zeros((), dtype=torch.long))
        self._stop_at = stop_at

    def forward(self, x):
        turn = int(self.turn)
        if self.training:
            self.turn += 1
            if turn == self._stop_at:
                os.kill(os.getppid(), signal.SIGTERM)
        for number in range(6):
            x = x + torch.tanh(self.layers[(turn + number) % 6](x))
        if turn < ALL_USED_STEPS or float(x[0, 0]) > 0:
            x = x + self.side(x)
        return self.head(x)


class RotatingTask:
    """``stop_at``: the step at which the run is told to stop, by SIGTERM."""

    def __init__(self, *, stop_at=-1):
        self._stop_at = stop_at

    def build_model(self):
        return Rotating(stop_at=self._stop_at)

    def build_datasets(self):
        x = torch.randn(600, WIDTH, generator=torch.Generator().manual_seed(1))
        return Datasets(train=TensorDataset(x, x.sum(1, keepdim=True)))

    def loss(self, model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])
