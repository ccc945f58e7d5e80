"""Measures the time that ``keep_local()`` takes in each step: sealing before the commit, and the look behind the update.

Run by hand: ``python benchmarks/local_state.py [--steps 400]``. One process, its CPU time, medians over the steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from ddp_runner.training.local_state.local_state import LocalState

ALONE = SimpleNamespace(rank=0, local_rank=0, world_size=1, local_world_size=1, local_slots=())


class Cart:
    """An environment: a position, a count and a generator."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng, self.at, self.games = rng, np.zeros(2), 0

    def push(self) -> None:
        """Change what a step of play changes."""
        self.at += 0.1 * self.rng.standard_normal(2)
        self.games += 1


def kinds() -> Iterator[tuple[str, dict, Callable[[int], object]]]:
    """Yield a name, the kept objects, and the change that a step makes to them."""
    rng, mean = np.random.default_rng(1), {"value": 0.0, "count": 0}
    cart = Cart(np.random.default_rng(2))
    yield "a NumPy generator", {"rng": rng}, lambda _: rng.standard_normal(4)
    yield "a running mean", {"mean": mean}, lambda step: mean.update(value=1 / step, count=step)
    yield "a small environment with a generator", {"cart": cart}, lambda _: cart.push()
    for size in (1_000, 10_000):
        replay = deque(((np.zeros(4, np.float32), 1, 0.5) for _ in range(size)), maxlen=size)

        def play(_: int, replay: deque = replay) -> None:
            replay.append((np.ones(4, np.float32), 1, 0.5))

        yield f"a deque of {size:,} tuples with an array each", {"replay": replay}, play
    rows = np.zeros((100_000, 8), np.float32)
    yield "a buffer of 100,000 rows in one array", {"rows": rows}, lambda step: rows[step].fill(1)


def measure(
    objects: dict, change: Callable[[int], object], *, steps: int
) -> tuple[float, float, float]:
    """Return milliseconds per step of each part, and the size in kilobytes."""
    state = LocalState(objects, option="keep_local")
    state.belongs_to(ALONE)
    state.begin(0)
    sealed, settled = [], []
    for step in range(1, steps + 1):
        change(step)
        began_s = time.process_time()
        state.seal(step)
        sealed_s = time.process_time()
        state.committed(step)
        state.settle()
        sealed.append(sealed_s - began_s)
        settled.append(time.process_time() - sealed_s)
    size = state._size_bytes  # noqa: SLF001 - a figure of it
    return *(1e3 * statistics.median(each) for each in (sealed, settled)), size / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    asked = parser.parse_args()
    print("| kept | seal, ms | look, ms | kB |\n|---|---|---|---|")
    for name, objects, change in kinds():
        seal_ms, look_ms, size = measure(objects, change, steps=asked.steps)
        print(f"| {name} | {seal_ms:.3f} | {look_ms:.3f} | {size:,.1f} |", flush=True)


if __name__ == "__main__":
    main()
