"""Tasks whose samples break the loader worker that touches them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch

from ddp_runner.training.task import Datasets
from tests.scenarios.workload import NoisySamples, PacedTask

ALLOCATED_MB = 800
TRIES_NAME = "tries"  # in the folder where the run was started: a line for each sample that broke


class BreakingSamples(NoisySamples):
    """The samples of ``bad`` end, or hold for ever, whatever process loads them.

    With ``how`` as ``allocate`` they take ``ALLOCATED_MB`` of memory, the first time only.
    """

    def __init__(self, size, place, *, bad, how, many):
        super().__init__(size, place)
        self._bad = frozenset(int(index) for index in str(bad).split("+"))
        self._how = how
        if many:
            self.deterministic = True
            self.__getitems__ = self._at_once

    def __getitem__(self, index):
        if index in self._bad:
            with Path(TRIES_NAME).open("a", encoding="utf-8") as file:
                file.write(f"{index}\n")
            if self._how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self._how == "hang":
                time.sleep(600)
            elif len(Path(TRIES_NAME).read_text(encoding="utf-8").split()) == 1:
                torch.ones(ALLOCATED_MB * 2**20, dtype=torch.uint8)
        return super().__getitem__(index)

    def _at_once(self, indices):
        return [self[index] for index in indices]


class BreakingTask(PacedTask):
    """``bad``: samples, joined by ``+``; ``how``: ``kill``, ``hang`` or ``allocate``.

    They are of ``place``: ``data``, which is for training, or ``validation``.
    """

    def __init__(self, *, bad="5", how="kill", many=False, place="data", **settings):
        super().__init__(**settings)
        self._breaking = {"bad": bad, "how": how, "many": many}
        self._place = place

    def build_datasets(self):
        sets = super().build_datasets()
        own = sets.train if self._place == "data" else sets.validation
        broken = BreakingSamples(len(own), self._place, **self._breaking)
        return Datasets(
            train=broken if self._place == "data" else sets.train,
            validation=broken if self._place == "validation" else sets.validation,
            fingerprint=f"breaking {sets.fingerprint}",
        )
