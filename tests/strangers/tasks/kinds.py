"""Models, tensors and layers of kinds that few tasks have."""

import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddp_runner import Datasets

X = torch.randn(48, 6, generator=torch.Generator().manual_seed(8))
Y = X.sum(1).tanh()


class Base:
    def build_datasets(self):
        return Datasets(train=torch.utils.data.TensorDataset(X, Y))

    def loss(self, model, batch):
        x, y = batch
        return F.mse_loss(model(x)[:, 0], y)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2))
        self.head = nn.Linear(8, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.head(torch.relu(self.body(x))) / (1 + 0.01 * self.seen)


class Scripted(Base):
    def build_model(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # by now it is deprecated
            return torch.jit.script(Counting())


class Positions(nn.Module):
    """Its positions are one row, seen as one for each sample, as in BERT."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 4)
        self.head = nn.Linear(4, 1)
        self.register_buffer("positions", torch.arange(6.0).expand(8, 6))

    def forward(self, words):
        count = words.size(0)
        rows = torch.nested.to_padded_tensor(torch.relu(self.layer(words)), 0.0, (count, 6, 4))
        return self.head((rows * self.positions[:count, :, None]).mean(1))


def jagged(samples):
    """Sentences of different lengths, twice with the same offsets."""
    rows = [x[: 2 + int(y > 0)][:, None] for x, y in samples]
    words = torch.nested.nested_tensor(rows, layout=torch.jagged)
    return words, words * 2, torch.stack([y for _, y in samples])


class Jagged(Base):
    def build_model(self):
        return Positions()

    def build_datasets(self):
        return Datasets(train=torch.utils.data.TensorDataset(X, Y), collate=jagged)

    def loss(self, model, batch):
        words, twice, y = batch
        return F.mse_loss(model(words + twice)[:, 0], y)


def strided(samples):
    rows = [x[: 2 + int(y > 0)][:, None] for x, y in samples]
    return torch.nested.nested_tensor(rows), torch.stack([y for _, y in samples])


class Strided(Jagged):
    """The older layout of nested tensors, of which there is no deep copy."""

    def build_datasets(self):
        return Datasets(train=torch.utils.data.TensorDataset(X, Y), collate=strided)

    def loss(self, model, batch):
        words, y = batch
        return F.mse_loss(model(words)[:, 0], y)


class SyncNorms(Base):
    def build_model(self):
        return nn.SyncBatchNorm.convert_sync_batchnorm(Counting())


class Lookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(4, 1))
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        return self.head(x) + F.embedding((x[:, 0] > 0).long(), self.table, sparse=True)


class SparseLookup(Base):
    def build_model(self):
        return Lookup()


class MetaLayer(Base):
    def build_model(self):
        return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1, device="meta"))


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.again, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        x = self.stem(x)
        for _ in range(2):
            x = checkpoint(lambda inner: torch.tanh(self.again(inner)), x, use_reentrant=True)
        return self.head(x)


class CheckpointedTwice(Base):
    def build_model(self):
        return Twice()


class StaticTwice(CheckpointedTwice):
    """With the setting that the line names."""
