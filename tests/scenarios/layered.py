"""A model of like blocks, with all that a block may keep and draw besides its weights."""

from __future__ import annotations

import importlib
import os

import torch
from torch import nn

from tests.scenarios.workload import Calls, PacedTask

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


class CompiledTask(LayeredTask):
    """Says when this process compiles a graph, and at which call of the loss."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.__dict__["_calls"] = Calls()

    def build_model(self):
        handler = importlib.import_module("torch._dynamo.callback").callback_handler
        handler.register_start_callback(
            lambda *_: print(f"compiled by {os.getpid()} at {self._calls.count}", flush=True)
        )
        return super().build_model()

    def loss(self, model, batch):
        self._calls.more(1)
        return super().loss(model, batch)
