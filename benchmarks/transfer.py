"""Seconds to move a training state from one rank to another, beside a plain gloo broadcast of its bytes.

Run by hand, from the repository's root:
``python benchmarks/transfer.py --state-mb 1000 --rounds 7 --json out.jsonl``
Two processes, one generation. The state has the shape that a repair sends: weights and two moments
per weight, in many tensors; the broadcast is of one flat tensor of as many bytes, received into memory
that is there already. The two take turns; what is timed lies between two barriers. Goal: a ratio of 2.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from contenders import machine, show_machine
from torch.distributed import TCPStore

from ddp_runner.kernel.group.abort import AbortSwitch
from ddp_runner.kernel.group.group import Group, Membership, joined
from ddp_runner.kernel.group.tcp_store import StoreLink
from ddp_runner.kernel.group.transfer import receive_state, send_state

WORLD = 2
TIMEOUT_S = 300.0
TENSORS = 96  # of each kind
KINDS = ("transfer", "broadcast")


def make_state(state_mb: float) -> dict[str, object]:
    """Weights and moments; a few small tensors among them, as biases are."""
    elements = int(state_mb * 1e6 / 4 / 3 / TENSORS)
    tensors = {
        kind: {f"layer_{number}": torch.full((elements,), 0.5) for number in range(TENSORS)}
        for kind in ("model", "exp_avg", "exp_avg_sq")
    }
    biases = {f"bias_{number}": torch.ones(64) for number in range(TENSORS)}
    return {**tensors, "biases": biases, "committed_step": 1}


def timed(action: Callable[[], object]) -> float:
    dist.barrier()
    began_s = time.monotonic()
    received = action()
    dist.barrier()
    seconds = time.monotonic() - began_s
    del received  # a repair keeps its state: giving the memory back is no part of it
    return seconds


def measure(group: Group, *, state_mb: float, rounds: int) -> dict[str, list[float]]:
    state = make_state(state_mb)
    flat = torch.ones(int(state_mb * 1e6 / 4))

    def transfer() -> object:
        if group.rank == 0:
            return send_state(group, state, to=(1,))
        return receive_state(group, source=0)

    actions = {"transfer": transfer, "broadcast": lambda: dist.broadcast(flat, src=0)}
    taken: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(rounds + 1):
        for kind in KINDS if number % 2 else reversed(KINDS):
            seconds = timed(actions[kind])
            if number > 0:  # the first of each touches its memory for the first time
                taken[kind].append(seconds)
        if group.rank == 0:
            done = f"{number} of {rounds} rounds"
            sys.stderr.write(f"\r{state_mb:g} MB: {done if number else 'warming up'}   ")
            sys.stderr.flush()
    if group.rank == 0:
        sys.stderr.write("\n")
    return taken


def run_rank(rank: int, port: int, asked: argparse.Namespace, answers: Connection) -> None:
    torch.set_num_threads(1)
    membership = Membership(
        generation=1, rank=rank, world_size=WORLD, local_rank=rank, local_world_size=WORLD
    )
    with joined(
        membership,
        link=StoreLink("127.0.0.1", port, timeout_s=TIMEOUT_S),
        backend="gloo",
        device=torch.device("cpu"),
        timeout_s=TIMEOUT_S,
        switch=AbortSwitch(),
    ) as group:
        for state_mb in asked.state_mb:
            taken = measure(group, state_mb=state_mb, rounds=asked.rounds)
            if rank == 0:
                answers.send((state_mb, taken))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--state-mb", type=float, nargs="+", default=[2.0, 100.0, 1000.0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="append a line of JSON per state size here")
    asked = parser.parse_args()
    facts = machine()
    show_machine(facts)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    ranks = [
        context.Process(target=run_rank, args=(rank, store.port, asked, theirs))
        for rank in range(WORLD)
    ]
    for process in ranks:
        process.start()
    print("| state MB | transfer s (middle half) | broadcast s (middle half) | ratio | met |")
    print("|---|---|---|---|---|")
    try:
        for _ in asked.state_mb:
            if not mine.poll(TIMEOUT_S):
                raise RuntimeError("the ranks have gone silent")
            state_mb, taken = mine.recv()
            ratio = median(taken["transfer"]) / median(taken["broadcast"])
            shown = " | ".join(spread(taken[kind]) for kind in KINDS)
            print(f"| {state_mb:g} | {shown} | {ratio:.2f} | {ratio <= 2.0} |", flush=True)
            if asked.json:
                record = {"machine": facts, "state_mb": state_mb, "seconds": taken, "ratio": ratio}
                with asked.json.open("a") as file:
                    file.write(json.dumps(record) + "\n")
    finally:
        for process in ranks:
            process.join(20.0)
            if process.is_alive():
                process.kill()


def spread(seconds: list[float]) -> str:
    low, _, high = quantiles(seconds, n=4) if len(seconds) > 1 else (seconds[0],) * 3
    return f"{median(seconds):.4f} ({low:.4f}-{high:.4f})"


if __name__ == "__main__":
    main()
