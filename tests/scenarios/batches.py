"""Tasks whose loss does with its batch what people do: scale it, pop from it, add to a list in it."""

from __future__ import annotations

import random

import torch
from torch import nn

from ddp_runner.training.task import Datasets
from tests.scenarios.workload import keep_pace

PACE_S = 0.02


class Sentences(torch.utils.data.Dataset):
    """A vector, a target and a text each, with some noise."""

    def __len__(self):
        return 200

    def __getitem__(self, index):
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        y = x[:2].sum().unsqueeze(0)
        x = x + 0.05 * torch.randn(8)
        return {"x": x, "y": y, "text": str(index), "pair": [x, y]}


def scaled(batch, way):
    """Inputs, targets and texts of the batch, its inputs doubled; the same in every way."""
    if way == "rows":
        for row in batch:
            row["x"] *= 2
        return *(torch.stack([row[key] for row in batch]) for key in "xy"), ["end"]
    if way == "item":
        batch["pair"][0] = batch["pair"][0] * 2
        return *batch["pair"], [*batch["text"], "end"]
    if way == "pop":
        return batch.pop("x") * 2, batch["y"], [*batch["text"], "end"]
    if way == "pure":
        return batch["x"] * 2, batch["y"], [*batch["text"], "end"]
    if way == "key":
        batch["x"] = batch["x"] * 2
    elif way == "array":
        batch["x"].numpy()[:] *= 2
    elif way == "list":
        batch["text"].append("end")
        return batch["x"] * 2, batch["y"], batch["text"]
    return batch["x"], batch["y"], [*batch["text"], "end"]


class BatchTask:
    """A regression whose loss is weighted by the length of the texts. ``way``: what it does to a batch."""

    def __init__(self, *, way="pure"):
        self.way = way

    def build_datasets(self):
        if self.way == "rows":  # as what lies in memory is often given: a list, handed on as it is
            return Datasets(train=[Sentences()[n] for n in range(200)], collate=list)
        return Datasets(train=Sentences())

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))

    def loss(self, model, batch):
        x, y, texts = scaled(batch, self.way)
        keep_pace(PACE_S)
        weight = 1 + 0.01 * sum(len(text) for text in texts)
        return weight * nn.functional.mse_loss(model(x), y)


class ChangingTask(BatchTask):
    """Its batches are changed in another way in each step."""

    def loss(self, model, batch, context):
        self.way = ("key", "item", "pop", "array", "list")[context.step % 5]
        return super().loss(model, batch)


class Shuffled(torch.utils.data.IterableDataset):
    """Shuffles its numbers again for each epoch, with a generator that it was built with."""

    def __init__(self, rng):
        self.rng = rng
        self.numbers = list(range(100))

    def __iter__(self):
        self.rng.shuffle(self.numbers)
        for number in self.numbers:
            x = torch.randn(8, generator=torch.Generator().manual_seed(number))
            yield {"x": x + 0.05 * self.rng.random(), "y": x[:2].sum().unsqueeze(0), "text": "-"}


class ByEpoch(Shuffled):
    """As it was built before each epoch, but for the seed."""

    def set_epoch(self, epoch):
        self.numbers, self.rng = list(range(100)), random.Random(epoch)


class ShuffledTask(BatchTask):
    """Its data are a stream without a state."""

    def build_datasets(self):
        return Datasets(train=ByEpoch(random.Random(0)))


class CarryingTask(BatchTask):
    """Its stream's order is that of the epoch before, shuffled once more."""

    def build_datasets(self):
        return Datasets(train=Shuffled(random.Random(0)))
