"""A task as somebody writes it who knows no word of this project's tests: a net, some data, a loss."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddp_runner import Datasets
from tests.scenarios.workload import keep_pace

ODD_ONE = 100  # a sample that comes once an epoch


class Stumbling:
    """Its loss goes wrong at one sample, for as long as there is a file that says how."""

    def __init__(self, *, pace_s=0.03):
        self._pace_s = pace_s

    def build_model(self):
        return nn.Sequential(
            nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1)
        )

    def build_datasets(self):
        inputs = torch.randn(192, 8, generator=torch.Generator().manual_seed(5))
        numbers = torch.arange(192)
        return Datasets(train=TensorDataset(inputs, inputs.sum(1, keepdim=True), numbers))

    def loss(self, model, batch):
        inputs, targets, numbers = batch
        keep_pace(self._pace_s)
        if ODD_ONE in numbers:
            self._stumble()
        return nn.functional.mse_loss(model(inputs), targets)

    def _stumble(self):
        if Path("bug").exists():
            raise KeyError("a column that is not there")
        if Path("stuck").exists():
            Path("stuck_now").write_text(os.environ["RANK"])
            time.sleep(600)
