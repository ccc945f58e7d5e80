"""A task with what many real ones have: samples of many lengths, checkpoints of activations, a target, an own optimizer.

Its loss depends on step and epoch, and it has a hook.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from ddp_runner.training.task import Datasets
from tests.scenarios.workload import PacedTask


class Lengths(torch.utils.data.Dataset):
    """Sample ``n`` is a sequence of 2 to 6 vectors."""

    def __init__(self, size):
        self._size = size

    def __len__(self):
        return self._size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(2 + index % 5, 8, generator=generator)


def padded(samples):
    """The sequences in one tensor, and their lengths."""
    return pad_sequence(samples, batch_first=True), torch.tensor([len(one) for one in samples])


LATE_STEP = 29  # the first one that moves the second target


class WithTarget(nn.Module):
    """Follows itself slowly, as in BYOL: the targets have no gradient, and forward moves them.

    From elsewhere: the first step moves one of them, too; the other one begins in the middle of the run.
    """

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 4)
        self.target = nn.Linear(16, 4).requires_grad_(False)
        self.late = nn.Linear(16, 4).requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs):
        if self.training:
            for slow, quick in zip(self.target.parameters(), self.second.parameters(), strict=True):
                slow.data = 0.9 * slow.data + 0.1 * quick.data
            self._follow_late()
        inputs = inputs.requires_grad_(self.training)
        hidden = checkpoint(self.first, inputs, use_reentrant=True).relu()
        return self.second(hidden), self.target(hidden.detach())

    @torch.no_grad()
    def _follow_late(self):
        if self.steps >= LATE_STEP:
            for slow, quick in zip(self.late.parameters(), self.second.parameters(), strict=True):
                slow.lerp_(quick, 0.1)
        self.steps += 1


class UnusualTask(PacedTask):
    """All of it at once. ``killed_in``: the epoch in whose hook rank 1 dies."""

    def __init__(self, *, killed_in=-1):
        super().__init__()
        self._killed_in = killed_in

    def on_epoch_end(self, context):
        with Path(f"epochs_{context.rank}").open("a") as file:
            file.write(f"{context.epoch} ")
        killed = Path("killed")
        if context.epoch == self._killed_in and not context.is_first and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def build_model(self):
        return WithTarget()

    def build_datasets(self):
        return Datasets(
            train=Lengths(192),
            validation=Lengths(24),
            collate=padded,
            validation_collate=padded,
        )

    def configure_optimizers(self, model):
        groups = [
            {"params": model.first.parameters(), "lr": 0.001},
            {"params": model.second.parameters(), "lr": 0.01, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups)
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.001, 0.01], 40)

    def loss(self, model, batch, context):
        inputs, lengths = batch
        ours, theirs = model(inputs)
        mask = torch.arange(inputs.shape[1]) < lengths[:, None]
        distances = ((ours - theirs - 0.1) ** 2).mean(2) * mask
        factor = 1 + 0.1 * context.epoch + 0.01 * (context.step % 3)
        return factor * (distances.sum(1) / lengths).mean()
