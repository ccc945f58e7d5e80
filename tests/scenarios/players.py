"""A task whose loss plays: each rank has its own environment, replay buffer and generator."""

from __future__ import annotations

import os
from collections import deque

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddp_runner.training.task import Datasets
from tests.scenarios.loops.playing import Cart


class Forgetful:
    """Nobody keeps what the ranks have of their own."""

    def __init__(self):
        self.rng = np.random.default_rng(100 + int(os.environ["RANK"]))
        self.cart, self.replay = Cart(self.rng), deque(maxlen=64)

    def build_model(self):
        return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))

    def build_datasets(self):
        return Datasets(train=TensorDataset(torch.arange(96)))

    def loss(self, model, batch):
        (numbers,) = batch
        for _ in range(4):
            with torch.no_grad():
                action = model(torch.from_numpy(self.cart.at.astype(np.float32))).sign()
            self.replay.append(self.cart.push(float(action)))
        picked = self.rng.integers(len(self.replay), size=len(numbers))
        seen = torch.from_numpy(np.stack([self.replay[i][0] for i in picked]))
        reward = torch.tensor([[self.replay[i][1]] for i in picked])
        return (model(seen) - reward).square().mean()


class Players(Forgetful):
    """Each rank keeps its own."""

    def local_state(self):
        return {"cart": self.cart, "replay": self.replay, "rng": self.rng}
