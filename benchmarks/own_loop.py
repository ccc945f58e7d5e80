"""One training loop, in plain DDP and attached: what ``attached.py`` compares. Prints its own pace.

The step computes: a small Transformer's worth of matrix products, ``--width`` wide.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LAYERS = 6
SAMPLES = 16


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--skip", type=int, default=50, help="steps before the clock starts")
    parser.add_argument("--attached", action="store_true")
    return parser.parse_args()


def main() -> None:
    asked = parse()
    torch.manual_seed(1)
    layers = [
        layer for _ in range(LAYERS) for layer in (nn.Linear(asked.width, asked.width), nn.GELU())
    ]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.randn(64 * SAMPLES, asked.width)
    # An epoch ends with a checkpoint, of which plain DDP makes none: it is longer than the run.
    batches = [inputs[place : place + 64].repeat(4, 1) for place in range(0, len(inputs), 64)]
    batches *= -(-asked.steps // SAMPLES)
    times: list[float] = []
    if asked.attached:
        import ddp_runner

        run = ddp_runner.attach()
        net = run.ddp(model)
        run.keep(model=model, optimizer=optimizer)
        for batch in run.steps(batches, max_steps=asked.steps):
            with run.step():
                net(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            times.append(time.perf_counter())
        rank = run.rank
    else:
        torch.distributed.init_process_group("gloo")
        rank = torch.distributed.get_rank()
        ddp = DistributedDataParallel(model)
        for step in range(asked.steps):
            ddp(batches[step]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter())
        del ddp
        torch.distributed.destroy_process_group()
    if rank == 0:
        counted = times[asked.skip :]
        gaps = sorted(b - a for a, b in itertools.pairwise(counted))
        found = {
            "mean_ms": 1e3 * (counted[-1] - counted[0]) / len(gaps),
            "median_ms": 1e3 * gaps[len(gaps) // 2],
            "steps": len(times),
        }
        Path(os.environ["PACE_FILE"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
