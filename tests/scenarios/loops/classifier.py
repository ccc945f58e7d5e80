"""A loop as people have them, with the lines that attach it. Flags choose among their habits; harm is at hand."""

import argparse
import os
import random

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, default_collate

import ddp_runner

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=24)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--find-unused", action="store_true")
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--swallow", action="store_true")
parser.add_argument("--compile", action="store_true")
parser.add_argument("--own-loader", action="store_true")
parser.add_argument("--behind", action="store_true")
parser.add_argument("--mixup", action="store_true")
parser.add_argument("--two", action="store_true", help="optimizers")
parser.add_argument("--unfreeze", default="", help="where in the loop")
args = parser.parse_args()


def harm(run, where):
    """Do once what a file ``harm_RANK_STEP_WHERE`` says, if there is one."""
    path = f"harm_{run.rank}_{run.step_number}_{where}"
    if os.path.exists(path):
        with open(path) as file:
            text = file.read()
        os.rename(path, f"done_{path}")
        exec(text)


def main():
    run = ddp_runner.attach()
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 4)
    ).to(run.device)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    body = model[:-1] if args.two else model
    optimizer = torch.optim.AdamW(body.parameters(), lr=1e-2)
    others = {"second": torch.optim.SGD(model[-1].parameters(), lr=0.1, momentum=0.9)}
    others = others if args.two else {}
    bare = model
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    scaler = torch.amp.GradScaler(run.device.type, enabled=args.fp16, init_scale=2.0**20)
    if args.compile:

        def backend(graph, _):
            print("compiled by", os.getpid(), "at", run.step_number, flush=True)
            return graph.forward

        model = torch.compile(model, backend=backend)
    net = run.ddp(model, find_unused_parameters=args.find_unused)
    run.keep(model=model, ema=ema, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
    run.keep(**others)

    def unfreeze(where):
        if args.unfreeze == where:
            model[0].requires_grad_(run.step_number >= 7)

    if args.unfreeze:
        unfreeze(args.unfreeze)
        model.register_forward_pre_hook(lambda *_: unfreeze("within"))

    numbers = torch.Generator().manual_seed(1)
    x = torch.randn(240, 8, generator=numbers)
    data = TensorDataset(x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())

    def collate(samples):
        harm(run, "drawn")
        return default_collate(samples)

    if args.own_loader:
        loader = DataLoader(
            data,
            batch_size=5,
            sampler=DistributedSampler(data, run.world_size, run.rank),
            num_workers=args.workers,
            persistent_workers=args.workers > 0,
            collate_fn=collate,
        )
    else:
        loader = run.loader(data, batch_size=5, accumulate=args.accumulate)
    criterion = nn.CrossEntropyLoss()
    seen = []

    @run.every(steps=6)
    def evaluate():
        harm(run, "every")
        model.eval()
        with torch.no_grad():
            found = net(data.tensors[0].to(run.device)).argmax(1).cpu()
        hits = (found == data.tensors[1]).float().mean()
        model.train()
        seen.append(round(float(hits), 6))

    def compute(batches):
        batches = [[one.to(run.device) for one in batch] for batch in batches]
        for inputs, labels in batches[:-1]:
            with net.no_sync():
                scaler.scale(criterion(net(inputs), labels) / len(batches)).backward()
        for inputs, labels in batches[-1:]:
            loss = criterion(net(inputs), labels) / len(batches)
            if args.fp16 and run.step_number in (4, 12):  # as a loss of fp16 may be, scaled
                loss = loss * 1e38
            run.note(loss=loss)
            harm(run, "forward")
            scaler.scale(loss).backward()
            harm(run, "backward")
        scaler.step(optimizer)
        for one in others.values():
            harm(run, "amid")
            scaler.step(one)
            one.zero_grad()
        harm(run, "update")
        scaler.update()
        optimizer.zero_grad()
        if not args.behind:
            scheduler.step()
            ema.update_parameters(model)

    def mixed(inputs, labels):
        share, order = np.random.beta(0.4, 0.4), torch.randperm(len(inputs))  # noqa: NPY002
        inputs = share * inputs + (1 - share) * inputs[order] * random.uniform(0.9, 1.1)
        return [inputs, labels]

    for given in run.steps(loader, max_steps=args.steps, accumulate=args.accumulate):
        batch = mixed(*given) if args.mixup else given
        unfreeze("before")
        with run.step():
            unfreeze("inside")
            batches = batch if args.accumulate > 1 else [batch]
            if args.swallow:
                try:
                    compute(batches)
                except Exception as error:
                    print("swallowed", type(error).__name__)
            else:
                compute(batches)
        if args.behind:
            scheduler.step()
            ema.update_parameters(model)
        unfreeze("behind")
        harm(run, "between")
    if run.is_first:
        kept = {"model": bare, "ema": ema, "scheduler": scheduler, "scaler": scaler}
        torch.save({name: one.state_dict() for name, one in kept.items()}, "final.pt")
        print("evaluated", len(seen))


main()
