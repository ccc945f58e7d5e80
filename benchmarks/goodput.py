"""The share of the time that makes committed progress while a fault comes every few seconds.

Run by hand, from the repository's root:
``python benchmarks/goodput.py --seconds 180 --every-s 10 --world 3 --json goodput.jsonl``
(about 9 minutes: ``ddp_runner`` first, then ``torchrun --max-restarts`` with a checkpoint every 25 steps).
Both are measured alike, from outside: steps that had not been committed before, times the seconds a step takes
in a run of the same job without a fault, over the time. With ``--all-ranks`` all of them are killed at once, every 30 s. ``ddp_runner`` reports its own figure besides, from its summary. Goal: 0.97.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
from contenders import end_by_signal, machine, show_machine
from faulted import START_TIMEOUT_S, Faulted, Harm, Job, Mark, Ours, Torchrun

SETTLED_STEPS = 50
LOOK_S = 0.004
NEVER_S = 120.0  # without a step: it will not come back


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How far the run was at a moment."""

    at_s: float
    mark: Mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """``share``: of the time, in steps that count. ``reported``: what the run says of itself."""

    contender: str
    world: int
    state_mb: float
    faults: int
    seconds: float
    new_steps: int
    redone_steps: int
    step_s: float
    share: float
    reported: float | None

    def line(self) -> str:
        reported = "" if self.reported is None else f"{self.reported:.3f}"
        return (
            f"| {self.contender} | {self.world} | {self.state_mb:g} | {self.faults} | "
            f"{self.new_steps} | {self.redone_steps} | {self.step_s * 1e3:.1f} | {self.share:.3f} | {reported} |"
        )


def watch(run: Faulted, looks: list[Look], *, until_s: float) -> None:
    """Keep looking; a look is kept where something has changed."""
    while (now_s := time.monotonic()) < until_s:
        if run.process.poll() is not None:
            raise RuntimeError(f"{run.name} ended:\n{run.said()[-3000:]}")
        mark = run.mark()
        if not looks or mark != looks[-1].mark:
            looks.append(Look(at_s=now_s, mark=mark))
        elif now_s - looks[-1].at_s > NEVER_S:
            raise RuntimeError(f"{run.name} has not come back:\n{run.said()[-3000:]}")
        time.sleep(LOOK_S)


def harm(run: Faulted, kind: Harm, rank: int) -> bool:
    """Whether there was somebody to harm: a contender that is down already is spared."""
    try:
        run.harm(kind, rank)
    except (psutil.NoSuchProcess, ProcessLookupError, IndexError, FileNotFoundError):
        return False
    return True


def pace_without_faults(contender: type[Faulted], job: Job, seconds: float) -> float:
    """Seconds a step, saves and all, of the same job without a fault."""
    with contender(job) as run:
        run.wait_past(SETTLED_STEPS, timeout_s=START_TIMEOUT_S)
        looks: list[Look] = []
        sys.stderr.write(f"{contender.name}: {seconds:.0f} s without faults\n")
        watch(run, looks, until_s=time.monotonic() + seconds)
    first, last = looks[0], looks[-1]
    return (last.at_s - first.at_s) / (last.mark.step - first.mark.step)


def measure(contender: type[Faulted], job: Job, asked: argparse.Namespace) -> Outcome:
    step_s = pace_without_faults(contender, job, asked.control_s)
    kinds = itertools.cycle([Harm[name.upper()] for name in asked.kinds])
    with contender(job) as run:
        run.wait_past(SETTLED_STEPS, timeout_s=START_TIMEOUT_S)
        looks: list[Look] = []
        began_s = time.monotonic()
        faults, due_s, last_harm = 0, began_s + asked.every_s, None
        while due_s < began_s + asked.seconds:
            watch(run, looks, until_s=due_s)
            due_s += asked.every_s
            if last_harm is not None and looks[-1].mark.generation <= last_harm.generation:
                continue  # still down
            last_harm = run.mark()
            faults += harm(run, next(kinds), faults % job.world)
            show(contender.name, time.monotonic() - began_s, asked.seconds, faults)
        watch(run, looks, until_s=began_s + asked.seconds)
        took_s = time.monotonic() - began_s
        reported = run.finish()["goodput"] if isinstance(run, Ours) else None
    sys.stderr.write("\n")
    return summed_up(
        contender.name, job, looks, faults=faults, seconds=took_s, step_s=step_s, reported=reported
    )


def show(name: str, passed_s: float, seconds: float, faults: int) -> None:
    sys.stderr.write(f"\r{name}: {passed_s:.0f} of {seconds:.0f} s, {faults} faults   ")
    sys.stderr.flush()


def summed_up(
    name: str,
    job: Job,
    looks: list[Look],
    *,
    faults: int,
    seconds: float,
    step_s: float,
    reported: float | None,
) -> Outcome:
    furthest = looks[0].mark.step
    new = redone = 0
    for before, after in itertools.pairwise(looks):
        steps = after.mark.step - before.mark.step
        fresh = max(0, after.mark.step - furthest)
        furthest = max(furthest, after.mark.step)
        new += fresh
        redone += max(0, steps - fresh)
    return Outcome(
        contender=name,
        world=job.world,
        state_mb=job.state_mb,
        faults=faults,
        seconds=round(seconds, 2),
        new_steps=new,
        redone_steps=redone,
        step_s=step_s,
        share=new * step_s / seconds,
        reported=reported,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=180.0, help="of each contender")
    parser.add_argument("--every-s", type=float, default=10.0, help="between two faults")
    parser.add_argument("--control-s", type=float, default=60.0, help="without faults, before")
    parser.add_argument("--world", type=int, default=3)
    parser.add_argument("--state-mb", type=float, default=2.0)
    parser.add_argument("--pace-s", type=float, default=0.016, help="a step sleeps so long")
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=[kind.name.lower() for kind in Harm],
        default=["kill", "raise"],
        help="in turn; torchrun never comes back from stop",
    )
    parser.add_argument("--contenders", nargs="+", default=["ddp_runner", "torchrun"])
    parser.add_argument("--json", type=Path, help="append a line of JSON per contender here")
    parser.add_argument(
        "--all-ranks", action="store_true", help="all ranks are killed at once, every 30 s"
    )
    asked = parser.parse_args()
    if asked.all_ranks:
        asked.kinds, asked.every_s = ["all"], 30.0
    end_by_signal()
    facts = machine()
    show_machine(facts)
    job = Job(world=asked.world, state_mb=asked.state_mb, pace_s=asked.pace_s)
    print(
        "| contender | ranks | state MB | faults | new steps | redone | ms a step | share | reported |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for contender in (Ours, Torchrun):
        if contender.name not in asked.contenders:
            continue
        outcome = measure(contender, job, asked)
        print(outcome.line(), flush=True)
        if asked.json:
            with asked.json.open("a") as file:
                file.write(json.dumps({"machine": facts, **asdict(outcome)}) + os.linesep)


if __name__ == "__main__":
    main()
