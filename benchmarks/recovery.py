"""Seconds from a fault to the next committed step: ``ddp_runner`` beside ``torchrun --max-restarts``.

Run by hand: ``python benchmarks/recovery.py [--worlds 2 3 4] [--state-mb 2 100] [--rounds 3]``. The two
take turns within a round; each round starts them anew and harms them ``--faults`` times. For torchrun,
"to new ground" adds the steps since its checkpoint, which are done again; ours does none again.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from contenders import machine, show_machine
from faulted import START_TIMEOUT_S, Comeback, Faulted, Harm, Job, NoComebackError, Ours, Torchrun

SETTLED_STEPS = 12  # between two faults, at the least: a new process has its pace then
HARMS = {
    "kill1": (Harm.KILL, 1),
    "kill0": (Harm.KILL, 0),
    "raise": (Harm.RAISE, 1),
    "stop": (Harm.STOP, 1),
}


@dataclass(slots=True, kw_only=True)
class Cell:
    """One line of the table: a contender, a job, a kind of fault."""

    contender: str
    world: int
    state_mb: float
    harm: str
    comebacks: list[Comeback] = field(default_factory=list)
    seconds: list[dict[str, float]] = field(default_factory=list)  # of our own parts
    never: int = 0

    def line(self) -> str:
        where = f"{self.contender} | {self.world} | {self.state_mb:g} | {self.harm}"
        if not self.comebacks:
            return f"| {where} | never ({self.never} of {self.never}) | | |"
        first = [comeback.first_s for comeback in self.comebacks]
        beyond = median(comeback.beyond_s for comeback in self.comebacks)
        redone = median(comeback.steps_redone for comeback in self.comebacks)
        low, _, high = quantiles(first, n=4) if len(first) > 1 else (first[0],) * 3
        spread = f"{median(first):.3f} ({low:.3f}-{high:.3f}, n={len(first)})"
        return f"| {where} | {spread} | {beyond:.3f} | {redone:g} |"

    def parts(self) -> str:
        names = self.seconds[0] if self.seconds else {}
        values = {name: median(each.get(name, 0.0) for each in self.seconds) for name in names}
        return ", ".join(f"{name} {value * 1e3:.0f}" for name, value in values.items())


def harm_often(kind: type[Faulted], job: Job, cell: Cell, *, faults: int, within_s: float) -> None:
    harm, rank = HARMS[cell.harm]
    with kind(job) as run:
        run.wait_past(SETTLED_STEPS, timeout_s=START_TIMEOUT_S)
        for _ in range(faults):
            try:
                cell.comebacks.append(run.comeback(harm, rank, timeout_s=within_s))
            except NoComebackError:
                cell.never += 1
                break
            run.wait_past(run.mark().step + SETTLED_STEPS, timeout_s=START_TIMEOUT_S)
        if isinstance(run, Ours):
            cell.seconds += [fault["seconds"] for fault in run.finish()["faults"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--state-mb", type=float, nargs="+", default=[2.0])
    parser.add_argument("--harms", nargs="+", choices=HARMS, default=list(HARMS))
    parser.add_argument("--contenders", nargs="+", default=["ddp_runner", "torchrun"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--faults", type=int, default=3, help="per round")
    parser.add_argument("--within-s", type=float, default=90.0, help="then it is called never")
    parser.add_argument("--timeout-s", type=float, default=0.0, help="the plain script's, for gloo")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    asked = parser.parse_args()
    facts = machine()
    show_machine(facts)
    kinds = [kind for kind in (Ours, Torchrun) if kind.name in asked.contenders]
    cells = []
    print(
        "| contender | ranks | state MB | fault | s to a step (middle half) | to new ground | redone |"
    )
    print("|---|---|---|---|---|---|---|")
    for state_mb in asked.state_mb:
        for world in asked.worlds:
            for name in asked.harms:
                row = [
                    Cell(contender=kind.name, world=world, state_mb=state_mb, harm=name)
                    for kind in kinds
                ]
                job = Job(world=world, state_mb=state_mb, timeout_s=asked.timeout_s)
                for _ in range(asked.rounds):
                    for kind, cell in zip(kinds, row, strict=True):
                        if not cell.never:
                            harm_often(
                                kind, job, cell, faults=asked.faults, within_s=asked.within_s
                            )
                for cell in row:
                    print(cell.line(), flush=True)
                    if parts := cell.parts():
                        print(f"  ms of ours: {parts}", flush=True)
                cells += row
    if asked.json:
        rows = [asdict(cell) for cell in cells]
        asked.json.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
