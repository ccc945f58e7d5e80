"""What comparing the replicas costs: a run that does so at every step against one that never does.

Run by hand: ``python benchmarks/replica_check.py [--sizes small large] [--rounds 8] [--json FILE]``.
The two take turns as in ``throughput.py``. The difference of their steps is one comparison; spread
over the default interval it is the share of a step that is shown, by wall time and by CPU time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from contenders import SIZES, Contender, Size, end_by_signal, machine, show_machine
from throughput import SETTLE_S, STEPS_FOR_EVER, WARM_UP_LINES, take_turns

from ddp_runner.core.settings import RecoverySettings

INTERVAL_STEPS = RecoverySettings().replica_check_steps
SLICE_S = {"tiny": 1.0, "small": 3.0, "many": 12.0, "large": 20.0}


def measure(size: Size, *, rounds: int) -> dict:
    with contextlib.ExitStack() as stack:
        contenders = []
        for steps in (0, 1):
            settings = (f"replica_check_steps={steps}",)
            contender = stack.enter_context(
                Contender("ddp_runner", size, steps=STEPS_FOR_EVER, settings=settings)
            )
            contender.wait_for_lines(WARM_UP_LINES)
            contender.pause()
            contenders.append(contender)
        time.sleep(SETTLE_S)
        turns = take_turns(contenders, rounds=rounds, slice_s=SLICE_S[size.name])
        wall_s, cpu_s = [], []
        for contender, own in zip(contenders, turns, strict=True):
            stretches = [own.step_s(contender, turn=turn) for turn in range(rounds)]
            wall_s.append(statistics.median(value for each in stretches for value in each))
            cpu_s.append(own.cpu_per_step_s(contender, wall_s[-1]))
    return {
        "size": size.name,
        "step_ms": wall_s[0] * 1e3,
        "check_ms": (wall_s[1] - wall_s[0]) * 1e3,
        "share": (wall_s[1] / wall_s[0] - 1) / INTERVAL_STEPS,
        "cpu_share": (cpu_s[1] / cpu_s[0] - 1) / INTERVAL_STEPS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=["small", "large"])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    asked = parser.parse_args()
    end_by_signal()
    facts = machine()
    show_machine(facts)
    print(f"\n{'size':<8}{'ms/step':>9}{'one check, ms':>15}{'share':>10}{'of CPU':>10}")
    rows = []
    for name in asked.sizes:
        row = measure(SIZES[name], rounds=asked.rounds)
        rows.append(row)
        print(
            f"{name:<8}{row['step_ms']:>9.2f}{row['check_ms']:>15.2f}"
            f"{row['share']:>10.4%}{row['cpu_share']:>10.4%}"
        )
    print(f"shares of a step, one comparison every {INTERVAL_STEPS} steps")
    if asked.json:
        asked.json.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
