"""A task as somebody else writes one: a small classifier of images, its own dataset, nothing of ours.

It knows of no runner: that something is slow, or fails now and then, is what storage and services do.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

from ddp_runner.training.task import Datasets


class Digits(Dataset):
    """Noisy pictures of ten kinds, with the usual random shift of training data."""

    def __init__(self, size, *, augment, seed):
        self.labels = torch.arange(size) % 10
        self.kinds = torch.randn(10, 1, 12, 12, generator=torch.Generator().manual_seed(7))
        self.augment = augment
        self.seed = seed

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.seed * 100_003 + index)
        label = int(self.labels[index])
        picture = self.kinds[label] + 0.5 * torch.randn(1, 12, 12, generator=generator)
        if self.augment:
            picture = torch.roll(picture, int(torch.randint(-1, 2, ())), dims=-1)
        return picture, label, index


class Classifier:
    """``pace_s`` seconds a step at least, ``evaluation_pace_s`` a batch of validation.

    ``fails_at``: samples of validation, joined by ``+``; the service that is asked for each of them does
    not answer the first time. For ``always_fails_at`` it never does.
    """

    def __init__(
        self,
        *,
        pace_s=0.0,
        samples=480,
        evaluation_samples=40,
        evaluation_pace_s=0.0,
        fails_at="",
        always_fails_at=-1,
    ):
        self.pace_s = pace_s
        self.samples = samples
        self.evaluation_samples = evaluation_samples
        self.evaluation_pace_s = evaluation_pace_s
        self.fails_at = [int(word) for word in str(fails_at).split("+") if word]
        self.always_fails_at = always_fails_at

    def build_model(self):
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(8 * 36, 10),
        )

    def build_datasets(self):
        return Datasets(
            train=Digits(self.samples, augment=True, seed=1),
            validation=Digits(self.evaluation_samples, augment=False, seed=2),
            fingerprint=f"digits {self.samples}",
        )

    def loss(self, model, batch):
        pictures, labels, indices = batch
        if model.training:
            time.sleep(0.0 if Path("hurry").exists() else self.pace_s)
        else:
            self.ask_service(indices.tolist())
        return nn.functional.cross_entropy(model(pictures), labels)

    def ask_service(self, indices):
        time.sleep(self.evaluation_pace_s)
        for index in {*self.fails_at, self.always_fails_at}.intersection(indices):
            mark = Path(f"asked_{index}")
            if index == self.always_fails_at or not mark.exists():
                mark.touch()
                raise OSError("the service does not answer")
