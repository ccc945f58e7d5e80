"""Data as people load it."""

import random
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, random_split

from ddp_runner import Datasets
from tests.hashed_names import Name

VALUES = torch.randn(60, 6, generator=torch.Generator().manual_seed(77))


class Rows(Dataset):
    def __init__(self, rows):
        self.rows = list(rows)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return VALUES[self.rows[i]], float(self.rows[i]) / 60


class Fit:
    def build_model(self):
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(self, model, batch):
        x, y = batch
        return nn.functional.mse_loss(model(x)[:, 0], y.float())


class ShuffledRows(Fit):
    def build_datasets(self):
        rows = list(range(60))
        random.shuffle(rows)
        return Datasets(train=Rows(rows[:48]), validation=Rows(rows[48:]))


class NumpySplit(Fit):
    def build_datasets(self):
        rows = np.random.permutation(60)
        return Datasets(train=Rows(rows[:48]), validation=Rows(rows[48:]))


class TorchSplit(Fit):
    def build_datasets(self):
        train, held_out = random_split(Rows(range(60)), [48, 12])
        return Datasets(train=train, validation=held_out)


class UnseededSplit(Fit):
    def build_datasets(self):
        rows = np.random.default_rng().permutation(60)
        return Datasets(train=Rows(rows[:48]), validation=Rows(rows[48:]))


class FromSet(Fit):
    def build_datasets(self):
        names = {Name(f"file_{i:02d}") for i in range(48)}
        return Datasets(train=Rows(int(name[-2:]) for name in names))


class Augmented(Rows):
    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        if random.random() < 0.5:
            x = x.flip(0)
        x = x + 0.05 * torch.randn(6) + 0.01 * np.random.randn()
        return x.float(), y


class Augmentation(Fit):
    def build_datasets(self):
        return Datasets(train=Augmented(range(48)))


class OwnNoise(Rows):
    def __init__(self, rows):
        super().__init__(rows)
        self.rng = np.random.default_rng(0)

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x + 0.1 * torch.from_numpy(self.rng.standard_normal(6)).float(), y


class DatasetWithRng(Fit):
    def build_datasets(self):
        return Datasets(train=OwnNoise(range(48)))


class Clocked(Rows):
    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x * (1 + 0.1 * (time.time() % 1)), y


class ReadsTheClock(Fit):
    def build_datasets(self):
        return Datasets(train=Clocked(range(48)))


class Harder(Rows):
    """The more has been read of it, the harder it gets."""

    def __init__(self, rows):
        super().__init__(rows)
        self.read = 0

    def __getitem__(self, i):
        self.read += 1
        x, y = super().__getitem__(i)
        return x * min(2.0, 1 + self.read / 50), y


class CountingDataset(Fit):
    def build_datasets(self):
        return Datasets(train=Harder(range(48)))


class Numbered(Rows):
    """Gives each kind a number when it first comes."""

    def __init__(self, rows):
        super().__init__(rows)
        self.numbers = {}

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        kind = f"kind {int(y * 60) % 7}"
        return x, float(self.numbers.setdefault(kind, len(self.numbers)))


class GrowingVocabulary(Fit):
    def build_datasets(self):
        return Datasets(train=Numbered(range(48)))


class Shuffler(IterableDataset):
    """Shuffles each epoch with its own generator, which goes on over epochs."""

    def __init__(self):
        self.rng = random.Random(5)

    def __iter__(self):
        order = list(range(48))
        self.rng.shuffle(order)
        for i in order:
            yield VALUES[i], float(i) / 60

    def __len__(self):
        return 48


class StreamOverEpochs(Fit):
    def build_datasets(self):
        return Datasets(train=Shuffler())


class GlobalShuffler(Shuffler):
    def __iter__(self):
        for i in np.random.permutation(48):
            yield VALUES[i] + 0.01 * random.random(), float(i) / 60


class StreamGlobalRandom(Fit):
    def build_datasets(self):
        return Datasets(train=GlobalShuffler())


class Resumable(Shuffler):
    def __init__(self):
        super().__init__()
        self.epoch, self.at = 0, 0

    def __iter__(self):
        order = np.random.default_rng(self.epoch).permutation(48)
        for i in order[self.at :]:
            self.at += 1
            yield VALUES[i], float(i) / 60
        self.epoch, self.at = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state):
        self.epoch, self.at = state["epoch"], state["at"]


class StreamWithState(Fit):
    def build_datasets(self):
        return Datasets(train=Resumable())
