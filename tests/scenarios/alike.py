"""The paced task without batch norm and dropout: a step is the same however it is shared out."""

from __future__ import annotations

from torch import nn

from tests.scenarios.workload import PacedTask, make_trouble


class AlikeTask(PacedTask):
    """Its loss is a mean over samples, and nothing else."""

    def build_model(self):
        make_trouble("build")
        return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
