"""One small model as people wrap it: compiled, and in classes whose only child is called ``module``."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddp_runner.training.task import Datasets
from tests.scenarios.workload import keep_pace


class Wrapper(nn.Module):
    """Computes nothing of its own."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, inputs):
        return self.module(inputs)


class PlainTask:
    """Four features, two classes; ``pace_s`` seconds a batch at least."""

    def __init__(self, pace_s: float = 0.0):
        self.pace_s = pace_s

    def build_model(self):
        return nn.Sequential(
            nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2)
        )

    def build_datasets(self):
        points = torch.randn(256, 4, generator=torch.Generator().manual_seed(1))
        return Datasets(train=TensorDataset(points, (points.sum(1) > 0).long()), fingerprint="4")

    def loss(self, model, batch):
        keep_pace(self.pace_s)
        points, classes = batch
        return nn.functional.cross_entropy(model(points), classes)


class WrappedTask(PlainTask):
    """A wrapper in a wrapper around a model that is compiled as a whole, and its last layer once more by itself."""

    def build_model(self):
        model = super().build_model()
        model[4] = torch.compile(model[4], backend="eager")
        return Wrapper(Wrapper(torch.compile(model, backend="eager")))
