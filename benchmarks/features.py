"""What a feature costs a step: the same run with and without it, by turns, as ``throughput.py`` takes them.

Run by hand: ``python benchmarks/features.py [--cases average ...] [--rounds 10] [--size light]``.
Printed is, for each case, steps per second with the feature over those without (median and quartiles
of the rounds), and CPU per step of the whole process tree with over without. ``accumulation`` is beside
the plain script under torchrun, which accumulates with ``no_sync``.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from contenders import RANKS, SIZES, Contender, Size, machine, show_machine
from throughput import SETTLE_S, STEPS_FOR_EVER, WARM_UP_LINES, take_turns

TASK = f"{Path(__file__).with_name('feature_task.py')}:"
PARTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``off`` runs by another command where its name says so. ``needs``: modules of ``on``."""

    on: tuple[str, ...]
    off: tuple[str, ...] = ()
    other: str = "ddp_runner, off"
    needs: tuple[str, ...] = ()

    def lacks(self) -> list[str]:
        """The modules that are not installed."""
        return [name for name in self.needs if find_spec(name) is None]


UNWATCHED = ("log.gpu_watch_s=0", "recovery.explosion_window=0", "log.trackers=")


CASES = {
    "nothing": Case(on=()),  # what noise there is
    "average": Case(on=("optim.ema_decay=0.999",)),
    "loss watch": Case(on=(), off=("recovery.explosion_window=0",)),
    "copies": Case(
        on=(), off=("checkpoint.memory_every=0",)
    ),  # --slice-s 9: the clock goes on in pauses
    "Weighted": Case(on=(f"run.task={TASK}Sums",), off=(f"run.task={TASK}Mean",)),
    "named losses": Case(on=(f"run.task={TASK}Named",), off=(f"run.task={TASK}Mean",)),
    "watches and csv": Case(on=("log.gpu_watch_s=1", "log.trackers=csv"), off=UNWATCHED),
    "watches and trackers": Case(
        on=("log.gpu_watch_s=1", "log.trackers=csv,tensorboard,wandb"),
        off=UNWATCHED,
        needs=("tensorboard", "wandb"),
    ),
    "compile": Case(on=("run.compile=true",)),
    "accumulation": Case(
        on=(f"data.accumulation={PARTS}",), off=(f"--accumulate={PARTS}",), other="plain, find"
    ),
}


def measure(case: Case, size: Size, *, rounds: int, slice_s: float) -> tuple[list[float], float]:
    """Steps per second with over without, a ratio a round; and CPU per step with over without."""
    with contextlib.ExitStack() as stack:
        contenders = []
        for name, settings in (("ddp_runner, on", case.on), (case.other, case.off)):
            contender = stack.enter_context(
                Contender(name, size, steps=STEPS_FOR_EVER, settings=settings)
            )
            contender.wait_for_lines(WARM_UP_LINES)
            contender.pause()
            contenders.append(contender)
        time.sleep(SETTLE_S)
        turns = take_turns(contenders, rounds=rounds, slice_s=slice_s)
        step_s = [
            [own.step_s(one, turn=turn) for turn in range(rounds)]
            for one, own in zip(contenders, turns, strict=True)
        ]
        ratios = [
            statistics.median(off) / statistics.median(on)
            for on, off in zip(*step_s, strict=True)
            if on and off
        ]
        cpu_s = [
            own.cpu_per_step_s(one, statistics.median(value for turn in each for value in turn))
            for one, own, each in zip(contenders, turns, step_s, strict=True)
        ]
        return ratios, cpu_s[0] / cpu_s[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--slice-s", type=float, default=2.5)
    parser.add_argument("--size", choices=tuple(SIZES), default="small")
    asked = parser.parse_args()
    show_machine(machine())
    print(f"{RANKS} ranks, {asked.size}; above 1: faster with it; CPU below 1: less with it")
    for name in asked.cases:
        if lacking := CASES[name].lacks():
            print(f"{name:<24} left out: {', '.join(lacking)} not installed", flush=True)
            continue
        ratios, cpu = measure(
            CASES[name], SIZES[asked.size], rounds=asked.rounds, slice_s=asked.slice_s
        )
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"{name:<24}{middle:>8.3f} ({low:.3f} to {high:.3f}), CPU {cpu:.3f}, n={len(ratios)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
