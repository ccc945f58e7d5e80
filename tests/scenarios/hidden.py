"""Tasks whose loss depends on what no state of a run holds: a replacement would not compute the same."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import replace
from pathlib import Path

import torch

from tests.scenarios.workload import PacedTask

# The first step is computed twice, to see whether it can be repeated: nothing shows in there.
_calls = itertools.chain((0, 0), itertools.count(1))


def is_drill():
    """Whether this process computes beside a run."""
    return Path("/proc/self/comm").read_text(encoding="ascii").strip() == "ddp:drill"


class HoldsAGlobal(PacedTask):
    """Counts its calls in its module."""

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return loss * (1 + 0.01 * next(_calls)) if model.training else loss


class HoldsAFile(PacedTask):
    """Counts the calls of each of its processes in a file."""

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        if not model.training:
            return loss
        with Path(f"calls_{os.getpid()}").open("a+") as file:
            file.write("x")
            return loss * (1 + 0.01 * max(0, file.tell() - 2))


class HoldsALayer(PacedTask):
    """What its module keeps changes the gradient of its last layer alone, and no loss."""

    def loss(self, model, batch):
        if model.training:
            calls = next(_calls)
            model[4].bias.register_hook(lambda gradient: gradient + calls)
        return super().loss(model, batch)


class AsksTheOthers(PacedTask):
    """Computes with what all ranks know."""

    def loss(self, model, batch):
        known = torch.ones(1)
        if model.training:
            torch.distributed.all_reduce(known)
        return super().loss(model, batch) * float(known)


class AsksWhoItIs(PacedTask):
    """Computes with its rank and the size of the world, as torch has them."""

    def loss(self, model, batch):
        distributed = torch.distributed
        scale = distributed.get_rank() + distributed.get_world_size() * distributed.is_initialized()
        return super().loss(model, batch) * scale


class NeedsItsPast(PacedTask):
    """Raises in a process that has not trained from the start."""

    def loss(self, model, batch):
        if is_drill():
            raise RuntimeError("it knows nothing of\nwhat was before")
        return super().loss(model, batch)


class Lingers(PacedTask):
    """Takes long where it is built once more, beside the run, in the first drill; in later ones while a file is there."""

    def build_datasets(self):
        while is_drill() and Path("lingers").exists() and Path("all_linger").exists():
            time.sleep(0.01)
        if is_drill() and not Path("lingers").exists():
            Path("lingers").write_text(str(os.getpid()))
            print("a drill of rank", os.environ["RANK"], flush=True)
            time.sleep(600)
        return super().build_datasets()


class HasItsOwnCount(PacedTask):
    """Counts what each rank has its own of: a replacement of rank 1 gets that of rank 0."""

    def __init__(self, **options):
        super().__init__(**options)
        self.count = 0

    def loss(self, model, batch):
        if model.training:
            self.count += 1 + torch.distributed.get_rank()
        return super().loss(model, batch) * (1 + 0.01 * self.count)


class LoadsItsOwn(PacedTask):
    """Its samples are others in each process."""

    def build_datasets(self):
        datasets = super().build_datasets()
        return replace(datasets, train=_OfThisProcess(datasets.train))


class _OfThisProcess(torch.utils.data.Dataset):
    def __init__(self, inner):
        self._inner = inner

    def __len__(self):
        return len(self._inner)

    def __getitem__(self, index):
        inputs, *rest = self._inner[index]
        return (inputs + 0.25 * is_drill(), *rest)


class RateByEnvironment(PacedTask):
    """Has an optimizer whose updates follow a count in the environment."""

    def configure_optimizers(self, model):
        return _Counting(model.parameters(), lr=0.01)


class _Counting(torch.optim.Adam):
    def step(self, closure=None):
        os.environ["UPDATES"] = str(1 + int(os.environ.get("UPDATES", "0")))
        for group in self.param_groups:
            group["weight_decay"] = 0.001 * int(os.environ["UPDATES"])
        return super().step(closure)


class RateByItself(PacedTask):
    """Has a scheduler, and an average of the weights by its settings."""

    def configure_optimizers(self, model):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
