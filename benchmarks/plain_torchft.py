"""The script of ``plain_restart.py`` with torchft: one process is one replica group.

Started by ``faulted.py``, one torchrun for each replica group, beside a lighthouse. A lost replica leaves the
quorum, the others go on with fewer, and its new process gets the state of one that lives: the batches of a
step are fewer while it is away, so the weights are not those of the run without faults.

The gradients are summed by ``manager.allreduce`` in one buffer behind the backward pass. torchft's own
DistributedDataParallel (0.2.0) fails an assertion in the survivors where gloo reports a lost peer.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
from paced import Samples, build_model, paced_loss
from plain_restart import parse
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.utils.data import DataLoader
from torchft import DistributedSampler, Manager, Optimizer
from torchft.process_group import ProcessGroupGloo


def sum_over_replicas(manager: Manager, model: torch.nn.Module) -> None:
    """Replace each gradient by its mean over the replicas that are there."""
    gradients = [each.grad for each in model.parameters()]
    together = _flatten_dense_tensors(gradients)
    manager.allreduce(together).wait()
    for gradient, mean in zip(
        gradients, _unflatten_dense_tensors(together, gradients), strict=True
    ):
        gradient.copy_(mean)


def main() -> None:
    asked = parse()
    replica, world = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
    os.environ["RANK"] = str(replica)  # for the trouble file; torchft takes its own by argument
    torch.manual_seed(1)
    model = build_model(asked.state_mb, asked.tensors)
    plain = torch.optim.AdamW(model.parameters(), fused=True)

    def load(state: dict) -> None:
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()},
        min_replica_size=1,
        replica_id=f"replica_{replica}_",
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=30),
    )
    Path(f"rank_{replica}.pid").write_text(str(os.getpid()))
    while not all(Path(f"rank_{number}.pid").exists() for number in range(world)):
        time.sleep(0.01)  # else the first one trains alone
    optimizer = Optimizer(manager, plain)
    sampler = DistributedSampler(
        dataset := Samples(),
        replica_rank=replica,
        num_replica_groups=world,
        group_rank=0,
        num_replicas=1,
    )
    loader = DataLoader(dataset, batch_size=asked.batch_size, sampler=sampler, drop_last=True)
    with Path("progress.jsonl").open("a") as progress:
        while manager.current_step() < asked.steps:
            sampler.set_epoch(manager.current_step() // len(loader))
            for batch in loader:
                before = manager.current_step()
                optimizer.zero_grad()
                paced_loss(model, batch, asked.pace_s).backward()
                sum_over_replicas(manager, model)
                optimizer.step()
                if manager.current_step() > before and manager.participating_rank() == 0:
                    quorum = manager._quorum_id  # noqa: SLF001  a public one is not there
                    mark = {"step": manager.current_step(), "generation": quorum}
                    progress.write(json.dumps(mark) + "\n")
                    progress.flush()


if __name__ == "__main__":
    main()
