"""Tasks whose samples break the loader worker that touches them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from ddp_runner.training.task import Datasets
from tests.scenarios.workload import NoisySamples, PacedTask

TRIES_NAME = "tries"  # in the folder where the run was started: a line for each sample that broke


class BreakingSamples(NoisySamples):
    """The samples of ``bad`` end, or hold for ever, whatever process loads them."""

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
            time.sleep(600)
        return super().__getitem__(index)

    def _at_once(self, indices):
        return [self[index] for index in indices]


class BreakingTask(PacedTask):
    """``bad``: training samples, joined by ``+``; ``how``: ``kill`` or ``hang``."""

    def __init__(self, *, bad="5", how="kill", many=False, samples=192, **settings):
        super().__init__(samples=samples, **settings)
        self._train = BreakingSamples(samples, "data", bad=bad, how=how, many=many)

    def build_datasets(self):
        datasets = super().build_datasets()
        return Datasets(
            train=self._train,
            validation=datasets.validation,
            fingerprint=f"breaking {datasets.fingerprint}",
        )
