"""Tasks whose loss depends on state in odd places, or that hold objects that refuse to be asked."""

from __future__ import annotations

import array
import functools
import multiprocessing
import os
import queue
import random
import threading

import torch
from torch.utils.data import Dataset

from ddp_runner.training.task import Datasets
from tests.scenarios.changing import Regression


def warmed_up(loss):
    """A decorator as people write it."""
    calls = 0

    @functools.wraps(loss)
    def warm(self, model, batch):
        nonlocal calls
        calls += 1
        return loss(self, model, batch) * min(1.0, calls / 20)

    return warm


def noted(value, seen=[]):  # noqa: B006 - as people write it
    noted.calls = getattr(noted, "calls", 0) + 1
    seen.append(value)
    return noted.calls + len(seen)


class Dice(random.Random):
    def throw(self):
        return self.random()


class Totals:
    steps = 0


class Odd(Regression):
    """In a closure, a function, a class, memory of C, a queue, two names for one list."""

    def __init__(self):
        self.recent = array.array("d", [0.0])
        self.queue = queue.Queue()
        self.shared = multiprocessing.Value("i", 0)
        self.local = threading.local()
        self.local.n = 0
        self.dice = Dice(7)
        self.totals = Totals
        self.best, self.now = [], []

    @warmed_up
    def loss(self, model, batch):
        if not model.training:
            return super().loss(model, batch)
        self.recent.append(self.dice.throw())
        self.queue.put(self.recent[-1])
        if self.queue.qsize() > 3:
            self.queue.get()
        self.shared.value += 1
        self.local.n += 1
        self.totals.steps += 1
        if self.local.n == 2:
            self.best = self.now
        self.now.append(1)
        held = sum(self.recent) + sum(self.queue.queue) + self.shared.value + self.totals.steps
        held += self.local.n + noted(1) + 10 * len(self.best)
        return super().loss(model, batch) * (1 + 0.001 * held)


class Refuses:
    """Written once, and never again."""

    def __init__(self):
        object.__setattr__(self, "n", 0)

    def __setattr__(self, name, value):
        raise TypeError("read-only")

    def count(self):
        object.__setattr__(self, "n", self.n + 1)
        return self.n


class Silent:
    def state_dict(self):
        raise RuntimeError("not yet")

    load_state_dict = None


class Endless(list):
    def __len__(self):
        raise TypeError("endless")


class Rude(Regression):
    """Holds what refuses to be written, asked for its state, or counted."""

    def __init__(self):
        self.counter, self.silent, self.endless = Refuses(), Silent(), Endless([1])
        self.table = [0.0] * 200_000  # too long to be kept; nobody changes it

    def loss(self, model, batch):
        return super().loss(model, batch) * (1 + 0.01 * self.counter.count() + self.table[7])


class Table(Rude):
    """Changes a list that is too long to be kept, from its fifth step on."""

    def loss(self, model, batch):
        self.table[7] += 0.01 * (self.counter.n > 5)
        return super().loss(model, batch)


class Parting(Regression):
    """Its count is the same on all ranks at first, and each rank's own from then on."""

    def __init__(self):
        self.count = 0

    def loss(self, model, batch):
        self.count += 1 + (self.count > 12) * int(os.environ.get("RANK", "0"))
        return super().loss(model, batch) * (1 + self.count / 1000)


class Rows(Dataset):
    """Counts its reads, and its samples depend on that after a while."""

    def __init__(self):
        self.x, self.reads = torch.randn(256, 8, generator=torch.Generator().manual_seed(1)), 0
        self.cache = {}

    def __len__(self):
        return 256

    def __getitem__(self, index):
        self.reads += 1
        x = self.x[index] * (1 + 0.01 * max(0, self.reads - 200))
        return x, x.sum(0, keepdim=True)


class Cached(Rows):
    """Control: what it keeps changes no sample."""

    def __getitem__(self, index):
        x = self.cache.setdefault(index, self.x[index])
        return x, x.sum(0, keepdim=True)


class Reads(Regression):
    rows = Rows

    def build_datasets(self):
        return Datasets(train=self.rows())


class ReadsCached(Reads):
    rows = Cached
