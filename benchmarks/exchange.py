"""What an agreement of all ranks through the store costs: asked one by one, and all at once.

Run by hand: ``python benchmarks/exchange.py [--ranks 2 8 128] [--rounds 20] [--json FILE]``.
Ranks are processes with a connection each to one TCPStore, as in a run; what they exchange is signed. Each
writes a value and reads those of all, by n questions (``get``) and by one (``multi_get``) in turn.
CPU is of a rank, and of the store's process, in one exchange.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # forked with the ranks
from contenders import machine, show_machine
from torch._C._distributed_c10d import TCPStore

from ddp_runner.kernel.group.signed import SignedStore

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

TIMEOUT_S = 120.0
VALUE = "x" * 200  # as long as what a rank says of a checked step
BY_FORK = get_context("fork")


def one_by_one(store: SignedStore, keys: list[str]) -> list[bytes]:
    """As :meth:`ddp_runner.kernel.group.group.Group.exchange` once did."""
    return [store.get(key) for key in keys]


def at_once(store: SignedStore, keys: list[str]) -> list[bytes]:
    """As it does."""
    return store.multi_get(keys)


WAYS: dict[str, Callable[[SignedStore, list[str]], list[bytes]]] = {
    "get": one_by_one,
    "multi_get": at_once,
}


def host(line: Connection) -> None:
    store = TCPStore(
        "127.0.0.1", 0, None, True, timedelta(seconds=TIMEOUT_S), wait_for_workers=False
    )
    line.send(store.port)
    while line.recv():
        line.send(time.process_time())
    signal.pause()


def rank_of(rank: int, world: int, port: int, line: Connection) -> None:
    torch.set_num_threads(1)
    client = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=TIMEOUT_S))
    store = SignedStore(client, "secret", timeout_s=TIMEOUT_S)
    line.send("there")
    while asked := line.recv():
        way, number = asked
        began_s, used_s = time.monotonic(), time.process_time()
        store.set(f"{number}/{rank}", VALUE)
        values = WAYS[way](store, [f"{number}/{other}" for other in range(world)])
        assert values == [VALUE.encode()] * world
        line.send((time.monotonic() - began_s, time.process_time() - used_s))


def measure(world: int, *, rounds: int) -> list[dict]:
    pids: list[int] = []

    def start(function: Callable[..., None], *words: object) -> Connection:
        mine, theirs = BY_FORK.Pipe()
        process = BY_FORK.Process(target=function, args=(*words, theirs), daemon=True)
        process.start()
        assert process.pid is not None
        pids.append(process.pid)
        theirs.close()
        return mine

    store = start(host)
    port = store.recv()
    ranks = [start(rank_of, rank, world, port) for rank in range(world)]
    for line in ranks:
        line.recv()

    def store_cpu_s() -> float:
        store.send(True)
        return float(store.recv())

    found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
    for number in range(rounds * len(WAYS)):
        way = list(WAYS)[number % len(WAYS)]
        before_s = store_cpu_s()
        for line in ranks:
            line.send((way, number))
        answers = [line.recv() for line in ranks]
        longest_s = max(took_s for took_s, _ in answers)
        own_s = statistics.mean(cpu_s for _, cpu_s in answers)
        found[way].append((longest_s, own_s, store_cpu_s() - before_s))
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return [
        {
            "ranks": world,
            "way": way,
            "wall_ms": statistics.median(one[0] for one in samples) * 1e3,
            "rank_cpu_ms": statistics.median(one[1] for one in samples) * 1e3,
            "store_cpu_ms": statistics.median(one[2] for one in samples) * 1e3,
        }
        for way, samples in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 128])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    asked = parser.parse_args()
    facts = machine()
    show_machine(facts)
    print("| ranks | asked by | ms until all have it | CPU ms of a rank | CPU ms of the store |")
    print("|---|---|---|---|---|")
    rows = []
    for world in asked.ranks:
        for row in measure(world, rounds=asked.rounds):
            rows.append(row)
            values = " | ".join(
                f"{row[name]:.2f}" for name in ("wall_ms", "rank_cpu_ms", "store_cpu_ms")
            )
            print(f"| {world} | `{row['way']}` | {values} |", flush=True)
    if asked.json:
        asked.json.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
