"""A model of like blocks, with all that a block may keep and draw besides its weights."""

from __future__ import annotations

import torch
from torch import nn

from tests.scenarios.workload import PacedTask

WIDTH = 24


class Block(nn.Module):
    """Batch statistics, a counter that its forward reads, dropout."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs):
        self.seen += 1
        found = self.dropout(torch.relu(self.norm(self.linear(inputs))))
        return inputs + found / (1 + 0.01 * self.seen)


class Layered(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, inputs):
        inputs = self.stem(inputs)
        for layer in self.layers:
            inputs = layer(inputs)
        return self.head(inputs)


class LayeredTask(PacedTask):
    """The paced task with that model."""

    def build_model(self):
        return Layered()
