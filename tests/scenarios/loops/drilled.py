"""A loop for drills: what rank 0 does alone, what rank 1 computes otherwise, and what no state holds, by its flags."""

import argparse
import functools
import itertools
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import ddp_runner


class Count:
    """What a count is where it is kept."""

    def __init__(self):
        self.n = 0

    def __call__(self):
        self.n += 1
        return self.n

    def state_dict(self):
        return {"n": self.n}

    def load_state_dict(self, state):
        self.n = state["n"]


def count_in_environment():
    os.environ["COUNT"] = str(1 + int(os.environ.get("COUNT", "0")))
    return int(os.environ["COUNT"])


torch.steps = itertools.count(1)
# None of these is found by who reads the program.
RATES = {
    "environment": count_in_environment,
    "iterator": functools.partial(next, torch.steps),
    "kept": Count(),
}

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=48)
parser.add_argument(
    "--waits-at", type=int, default=0, help="and at each later step, for a file: go"
)
parser.add_argument("--waits-at-4", action="store_true", help="and later, for a file: first")
parser.add_argument("--waits-s", type=float, default=600.0, help="at each at most")
parser.add_argument("--hidden", action="store_true")
parser.add_argument(
    "--asks", choices=("itself", "the run"), help="the other ranks, before backward"
)
parser.add_argument(
    "--rate", choices=sorted(RATES), help="the count of steps that it follows, and no sum is shown"
)
parser.add_argument(
    "--lingers", type=int, default=0, help="how many drills do, each until it is ended"
)
parser.add_argument("--loses", action="store_true", help="rank 1, while the first step is made")
args = parser.parse_args()

begun = itertools.count()
# The first step is made twice, to see whether it can be repeated: nothing shows in there.
torch.calls = itertools.chain((0, 0), itertools.count(1))


def is_drill():
    return Path("/proc/self/comm").read_text(encoding="ascii").strip() == "ddp:drill"


class Net(nn.Sequential):
    """Counts its calls, if it is to, where neither the model nor the loop holds that."""

    def forward(self, rows):
        outputs = super().forward(rows)
        return outputs * (1 + 0.01 * next(torch.calls)) if args.hidden else outputs


def asked(run, mean):
    def summed():
        dist.all_reduce(mean)
        return mean

    return summed() if args.asks == "itself" else run.from_ranks(summed)


def body(run, net, rows, wanted):
    # The second one of a launch makes the step that the first one has rehearsed.
    if args.loses and run.rank == 1 and next(begun) == 1 and not Path("lost").exists():
        Path("lost").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    rows = rows * (1.0 + run.rank)
    if args.asks:
        mean = asked(run, rows.mean())
        rows = rows - mean / run.world_size
    loss = (net(rows) - wanted).square().mean()
    loss.backward()
    if args.rate:
        return
    seen = loss.detach().clone()
    dist.all_reduce(seen)  # of which no weight is made


def linger():
    count = len(list(Path().glob("lingers_*")))
    if is_drill() and count < args.lingers:
        Path(f"lingers_{count}").write_text(str(os.getpid()))
        time.sleep(600)


def wait(run):
    began_s = time.monotonic()
    while args.waits_at_4 and run.step_number >= 4 and not Path("first").exists():
        run.alive()
        time.sleep(0.01)
    while args.waits_at and run.step_number >= args.waits_at and not Path("go").exists():
        if time.monotonic() > began_s + args.waits_s:
            break
        run.alive()
        time.sleep(0.01)


def main():
    run = ddp_runner.attach()
    print("begun as rank", run.rank, "first" if run.is_first else "another one", flush=True)
    if run.is_first:
        with Path("begun").open("a") as file:
            file.write("x")
    linger()
    x = torch.randn(256, 8)
    model = Net(nn.Linear(8, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    net = run.ddp(model)
    run.keep(model=model, optimizer=optimizer)
    if args.rate == "kept":
        run.keep(count=RATES["kept"])
    data = TensorDataset(x, x.sum(1, keepdim=True))
    try:
        for rows, wanted in run.steps(run.loader(data, batch_size=4), max_steps=args.steps):
            wait(run)
            with run.step():
                body(run, net, rows, wanted)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                if args.rate:
                    optimizer.param_groups[0]["lr"] = 1e-2 / RATES[args.rate]()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        if is_drill():
            Path("unwound").touch()
    if run.is_first:
        torch.save({"model": dict(model.state_dict())}, "final.pt")


main()
