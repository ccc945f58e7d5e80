"""The same script, ``plain_restart.py``, under ``ddp_runner run`` and under ``torchrun --max-restarts``, by turns.

Run by hand, from the repository's root: ``python benchmarks/scripts.py --rounds 5 --json scripts.json``.
Measured are the seconds from the command to the first optimizer step, those from SIGKILL of a rank to the next
one, and steps per second without faults. torchrun has TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which it does
not come back on gloo. Each round starts both, in the other order than the round before; the first only warms the
page cache. For the pace both run at once, held by SIGSTOP in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
from contenders import end_by_signal, machine, show_machine
from faulted import START_TIMEOUT_S, Faulted, Harm, Job, NoComebackError, Supervised, Torchrun

KINDS: tuple[type[Faulted], ...] = (Supervised, Torchrun)
SETTLED_STEPS = 30  # with a checkpoint among them
WITHIN_S = 60.0
WARM_UP_S = 0.5  # of a slice, which do not count


@dataclass(slots=True, kw_only=True)
class Figures:
    """Of one contender and one world size; those of one index are of one round."""

    launch_s: list[float] = field(default_factory=list)
    kill_s: list[float] = field(default_factory=list)
    steps_per_s: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)  # per step, of all processes
    never: int = 0  # killed, and not back within the time


def launch_and_kill(kind: type[Faulted], job: Job, figures: Figures) -> None:
    """One start, and one rank killed."""
    began_s = time.monotonic()
    with kind(job) as run:
        figures.launch_s.append(run.wait_past(0, timeout_s=START_TIMEOUT_S) - began_s)
        run.wait_past(SETTLED_STEPS, timeout_s=START_TIMEOUT_S)
        try:
            figures.kill_s.append(run.comeback(Harm.KILL, 1, timeout_s=WITHIN_S).first_s)
        except NoComebackError:
            figures.never += 1


def pace(job: Job, figures: dict[type[Faulted], Figures], *, slices: int, seconds: float) -> None:
    """Steps per second without faults: both run, and one at a time is not held by SIGSTOP."""
    with contextlib.ExitStack() as stack:
        runs = {kind: stack.enter_context(kind(job)) for kind in KINDS}
        for run in runs.values():
            run.wait_past(SETTLED_STEPS, timeout_s=START_TIMEOUT_S)
            hold(run)
        for number in range(slices):
            for kind in KINDS if number % 2 else reversed(KINDS):
                run = runs[kind]
                hold(run, signal.SIGCONT)
                time.sleep(WARM_UP_S)
                steps, began_s, cpu_s = run.mark().step, time.monotonic(), cpu_of(run)
                time.sleep(seconds)
                steps, took_s = run.mark().step - steps, time.monotonic() - began_s
                figures[kind].steps_per_s.append(steps / took_s)
                figures[kind].cpu_ms.append(1e3 * (cpu_of(run) - cpu_s) / max(1, steps))
                hold(run)
        for run in runs.values():
            hold(run, signal.SIGCONT)


def tree(run: Faulted) -> list[psutil.Process]:
    """All processes of a run."""
    return [run.process, *run.process.children(recursive=True)]


def hold(run: Faulted, number: int = signal.SIGSTOP) -> None:
    """Stop every process of a run where it stands, or let all go on."""
    for process in tree(run):
        process.send_signal(number)


def cpu_of(run: Faulted) -> float:
    """Seconds of CPU time that all its processes have had."""
    times = [process.cpu_times() for process in tree(run)]
    return sum(one.user + one.system for one in times)


def line(name: str, ours: list[float], theirs: list[float]) -> str:
    """A row of the table: medians, and the ratio of each pair."""
    if not ours or not theirs:
        return f"| {name} | {len(ours)} and {len(theirs)} measured | | |"
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=False)]
    low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    spread = f"{median(ratios):.2f} ({low:.2f}-{high:.2f})"
    return f"| {name} | {median(ours):.2f} | {median(theirs):.2f} | {spread} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--slices", type=int, default=12, help="of each pace; 0: none")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each slice")
    parser.add_argument("--pace-s", type=float, default=0.016, help="a step's own time")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    asked = parser.parse_args()
    end_by_signal()
    facts = machine()
    show_machine(facts)
    loads: list[float] = []
    found = {(kind, world): Figures() for kind in KINDS for world in asked.worlds}
    for number in range(asked.rounds + 1 if asked.rounds else 0):
        for world in asked.worlds:
            for kind in KINDS if number % 2 else reversed(KINDS):
                job = Job(world=world, state_mb=2.0, pace_s=asked.pace_s)
                figures = found[kind, world] if number else Figures()
                launch_and_kill(kind, job, figures)
        loads.append(os.getloadavg()[0])
        sys.stderr.write(f"\rround {number} of {asked.rounds}, load {loads[-1]:.1f}  ")
    if asked.slices:
        job = Job(world=asked.worlds[0], state_mb=2.0, pace_s=asked.pace_s)
        figures = {kind: found[kind, job.world] for kind in KINDS}
        pace(job, figures, slices=asked.slices, seconds=asked.seconds)
        loads.append(os.getloadavg()[0])
    print(
        "\n| what | ddp_runner run | torchrun | ratio of each pair (middle half) |\n|---|---|---|---|"
    )
    for world in asked.worlds:
        ours, theirs = (found[kind, world] for kind in KINDS)
        print(line(f"launch to first step, {world} ranks, s", ours.launch_s, theirs.launch_s))
        print(line(f"SIGKILL to next step, {world} ranks, s", ours.kill_s, theirs.kill_s))
        if ours.steps_per_s:
            print(line(f"steps per second, {world} ranks", ours.steps_per_s, theirs.steps_per_s))
            print(line(f"CPU ms per step, {world} ranks", ours.cpu_ms, theirs.cpu_ms))
        print(f"  never back, {world} ranks: {ours.never} and {theirs.never}")
    print(
        f"load of the machine, one minute's, after each round: {', '.join(f'{x:.0f}' for x in loads)}"
    )
    if asked.json:
        rows = [
            {"contender": kind.name, "world": world, "figures": vars_of(figures)}
            for (kind, world), figures in found.items()
        ]
        asked.json.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n")


def vars_of(figures: Figures) -> dict[str, object]:
    return {name: getattr(figures, name) for name in Figures.__slots__}


if __name__ == "__main__":
    main()
