"""A small paced task for whole-run tests: its state has buffers, dropout and per-sample noise.

What should go wrong, and when, comes from a file that a test writes while the run trains, or from
a sample whose turn always comes at the same step of an epoch.
"""

from __future__ import annotations

import ctypes
import os
import random
import time
from pathlib import Path

import torch
from torch import nn

from ddp_runner.training.task import Datasets

TROUBLE_NAME = "trouble"  # in the folder where the run was started


class NoisySamples(torch.utils.data.Dataset):
    """Draws from python's and torch's generators per sample, so that seeding shows in the weights."""

    def __init__(self, size, place):
        self._size = size
        self._place = place

    def __len__(self):
        return self._size

    def __getitem__(self, index):
        make_trouble(self._place)
        generator = torch.Generator().manual_seed(index)
        clean = torch.randn(8, generator=generator)
        noise = 0.05 * torch.randn(8) + 0.01 * random.random()
        return clean + noise, clean[:2].sum().unsqueeze(0), index


def make_trouble(place):
    """Do, once, what the trouble file asks of ``place``: ``PLACE RANK ACTION``; the file is gone then."""
    try:
        wanted, rank, action = Path(TROUBLE_NAME).read_text(encoding="utf-8").split()
        if wanted != place or rank not in ("any", os.environ.get("RANK")):
            return
        Path(TROUBLE_NAME).unlink()
    except (OSError, ValueError):  # no trouble, or another rank has taken it
        return
    if action == "device":
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
    if action == "raise":
        raise RuntimeError("trouble was asked for")
    if action.startswith("exit"):
        os._exit(int(action.removeprefix("exit")))
    if action.startswith("sleep"):
        time.sleep(float(action.removeprefix("sleep")))
    if action == "barrier":
        for _ in range(4):  # which nobody else is in; as many as hold every thread of gloo
            torch.distributed.barrier(async_op=True)
    if action.startswith("gil"):
        # PyDLL keeps the interpreter's lock for the length of the call.
        ctypes.PyDLL(None).usleep(int(float(action.removeprefix("gil")) * 1e6))


class PacedTask:
    """``pace_s`` seconds a step at least; ``validation_s`` seconds a validation batch.

    ``raise_at_sample`` and ``nan_at_sample`` name a training sample that ruins its step.
    """

    def __init__(
        self,
        *,
        pace_s=0.02,
        samples=192,
        validation_samples=24,
        validation_s=0.0,
        width=32,
        raise_at_sample=-1,
        nan_at_sample=-1,
    ):
        self._pace_s = pace_s
        self._samples = samples
        self._validation_samples = validation_samples
        self._validation_s = validation_s
        self._width = width
        self._raise_at_sample = raise_at_sample
        self._nan_at_sample = nan_at_sample

    def build_model(self):
        make_trouble("build")
        return nn.Sequential(
            nn.Linear(8, self._width),
            nn.BatchNorm1d(self._width),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(self._width, 1),
        )

    def build_datasets(self):
        return Datasets(
            train=NoisySamples(self._samples, "data"),
            validation=NoisySamples(self._validation_samples, "validation"),
            fingerprint=f"noisy {self._samples}",
        )

    def loss(self, model, batch):
        inputs, targets, indices = batch
        if not model.training:
            make_trouble("evaluation")
            time.sleep(self._validation_s)
            return nn.functional.mse_loss(model(inputs), targets)
        time.sleep(self._pace_s)
        make_trouble("loss")
        if self._raise_at_sample in indices:
            raise RuntimeError("this step never works")
        loss = nn.functional.mse_loss(model(inputs), targets)
        return loss * float("nan") if self._nan_at_sample in indices else loss


class Hashed(nn.Sequential):
    """A model in which something may go wrong while its weights are looked at."""

    def state_dict(self, *args, **options):
        make_trouble("state_dict")
        return super().state_dict(*args, **options)


class HashedTask(PacedTask):
    """Its model is asked for its weights when the replicas are compared."""

    def build_model(self):
        return Hashed(*super().build_model())


class FailsInModel(PacedTask):
    """Raises while the model is built."""

    def build_model(self):
        raise RuntimeError("no model today")


class FailsInDatasets(PacedTask):
    """Raises while the data is built."""

    def build_datasets(self):
        raise RuntimeError("no data today")


class DiesInModel(PacedTask):
    """Takes its process along at every start."""

    def build_model(self):
        os._exit(9)
