"""A task without a random number in its steps: how they are cut changes no more than last bits."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from ddp_runner.training.task import Datasets
from tests.scenarios.workload import keep_pace

PACE_S = 0.02


class SharedTask:
    """A regression."""

    def build_datasets(self):
        x = torch.randn(240, 8, generator=torch.Generator().manual_seed(3))
        return Datasets(train=TensorDataset(x, x.square().sum(1, keepdim=True)))

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 1))

    def loss(self, model, batch):
        keep_pace(PACE_S)
        return nn.functional.mse_loss(model(batch[0]), batch[1])


class UnevenTask(SharedTask):
    """Rank 1 takes three times as long for a sample, as a slower device would."""

    def loss(self, model, batch):
        slow = dist.is_initialized() and dist.get_rank() == 1
        time.sleep(len(batch[0]) * (0.006 if slow else 0.002) * model.training)
        return nn.functional.mse_loss(model(batch[0]), batch[1])
