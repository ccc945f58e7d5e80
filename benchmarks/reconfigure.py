"""What torch's own reconfiguration of a group would save of a repair: a group that is formed again, two ways.

The ranks of one machine meet at a barrier, and are timed from there to the end of their next step of training:
``new``: a group is formed over the same store, and the model wrapped in a new DistributedDataParallel, as a repair
does today (it leaves the old group to a thread, so that is not timed); ``same``: ``_reconfigure`` of the same group (torch 2.15 and newer), with the same replica.
Both take turns within one set of processes. What a repair needs beside (seeing the fault, starting the rank,
handing the state on) is the same either way and is not timed.

    python benchmarks/reconfigure.py --worlds 3 8 --state-mb 2 100
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import PrefixStore, TCPStore
from torch.nn.parallel import DistributedDataParallel

TIMEOUT = timedelta(seconds=60)
WAYS = ("new", "same")


def model_of(megabytes: int) -> nn.Module:
    """Layers of about 0.5 MB for a state of ``megabytes``, so that DDP has buckets to lay out."""
    torch.manual_seed(0)
    width = 360  # 360 x 360 floats: 0.5 MB
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(2 * megabytes)))


def step(replica: DistributedDataParallel, batch: torch.Tensor) -> None:
    """One forward and backward, whose gradients are summed."""
    replica.zero_grad(set_to_none=True)
    replica(batch).sum().backward()


def wrap(model: nn.Module) -> DistributedDataParallel:
    """As a repair does: the state is handed on by other means, so DDP sends none of it."""
    return DistributedDataParallel(model, find_unused_parameters=True, init_sync=False)


def form_new(store: TCPStore, number: int, rank: int, world: int) -> None:
    """The group of a new generation over keys of its own."""
    dist.init_process_group(
        "gloo", store=PrefixStore(f"g{number}", store), rank=rank, world_size=world, timeout=TIMEOUT
    )


def reconfigure(store: TCPStore, number: int, rank: int, world: int) -> None:
    """The same group object under a new number; the handles are exchanged by the store."""
    keys = PrefixStore(f"r{number}", store)
    keys.set(str(rank), dist._get_reconfigure_handle())  # noqa: SLF001 - experimental
    handles = [keys.get(str(one)).decode() for one in range(world)]
    dist._reconfigure(uuid=number, handles=handles, timeout=TIMEOUT).wait()  # noqa: SLF001


def run_rank(rank: int, world: int, port: int, megabytes: int, rounds: int) -> None:
    """One rank: both ways in turn. Rank 0 prints the medians."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=TIMEOUT)
    batch = torch.ones(1, 360)
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    model = model_of(megabytes)
    for block in range(
        2
    ):  # each way has a block of its own, and then again: a world has one kind of group
        for way in WAYS:
            base = 1000 * (2 * block + WAYS.index(way))
            if dist.is_initialized():
                dist.destroy_process_group()
            if way == "same":
                dist.init_process_group(
                    "gloo",
                    store=PrefixStore(f"first{base}", store),
                    rank=rank,
                    world_size=world,
                    timeout=TIMEOUT,
                    enable_reconfigure=True,
                )
                reconfigure(store, base, rank, world)
            else:
                form_new(store, base, rank, world)
            replica = wrap(model)
            step(replica, batch)
            step(replica, batch)
            for number in range(base + 1, base + 1 + rounds):
                if way == "new":
                    del replica
                    dist.destroy_process_group()
                keys = PrefixStore(f"b{number}", store)
                keys.add("here", 1)
                while int(keys.add("here", 0)) < world:
                    time.sleep(0.001)
                began_s = time.perf_counter()
                if way == "same":
                    reconfigure(store, number, rank, world)
                else:
                    form_new(store, number, rank, world)
                    replica = wrap(model)
                step(replica, batch)
                taken[way].append(time.perf_counter() - began_s)
            del replica
    if rank == 0:
        new, same = (statistics.median(taken[way]) * 1000 for way in WAYS)
        print(f"| {world} | {megabytes} | {new:.1f} | {same:.1f} | {new - same:+.1f} |", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--worlds", type=int, nargs="+", default=[3, 8])
    parser.add_argument("--state-mb", type=int, nargs="+", default=[2, 100])
    parser.add_argument(
        "--rounds", type=int, default=10, help="in each block, of which each way has two"
    )
    asked = parser.parse_args()
    if not hasattr(dist, "_reconfigure"):
        parser.exit(2, f"torch {torch.__version__} has no reconfiguration: it came with 2.15\n")
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, gloo")
    print("| ranks | state, MB | new, ms | same, ms | saved, ms |\n|---|---|---|---|---|")
    for world in asked.worlds:
        for megabytes in asked.state_mb:
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port = store.port
            del store
            mp.spawn(run_rank, args=(world, port, megabytes, asked.rounds), nprocs=world)


if __name__ == "__main__":
    main()
