"""A task whose every reading of a sample is noted in a file, and can be held up."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ddp_runner.training.task import Datasets
from tests.scenarios.workload import keep_pace

READ_NAME = "read"  # a line for each sample that was read: process, kind and index
HOLD_NAME = "hold_reading"  # nobody reads HELD_SAMPLE while it is there
HELD_SAMPLE = 20


class Noted(torch.utils.data.Dataset):
    """Samples of several types, the same each time."""

    deterministic = True

    def __init__(self, kind, samples):
        self.kind = kind
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        with Path(READ_NAME).open("a") as file:
            file.write(f"{os.getpid()} {self.kind} {index}\n")
        while index == HELD_SAMPLE and Path(HOLD_NAME).exists():
            time.sleep(0.01)
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": x[:2].sum().unsqueeze(0).numpy(), "text": str(index)}


class Random(Noted):
    """Draws random numbers, for its last sample."""

    deterministic = False

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        if index == self.samples - 1:
            sample["x"] += torch.rand(1)
        return sample


class Huge(Noted):
    """No machine has room for it."""

    def __getitem__(self, index):
        return np.zeros(1_000_000)


class PreloadedTask:
    """``kind``: of its training data; ``pace_s``: how long a step takes at least."""

    def __init__(self, *, kind="noted", pace_s=0.02):
        self.kind = kind
        self._pace_s = pace_s

    def build_datasets(self):
        train = {
            "noted": Noted("train", 192),
            "random": Random("train", 192),
            "huge": Huge("train", 10**8),
        }[self.kind]
        return Datasets(train=train, validation=Noted("validation", 24))

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))

    def loss(self, model, batch):
        keep_pace(self._pace_s * model.training)
        return nn.functional.mse_loss(model(batch["x"]), batch["y"])
