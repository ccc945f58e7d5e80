"""Fault-free runs with many drills: none may find a difference, and none may blame a rank.

By hand: ``CALM_RUNS=200 pytest -m soak tests/soak/test_false_alarms.py -s``; ``CALM_FROM`` skips the first runs.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.scenarios.harness import Run
from tests.scenarios.test_attached import CLASSIFIER, LOOPS, run_loop
from tests.strangers.table import EXACT, TABLE

RUNS = int(os.environ.get("CALM_RUNS", "100"))
FROM = int(os.environ.get("CALM_FROM", "0"))
STEPS, PACE_S = 24, 0.25
DRILLS = ("recovery.drill_at=2,6,10,14,18,22", "recovery.proof_share=0.05")
PACED = ("--inject", f"slow:rank=all,step=1,phase=data,times={STEPS - 2},seconds={PACE_S}")
TASKS = [one for one in TABLE.values() if one.allowed == (EXACT,)]
LOOP_KINDS = [
    *(
        (CLASSIFIER, words)
        for words in ((), ("--accumulate", "2"), ("--fp16",), ("--workers", "1"))
    ),
    *((CLASSIFIER, (word,)) for word in ("--find-unused", "--own-loader", "--mixup")),
    *((LOOPS / "playing.py", words) for words in ((), ("--late",), ("--plays-late",))),
    *((LOOPS / f"{name}.py", ()) for name in ("hooked", "sharpness", "two_faces", "drilled")),
]
SHARED = (*PACED, *DRILLS, "log.display=plain", "recovery.hang_min_s=30")

pytestmark = [pytest.mark.soak, pytest.mark.whole_run, pytest.mark.timeout(14400)]


def kinds():
    """Every kind of task and of loop, once with and once without loader workers, again and again."""
    number = 0
    while True:
        for task in TASKS:
            yield task.key, task, task.workers[number % len(task.workers)]
        for file, words in LOOP_KINDS:
            yield " ".join((file.stem, *words)), (file, words), 0
        number += 1


def begun(kind, folder, *, workers, seed):
    """A run of this kind."""
    if isinstance(kind, tuple):
        file, words = kind
        return run_loop(folder, *words, loop=file, options=(*SHARED, f"run.seed={seed}"))
    settings = ("-b", 4, "--max-steps", STEPS, "save_every_steps=0", "recovery.warm_spare=false")
    own = (f"num_workers={workers}", f"run.seed={seed}", *kind.settings)
    return Run(folder, *settings, *SHARED, *own, task=kind.spec)


def test_no_fault_free_run_is_called_wrong(tmp_path):
    """Of many kinds of task and of loop, each with a seed of its own."""
    counts, alarms, names = Counter(), [], set()
    for number, (name, kind, workers) in enumerate(kinds()):
        if number >= RUNS:
            break
        if number < FROM:
            continue
        with begun(kind, tmp_path / str(number), workers=workers, seed=number) as run:
            assert run.wait(600.0) == 0, f"{name}: {run.console}"
        summary, drills = run.summary(), run.events("drill")
        counts["drills"] += len(drills)
        counts["updates"] += sum(one.get("updated", False) for one in drills)
        counts["runs with a drill"] += bool(drills)
        counts["runs"] += 1
        names.add(name)
        found = [one["differs"] for one in drills if one["differs"]]
        if found or summary["faults"] or not summary["exact"]:
            alarms.append((number, name, found, summary["inexact_reasons"]))
        print(
            number,
            name,
            len(drills),
            sum(one.get("updated", False) for one in drills),
            alarms[-1:] if found else "",
            flush=True,
        )
    print(f"{len(names)} kinds, {dict(counts)}, alarms: {alarms}")
    assert alarms == []
    assert counts["runs with a drill"] > 0.8 * counts["runs"]
