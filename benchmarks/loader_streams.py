"""A stream in shards against torchdata's StatefulDataLoader over the same JSONL shards: samples per second.

Run by ``python benchmarks/loader.py --streams``; needs torchdata. Both make the same tensors of the same lines, in batches of the
same size, with as many workers; both know after each batch where they stand. Each loads in a process of its own, since workers are
forks and would inherit the other's; rounds alternate. Prints medians.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ddp_runner.data.loader import Loader, LoadOptions
from ddp_runner.data.shard_files import JsonLines
from ddp_runner.data.shard_source import ShardSource
from ddp_runner.data.shards import ShardPositions
from ddp_runner.data.source import Cut
from ddp_runner.data.stream import StreamOrder

BATCH = 32
PREFETCH = 2
SHARDS = 24
STEPS = 10**9


class Tokens:
    """What is made of a line: ``rounds`` of work beside a tensor of its numbers; the same for both."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds

    def __call__(self, item: dict[str, Any]) -> torch.Tensor:
        tokens = torch.tensor(item["tokens"])
        for _ in range(self._rounds):
            tokens = torch.sort((tokens * 31 + 7) % 50_257).values
        return tokens


class Made:
    """What ``made_of`` makes of the lines of ``files``, a shard each. ``deterministic``: it draws nothing."""

    def __init__(self, files: list[str], made_of: Tokens, *, deterministic: bool) -> None:
        self._lines, self._made_of, self.deterministic = JsonLines(files), made_of, deterministic
        self.shards = self._lines.shards

    def read(self, shard: int, position: Any) -> Iterator[tuple[Any, Any]]:
        """Yield each, and the position behind it."""
        return ((self._made_of(item), to) for item, to in self._lines.read(shard, position))


