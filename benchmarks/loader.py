"""Loader against a plain torch DataLoader with the same settings: samples per second.

Run by hand: ``python benchmarks/loader.py [--rounds 25] [--seconds 0.25]``. Both load the same samples in the
same order; rounds alternate, so that a slow moment of the machine meets both. Prints medians.

``python benchmarks/loader.py --waits`` does so for data that is waited for, with more workers than cores.

``python benchmarks/loader.py --storm [--rounds 3] [--seconds 10]`` compares Loader without faults with itself while a
worker gets SIGKILL every 2 seconds; the goal is a ratio of 0.9.

``python benchmarks/loader.py --streams`` compares streams in shards with torchdata's StatefulDataLoader (loader_streams.py).
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import time
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ddp_runner.data.loader import Loader, LoadOptions
from ddp_runner.data.map_source import MapSource
from ddp_runner.data.order import SampleOrder
from ddp_runner.data.source import Cut
from ddp_runner.data.text.corpus import scan_standard_library
from ddp_runner.data.workers.fetch import SampleReader
from ddp_runner.data.workers.memory_files import collate_batch
from ddp_runner.tasks.bytes_lm import ByteWindows

if TYPE_CHECKING:
    from collections.abc import Iterator

BATCH = 32
PREFETCH = 2
SEED = 1
STEPS = 10**9  # more than there is time for


class Decoded:
    """Stands for decoding and augmenting an image: ``passes`` rounds of numpy work per sample."""

    def __init__(self, passes: int, *, deterministic: bool = False) -> None:
        self._passes = passes
        self.deterministic = deterministic  # nothing random is drawn: for ours, seeding is left out
        self._pixels = np.random.default_rng(0).random((64, 64, 3), dtype=np.float32)

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        image = np.roll(self._pixels, index, axis=0)
        for _ in range(self._passes):
            image = np.sqrt(image * image + np.float32(0.5)) - np.float32(0.1)
        return torch.from_numpy(image)


class Remote:
    """Samples that are waited for, as from a disk or over a network, and take no time of a core."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._wait_s)
        return torch.tensor(index)


def per_sample_us(dataset: Any) -> float:
    """Microseconds to get one sample, in this process."""
    began_s = time.perf_counter()
    for index in range(300):
        dataset[index]
    return (time.perf_counter() - began_s) / 300 * 1e6


def decoded(target_us: float, *, deterministic: bool = False) -> Decoded:
    """A :class:`Decoded` that takes about ``target_us`` per sample on this machine."""
    low, high = per_sample_us(Decoded(0)), per_sample_us(Decoded(50))
    passes = max(round((target_us - low) / ((high - low) / 50)), 1)
    return Decoded(passes, deterministic=deterministic)


class _Steps:
    """The same batches for the plain loader: the whole run's, as lists."""

    def __init__(self, order: SampleOrder) -> None:
        self._order = order

    def __iter__(self) -> Iterator[list[int]]:
        return (self._order.indices(step).tolist() for step in range(STEPS))


def plain(dataset: Any, order: SampleOrder, workers: int) -> Iterator[Any]:
    """The loader that a user would write."""
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_sampler=_Steps(order),
        num_workers=workers,
        prefetch_factor=PREFETCH if workers else None,
    )
    return iter(loader)


def safe(dataset: Any, order: SampleOrder, workers: int) -> Iterator[Any]:
    """Ours."""
    cut = Cut(order=order, rank=0, world_size=1, micro_batch_size=BATCH)
    with Loader(
        MapSource(SampleReader(dataset, seed=SEED, collate=collate_batch), cut),
        total_steps=STEPS,
        num_workers=workers,
        options=LoadOptions(prefetch_factor=PREFETCH),
    ) as loader:
        for step in count():
            yield loader.take(step)


def samples_per_s(batches: Iterator[Any], *, workers: int, seconds: float) -> float:
    """The rate once what was loaded ahead during the other's turn is used up.

    Without workers per second of CPU, which other work on the machine changes less.
    """
    for _ in range(2 * PREFETCH * max(workers, 1)):
        next(batches)
    clock = time.perf_counter if workers else time.process_time
    began_s = clock()
    taken = 0
    while (now_s := clock()) - began_s < seconds:
        next(batches)
        taken += BATCH
    return taken / (now_s - began_s)


def compare(
    dataset: Any, *, workers: int, rounds: int, seconds: float
) -> list[tuple[float, float]]:
    """``(plain, safe)`` rates of each round; the one whose turn it is not waits, loaded ahead."""
    order = SampleOrder(seed=SEED, dataset_size=len(dataset), global_batch_size=BATCH)
    loaders = {make: make(dataset, order, workers) for make in (plain, safe)}
    pairs = []
    for turn in range(rounds):
        first_to_last = (plain, safe) if turn % 2 else (safe, plain)
        rates = {
            make: samples_per_s(loaders[make], workers=workers, seconds=seconds)
            for make in first_to_last
        }
        pairs.append((rates[plain], rates[safe]))
    return pairs


