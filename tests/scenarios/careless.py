"""A task as it is first written: it shuffles its data where it makes them, and its helpers break."""

from __future__ import annotations

import math
import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import Sampler, TensorDataset

from ddp_runner.training.task import Datasets
from tests.hashed_names import Name


class Towers(nn.Module):
    """Its parts come from a set of names: another process has them in another order."""

    def __init__(self):
        super().__init__()
        names = {Name("text"), Name("image"), Name("sound")}
        self.towers = nn.ModuleDict({str(name): nn.Linear(8, 8) for name in names})
        for name in sorted(self.towers):  # the order of the set shows in no weight
            generator = torch.Generator().manual_seed(len(name))
            self.towers[name].weight.data.normal_(std=0.3, generator=generator)
            self.towers[name].bias.data.zero_()
        self.head = nn.Linear(24, 1)
        nn.init.constant_(self.head.weight, 0.1)
        nn.init.zeros_(self.head.bias)

    def forward(self, x):
        parts = (
            self.towers["text"](x),
            self.towers["image"](x.sin()),
            self.towers["sound"](x.abs()),
        )
        return self.head(torch.cat(parts, dim=1).relu())


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
        return nn.Sequential(Towers(), nn.Dropout(0.1))

    def loss(self, model, batch):
        x, y = batch
        return nn.functional.mse_loss(model(x), y)

    def figures(self, loss):
        return {"rmse": torch.tensor(loss).sqrt(), "perplexity": math.exp(1e4 * (1 + loss))}

    def sample(self, model):
        for parameter in model.parameters():
            parameter.fill_(0.0)
        return model(torch.ones(1, 8)).tolist()[0][3]


class HarderData(TensorDataset):
    """Rows that get harder with its level."""

    level = 0.0

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + self.level * x.sin(), y


class DrawingData(TensorDataset):
    """Rows with noise of their own in each epoch."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 0.3 * torch.randn(8), y


class CachingData(DrawingData):
    """Rows with the noise that they had at first."""

    def __init__(self, *tensors):
        super().__init__(*tensors)
        self.cache = {}

    def __getitem__(self, index):
        if index not in self.cache:
            self.cache[index] = super().__getitem__(index)
        return self.cache[index]


class ScaledData(TensorDataset):
    """Rows that a method of the task scales."""

    scaled = staticmethod(lambda row: row)

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return self.scaled(x), y


class EachEpoch(Sampler):
    """The samples in an order that follows from the epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 240

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(240, generator=generator).tolist())


KINDS = {
    "sampled": TensorDataset,
    "harder": HarderData,
    "drawing": DrawingData,
    "caching": CachingData,
    "scaled": ScaledData,
}


class UnkeptTask(CarelessTask):
    """Its rows are of one of the kinds above; after each epoch they are a little harder."""

    def __init__(self, kind="harder"):
        self.kind = KINDS[kind]
        self.steps, self.sampler = 0, EachEpoch() if kind == "sampled" else None

    def build_datasets(self):
        x = torch.randn(240, 8)
        self.rows = self.kind(x, x[:, :2].sum(1, keepdim=True))
        if self.kind is ScaledData:
            self.rows.scaled = self.scaled
        return Datasets(train=self.rows, sampler=self.sampler)

    def scaled(self, row):
        return row * (1 + self.steps / 100)

    def loss(self, model, batch):
        self.steps += 1
        return super().loss(model, batch)

    def on_epoch_end(self, context):
        if self.kind is HarderData:
            self.rows.level += 0.1

    def figures(self, loss):
        return {}

    def sample(self, model):
        return ""
