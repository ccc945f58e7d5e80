"""A task over an iterable dataset of uneven epochs, with or without a state of its own."""

from __future__ import annotations

import torch

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
    """Knows where it stands."""

    def __init__(self):
        super().__init__()
        self._next = 0

    def state_dict(self):
        return {"next": self._next}

    def load_state_dict(self, state):
        self._next = state["next"]

    def __iter__(self):
        while self._next < self._length():
            self._next += 1
            yield self._item(self._next - 1)


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
