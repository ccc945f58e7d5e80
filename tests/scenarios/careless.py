"""A task as it is first written: it shuffles its data where it makes them, and its helpers break."""

from __future__ import annotations

import math
import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddp_runner.training.task import Datasets


class CarelessTask:
    """A regression. Nothing in it is seeded."""

    def build_datasets(self):
        x = torch.randn(240, 8)
        rows = list(range(240))
        random.shuffle(rows)
        held_out = np.random.permutation(rows)[:40]  # noqa: NPY002 - as people write it
        train = [row for row in rows if row not in set(held_out.tolist())]
        y = x[:, :2].sum(1, keepdim=True)
        return Datasets(
            train=TensorDataset(x[train], y[train]),
            validation=TensorDataset(x[held_out], y[held_out]),
        )

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))

    def loss(self, model, batch):
        x, y = batch
        return nn.functional.mse_loss(model(x), y)

    def figures(self, loss):
        return {"rmse": torch.tensor(loss).sqrt(), "perplexity": math.exp(1e4 * (1 + loss))}

    def sample(self, model):
        for parameter in model.parameters():
            parameter.fill_(0.0)
        return model(torch.ones(1, 8)).tolist()[0][3]
