"""Tasks as people write them whose evaluations say more than a loss: a classifier, and a small language model."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from ddp_runner import Datasets, Weighted

CLASSES, FEATURES = 5, 6


def blobs(count, seed, noise):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    centres = torch.eye(CLASSES, FEATURES)[labels]
    return TensorDataset(
        centres + noise * torch.randn(count, FEATURES, generator=generator), labels
    )


class MeanRecall:
    """The mean over classes of the share that was found."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.found = torch.zeros(CLASSES, dtype=torch.int64)
        self.there = torch.zeros(CLASSES, dtype=torch.int64)

    def update(self, guesses, labels):
        self.there += torch.bincount(labels, minlength=CLASSES)
        self.found += torch.bincount(labels[guesses == labels], minlength=CLASSES)

    def compute(self):
        return (self.found / self.there.clamp(min=1)).double().mean()


class Classifier:
    """Blobs, judged on many points and on the one that a customer has sent."""

    def __init__(self):
        self.recall = MeanRecall()

    def build_model(self):
        return nn.Sequential(
            nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, CLASSES)
        )

    def build_datasets(self):
        return Datasets(
            train=blobs(400, 1, 0.8),
            validation={"all": blobs(37, 2, 0.8), "customer": blobs(1, 3, 0.8)},
        )

    def loss(self, model, batch):
        points, labels = batch
        return functional.cross_entropy(model(points), labels)

    def build_metrics(self):
        return {"recall": self.recall}

    def metrics(self, model, batch):
        points, labels = batch
        guesses = model(points).argmax(1)
        return {"accuracy": ((guesses == labels).sum(), len(labels)), "recall": (guesses, labels)}


class Stumbling(Classifier):
    """Each rank does, amid an evaluation, what the next word of its file says, for as long as there is one."""

    def metrics(self, model, batch):
        if int(self.recall.there.sum()) == 8:  # of the 18 or 19 of its share
            self._stumble(Path(f"trouble_{os.environ['RANK']}"))
        return super().metrics(model, batch)

    def _stumble(self, file):
        word, *later = (file.read_text() if file.exists() else "").split() or [""]
        file.write_text(" ".join(later))
        if word == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "raise":
            raise KeyError("a label that is not there")
        if word == "wait":
            Path("waits").touch()
            while Path("waits").exists():
                time.sleep(0.01)


class Lines(Dataset):
    """Texts of unequal length: numbers, and zeros behind them."""

    deterministic = True

    def __init__(self, count, first):
        self.count, self.first = count, first

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        length = 4 + (index * 7 + self.first) % 9
        text = torch.zeros(13, dtype=torch.long)
        text[:length] = 1 + (torch.arange(length) * (1 + index % 3) + self.first) % 15
        return text


class Language:
    """The next number, over those that are there; two texts to validate on."""

    def build_model(self):
        return nn.Sequential(nn.Embedding(16, 12), nn.Linear(12, 16))

    def build_datasets(self):
        return Datasets(train=Lines(96, 0), validation={"all": Lines(21, 1), "bach": Lines(9, 5)})

    def loss(self, model, batch):
        there = batch[:, 1:] > 0
        losses = functional.cross_entropy(
            model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten(), reduction="none"
        )
        return Weighted((losses * there.flatten()).sum(), there.sum())

    def figures(self, loss):
        return {"perplexity": 2.718281828**loss}

    def metrics(self, model, batch):
        there = batch[:, 1:] > 0
        hits = (model(batch[:, :-1]).argmax(2) == batch[:, 1:]) & there
        return {"hits": (hits.sum(), there.sum())}
