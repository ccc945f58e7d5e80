"""Small regressions whose losses do things to their batch."""

from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from ddp_runner import Datasets

X = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
Y = X[:, :2].sum(1).tanh()
WORDS = ["red", "green", "blue", "yellow", "black"]


class Dicts(Dataset):
    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        return {"x": X[i], "y": Y[i]}


class Pairs(Dicts):
    def __getitem__(self, i):
        return X[i], Y[i]


class Regression:
    def build_model(self):
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))

    def build_datasets(self):
        return Datasets(train=Dicts(), validation=torch.utils.data.Subset(Dicts(), range(8)))

    def loss(self, model, batch):
        return F.mse_loss(model(batch["x"])[:, 0], batch["y"])


class Normalized(Regression):
    def loss(self, model, batch):
        batch["x"] = (batch["x"] - 0.5) * 2
        return super().loss(model, batch)


class FirstItem(Regression):
    def build_datasets(self):
        return Datasets(train=Pairs())

    def loss(self, model, batch):
        batch[0] = batch[0] * 2 - 1
        x, y = batch
        return F.l1_loss(model(x).squeeze(1), y)


class Popped(Regression):
    def loss(self, model, batch):
        y = batch.pop("y")
        return F.mse_loss(model(**{"input": batch.pop("x")})[:, 0], y)


class ThroughNumpy(Regression):
    def loss(self, model, batch):
        batch["x"].numpy()[:] *= 2
        return super().loss(model, batch)


class InPlace(Regression):
    def loss(self, model, batch):
        batch["x"].sub_(0.5).mul_(2)
        return super().loss(model, batch)


class DataInPlace(Regression):
    def loss(self, model, batch):
        batch["y"].data.mul_(2)
        return super().loss(model, batch)


def with_words(samples):
    batch = torch.utils.data.default_collate(samples)
    batch["words"] = [WORDS[int(abs(s["x"][0]) * 10) % 5] for s in samples]
    return batch


class WordList(Regression):
    def build_datasets(self):
        return Datasets(train=Dicts(), collate=with_words)

    def loss(self, model, batch):
        batch["words"].append("<end>")
        scale = sum(len(word) for word in batch["words"]) / 20
        return scale * super().loss(model, batch)


def to_numpy(samples):
    return {key: np.stack([sample[key].numpy() for sample in samples]) for key in ("x", "y")}


class NumpyBatches(Regression):
    def build_datasets(self):
        return Datasets(train=Dicts(), collate=to_numpy)

    def loss(self, model, batch):
        x = batch["x"]
        x -= x.mean(0)
        x /= x.std(0) + 1e-3
        return F.mse_loss(model(torch.from_numpy(x))[:, 0], torch.from_numpy(batch["y"]))


class Sentences(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, i):
        return " ".join(WORDS[(i * k + k) % 5] for k in range(1, 5)), i % 3


class TextClassifier:
    def build_model(self):
        return nn.ModuleDict({"embed": nn.EmbeddingBag(128, 8), "head": nn.Linear(8, 3)})

    def build_datasets(self):
        return Datasets(train=Sentences())

    def loss(self, model, batch):
        texts, labels = batch
        ids = [torch.tensor([ord(c) % 128 for c in text]) for text in texts]
        offsets = torch.tensor([0, *[len(one) for one in ids[:-1]]]).cumsum(0)
        return F.cross_entropy(model["head"](model["embed"](torch.cat(ids), offsets)), labels)


Sample = namedtuple("Sample", "x y weight")


class Tuples(Dicts):
    def __getitem__(self, i):
        return Sample(X[i], Y[i], float(i % 3))


class NamedTuples(Regression):
    def build_datasets(self):
        return Datasets(train=Tuples())

    def loss(self, model, batch):
        batch = batch._replace(x=batch.x * 2)
        return (batch.weight * (model(batch.x)[:, 0] - batch.y) ** 2).float().mean()


@dataclass
class Pack:
    x: torch.Tensor
    y: torch.Tensor


def pack(samples):
    return Pack(torch.stack([s["x"] for s in samples]), torch.stack([s["y"] for s in samples]))


class Packed(Regression):
    def build_datasets(self):
        return Datasets(train=Dicts(), collate=pack)

    def loss(self, model, batch):
        batch.x = torch.cat([batch.x, batch.x[:1]])
        batch.y = torch.cat([batch.y, batch.y[:1]])
        return F.mse_loss(model(batch.x)[:, 0], batch.y)


class Mixup(Regression):
    def loss(self, model, batch):
        lam = np.random.beta(0.4, 0.4)
        order = np.random.permutation(len(batch["x"]))
        mixed = lam * batch["x"] + (1 - lam) * batch["x"][order]
        y = batch["y"]
        out = model(mixed.float())[:, 0]
        return lam * F.mse_loss(out, y) + (1 - lam) * F.mse_loss(out, y[order])


class Shared(Dataset):
    def __init__(self):
        self.rows = [row.clone() for row in X]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class ByReference(Regression):
    def build_datasets(self):
        return Datasets(train=Shared(), collate=list)

    def loss(self, model, batch):
        total = 0.0
        for x in batch:
            x.mul_(0.9)
            total = total + (model(x) - x.sum()).square().mean()
        return total / len(batch)
