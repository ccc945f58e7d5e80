"""Tasks whose data is another one in another process, at another time, or whenever it is asked again."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ddp_runner.training.task import Datasets
from tests.scenarios.workload import keep_pace

SAMPLES = 96
# In the folder where the run was started.
DATA_NAME = "data.txt"  # a number: what the rows of the data begin with
OPENED_NAME = "opened"  # a line for each process that has opened the data


class Rows(torch.utils.data.Dataset):
    def __init__(self, rows):
        self._rows = rows

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, index):
        x = torch.full((8,), float(self._rows[index])) + 0.01 * torch.randn(8)
        return {"x": x / SAMPLES, "name": f"row {self._rows[index]}"}


class FromFile:
    """Its rows are those of a file."""

    def build_datasets(self):
        begin = int(Path(DATA_NAME).read_text(encoding="utf-8"))
        return Datasets(train=Rows(range(begin, begin + SAMPLES)))

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1))

    def loss(self, model, batch):
        keep_pace(0.02)
        return model(batch["x"]).square().mean()


class Unsorted(FromFile):
    """Its rows come in an order that is another one in each process, as that of a set of objects does."""

    def build_datasets(self):
        return Datasets(train=Rows(np.roll(range(SAMPLES), os.getpid() % 89).tolist()))


class OwnGenerator(FromFile):
    """Its dataset has a generator of its own, as people write it."""

    def build_datasets(self):
        return Datasets(train=_Noisy(range(SAMPLES)))


class _Noisy(Rows):
    def __init__(self, rows):
        super().__init__(rows)
        self._rng = np.random.default_rng(0)

    def __getitem__(self, index):
        found = super().__getitem__(index)
        return found | {"x": found["x"] + torch.from_numpy(self._rng.normal(size=8)).float()}


class Lazy(FromFile):
    """Its dataset opens its file when it is first asked, as one does that reads HDF5 or LMDB."""

    def build_datasets(self):
        return Datasets(train=_Lazy(range(SAMPLES)))


class _Lazy(Rows):
    _file = None

    def __getitem__(self, index):
        if self._file is None:
            self._file = Path(OPENED_NAME).open("a", encoding="utf-8")  # noqa: SIM115
            self._file.write(f"{os.getpid()}\n")
            self._file.flush()
        return super().__getitem__(index)


class Broken(FromFile):
    """Its first sample does not load: ``how`` it breaks."""

    def __init__(self, how="raise"):
        self._how = how

    def build_datasets(self):
        return Datasets(train=_Broken(range(SAMPLES), self._how))


class _Broken(Rows):
    def __init__(self, rows, how):
        super().__init__(rows)
        self._how = how

    def __getitem__(self, index):
        if index == 0:
            if self._how == "raise":
                raise ValueError("broken image")
            if self._how == "hang":
                time.sleep(1e6)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


_losses = 0  # that this process has computed


class Forgetful(FromFile):
    """Its loss depends on a global of the module, which no replacement and no resume has."""

    def build_datasets(self):
        return Datasets(train=Rows(range(SAMPLES)))

    def loss(self, model, batch):
        global _losses  # noqa: PLW0603 - as people write it
        _losses += 1
        return super().loss(model, batch) * (1 + 1 / _losses)
