"""What a feature costs a step: the same run with and without it, by turns, as ``throughput.py`` takes them.

Run by hand: ``python benchmarks/features.py [--cases average ...] [--rounds 10] [--size light]``.
Printed is, for each case, steps per second with the feature over those without (median and quartiles
of the rounds), CPU per step of the whole process tree with over without, and what of it is not the
ranks', with and without. ``accumulation`` is beside
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

from contenders import RANKS, SIZES, Contender, Size, end_by_signal, machine, show_machine
from throughput import SETTLE_S, STEPS_FOR_EVER, WARM_UP_LINES, take_turns

TASK = f"{Path(__file__).with_name('feature_task.py')}:"
PARTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """``ratios``: steps per second with over without, one a round; ``cpu``: per step with over without.

    ``beside_ms``: CPU a step of processes that are no rank's, with and without.
    """

    ratios: list[float]
    cpu: float
    beside_ms: tuple[float, ...]


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


# W&B is given a step once that is in a checkpoint.
SAVES = "checkpoint.save_every_steps=100"
UNWATCHED = (SAVES, "log.gpu_watch_s=0", "recovery.explosion_window=0", "log.trackers=")


CASES = {
    "nothing": Case(on=()),  # what noise there is
    "average": Case(on=("optim.ema_decay=0.999",)),
    "loss watch": Case(on=(), off=("recovery.explosion_window=0",)),
    "copies": Case(
        on=(), off=("checkpoint.memory_every=0",)
    ),  # --slice-s 9: the clock goes on in pauses
    "Weighted": Case(on=(f"run.task={TASK}Sums",), off=(f"run.task={TASK}Mean",)),
    "named losses": Case(on=(f"run.task={TASK}Named",), off=(f"run.task={TASK}Mean",)),
    "watches and csv": Case(on=(SAVES, "log.gpu_watch_s=1", "log.trackers=csv"), off=UNWATCHED),
    "watches and trackers": Case(
        on=(SAVES, "log.gpu_watch_s=1", "log.trackers=csv,tensorboard,wandb"),
        off=UNWATCHED,
        needs=("tensorboard", "wandb"),
    ),
    "compile": Case(on=("run.compile=true",)),
    "accumulation": Case(
        on=(f"data.accumulation={PARTS}",), off=(f"--accumulate={PARTS}",), other="plain, find"
    ),
}


def measure(case: Case, size: Size, *, rounds: int, slice_s: float) -> Measured:
    """The two by turns."""
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
        begins = [(one.lines()[-1]["step"], one.beside_cpu_s()) for one in contenders]
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
        beside_ms = tuple(
            (one.beside_cpu_s() - cpu) * 1e3 / (one.lines()[-1]["step"] - step)
            for one, (step, cpu) in zip(contenders, begins, strict=True)
        )
        return Measured(ratios=ratios, cpu=cpu_s[0] / cpu_s[1], beside_ms=beside_ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--slice-s", type=float, default=2.5)
    parser.add_argument("--size", choices=tuple(SIZES), default="small")
    asked = parser.parse_args()
    end_by_signal()
    show_machine(machine())
    print(f"{RANKS} ranks, {asked.size}; above 1: faster with it; CPU below 1: less with it")
    for name in asked.cases:
        if lacking := CASES[name].lacks():
            print(f"{name:<24} left out: {', '.join(lacking)} not installed", flush=True)
            continue
        found = measure(CASES[name], SIZES[asked.size], rounds=asked.rounds, slice_s=asked.slice_s)
        low, middle, high = statistics.quantiles(found.ratios, n=4)
        beside = " / ".join(f"{ms:.2f}" for ms in found.beside_ms)
        if not CASES[name].other.startswith("ddp_runner"):
            beside = "unknown /"  # the other's ranks have no such names
        print(
            f"{name:<24}{middle:>8.3f} ({low:.3f} to {high:.3f}), CPU {found.cpu:.3f}, beside the ranks"
            f" {beside} ms a step, n={len(found.ratios)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
