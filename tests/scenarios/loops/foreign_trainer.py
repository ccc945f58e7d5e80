"""A framework's trainer, as others write it: a loop that calls hooks. Run as a script it trains by torch's own DDP."""

import os

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LinearLR, MultiStepLR, SequentialLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 2


class Trainer:
    """Its loop is not ours: what is around a step are two hooks, and a counter of its own."""

    def __init__(self, net, optimizer, scheduler):
        self.net, self.optimizer, self.scheduler = net, optimizer, scheduler
        self.global_step = 0

    def on_step_begin(self):
        pass

    def on_step_end(self):
        pass

    def training_step(self, batch):
        inputs, labels = batch
        return cross_entropy(self.net(inputs), labels) * min(1.0, 0.5 + self.global_step)

    def fit(self, batches):
        for batch in batches:
            self.on_step_begin()
            try:
                loss = self.training_step(batch)
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
            except Exception as error:
                print("the trainer has failed:", error)
                raise
            self.on_step_end()
            self.scheduler.step()
            self.global_step += 1


def parts():
    """Return what is trained, with a rate that warms up and falls in steps."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    warming, falling = LinearLR(optimizer, 0.1, total_iters=4), MultiStepLR(optimizer, [3, 7])
    return model, optimizer, SequentialLR(optimizer, [warming, falling], [4])


def loader(world_size, rank):
    """Return a rank's batches, nine a pass."""
    x = torch.randn(90, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())
    sampler = DistributedSampler(data, world_size, rank)
    return DataLoader(data, batch_size=5, sampler=sampler)


def main():
    """Train by torch's own DDP, under a launcher."""
    torch.distributed.init_process_group("gloo")
    model, optimizer, scheduler = parts()
    trainer = Trainer(DistributedDataParallel(model), optimizer, scheduler)
    batches = loader(int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]))
    for epoch in range(EPOCHS):
        batches.sampler.set_epoch(epoch)
        trainer.fit(batches)
    if torch.distributed.get_rank() == 0:
        torch.save({"model": model.state_dict(), "steps": trainer.global_step}, "final.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
