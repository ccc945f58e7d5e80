"""The script of ``plain_restart.py`` under NVIDIA's in-process restart (``nvidia_resiliency_ext.inprocess``).

Started by ``faulted.py``, one process for each rank and one in reserve, as a batch system would start them. The
wrapped function begins again in all living processes, from the newest checkpoint; a killed rank's place
is taken by the process in reserve. Nothing starts a killed process again, so one run survives one kill.
"""

# No `from __future__ import annotations`: the wrapper passes itself where the annotation is this very object.
import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Optional

import torch
import torch.distributed as dist
from nvidia_resiliency_ext import inprocess
from nvidia_resiliency_ext.inprocess.rank_assignment import MaxActiveWorldSize, ShiftRanks
from paced import Samples, build_model, paced_loss
from plain_restart import parse, save
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

ASKED = parse()
QUICK = timedelta(milliseconds=100)


@inprocess.Wrapper(
    store_kwargs={"port": int(os.environ["MASTER_PORT"]) + 1},
    initialize=inprocess.initialize.RetryController(max_iterations=None, min_world_size=1),
    rank_assignment=inprocess.Compose(
        MaxActiveWorldSize(int(os.environ["ACTIVE_RANKS"])), ShiftRanks()
    ),
    monitor_thread_interval=QUICK,
    monitor_process_interval=QUICK,
    last_call_wait=QUICK,
    soft_timeout=timedelta(seconds=20),
    hard_timeout=timedelta(seconds=30),
)
def train(call_wrapper: Optional[inprocess.CallWrapper] = None) -> None:  # noqa: UP045
    """Train until all steps are made or a rank is lost; then it is called again."""
    if call_wrapper is None:
        raise RuntimeError("the wrapper passes itself")
    restart = call_wrapper.iteration
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 2
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        address, port, is_master=rank == 0 and restart == 0, wait_for_workers=False
    )
    if rank == 0 and restart == 0:
        train.store = store  # it serves every later call
    group_store = dist.PrefixStore(str(restart), store)
    dist.init_process_group("gloo", store=group_store, rank=rank, world_size=world)
    Path(f"rank_{rank}.pid").write_text(str(os.getpid()))
    torch.manual_seed(1)
    model = build_model(ASKED.state_mb, ASKED.tensors)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    checkpoint, step = Path("checkpoint.pt"), 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    ddp = DistributedDataParallel(model)
    sampler = DistributedSampler(dataset := Samples(), num_replicas=world, rank=rank)
    loader = DataLoader(dataset, batch_size=ASKED.batch_size, sampler=sampler, drop_last=True)
    with Path("progress.jsonl").open("a") as progress:
        while step < ASKED.steps:
            sampler.set_epoch(step // len(loader))
            for batch in loader:
                optimizer.zero_grad()
                paced_loss(ddp, batch, ASKED.pace_s).backward()
                optimizer.step()
                step += 1
                if rank == 0:
                    progress.write(json.dumps({"step": step, "generation": restart}) + "\n")
                    progress.flush()
                    if step % ASKED.save_every == 0:
                        save(checkpoint, step, model, optimizer)


if __name__ == "__main__":
    train()
