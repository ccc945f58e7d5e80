"""A task over an iterable dataset of uneven epochs, with or without a state of its own."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from ddp_runner.training.task import Datasets
from tests.scenarios.workload import PacedTask


class Stream(torch.utils.data.IterableDataset):
    """Item ``n`` of any epoch; each epoch is a little longer than the one before."""

    def __init__(self):
        self._epoch = 0

    def set_epoch(self, epoch):
        self._epoch = epoch

    def __iter__(self):
        for number in range(self._length()):
            yield self._item(number)

    def _length(self):
        return 100 + 5 * self._epoch

    def _item(self, number):
        clean = torch.randn(8, generator=torch.Generator().manual_seed(number))
        return clean + 0.05 * torch.randn(8), clean[:2].sum().unsqueeze(0), number


class StatefulStream(Stream):
    """Knows where it stands, in values of python, numpy and torch; draws from generators of its own."""

    def __init__(self):
        super().__init__()
        self._next = np.int64(0)
        self._seen = np.zeros(8, dtype=np.float32)
        self._old = np.random.RandomState(1)
        self._new = np.random.default_rng(2)
        self._torch = torch.Generator().manual_seed(3)

    def state_dict(self):
        return {
            "next": self._next,
            "seen": self._seen,
            "generators": [
                self._old.get_state(),
                self._new.bit_generator.state,
                self._torch.get_state(),
            ],
        }

    def load_state_dict(self, state):
        self._next, self._seen = state["next"], state["seen"]
        assert isinstance(self._next, np.int64)
        old, new, of_torch = state["generators"]
        self._old.set_state(old)
        self._new.bit_generator.state = new
        self._torch.set_state(of_torch)

    def __iter__(self):
        while self._next < self._length():
            self._next += 1
            inputs, target, number = self._item(int(self._next) - 1)
            self._seen += inputs.numpy()  # in place: a state that was handed out must stay
            noise = self._old.rand() + self._new.random() + torch.rand((), generator=self._torch)
            yield inputs + 0.01 * float(noise) + torch.tensor(self._seen * 1e-3), target, number


class StreamTask(PacedTask):
    """``PacedTask`` with a stream to train on."""

    def __init__(self, *, stateful=True, pace_s=0.02):
        super().__init__(pace_s=pace_s)
        self._stateful = stateful

    def build_datasets(self):
        return Datasets(train=StatefulStream() if self._stateful else Stream())


class StreamedValidation(StreamTask):
    """Asks for what there is not."""

    def build_datasets(self):
        return Datasets(train=Stream(), validation=Stream())


class SparseTask(StreamTask):
    """Gradients that neither the norm nor the comparison of replicas takes."""

    def build_model(self):
        return nn.Sequential(nn.Embedding(4, 8, sparse=True))


class _OddState(nn.Linear):
    def get_extra_state(self):
        return {1, 2}

    def set_extra_state(self, state):
        pass


class OddStateTask(StreamTask):
    """Its model has something that no checkpoint can hold."""

    def build_model(self):
        return _OddState(8, 1)
