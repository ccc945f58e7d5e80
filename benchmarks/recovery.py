"""Seconds from a fault to the next committed step: ``ddp_runner`` beside ``torchrun --max-restarts``.

Run by hand, from the repository's root:
``python benchmarks/recovery.py --worlds 3 --rounds 3 --json recovery.json`` (2 MB, all kinds, 3 minutes)
``python benchmarks/recovery.py --matrix --json matrix.json`` (2, 3, 4, 8 ranks; 2 MB, 100 MB, 1 GB; 15 minutes)
The two take turns within a round; each round starts them again and harms each ``--faults`` times in every way.
For torchrun, "to new ground" adds the steps since its checkpoint, which are done again; ours does none again.
Of our own parts "abort" lasts until the others have left: at the end of the forward or the optimizer's call that they are in.
What has not come back once within ``--within-s`` is not tried again in larger jobs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from contenders import end_by_signal, machine, show_machine
from faulted import (
    SAVE_EVERY,
    START_TIMEOUT_S,
    Comeback,
    Faulted,
    Harm,
    Job,
    NoComebackError,
    Ours,
    Torchrun,
)
from rivals import RIVALS

CONTENDERS: tuple[type[Faulted], ...] = (Ours, Torchrun, *RIVALS)
MATRIX = {
    "worlds": [2, 3, 4, 8],
    "state_mb": [2.0, 100.0, 1000.0],
    "harms": ["kill1", "all", "raise", "stop"],
}
HARMS = {
    "kill1": (Harm.KILL, 1),
    "kill0": (Harm.KILL, 0),
    "all": (Harm.ALL, 0),
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


def settled_steps(state_mb: float, tensors: int) -> int:
    """Steps between two faults, at the least: a new process is watched by its pace from the third on."""
    return 4 if tensors > 1000 else 12 if state_mb <= 10 else 6 if state_mb <= 200 else 4


def faults_for(state_mb: float, asked: argparse.Namespace) -> int:
    """How often each harm is done in a round; large states take long, and vary less."""
    return max(1, asked.faults if state_mb <= 200 else asked.faults - 2)


def harm_all(
    kind: type[Faulted], job: Job, cells: list[Cell], *, faults: int, within_s: float
) -> None:
    """One run of a contender that meets every harm in turn; what it does not come back from ends it."""
    settled = settled_steps(job.state_mb, job.tensors)
    done: list[Cell] = []
    with kind(job) as run:
        run.wait_past(settled, timeout_s=START_TIMEOUT_S)
        # A stop comes last: it may be the end of a contender.
        for cell in sorted(cells, key=lambda cell: HARMS[cell.harm][0] is Harm.STOP):
            harm, rank = HARMS[cell.harm]
            if (
                harm is Harm.ALL
            ):  # before the first save there is nothing to go back to but the start
                run.wait_past(SAVE_EVERY + settled, timeout_s=START_TIMEOUT_S)
            for number in range(faults):
                show(
                    f"{cell.contender}, {job.world} ranks, {job.state_mb:g} MB: {cell.harm} {number + 1}"
                )
                try:
                    cell.comebacks.append(run.comeback(harm, rank, timeout_s=within_s))
                    done.append(cell)
                    run.wait_past(run.mark().step + settled, timeout_s=START_TIMEOUT_S)
                except NoComebackError:
                    cell.never += 1
                    return
        if isinstance(run, Ours):
            reported = run.finish()["faults"]
            if len(reported) == len(done):
                for cell, fault in zip(done, reported, strict=True):
                    cell.seconds.append(fault["seconds"])


def show(text: str) -> None:
    sys.stderr.write(f"\r\033[K{text}")
    sys.stderr.flush()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--matrix", action="store_true", help="every size, with few repeats")
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--state-mb", type=float, nargs="+", default=[2.0])
    parser.add_argument("--tensors", type=int, default=0, help="of small layers, say 10000")
    parser.add_argument(
        "--harms", nargs="+", choices=HARMS, default=["kill1", "kill0", "raise", "stop"]
    )
    parser.add_argument(
        "--contenders", nargs="+", default=[kind.name for kind in CONTENDERS], help="see rivals.py"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--faults", type=int, default=3, help="per round")
    parser.add_argument("--within-s", type=float, default=90.0, help="then it is called never")
    parser.add_argument("--timeout-s", type=float, default=0.0, help="the plain script's, for gloo")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    asked = parser.parse_args()
    if asked.matrix:
        asked = argparse.Namespace(**{**vars(asked), **MATRIX, "rounds": 1})
    end_by_signal()
    facts = machine()
    show_machine(facts)
    kinds = [kind for kind in CONTENDERS if kind.name in asked.contenders]
    cells: list[Cell] = []
    print(
        "| contender | ranks | state MB | fault | s to a step (middle half) | to new ground | redone |"
    )
    print("|---|---|---|---|---|---|---|")
    given_up: set[tuple[str, str]] = set()
    for state_mb, world in itertools.product(asked.state_mb, asked.worlds):
        job = Job(world=world, state_mb=state_mb, timeout_s=asked.timeout_s, tensors=asked.tensors)
        rows = [
            [
                Cell(contender=kind.name, world=world, state_mb=state_mb, harm=name)
                for name in asked.harms
                if (kind.name, name) not in given_up
            ]
            for kind in kinds
        ]
        for _ in range(asked.rounds):
            for kind, row in zip(kinds, rows, strict=True):
                tried = [cell for cell in row if not cell.never]
                harm_all(
                    kind,
                    job,
                    tried,
                    faults=min(faults_for(state_mb, asked), kind.harms_at_most),
                    within_s=asked.within_s,
                )
        show("")
        for cell in itertools.chain(*rows):
            given_up |= {(cell.contender, cell.harm)} if cell.never else set()
            print(cell.line(), flush=True)
            if parts := cell.parts():
                print(f"  ms of ours: {parts}", flush=True)
            cells.append(cell)
    if asked.json:
        rows = [asdict(cell) for cell in cells]
        asked.json.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