def storm_rate(dataset: Any, *, workers: int, seconds: float, kill_every_s: float) -> float:
    """Samples per second of ``seconds``, a worker being killed each ``kill_every_s``; 0: none is."""
    order = SampleOrder(seed=SEED, dataset_size=len(dataset), global_batch_size=BATCH)
    cut = Cut(order=order, rank=0, world_size=1, micro_batch_size=BATCH)
    source = MapSource(SampleReader(dataset, seed=SEED, collate=collate_batch), cut)
    with Loader(source, total_steps=STEPS, num_workers=workers) as loader:
        for step in range(2 * PREFETCH * workers):
            loader.take(step)
        began_s = time.perf_counter()
        kill_at_s = began_s + (kill_every_s or seconds + 1)
        for taken in count():
            now_s = time.perf_counter()
            if now_s - began_s >= seconds:
                break
            if now_s >= kill_at_s:
                kill_at_s = now_s + kill_every_s
                os.kill(random.choice(loader.worker_pids), signal.SIGKILL)
            loader.take(2 * PREFETCH * workers + taken)
        if loader.workers != workers:
            raise RuntimeError(f"{loader.workers} workers are left of {workers}")
    return taken * BATCH / (now_s - began_s)


def storm(datasets: dict[str, Any], *, rounds: int, seconds: float) -> None:
    """Print rates with and without a worker killed every 2 seconds."""
    print(
        f"torch {torch.__version__}, batch {BATCH}, medians of {rounds} x {seconds:g} s; samples/s"
    )
    print(f"{'dataset':<14} {'workers':>7} {'fault_free':>9} {'storm':>9} {'ratio':>6}")
    for name, dataset in datasets.items():
        for workers in (1, 2):
            rates = [
                [
                    storm_rate(dataset, workers=workers, seconds=seconds, kill_every_s=every_s)
                    for every_s in (0.0, 2.0)
                ]
                for _ in range(rounds)
            ]
            fault_free, struck = (statistics.median(side) for side in zip(*rates, strict=True))
            ratio = statistics.median(pair[1] / pair[0] for pair in rates)
            print(f"{name:<14} {workers:>7} {fault_free:>9.0f} {struck:>9.0f} {ratio:>6.3f}")


def main() -> None:
    """Measure every dataset and worker count; print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=None, help="25; 3 in a storm")
    parser.add_argument("--seconds", type=float, default=None, help="0.25 per turn; 10 in a storm")
    parser.add_argument("--storm", action="store_true", help="a worker is killed every 2 seconds")
    parser.add_argument("--waits", action="store_true", help="data that is waited for, 8 workers")
    parser.add_argument("--streams", action="store_true", help="against torchdata, over shards")
    parser.add_argument("--workers", type=int, nargs="+", default=(0, 1, 2))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.streams:
        import loader_streams

        loader_streams.main(rounds=asked.rounds or 15, seconds=asked.seconds or 0.5)
        return
    datasets = {
        "decode 200 us": decoded(200),
        "declared 200 us": decoded(200, deterministic=True),
        "decode 1 ms": decoded(1000),
        "byte windows": ByteWindows(scan_standard_library(), seq_len=128),
    }
    if asked.storm:
        storm(datasets, rounds=asked.rounds or 3, seconds=asked.seconds or 10.0)
        return
    counts: tuple[int, ...] = tuple(asked.workers)
    if asked.waits:
        datasets, counts = {"wait 5 ms": Remote(0.005)}, (2, 8)
    asked.rounds, asked.seconds = asked.rounds or 25, asked.seconds or 0.25
    print(f"torch {torch.__version__}, batch {BATCH}, medians of {asked.rounds}; samples/s")
    print(
        f"{'dataset':<16} {'workers':>7} {'plain':>9} {'safe':>9} {'ratio':>6}  {'middle half':>13}"
    )
    for name, dataset in datasets.items():
        for workers in counts:
            pairs = compare(dataset, workers=workers, rounds=asked.rounds, seconds=asked.seconds)
            theirs, ours = (statistics.median(side) for side in zip(*pairs, strict=True))
            ratios = sorted(pair[1] / pair[0] for pair in pairs)
            print(
                f"{name:<16} {workers:>7} {theirs:>9.0f} {ours:>9.0f} "
                f"{statistics.median(ratios):>6.3f}  {ratios[len(ratios) // 4]:>6.3f}-{ratios[-len(ratios) // 4]:.3f}"
            )


if __name__ == "__main__":
    main()
