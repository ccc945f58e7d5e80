"""Seconds that one checkpoint blocks, against copying, torch.save and a plain synced write.

Run by hand: ``python benchmarks/checkpoint.py [--parameters MILLIONS ...] [--rounds N]``. The state
is that of AdamW: weights and two moments, 12 bytes a parameter, in tensors of a Transformer's
sizes. The contenders take turns within each round, in an order that rotates; medians are printed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from typing import TYPE_CHECKING

from ddp_runner.checkpoint.store import CheckpointStore

if TYPE_CHECKING:
    from collections.abc import Callable

TENSOR_PARAMETERS = 1024 * 1024
PIECE_BYTES = 64 * 1024 * 1024


def adamw_like(parameters: int) -> dict[str, object]:
    """Weights, and per weight the two moments and the step count that AdamW keeps."""
    count = max(1, parameters // TENSOR_PARAMETERS)
    shape = (parameters // count // 1024, 1024)
    model = {f"layers.{i}.weight": torch.rand(shape) for i in range(count)}
    moments = {
        i: {
            "step": torch.tensor(1.0),
            "exp_avg": torch.rand(shape),
            "exp_avg_sq": torch.rand(shape),
        }
        for i in range(count)
    }
    groups = [{"lr": 1e-3, "params": list(range(count))}]
    return {"model": model, "optimizer": {"state": moments, "param_groups": groups}}


def tensors_of(state: dict) -> list[torch.Tensor]:
    moments = [t for entry in state["optimizer"]["state"].values() for t in entry.values()]
    return [*state["model"].values(), *moments]


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def contenders(state: dict, directory: Path) -> dict[str, Callable[[], object]]:
    """Name -> one call whose duration counts. Each writes to its own, fresh names."""
    tensors = tensors_of(state)
    copies = [torch.empty_like(tensor) for tensor in tensors]
    store = CheckpointStore(directory / "store", keep_last=1)
    steps = iter(range(1, 10_000))

    def copy() -> None:
        for target, source in zip(copies, tensors, strict=True):
            target.copy_(source)

    def torch_save() -> None:
        torch.save(state, directory / "plain.pt")

    def torch_save_synced() -> None:
        torch.save(state, directory / "synced.pt")
        sync(directory / "synced.pt")

    def raw_synced() -> None:
        with (directory / "raw.bin").open("wb", buffering=0) as file:
            for tensor in tensors:
                file.write(tensor.reshape(-1).numpy().data)
            os.fsync(file.fileno())

    def ours() -> None:
        store.save(
            state,
            step=next(steps),
            epoch=1,
            samples=1,
            run_id="benchmark",
            meaning={},
            settings_digest="",
            monitored=None,
            reason="benchmark",
        )

    return {
        "memcpy": copy,
        "torch.save": torch_save,
        "torch.save + fsync": torch_save_synced,
        "raw write + fsync": raw_synced,
        "CheckpointStore.save": ours,
    }


def measure(parameters: int, *, rounds: int, directory: Path) -> None:
    state = adamw_like(parameters)
    size_bytes = sum(tensor.nbytes for tensor in tensors_of(state))
    calls = contenders(state, directory)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for index in range(rounds + 1):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            for path in directory.glob("*.*"):
                path.unlink()  # nobody pays for the truncation of an older file
            os.sync()  # nor for the pages of the contender before
            started_s = time.perf_counter()
            calls[name]()
            if index > 0:  # the first round warms up
                seconds[name].append(time.perf_counter() - started_s)
    base_s = statistics.median(seconds["memcpy"])
    print(f"\n{parameters / 1e6:.0f} M parameters, {size_bytes / 1e6:.0f} MB, {rounds} rounds")
    print(f"{'':<22}{'median s':>10}{'min':>8}{'max':>8}{'MB/s':>8}{'x memcpy':>10}")
    for name, taken in seconds.items():
        middle_s = statistics.median(taken)
        print(
            f"{name:<22}{middle_s:>10.3f}{min(taken):>8.3f}{max(taken):>8.3f}"
            f"{size_bytes / middle_s / 1e6:>8.0f}{middle_s / base_s:>10.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=float, nargs="+", default=[5, 50], help="millions")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--directory", type=Path, help="where to write (default: the temporary one)"
    )
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for millions in arguments.parameters:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
            measure(int(millions * 1e6), rounds=arguments.rounds, directory=Path(directory))


if __name__ == "__main__":
    main()
