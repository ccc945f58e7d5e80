"""A task whose data comes in the order of a sampler that draws from every generator that it finds."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import torch
from torch.utils.data import Sampler

from tests.scenarios.workload import PacedTask

SAMPLES = 96


class Drawing(Sampler):
    """Another order in each epoch, of samples that come twice or never."""

    def __init__(self, size):
        self.size = size
        self.generator = torch.Generator().manual_seed(3)
        self.epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        own = torch.randint(self.size, (SAMPLES,), generator=self.generator).tolist()
        for index in own:
            drawn = random.random() + np.random.rand() + torch.rand(()).item()  # noqa: NPY002
            yield (index + int(drawn * self.size) + self.epoch) % self.size


class SampledTask(PacedTask):
    """The paced task in that order."""

    def build_datasets(self):
        found = super().build_datasets()
        return replace(found, sampler=Drawing(len(found.train)))
