"""How soon drills find a wrong gradient, against their budget: calculated, simulated, and with ``--real`` measured.

Run by hand, from the repository's root:
``python benchmarks/detection.py --json detection.json`` (calculated and simulated, half a minute)
``python benchmarks/detection.py --real 3`` (also real runs of two ranks, one of which is always wrong; a minute each)

A drill computes one rank's share of one step again. With a budget ``f`` (``recovery.proof_share``), drills that cost
``c`` seconds of the machine, steps of ``t`` seconds and ``n`` ranks, one drill comes every ``c / f`` seconds on average,
so every ``m = c / (f t)`` steps, each of a rank drawn at random. Hence

* of single wrong gradients, each in one step of one rank, a share of ``1 / (m n)`` is found;
* drills of a rank that is always wrong come every ``m n`` steps on average, at random: the median is ``ln 2 m n`` steps
  (of one rank alone ``m``: the pauses are drawn from half to one and a half of their mean).

The simulation has the order's lead and the drill's own time too, which count where the budget is large.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ddp_runner.features.proof.rules import pause_s, step_to_drill  # noqa: E402

BUDGETS = (0.001, 0.005, 0.02, 0.1)
STEPS_S = (0.01, 0.07)
RUNS = 400
SHORT_BUDGETS = (0.001, 0.005, 0.02, 0.05, 0.1)
SHORT_RUNS, SHORT_STEPS = 50, 2_000  # those of a rank that is wrong from the step WRONG_FROM on
WRONG_FROM = 20


def calculated(budget: float, *, cost_s: float, step_s: float, ranks: int) -> tuple[float, float]:
    """Return the share of single wrong gradients that is found, and the median of steps until a wrong rank is."""
    steps_apart = cost_s / (budget * step_s)
    until = steps_apart if ranks == 1 else math.log(2) * steps_apart * ranks
    return min(1.0, 1 / (steps_apart * ranks)), until


def drilled(
    budget: float, *, cost_s: float, step_s: float, ranks: int, steps: int, chance: random.Random
) -> list[tuple[int, int]]:
    """Return step and rank of each drill of one run, by the rules of the product."""
    found, step = [], 0
    while True:
        step += math.ceil(pause_s(cost_s, share=budget, drawn=chance.random()) / step_s)
        at = step_to_drill(step, step_s=step_s, total_steps=steps)
        if at is None:
            return found
        found.append((at, chance.randrange(ranks)))
        step = at + math.ceil(cost_s / step_s)  # it is computed, and the next pause begins


def simulated(budget: float, *, cost_s: float, step_s: float, ranks: int) -> tuple[float, float]:
    """Return the same as :func:`calculated`, counted in runs that draw as the supervisor does."""
    chance = random.Random(1)
    _, until = calculated(budget, cost_s=cost_s, step_s=step_s, ranks=ranks)
    steps = int(until * 40)
    firsts, singles, hits = [], 0, 0
    for _ in range(RUNS):
        drills = drilled(
            budget, cost_s=cost_s, step_s=step_s, ranks=ranks, steps=steps, chance=chance
        )
        firsts.append(next((step for step, rank in drills if rank == 0), steps))
        known = set(drills)
        singles += steps * ranks
        hits += len(known)
    return hits / singles, median(firsts)


def short_runs(
    budget: float, *, cost_s: float, step_s: float, ranks: int
) -> tuple[float, float, float]:
    """Return for 50 runs of 2,000 steps with a rank that is always wrong: in how many it is found, and the median step.

    First the share that is calculated. The median is of all runs; infinite if half of them do not find it.
    """
    chance = random.Random(2)
    steps_apart = cost_s / (budget * step_s)
    expected = 1 - math.exp(-(SHORT_STEPS - WRONG_FROM) / (steps_apart * ranks))
    firsts = []
    for _ in range(SHORT_RUNS):
        drills = drilled(
            budget, cost_s=cost_s, step_s=step_s, ranks=ranks, steps=SHORT_STEPS, chance=chance
        )
        wrong = (step for step, rank in drills if rank == 0 and step >= WRONG_FROM)
        firsts.append(next(wrong, math.inf))
    found = sum(map(math.isfinite, firsts))
    return expected, found / SHORT_RUNS, sorted(firsts)[SHORT_RUNS // 2]


def measured(budget: float, *, step_s: float, steps: int) -> dict[str, float]:
    """Train two ranks, one of which is always wrong from then on; return the step of the drill that has found it."""
    with tempfile.TemporaryDirectory(prefix="detection_") as folder:
        words = (
            *(sys.executable, "-m", "ddp_runner", "train", "--cpu", "-n", "2"),
            *("--task", str(ROOT / "benchmarks" / "paced.py:Paced"), f"task.pace_s={step_s}"),
            *("-b", "8", "--max-steps", str(steps), "-l", f"{folder}/logs", "-c", f"{folder}/kept"),
            *(f"recovery.proof_share={budget}", "recovery.drill_at=2"),
            *("recovery.on_wrong_gradient=continue", "num_workers=0", "log.display=plain"),
            *("--inject", f"wrong_gradient:rank=1,step={WRONG_FROM},times=100000"),
            "save_interval=0",
        )
        subprocess.run(words, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        lines = Path(folder, "logs", "events.jsonl").read_text(encoding="utf-8").splitlines()
    drills = [one for one in map(json.loads, lines) if one["event"] == "drill"]
    wrong = [one["step"] for one in drills if one["differs"]]
    missed = [
        one
        for one in drills
        if one["rank"] == 1 and one["step"] >= WRONG_FROM and not one["differs"]
    ]
    return {
        "step_s": step_s,
        "found_at": float(min(wrong, default=-1)),
        "drills": float(len(drills)),
        "missed": float(len(missed)),
        "drill_s": median(one["seconds"] for one in drills),
    }


def main() -> None:
    """Print a table, and write it as JSON where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cost-s", type=float, default=0.5, help="of a drill, of the machine")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--real", type=int, default=0, help="real runs")
    parser.add_argument("--real-steps", type=int, default=1000)
    parser.add_argument("--real-budget", type=float, default=0.2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = []
    print("budget  step    single found            steps until a wrong rank is found")
    print("                calculated  simulated   calculated  simulated")
    for step_s in STEPS_S:
        for budget in BUDGETS:
            known = {"cost_s": given.cost_s, "step_s": step_s, "ranks": given.ranks}
            share, steps = calculated(budget, **known)
            share_seen, steps_seen = simulated(budget, **known)
            rows.append([budget, step_s, share, share_seen, steps, steps_seen])
            print(
                f"{budget:6.1%}  {step_s * 1e3:2.0f} ms {share:11.4%} {share_seen:10.4%}"
                f" {steps:12,.0f} {steps_seen:10,.0f}"
            )
    print(f"{SHORT_RUNS} runs of {SHORT_STEPS:,} steps: share that finds the rank, calculated and")
    print("simulated, and the median step")
    short = []
    for step_s in STEPS_S:
        for budget in SHORT_BUDGETS:
            seen = short_runs(budget, cost_s=given.cost_s, step_s=step_s, ranks=given.ranks)
            short.append([budget, step_s, *seen])
            print(
                f"{budget:6.1%}  {step_s * 1e3:2.0f} ms {seen[0]:7.0%} {seen[1]:6.0%} {seen[2]:8,.0f}"
            )
    real = [
        measured(given.real_budget, step_s=0.02, steps=given.real_steps) for _ in range(given.real)
    ]
    for one in real:
        print(f"a real run: {one}")
    if given.json is not None:
        given.json.write_text(
            json.dumps({"rows": rows, "short": short, "real": real}, indent=1), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
