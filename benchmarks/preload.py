"""What reading a sample costs once it is preloaded, and what preloading itself does.

Run by hand: ``python benchmarks/preload.py [--rounds 5]``. For several kinds of samples: microseconds to read one
from the memory that ranks share, beside ``pickle`` and ``torch.load`` of the same sample, and the seconds
and bytes of preloading. Then samples a second of a loader with one worker: preloaded, and from a
dataset that holds all of them in a list.
"""

from __future__ import annotations

import argparse
import io
import os
import pickle
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ddp_runner.data.loader import Loader
from ddp_runner.data.map_source import MapSource
from ddp_runner.data.order import SampleOrder
from ddp_runner.data.source import Cut
from ddp_runner.data.workers.fetch import SampleReader
from ddp_runner.data.workers.memory_files import collate_batch
from ddp_runner.features.preload.memory import PreloadedDataset, SampleMemory
from ddp_runner.features.preload.reading import Reading

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BATCH = 32
LOADED_S = 2.0  # a round of a loader


def _tokens(index: int) -> Any:
    return torch.full((512,), index), torch.full((512,), index)


def _row(index: int) -> Any:
    return torch.full((64,), float(index)), index


def _picture(index: int) -> Any:
    return {"picture": torch.full((3, 224, 224), index % 256, dtype=torch.uint8), "label": index}


def _floats(index: int) -> Any:
    return np.full((3, 224, 224), index, dtype=np.float32), np.int64(index)


KINDS: dict[str, tuple[Callable[[int], Any], int]] = {
    "row: 64 floats, a label": (_row, 20_000),
    "tokens: 2 x 512 int64": (_tokens, 20_000),
    "picture: 150 kB of bytes": (_picture, 2_000),
    "array: 600 kB of floats": (_floats, 500),
}


class Held(Dataset[Any]):
    """All samples in a list."""

    deterministic = True

    def __init__(self, samples: Sequence[Any]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._samples[index]


def filled(dataset: Held) -> tuple[SampleMemory, float]:
    """The memory of ``dataset``, and the seconds that filling it took."""
    memory = SampleMemory(os.memfd_create("samples"), samples=len(dataset))
    began_s = time.perf_counter()
    Reading(
        dataset,
        memory,
        room=lambda: 10**12,
        on_sample=lambda _index: None,
        on_progress=lambda _done: None,
    ).read()
    return memory, time.perf_counter() - began_s


def microseconds(read: Callable[[int], Any], order: Sequence[int]) -> float:
    """For one of them, in this order."""
    began_s = time.perf_counter()
    for index in order:
        read(index)
    return (time.perf_counter() - began_s) / len(order) * 1e6


def loaded_per_s(dataset: Any) -> float:
    """Samples a second of a loader with one worker, whose batches are thrown away."""
    order = SampleOrder(seed=1, dataset_size=len(dataset), global_batch_size=BATCH)
    cut = Cut(order=order, rank=0, world_size=1, micro_batch_size=BATCH)
    with Loader(
        MapSource(SampleReader(dataset, seed=1, collate=collate_batch), cut),
        total_steps=10**9,
        num_workers=1,
    ) as loader:
        for step in range(10):
            loader.take(step)
        began_s, step = time.perf_counter(), 10
        while time.perf_counter() < began_s + LOADED_S:
            loader.take(step)
            step += 1
        return (step - 10) * BATCH / (time.perf_counter() - began_s)


def _saved(sample: Any) -> bytes:
    file = io.BytesIO()
    torch.save(sample, file)
    return file.getvalue()


def main() -> None:
    """Measure; print a line for each kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for name, (make, count) in KINDS.items():
        dataset = Held([make(index) for index in range(count)])
        memory, seconds = filled(dataset)
        order = np.random.default_rng(1).permutation(count).tolist()[:2000]
        pickled = [pickle.dumps(dataset[index], protocol=5) for index in order]
        saved = [_saved(dataset[index]) for index in order]
        shared = PreloadedDataset(memory)
        readers: dict[str, Callable[[int], Any]] = {
            "preloaded": lambda at: shared[order[at]],  # noqa: B023 - called in this round of the loop
            "pickle": lambda at: pickle.loads(pickled[at]),  # noqa: B023
            "torch.load": lambda at: torch.load(io.BytesIO(saved[at]), weights_only=False),  # noqa: B023
        }
        places = range(len(order))
        found: dict[str, list[float]] = {one: [] for one in readers}
        rates: dict[str, list[float]] = {"preloaded": [], "held": []}
        for _ in range(asked.rounds):
            for one, read in readers.items():
                found[one].append(microseconds(read, places))
            rates["preloaded"].append(loaded_per_s(shared))
            rates["held"].append(loaded_per_s(dataset))
        each = "  ".join(f"{one} {statistics.median(us):8.1f} us" for one, us in found.items())
        size = memory.size_bytes
        print(f"{name:26} {each}  filled {count / seconds:8.0f}/s, {size / count:9.0f} B each")
        loads = "  ".join(f"{one} {statistics.median(rate):8.0f}/s" for one, rate in rates.items())
        print(f"{'':26} one loader worker: {loads}")
        memory.close()


if __name__ == "__main__":
    main()
