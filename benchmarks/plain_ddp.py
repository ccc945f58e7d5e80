"""The script that a user would write by hand for the byte-level language model: plain DDP, no repair.

Started by ``torchrun --standalone --nproc-per-node 2 benchmarks/plain_ddp.py``; the other benchmarks
do so. Model, data windows, order, batch, schedule and optimizer are those of ``ddp_runner``'s default
task, so that with 2 ranks both end with the same weights (``throughput.py --check``). Everything
else is as plain as can be: DDP's defaults, a DataLoader, gradients clipped, one ``torch.save``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from ddp_runner.core.settings import OptimSettings
from ddp_runner.data.order import SampleOrder, share
from ddp_runner.data.text.corpus import scan_standard_library, split_by_file
from ddp_runner.tasks.bytes_lm import ByteWindows
from ddp_runner.tasks.transformer import TransformerLM, next_token_loss
from ddp_runner.training.components.lr_schedule import learning_rate
from ddp_runner.values.generators import seed_all

if TYPE_CHECKING:
    from collections.abc import Iterator

SEED = 1234
# Those that contenders.py gives ours.
OPTIM = OptimSettings(learning_rate=1e-4, beta2=0.999, warmup_steps=100)
VALIDATION_FRACTION = 0.05


class RankBatches:
    """This rank's part of every step's samples, as a batch sampler."""

    def __init__(self, order: SampleOrder, *, steps: int) -> None:
        self._order = order
        self._steps = steps

    def __iter__(self) -> Iterator[list[int]]:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        for step in range(self._steps):
            yield share(self._order.indices(step), rank=rank, world_size=world_size).tolist()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=8, help="per rank")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=10)
    parser.add_argument("--accumulate", type=int, default=1, help="batches a step, with no_sync")
    parser.add_argument("--find-unused-parameters", action="store_true")
    parser.add_argument("--metrics", type=Path, required=True, help="JSON lines, by rank 0")
    parser.add_argument("--checkpoint", type=Path, required=True)
    return parser.parse_args()


def build_model(asked: argparse.Namespace) -> TransformerLM:
    seed_all(SEED)
    return TransformerLM(
        vocab_size=256,
        seq_len=asked.seq_len,
        hidden_size=asked.hidden_size,
        num_layers=asked.num_layers,
        num_heads=asked.num_heads,
        dropout=0.0,
    )


def build_optimizer(model: torch.nn.Module, optim: OptimSettings) -> torch.optim.AdamW:
    """Weight decay on matrices only, as everybody does since GPT-2."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (optim.beta1, optim.beta2)
    return torch.optim.AdamW(groups, lr=optim.learning_rate, betas=betas, fused=True)


def build_loader(asked: argparse.Namespace) -> DataLoader:
    train, _ = split_by_file(
        scan_standard_library(), validation_fraction=VALIDATION_FRACTION, seed=SEED
    )
    dataset = ByteWindows(train, seq_len=asked.seq_len)
    order = SampleOrder(
        seed=SEED,
        dataset_size=len(dataset),
        global_batch_size=asked.batch_size * asked.accumulate * dist.get_world_size(),
    )
    return DataLoader(
        dataset,
        batch_sampler=RankBatches(order, steps=asked.steps),
        num_workers=asked.num_workers,
    )


def accumulated(ddp: DistributedDataParallel, batch: torch.Tensor, parts: int) -> torch.Tensor:
    """The mean loss of ``parts`` parts, of which the last one's backward sums over ranks."""
    total = torch.zeros(())
    for number, part in enumerate(batch.chunk(parts)):
        is_last = number == parts - 1
        with contextlib.nullcontext() if is_last else ddp.no_sync():
            loss = next_token_loss(ddp, part) / parts
            loss.backward()
        total += loss.detach()
    return total


def main() -> None:
    asked = parse()
    dist.init_process_group("gloo")
    optim = OPTIM
    model = build_model(asked)
    optimizer = build_optimizer(model, optim)
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    ddp = DistributedDataParallel(model, find_unused_parameters=asked.find_unused_parameters)
    metrics = asked.metrics.open("a") if dist.get_rank() == 0 else None
    logged_at_s, logged_step = time.monotonic(), 0
    for step, batch in enumerate(build_loader(asked), start=1):
        optimizer.zero_grad()
        loss = accumulated(ddp, batch, asked.accumulate)
        norm = torch.nn.utils.clip_grad_norm_(trained, optim.max_grad_norm)
        rate = learning_rate(step - 1, total_steps=asked.steps, settings=optim)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        if metrics is not None and (step == 1 or step % asked.log_interval == 0):
            now_s = time.monotonic()
            record = {
                "step": step,
                "rank": 0,
                "utc": datetime.now(timezone.utc).isoformat(),
                "loss": loss.item(),
                "grad_norm": norm.item(),
                "steps_per_s": (step - logged_step) / (now_s - logged_at_s),
            }
            metrics.write(json.dumps(record) + "\n")
            metrics.flush()
            logged_at_s, logged_step = now_s, step
    if metrics is not None:
        metrics.close()
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, asked.checkpoint
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
