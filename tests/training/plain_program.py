"""A program as people have it: its own model, loader and optimizer, for a plain loop or for DDPTrainer.

``python plain_program.py plain|trainer KIND OUT [NAME=VALUE ...]``, by itself or under torchrun.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler, WeightedRandomSampler

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
SAMPLES, BATCH, EPOCHS = 192, 8, 2
KILLED = "killed"


class Data(Dataset):
    """Kills a process once, where that is asked for."""

    def __init__(self, killing="", folder="."):
        self.killing, self.folder = killing, Path(folder)
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, 6, generator=generator)
        self.y = self.x.square().sum(1, keepdim=True)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        if self.killing and index == 150 and not (self.folder / KILLED).exists():
            (self.folder / KILLED).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.x[index], self.y[index]


class Backwards(Sampler):
    """An order of its own: another one in each epoch, without three samples."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return SAMPLES - BATCH

    def __iter__(self):
        return iter(range(self.epoch + len(self) - 1, self.epoch - 1, -1))


class Contiguous(Sampler):
    """This rank's half of each step's samples, one after the other."""

    def __len__(self):
        return SAMPLES // WORLD

    def __iter__(self):
        for begin in range(RANK * BATCH, SAMPLES, BATCH * WORLD):
            yield from range(begin, begin + BATCH)


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


def made(kind):
    """Model, optimizer, scheduler and when it is stepped; ranks do not draw the same weights."""
    torch.manual_seed(11 + RANK)
    model = Net()
    groups = [
        {"params": model[0].parameters(), "lr": 0.02},
        {"params": [*model[1].parameters(), *model[3].parameters()]},
    ]
    schedulers = torch.optim.lr_scheduler
    if kind == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
        steps = EPOCHS * SAMPLES // (BATCH * WORLD)
        scheduler = schedulers.OneCycleLR(optimizer, [0.05, 0.02], total_steps=steps + 1)
        return model, optimizer, scheduler, "step"
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)
    if kind == "warmup":
        parts = [
            schedulers.LinearLR(optimizer, 0.1, total_iters=5),
            schedulers.CosineAnnealingLR(optimizer, 30),
        ]
        return model, optimizer, schedulers.SequentialLR(optimizer, parts, [5]), "step"
    if kind == "sgd":
        return model, optimizer, schedulers.StepLR(optimizer, 1, gamma=0.3), "epoch"
    return model, optimizer, None, None


def main(way, kind, out, **more):
    folder = Path(out).parent
    data = Data(more.pop("killing", ""), folder)
    model, optimizer, scheduler, interval = made(kind)
    sampler = Backwards() if kind == "sampler" else None
    workers = int(more.pop("workers", 0))
    if way == "trainer":
        from ddp_runner import DDPTrainer

        if more.pop("drawn", ""):
            sampler = WeightedRandomSampler(torch.arange(SAMPLES) + 1.0, SAMPLES)
        loader = DataLoader(data, batch_size=BATCH, sampler=sampler, num_workers=workers)
        scheduling = {"scheduler": scheduler, "scheduler_interval": interval} if scheduler else {}
        report = DDPTrainer(
            model=model, train_loader=loader, optimizer=optimizer, criterion=nn.MSELoss(), **scheduling,
            config={"epochs": EPOCHS, "device": "cpu", "save_every_steps": 5,
                    "collective_timeout_s": 10, **more},
        ).train()  # fmt: skip
        assert report.model is model
        (folder / f"report_{RANK}.json").write_text(json.dumps([report.steps, report.loss]))
    else:
        plain(model, optimizer, scheduler, interval, DataLoader(
            data, batch_size=BATCH, sampler=sampler or (Contiguous() if WORLD > 1 else None)
        ))  # fmt: skip
    torch.save(model.state_dict(), f"{out}.{RANK}")


def plain(model, optimizer, scheduler, interval, loader):
    wrapped = model
    if WORLD > 1:
        dist.init_process_group("gloo")
        wrapped = nn.parallel.DistributedDataParallel(model)
    model.train()
    for epoch in range(EPOCHS):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(wrapped(x), y).backward()
            optimizer.step()
            if interval == "step":
                scheduler.step()
        if interval == "epoch":
            scheduler.step()
    if WORLD > 1:
        dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:4], **dict(word.split("=", 1) for word in sys.argv[4:]))
    sys.stdout.flush()
    os._exit(
        0
    )  # torch sometimes waits for ever for the end of a plain loop's DistributedDataParallel
