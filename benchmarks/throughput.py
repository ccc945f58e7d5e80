"""Steps per second of ``ddp_runner train`` against the plain DDP script under torchrun.

Run by hand: ``python benchmarks/throughput.py [--sizes small large] [--rounds 12] [--json FILE]``.
All contenders are started and warmed up, then take turns: one runs for a slice of some seconds
while SIGSTOP holds the others, in an order that rotates. So a slow moment of the machine meets all
alike. Counted are stretches of 10 steps inside one slice: wall time per step, of which a ratio
compares the means of a round, and beside it, as the steadier witness, CPU time per step of the whole
process tree (launcher, store and loaders too). Drills at random steps take a share of the time on the
clock, of which a contender trains only a part: they are asked for as much less often.
``--check`` first trains both for 40 steps and compares the weights bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from contenders import (
    LOG_INTERVAL,
    NAMES,
    ROOT,
    SIZES,
    Contender,
    Size,
    end_by_signal,
    machine,
    show_machine,
)

BEFORE = "ddp_runner, before"
STEPS_FOR_EVER = 1_000_000
WARM_UP_LINES = 10  # behind the drill at step 50
SLICE_S = {"tiny": 1.0, "light": 2.0, "small": 3.0, "many": 12.0, "large": 6.0}
SETTLE_S = 0.3
PROOF_SHARE = 0.005  # the default of recovery.proof_share
# A supervisor that is held and let go finds its ranks silent for the whole pause.


@dataclass(slots=True)
class Turns:
    """What one contender did in its slices."""

    slices: list[tuple[float, float]] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)  # of the tree, at each slice's end

    def step_s(self, contender: Contender, *, turn: int) -> list[float]:
        """Seconds per step of every stretch that lies inside slice ``turn``."""
        began_s, ended_s = self.slices[turn]
        return [
            stretch.duration_s / stretch.steps
            for stretch in contender.intervals()
            if began_s <= stretch.ended_s - stretch.duration_s and stretch.ended_s <= ended_s
        ]

    def cpu_per_step_s(self, contender: Contender, typical_s: float) -> float:
        """CPU seconds per step from the end of the first slice to the end of the last."""
        done = []
        for _, ended_s in (self.slices[0], self.slices[-1]):
            newest = [each for each in contender.intervals() if each.ended_s <= ended_s][-1]
            since_s = min(ended_s - newest.ended_s, LOG_INTERVAL * typical_s)
            done.append(newest.step + since_s / typical_s)
        return (self.cpu_s[-1] - self.cpu_s[0]) / (done[1] - done[0])


def take_turns(contenders: list[Contender], *, rounds: int, slice_s: float) -> list[Turns]:
    turns = [Turns() for _ in contenders]
    for number in range(rounds):
        start = number % len(contenders)
        for index in (*range(start, len(contenders)), *range(start)):
            contender = contenders[index]
            began_s = time.time()
            contender.resume()
            time.sleep(slice_s)
            contender.pause()
            turns[index].slices.append((began_s, time.time()))
            turns[index].cpu_s.append(contender.cpu_s())
    return turns


def measure(
    size: Size, *, rounds: int, slice_s: float, settings: tuple[str, ...], before: Path | None
) -> list[dict]:
    """A row per contender; ``ratio`` is steps per second of ours over theirs, by rounds."""
    roots = dict.fromkeys(NAMES, ROOT) | ({BEFORE: before} if before else {})
    with contextlib.ExitStack() as stack:
        contenders = []
        share = PROOF_SHARE / len(roots)
        settings = (*settings, f"recovery.proof_share={share:.6f}")
        for name, root in roots.items():
            contender = stack.enter_context(
                Contender(name, size, steps=STEPS_FOR_EVER, settings=settings, root=root)
            )
            contender.wait_for_lines(WARM_UP_LINES)
            contender.pause()
            contenders.append(contender)
        time.sleep(SETTLE_S)
        turns = take_turns(contenders, rounds=rounds, slice_s=slice_s)
        return [
            _row(contender, own, contenders[0], turns[0])
            for contender, own in zip(contenders, turns, strict=True)
        ]


def _row(contender: Contender, own: Turns, ours: Contender, our_turns: Turns) -> dict:
    step_s = [own.step_s(contender, turn=turn) for turn in range(len(own.slices))]
    our_step_s = [our_turns.step_s(ours, turn=turn) for turn in range(len(our_turns.slices))]
    all_s = sorted(value for each in step_s for value in each)
    typical_s = statistics.median(all_s)
    our_typical_s = statistics.median(value for each in our_step_s for value in each)
    ratios = [
        statistics.fmean(theirs) / statistics.fmean(mine)
        for theirs, mine in zip(step_s, our_step_s, strict=True)
        if theirs and mine
    ]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    cpu_s = own.cpu_per_step_s(contender, typical_s)
    our_cpu_s = our_turns.cpu_per_step_s(ours, our_typical_s)
    return {
        "size": contender.size.name,
        "contender": contender.name,
        "stretches": len(all_s),
        "step_ms": typical_s * 1e3,
        "step_best_tenth_ms": all_s[len(all_s) // 10] * 1e3,
        "cpu_ms_per_step": cpu_s * 1e3,
        "ratio": quartiles[1],
        "ratio_quartiles": [quartiles[0], quartiles[2]],
        "ratio_best_tenth": all_s[len(all_s) // 10] / _best_tenth(our_step_s),
        "cpu_ratio": cpu_s / our_cpu_s,
    }


def _best_tenth(step_s: list[list[float]]) -> float:
    values = sorted(value for each in step_s for value in each)
    return values[len(values) // 10]


def check(size: Size) -> bool:
    """Whether all contenders end with the same weights, bit for bit."""
    import torch

    states = []
    for name in NAMES:
        with Contender(name, size, steps=40) as contender:
            contender.wait()
            loaded = torch.load(contender.checkpoint, weights_only=True)
            states.append(loaded.get("model", loaded))  # final.pt of ours is the weights alone
    first = states[0]
    return all(
        state.keys() == first.keys() and all(torch.equal(state[key], first[key]) for key in first)
        for state in states[1:]
    )


def show(rows: list[dict]) -> None:
    print(
        f"\n{'size':<7}{'contender':<20}{'ms/step':>9}{'best 10%':>10}{'CPU ms':>8}"
        f"{'steps/s ratio':>15}{'quartiles':>15}{'best 10%':>10}{'CPU ratio':>11}"
    )
    for row in rows:
        low, high = row["ratio_quartiles"]
        print(
            f"{row['size']:<7}{row['contender']:<20}{row['step_ms']:>9.2f}"
            f"{row['step_best_tenth_ms']:>10.2f}{row['cpu_ms_per_step']:>8.1f}"
            f"{row['ratio']:>15.3f}{f'{low:.3f}-{high:.3f}':>15}"
            f"{row['ratio_best_tenth']:>10.3f}{row['cpu_ratio']:>11.3f}"
        )
    print("ratios: ours to that contender's; above 1 ours is faster, or takes less CPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=["small", "large"])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--slice-s", type=float, default=0.0, help="0: 60 steps or so")
    parser.add_argument("--check", action="store_true", help="compare the weights first")
    parser.add_argument("--before", type=Path, help="another checkout of ours, to compare with")
    parser.add_argument("--set", action="append", default=[], help="a setting for ddp_runner")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    asked = parser.parse_args()
    end_by_signal()
    facts = machine()
    show_machine(facts)
    rows = []
    for name in asked.sizes:
        size = SIZES[name]
        if asked.check:
            print(f"{name}: same weights as plain DDP: {'yes' if check(size) else 'NO'}")
        slice_s = asked.slice_s or SLICE_S[name]
        rows += measure(
            size,
            rounds=asked.rounds,
            slice_s=slice_s,
            settings=tuple(asked.set),
            before=asked.before and asked.before.resolve(),
        )
    show(rows)
    if asked.json:
        asked.json.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
