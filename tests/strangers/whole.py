"""The whole table: every task, without faults and with every fault, with and without loader workers.

By hand: ``python -m tests.strangers.whole --jobs 2`` takes the better part of an hour on two cores;
``--only NAME`` takes those whose name holds it, ``--how`` and ``--workers`` a part of what is done to
each. A line each; what is wrong ends it with 1.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.strangers.driving import INJECTED, WORLD, Outcome, run, verdict
from tests.strangers.table import EXACT, TABLE, Stranger

HOWS = tuple(how for how in INJECTED if how not in ("fault_free", "everything"))


def tried(stranger: Stranger, folder: Path, *, hows: tuple[str, ...], workers: int) -> list[str]:
    """All that is done to one task with so many workers: two fault-free runs, then the faults."""
    calm = run(stranger, folder / "calm", workers=workers)
    lines = [_line(stranger, "fault_free", workers, verdict(stranger, calm, calm=calm))]
    if calm.exit_code != 0:
        return lines
    again = run(stranger, folder / "again", workers=stranger.workers[0])
    lines.append(_line(stranger, "again", workers, _agreed(stranger, calm, again)))
    for how in hows:
        outcome = run(stranger, folder / how, how=how, workers=workers)
        result = verdict(stranger, outcome, calm=calm)
        if outcome.exit_code == 0 and not _has_happened(how, outcome):
            result = "wrong: nothing has happened to it"
        lines.append(_line(stranger, how, workers, result))
    return lines


def _agreed(stranger: Stranger, calm: Outcome, again: Outcome) -> str:
    """Whether another fault-free run, without workers, has the same weights; or one says that it may not."""
    if calm.digest == again.digest or not (calm.is_exact and again.is_exact):
        return verdict(stranger, again, calm=calm)
    return "wrong: two fault-free runs have other weights, and that is not reported"


def _has_happened(how: str, outcome: Outcome) -> bool:
    if how == "all":
        return outcome.all_dead > 0 or outcome.killed >= WORLD
    return how == "stop" or outcome.killed > 0


def _line(stranger: Stranger, how: str, workers: int, result: str) -> str:
    line = f"{stranger.key:30} {how:8} workers={workers}  {result}"
    print(line, flush=True)
    return result


def main(words: list[str]) -> int:
    """Run what is asked for; 0 where nothing is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--how", action="append", choices=tuple(INJECTED), default=[])
    parser.add_argument("--workers", type=int, choices=(0, 2))
    parser.add_argument("--jobs", type=int, default=1)
    asked = parser.parse_args(words)
    chosen = [
        (one, workers)
        for one in TABLE.values()
        for workers in one.workers
        if asked.workers in (None, workers)
        if not asked.only or any(name in one.key for name in asked.only)
    ]
    began_s = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="strangers_"))
    counted: Counter[str] = Counter()
    try:
        with ThreadPoolExecutor(asked.jobs) as pool:
            hows = tuple(asked.how) or HOWS
            running = [
                pool.submit(
                    *(tried, one, folder / f"{one.key}_{workers}"),
                    hows=hows,
                    workers=workers,
                )
                for one, workers in chosen
            ]
            for done in running:
                counted.update(result.partition(":")[0] for result in done.result())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    took_s = time.monotonic() - began_s
    reported = ", ".join(f"{number} {what}" for what, number in counted.most_common())
    print(
        f"{len(chosen)} tasks and workers, {sum(counted.values())} runs in {took_s:.0f} s: {reported}"
    )
    return 1 if counted["wrong"] or not counted[EXACT] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
