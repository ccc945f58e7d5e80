"""Seconds from the launch command to the first committed step, against torchrun.

Run by hand: ``python benchmarks/launch.py [--rounds 7] [--json FILE]``. Measured from the spawn of the
command to the time stamp of the first line of metrics, which both write once step 1 is committed. The
contenders take turns; the first round only warms the page cache. ``ddp_runner`` builds the same
model over the same text, and also opens its logs, locks its folders and forms a generation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from contenders import SIZES, Contender, Size, end_by_signal, machine, show_machine, stamp_s

STEPS = 1000  # more than it gets to
NAMES = ("ddp_runner", "plain")


def launch_s(name: str, size: Size) -> float:
    """Seconds to the first step of one launch, which is then ended."""
    with Contender(name, size, steps=STEPS) as contender:
        first = contender.wait_for_lines(1)[0]
        return stamp_s(first["utc"]) - contender.started_s


def measure(size: Size, *, rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    for number in range(rounds + 1):
        for name in NAMES if number % 2 else reversed(NAMES):
            taken_s = launch_s(name, size)
            if number > 0:
                seconds[name].append(taken_s)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    asked = parser.parse_args()
    end_by_signal()
    facts = machine()
    show_machine(facts)
    seconds = measure(SIZES["small"], rounds=asked.rounds)
    print(f"\n{'contender':<14}{'median s':>10}{'min':>8}{'max':>8}")
    for name, taken in seconds.items():
        shown = f"{statistics.median(taken):>10.2f}{min(taken):>8.2f}{max(taken):>8.2f}"
        print(f"{name:<14}{shown}")
    ratios = [ours / theirs for ours, theirs in zip(*seconds.values(), strict=True)]
    middle = statistics.median(ratios)
    print(f"ours / torchrun: {middle:.2f} (of each pair: {min(ratios):.2f}-{max(ratios):.2f})")
    if asked.json:
        record = {"machine": facts, "seconds": seconds, "ratio": middle, "ratios": ratios}
        asked.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