class Plain(IterableDataset[torch.Tensor]):
    """The shards of a worker, as one writes them for a StatefulDataLoader: each for ever, with its state."""

    def __init__(self, files: list[str], made_of: Tokens) -> None:
        self._files, self._made_of = files, made_of
        self._shard, self._place = 0, 0

    def state_dict(self) -> dict[str, int]:
        """File and place."""
        return {"shard": self._shard, "place": self._place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """The other way round."""
        self._shard, self._place = state["shard"], state["place"]

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        own = self._files if info is None else self._files[info.id :: info.num_workers]
        while True:
            with Path(own[self._shard % len(own)]).open("rb") as file:
                file.seek(self._place)
                for line in file:
                    self._place += len(line)
                    yield self._made_of(json.loads(line))
            self._shard, self._place = self._shard + 1, 0


def write(folder: Path, *, lines: int, tokens: int) -> None:
    """Shards of ``lines`` lines with ``tokens`` numbers each."""
    draw = random.Random(1)
    for shard in range(SHARDS):
        path = folder / f"{shard:02}.jsonl"
        with path.open("w") as file:
            for _ in range(lines):
                numbers = [draw.randrange(50_257) for _ in range(tokens)]
                file.write(json.dumps({"tokens": numbers}) + "\n")


def theirs(files: list[str], made_of: Tokens, workers: int) -> Iterator[Any]:
    """torchdata's, with its defaults but for the prefetch, which is also its default."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    data = Plain(files, made_of)
    return iter(
        StatefulDataLoader(data, batch_size=BATCH, num_workers=workers, prefetch_factor=PREFETCH)
    )


def ours(
    files: list[str], made_of: Tokens, workers: int, *, deterministic: bool = True
) -> Iterator[Any]:
    """What a Task's stream is read by. Not ``deterministic``: generators are seeded for each item."""
    order = StreamOrder(
        seed=1, dataset_size=BATCH * 1000, global_batch_size=BATCH, shuffle=False, is_sharded=True
    )
    loader = Loader(
        ShardSource(
            Made(files, made_of, deterministic=deterministic),
            Cut(order=order, rank=0, world_size=1, micro_batch_size=BATCH),
            positions=ShardPositions(),
        ),
        total_steps=STEPS,
        num_workers=workers,
        options=LoadOptions(prefetch_factor=PREFETCH),
    )
    for step in count():
        yield loader.take(step)


def seeded(files: list[str], made_of: Tokens, workers: int) -> Iterator[Any]:
    """Ours, where the function may draw random numbers."""
    return ours(files, made_of, workers, deterministic=False)


MAKERS = {"torchdata": theirs, "ours": ours, "seeded": seeded}


def rate(batches: Iterator[Any], *, workers: int, seconds: float) -> tuple[float, int]:
    """Samples per second, once what was loaded ahead is used up; and how many samples in all."""
    before = 2 * PREFETCH * workers
    for _ in range(before):
        next(batches)
    began_s, taken = time.perf_counter(), 0
    while (now_s := time.perf_counter()) - began_s < seconds:
        next(batches)
        taken += BATCH
    return taken / (now_s - began_s), taken + before * BATCH


def serve(folder: str, maker: str, work: int, workers: int) -> None:
    """In a process of its own: one turn for each line of its input, which has the seconds."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    files = sorted(str(path) for path in Path(folder).glob("*.jsonl"))
    batches = MAKERS[maker](files, Tokens(work), workers)
    for line in sys.stdin:
        print(*rate(batches, workers=workers, seconds=float(line)), flush=True)
    os._exit(0)  # the workers end with the pipes that they wait at


class Contender:
    """One loader with its workers, in a process of its own, idle between its turns."""

    def __init__(self, folder: Path, maker: str, *, work: int, workers: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(folder), maker, str(work), str(workers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def turn(self, seconds: float) -> tuple[float, float]:
        """Its rate, and microseconds of CPU a sample, workers included."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        before_s = self._cpu_s()
        print(seconds, file=self._process.stdin, flush=True)
        found, taken = map(float, self._process.stdout.readline().split())
        return found, (self._cpu_s() - before_s) / taken * 1e6

    def _cpu_s(self) -> float:
        ticks = 0
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = path.read_text().rpartition(")")[2].split()
                if int(fields[3]) == self._process.pid:  # the session
                    ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        """With all of its workers."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def compared(folder: Path, *, work: int, workers: int, rounds: int, seconds: float) -> str:
    """A row of the table."""
    sides = [Contender(folder, maker, work=work, workers=workers) for maker in MAKERS]
    found = []
    try:
        for turn in range(-1, rounds):  # the first one warms up
            order = [(turn + at) % len(sides) for at in range(len(sides))]
            rates = {at: sides[at].turn(seconds) for at in order}
            found.append([rates[at] for at in range(len(sides))])
    finally:
        for side in sides:
            side.end()
    rates, cpu_us = ([[side[part] for side in one] for one in found[1:]] for part in (0, 1))
    cells = []
    for at in range(len(sides)):
        ratios = sorted(one[at] / one[0] for one in rates)
        half = f"{ratios[len(ratios) // 4]:.2f}-{ratios[-1 - len(ratios) // 4]:.2f}"
        cells.append(f"{statistics.median(one[at] for one in rates):>8.0f}")
        if at:
            cells.append(f"{statistics.median(ratios):>6.3f} ({half})")
        cells.append(f"{statistics.median(one[at] for one in cpu_us):>6.0f}")
    return " ".join(cells)


def main(*, rounds: int, seconds: float) -> None:
    """Print a table over kinds of samples and numbers of workers."""
    cases = {"128 tokens": (128, 0), "1024 tokens": (1024, 0), "128, 0.5 ms": (128, 30)}
    print(f"torch {torch.__version__}, batch {BATCH}, medians of {rounds} rounds; samples/s")
    print("each: samples/s, ratio to torchdata (middle half), us of CPU a sample")
    print(f"{'an item':<12} {'workers':>7} {'torchdata':>15} {'ours':>34} {'seeded':>34}")
    for name, (tokens, work) in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), lines=400, tokens=tokens)
            for workers in (1, 2, 4):
                row = compared(
                    Path(folder), work=work, workers=workers, rounds=rounds, seconds=seconds
                )
                print(f"{name:<12} {workers:>7} {row}", flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
