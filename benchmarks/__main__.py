"""The figures that README claims, measured here: ``python -m benchmarks`` takes about a quarter of an hour.

``python -m benchmarks [recovery steps launch save goodput] [--quick] [--json FILE]``. Each row is a benchmark of its own in
this folder, run with few rounds, contenders in turn; the tables at the end have a column for each contender. torchft and
NVIDIA's in-process restart take part in the recovery where they are installed. Nothing else should run beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from contenders import end_by_signal, machine, show_machine

HERE = Path(__file__).resolve().parent
Table = Iterable[tuple[str, str, str]]  # what, contender, figure


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The median with the middle half, and the number of values."""
    low, middle, high = (
        statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    )
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f}, n={len(values)})"


def recovery(figures: dict) -> Table:
    """Seconds from a fault to the next committed step."""
    faults = {"kill1": "SIGKILL of a rank", "raise": "an exception in a rank"}
    for row in figures["rows"]:
        what = f"{faults[row['harm']]}, {row['world']} ranks: seconds to the next step"
        taken = [each["first_s"] for each in row["comebacks"]]
        yield what, row["contender"], spread(taken) if taken else "not within 90 s"
        again = sum(each["steps_redone"] for each in row["comebacks"])
        yield f"{what}; steps repeated", row["contender"], str(again)


def steps(figures: dict) -> Table:
    """Milliseconds of a step, and steps per second of ours over theirs."""
    for row in figures["rows"]:
        yield f"{row['size']} model: ms a step", row["contender"], f"{row['step_ms']:.2f}"
        low, high = row["ratio_quartiles"]
        if row["contender"] != "ddp_runner":
            figure = f"{row['ratio']:.3f} ({low:.3f}-{high:.3f})"
            yield f"{row['size']} model: our steps/s over theirs", row["contender"], figure


def launch(figures: dict) -> Table:
    """Seconds from the command to the first committed step."""
    for name, taken in figures["seconds"].items():
        yield "launch to the first step: seconds", name.replace("plain", "torchrun"), spread(taken)


def save(figures: dict) -> Table:
    """Seconds for which a save blocks training, and until it is on disk."""
    for row in figures["rows"]:
        megabytes = f"{figures['megabytes']:.0f} MB"
        yield f"a save of {megabytes} blocks: seconds", row["contender"], spread(row["blocked"], 4)
        yield (
            f"a save of {megabytes}, until written: seconds",
            row["contender"],
            spread(row["written"]),
        )


def goodput(figures: dict) -> Table:
    """Share of the fault-free pace with a fault each ten seconds."""
    for row in figures["rows"]:
        what = "share of its own fault-free pace, a fault each 10 s"
        yield what, row["contender"], f"{row['share']:.2f} ({row['redone_steps']} steps repeated)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One benchmark of this folder: its words, those of ``--quick``, and what its figures are called."""

    words: str
    quick: str
    table: Callable[[dict], Table]
    minutes: float


ROWS = {
    "recovery": Row(
        words="recovery.py --worlds 3 --harms kill1 raise --rounds 2 --faults 3",
        quick="recovery.py --worlds 2 --harms kill1 --rounds 1 --faults 1",
        table=recovery,
        minutes=4,
    ),
    "steps": Row(
        words="throughput.py --sizes tiny light small --rounds 6",
        quick="throughput.py --sizes tiny --rounds 2 --slice-s 1",
        table=steps,
        minutes=4,
    ),
    "launch": Row(
        words="launch.py --rounds 5", quick="launch.py --rounds 1", table=launch, minutes=1
    ),
    "save": Row(
        words="checkpoint.py --rounds 5",
        quick="checkpoint.py --rounds 2 --parameters 2",
        table=save,
        minutes=2,
    ),
    "goodput": Row(
        words="goodput.py --seconds 60 --control-s 20",
        quick="goodput.py --seconds 12 --control-s 5 --every-s 5 --world 2",
        table=goodput,
        minutes=4,
    ),
}


def run(words: str) -> dict:
    """Run a benchmark and read its figures. Raises CalledProcessError if it fails."""
    script, *options = words.split()
    with tempfile.TemporaryDirectory(prefix="ddp_bench_") as folder:
        path = Path(folder) / "figures.json"
        command = [sys.executable, str(HERE / script), *options, "--json", str(path)]
        said = (Path(folder) / "said.txt").open("w+b")
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        try:
            code = process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()  # it ends its contenders
            process.wait()
        if code != 0:
            said.seek(0)
            sys.stderr.write(said.read().decode(errors="replace")[-3000:])
            raise subprocess.CalledProcessError(code, command)
        lines = path.read_text().splitlines()
        with contextlib.suppress(json.JSONDecodeError):
            return {"rows": [json.loads(line) for line in lines]}  # a line for each contender
        return json.loads("\n".join(lines))


def show(cells: list[tuple[str, str, str]]) -> None:
    """Print the table: a line for each figure, a column for each contender."""
    contenders = list(dict.fromkeys(contender for _, contender, _ in cells))
    contenders.sort(key=lambda name: name != "ddp_runner")
    table: dict[str, dict[str, str]] = {}
    for what, contender, figure in cells:
        table.setdefault(what, {})[contender] = figure
    print(f"\n| figure | {' | '.join(contenders)} |")
    print(f"|---|{'---|' * len(contenders)}")
    for what, figures in table.items():
        print(f"| {what} | {' | '.join(figures.get(name, '') for name in contenders)} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"default: {' '.join(ROWS)}")
    parser.add_argument(
        "--quick", action="store_true", help="one round of each, to try the command"
    )
    parser.add_argument("--json", type=Path, help="write the figures here too")
    asked = parser.parse_args()
    if unknown := set(asked.rows) - set(ROWS):
        parser.error(f"no row {', '.join(sorted(unknown))}: choose from {', '.join(ROWS)}")
    end_by_signal()
    facts = machine()
    show_machine(facts)
    chosen = asked.rows or list(ROWS)
    tables: list[list[tuple[str, str, str]]] = []
    for number, name in enumerate(chosen, 1):
        row = ROWS[name]
        words = row.quick if asked.quick else row.words
        about = "" if asked.quick else f", about {row.minutes:g} minutes"
        began_s = time.monotonic()
        print(f"{number} of {len(chosen)}: python benchmarks/{words}{about}", flush=True)
        tables.append(list(row.table(run(words))))
        print(f"  done in {time.monotonic() - began_s:.0f} s", flush=True)
    for cells in tables:
        show(cells)
    if asked.json:
        found = [cell for cells in tables for cell in cells]
        asked.json.write_text(json.dumps({"machine": facts, "cells": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
