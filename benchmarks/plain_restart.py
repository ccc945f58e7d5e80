"""The script that a user would write by hand to survive a restart: plain DDP and a checkpoint.

Started by ``torchrun --standalone --max-restarts N``; ``recovery.py`` and ``goodput.py`` do so. Rank 0
saves every ``--save-every`` steps and all ranks load what is there when they start. ``progress.jsonl``
has a line for every step, ``rank_<r>.pid`` the process of each rank; both are there to be measured.
"""

from __future__ import annotations

import argparse
import json
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from paced import Samples, build_model, paced_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state-mb", type=float, default=2.0)
    parser.add_argument("--tensors", type=int, default=0)
    parser.add_argument("--pace-s", type=float, default=0.016)
    parser.add_argument("--batch-size", type=int, default=8, help="per rank")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--save-every", type=int, default=25)
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="torch's default for gloo")
    return parser.parse_args()


def save(path: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    temporary = path.with_suffix(".tmp")
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, temporary)
    temporary.replace(path)


def main() -> None:
    asked = parse()
    dist.init_process_group("gloo", timeout=timedelta(seconds=asked.timeout_s))
    rank = dist.get_rank()
    Path(f"rank_{rank}.pid").write_text(str(os.getpid()))
    torch.manual_seed(1)
    model = build_model(asked.state_mb, asked.tensors)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    checkpoint, step = Path("checkpoint.pt"), 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    ddp = DistributedDataParallel(model)
    sampler = DistributedSampler(dataset := Samples())
    loader = DataLoader(dataset, batch_size=asked.batch_size, sampler=sampler, drop_last=True)
    restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    progress = Path("progress.jsonl").open("a") if rank == 0 else None  # noqa: SIM115
    while step < asked.steps:
        sampler.set_epoch(step // len(loader))
        for batch in loader:
            optimizer.zero_grad()
            paced_loss(ddp, batch, asked.pace_s).backward()
            optimizer.step()
            step += 1
            if progress is not None:
                progress.write(json.dumps({"step": step, "generation": restart}) + "\n")
                progress.flush()
                if step % asked.save_every == 0:
                    save(checkpoint, step, model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
