"""SafeDataLoader against a plain torch DataLoader with the same settings: samples per second.

Run by hand: ``python benchmarks/loader.py [--rounds 25] [--seconds 0.25]``. Both load the same samples in the
same order; rounds alternate, so that a slow moment of the machine meets both. Prints medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from ddp_runner.data.corpus import scan_standard_library
from ddp_runner.data.loader import SafeDataLoader
from ddp_runner.data.order import SampleOrder
from ddp_runner.data.windows import ByteWindows

if TYPE_CHECKING:
    from collections.abc import Iterator

BATCH = 32
PREFETCH = 2
SEED = 1
STEPS = 10**9  # more than there is time for


class Decoded:
    """Stands for decoding and augmenting an image: ``passes`` rounds of numpy work per sample."""

    def __init__(self, passes: int) -> None:
        self._passes = passes
        self._pixels = np.random.default_rng(0).random((64, 64, 3), dtype=np.float32)

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        image = np.roll(self._pixels, index, axis=0)
        for _ in range(self._passes):
            image = np.sqrt(image * image + np.float32(0.5)) - np.float32(0.1)
        return torch.from_numpy(image)


def per_sample_us(dataset: Any) -> float:
    """Microseconds to get one sample, in this process."""
    began_s = time.perf_counter()
    for index in range(300):
        dataset[index]
    return (time.perf_counter() - began_s) / 300 * 1e6


def decoded(target_us: float) -> Decoded:
    """A :class:`Decoded` that takes about ``target_us`` per sample on this machine."""
    low, high = per_sample_us(Decoded(0)), per_sample_us(Decoded(50))
    return Decoded(max(round((target_us - low) / ((high - low) / 50)), 1))


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
    with SafeDataLoader(
        dataset,
        order=order,
        rank=0,
        world_size=1,
        total_steps=STEPS,
        micro_batch_size=BATCH,
        seed=SEED,
        num_workers=workers,
        prefetch_factor=PREFETCH,
    ) as loader:
        for step in count():
            yield loader.take(step)


def samples_per_s(batches: Iterator[Any], *, workers: int, seconds: float) -> float:
    """The rate once what was loaded ahead during the other's turn is used up."""
    for _ in range(2 * PREFETCH * max(workers, 1)):
        next(batches)
    began_s = time.perf_counter()
    taken = 0
    while (now_s := time.perf_counter()) - began_s < seconds:
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


def main() -> None:
    """Measure every dataset and worker count; print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=0.25, help="per loader and round")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    datasets = {
        "decode 200 us": decoded(200),
        "decode 1 ms": decoded(1000),
        "byte windows": ByteWindows(scan_standard_library(), seq_len=128),
    }
    print(f"torch {torch.__version__}, batch {BATCH}, medians of {asked.rounds}; samples/s")
    print(
        f"{'dataset':<14} {'workers':>7} {'plain':>9} {'safe':>9} {'ratio':>6}  {'middle half':>13}"
    )
    for name, dataset in datasets.items():
        for workers in (0, 1, 2):
            pairs = compare(dataset, workers=workers, rounds=asked.rounds, seconds=asked.seconds)
            theirs, ours = (statistics.median(side) for side in zip(*pairs, strict=True))
            ratios = sorted(pair[1] / pair[0] for pair in pairs)
            print(
                f"{name:<14} {workers:>7} {theirs:>9.0f} {ours:>9.0f} "
                f"{statistics.median(ratios):>6.3f}  {ratios[len(ratios) // 4]:>6.3f}-{ratios[-len(ratios) // 4]:.3f}"
            )


if __name__ == "__main__":
    main()
