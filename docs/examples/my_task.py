"""A complete task of one's own: sort points by which of three rings they lie on.

    ./launch_training.sh --name rings --task docs/examples/my_task.py --cpu -b 64 --epochs 5 lr=0.01
    ./launch_training.sh --name rings4 --task docs/examples/my_task.py --cpu -b 64 task.rings=4

A task is any class with the three methods below. What its constructor takes comes from ``task.*``
on the command line or from the ``task:`` section of a configuration file.
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddp_runner.training.task import Datasets


def points_on_rings(*, count: int, rings: int, seed: int) -> TensorDataset:
    """``count`` pairs: a point, float32 ``[2]``, and the number of its ring, int64."""
    generator = torch.Generator().manual_seed(seed)
    ring = torch.randint(rings, (count,), generator=generator)
    angle = torch.rand(count, generator=generator) * 2 * torch.pi
    radius = ring + 1 + 0.1 * torch.randn(count, generator=generator)
    return TensorDataset(torch.stack((radius * angle.cos(), radius * angle.sin()), 1), ring)


class RingsTask:
    """Tell ``rings`` rings apart."""

    def __init__(self, rings: int = 3, hidden: int = 32) -> None:
        self.rings = rings
        self.hidden = hidden

    def build_model(self) -> nn.Module:
        """Called once per rank, on the CPU, under the run's seed: no .to(device), no DDP here."""
        return nn.Sequential(
            nn.Linear(2, self.hidden),
            nn.BatchNorm1d(self.hidden),
            nn.ReLU(),
            nn.Linear(self.hidden, self.hidden),
            nn.ReLU(),
            nn.Linear(self.hidden, self.rings),
        )

    def build_datasets(self) -> Datasets:
        """Whole datasets, the same on every rank: the runner deals the samples out."""
        return Datasets(
            train=points_on_rings(count=20_000, rings=self.rings, seed=1),
            validation=points_on_rings(count=2_000, rings=self.rings, seed=2),
            fingerprint=f"rings-{self.rings}",  # a resumed run must see the same data
        )

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        """The mean over the samples of one micro-batch, which is on the model's device."""
        points, ring = batch
        return nn.functional.cross_entropy(model(points), ring)
