"""A task over more samples than anybody has memory for a list of: each is computed when it is asked for."""

from __future__ import annotations

import torch
from torch import nn

from ddp_runner.training.task import Datasets

SAMPLES = 10**9


class Computed(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        phase = torch.tensor([index % 1000, index // 1000 % 1000, index // 10**6]) / 1000
        return phase, phase.sin().sum().unsqueeze(0)


class HugeTask:
    def build_model(self):
        return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))

    def build_datasets(self):
        return Datasets(train=Computed())

    def loss(self, model, batch):
        inputs, targets = batch
        return nn.functional.mse_loss(model(inputs), targets)
