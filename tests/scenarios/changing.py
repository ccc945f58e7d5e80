"""Tasks that change, in each step, what no optimizer does."""

from __future__ import annotations

import random
from collections import deque

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddp_runner.training.task import Datasets
from tests.scenarios.workload import keep_pace


class Regression:
    def build_datasets(self):
        x = torch.randn(256, 8)
        return Datasets(train=TensorDataset(x, x.sum(1, keepdim=True)))

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def loss(self, model, batch):
        keep_pace(0.03)  # as long as a larger model would take
        x, y = batch
        return nn.functional.mse_loss(model(x), y)


class Counts(Regression):
    def __init__(self):
        self.calls = 0
        self.recent = deque(maxlen=4)
        self.rng = random.Random(3)
        self.generator = torch.Generator().manual_seed(5)

    def loss(self, model, batch):
        self.calls += 1
        self.recent.append(self.rng.random())
        noise = torch.rand((), generator=self.generator)
        return super().loss(model, batch) * (1 + 0.01 * self.calls + sum(self.recent) + noise)


class Clips(Regression):
    def loss(self, model, batch):
        for parameter in model.parameters():
            parameter.data.clamp_(-0.1, 0.1)
        return super().loss(model, batch)


class Bank(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 1)
        self.register_buffer("bank", torch.empty(0, 8))
        self.register_buffer("mean", torch.zeros(8), persistent=False)
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int32))

    def forward(self, x):
        with torch.no_grad():
            self.bank = torch.cat([self.bank, x])[-64:]
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            self.steps = self.steps + (1 if self.steps[0] < 4 else 0.5)
        return self.net(x - self.bank.mean(0)) + (self.mean * x).sum(1, keepdim=True)


class Grows(Regression):
    def build_model(self):
        return Bank()


class CountsClipsAndGrows(Counts, Clips, Grows):
    """All of that in each step."""


class Unfreezes(Regression):
    def __init__(self):
        self.step = 0

    def build_model(self):
        model = super().build_model()
        model[0].requires_grad_(False)
        return model

    def loss(self, model, batch):
        self.step += 1
        if self.step == 5:
            model[0].requires_grad_(True)
        if self.step == 14:
            model[2].requires_grad_(False)
        return super().loss(model, batch)


CALLS = [0]


class HasAGlobal(Regression):
    def loss(self, model, batch):
        CALLS[0] += 1
        return super().loss(model, batch) * (1 + 0.1 * CALLS[0])
