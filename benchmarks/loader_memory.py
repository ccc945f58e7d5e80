"""What a loader worker holds of batches that it has sent, and what letting go of them costs.

Run by hand: ``python benchmarks/loader_memory.py [--batch-mb 32] [--batches 120]``. Loader and a plain
torch DataLoader, one worker and the same settings each: batches per second, and the most shared memory that
the worker had mapped, looked at after each batch.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ddp_runner.data.loader import Loader, LoadOptions
from ddp_runner.data.map_source import MapSource
from ddp_runner.data.order import SampleOrder
from ddp_runner.data.source import Cut
from ddp_runner.data.workers.fetch import SampleReader
from ddp_runner.data.workers.memory_files import collate_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SAMPLES = 8  # a batch
WARM_BATCHES = 10
PREFETCH = 2


class Large:
    """Samples that take no time to make, and much room."""

    deterministic = True

    def __init__(self, sample_bytes: int) -> None:
        self._row = torch.zeros(sample_bytes // 4)

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._row


def shared_bytes(pid: int) -> int:
    """The shared memory that ``pid`` has mapped and touched."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith("RssShmem:"))
    return int(line.split()[1]) * 1024


def measured(batches: Iterator[Any], *, count: int, pid: Callable[[], int]) -> tuple[float, int]:
    """Batches per second, and the most that the worker ``pid`` had of shared memory."""
    for _ in islice(batches, WARM_BATCHES):
        pass
    most_bytes, began_s = 0, time.perf_counter()
    for _ in islice(batches, count):
        most_bytes = max(most_bytes, shared_bytes(pid()))
    return count / (time.perf_counter() - began_s), most_bytes


def main() -> None:
    """Measure both; print a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-mb", type=int, default=32)
    parser.add_argument("--batches", type=int, default=120)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    dataset = Large(asked.batch_mb * 2**20 // SAMPLES)
    order = SampleOrder(seed=1, dataset_size=len(dataset), global_batch_size=SAMPLES)
    cut = Cut(order=order, rank=0, world_size=1, micro_batch_size=SAMPLES)
    with Loader(
        MapSource(SampleReader(dataset, seed=1, collate=collate_batch), cut),
        total_steps=10**9,
        num_workers=1,
        options=LoadOptions(prefetch_factor=PREFETCH),
    ) as loader:
        steps = (loader.take(step) for step in range(10**9))
        rate, held = measured(steps, count=asked.batches, pid=lambda: loader.worker_pids[0])
        print(f"safe   {rate:6.1f} batches/s  {held / 1e6:7.0f} MB")
    plain: DataLoader[Any] = DataLoader(
        dataset,  # type: ignore[arg-type]  # needs no more than it has
        batch_size=SAMPLES,
        num_workers=1,
        prefetch_factor=PREFETCH,
    )
    batches: Any = iter(plain)
    rate, held = measured(batches, count=asked.batches, pid=lambda: batches._workers[0].pid)  # noqa: SLF001
    print(f"plain  {rate:6.1f} batches/s  {held / 1e6:7.0f} MB")


if __name__ == "__main__":
    main()
