"""A script as the tutorials have it: plain DDP, its own loop, its own checkpoint. Knows nothing of this runner."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--checkpoint", default="ckpt.pt")
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--start-method", default=None)
args = parser.parse_args()


class Scale:
    """A collate function that workers which are spawned have to unpickle from ``__main__``."""

    def __call__(self, items):
        x, y = zip(*items, strict=True)
        return torch.stack(x) * 0.5, torch.stack(y)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = TensorDataset(torch.randn(256, 8), torch.randn(256, 1))
    sampler = DistributedSampler(data)
    loader = DataLoader(
        data,
        batch_size=8,
        sampler=sampler,
        collate_fn=Scale(),
        num_workers=args.workers,
        multiprocessing_context=args.start_method,
    )
    begin = 0
    if os.path.exists(args.checkpoint):
        state = torch.load(args.checkpoint)
        model.module.load_state_dict(state["model"])
        begin = state["epoch"]
        print(f"resumed at epoch {begin}")
    for epoch in range(begin, args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            wait_for_harm(rank, f"{epoch}_inside")
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
            torch.save({"model": model.module.state_dict(), "epoch": epoch + 1}, args.checkpoint)
        dist.barrier()
        wait_for_harm(rank, epoch)
    if rank == 0:
        torch.save(model.module.state_dict(), "final.pt")
    # Else torch 2.13 with gloo waits for ever, now and then, for a thread that waits for it.
    del model, optimizer, loss, x, y
    dist.destroy_process_group()


def wait_for_harm(rank, epoch):
    """Whoever tests this may write a file ``harm_<rank>_<epoch>`` of Python beside the script."""
    path = f"harm_{rank}_{epoch}"
    if os.path.exists(path):
        with open(path) as file:
            code = file.read()
        os.unlink(path)
        exec(code)


if __name__ == "__main__":
    main()
