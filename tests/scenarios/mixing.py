"""Images as a vision task has them: random changes for each part of its own, MixUp in the batch, a mean as metric."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

from ddp_runner import Datasets

CLASSES = 4


class Pictures(Dataset):
    def __init__(self, count, *, changes, deterministic):
        self.pictures = torch.randn(count, 3, 6, 6, generator=torch.Generator().manual_seed(count))
        self.changes = changes
        self.deterministic = deterministic

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        picture = self.pictures[index].clone()
        if self.changes:  # as RandomHorizontalFlip and RandomErasing
            picture = picture.flip(2) if torch.rand(()) < 0.5 else picture
            top, left = torch.randint(5, (2,)).tolist()
            picture[:, top : top + 2, left : left + 2] = 0.0
        return picture, index % CLASSES


def mix(samples):
    """As torchvision's MixUp."""
    pictures, labels = default_collate(samples)
    share = torch.distributions.Beta(1.0, 1.0).sample()
    soft = nn.functional.one_hot(labels, CLASSES).float()
    return pictures.lerp(pictures.roll(1, 0), share), soft.lerp(soft.roll(1, 0), share)


class MixingTask:
    """``changes``: samples are changed at random; without, they are the same each time, and say so."""

    def __init__(self, changes: bool = True):
        self.changes = changes

    def build_model(self):
        return nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, CLASSES)
        )

    def build_datasets(self):
        how = {"deterministic": not self.changes}
        return Datasets(
            train=Pictures(192, changes=self.changes, **how),
            validation=Pictures(50, changes=False, deterministic=True),
            collate=mix,
        )

    def loss(self, model, batch):
        pictures, labels = batch
        assert labels.dtype is (torch.float32 if model.training else torch.int64)
        return nn.functional.cross_entropy(model(pictures), labels)

    def metrics(self, model, batch):
        pictures, labels = batch
        return {"accuracy": (model(pictures).argmax(1) == labels).float().mean()}
