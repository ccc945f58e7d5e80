"""Two and three gloo ranks on one GPU through the whole product, with every fault in every phase."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from tests.gpu import group as by_hand
from tests.gpu import repairs, sums
from tests.gpu.facts import rehearses
from tests.gpu.launches import EXACT, Launch, expected, finish, inject

STEPS = 60
HARMS_2 = (
    ("kill", "forward", 1, 5),
    ("raise", "backward", 0, 9),
    ("stop", "reduce", 1, 13),
    ("kill", "commit", 0, 17),
    ("raise", "forward", 1, 21),
    ("kill", "reduce", 1, 25),
    ("stop", "backward", 0, 29),
    ("raise", "commit", 0, 33),
    ("kill", "backward", 0, 37),
    ("stop", "forward", 1, 41),
    ("raise", "reduce", 1, 45),
    ("stop", "commit", 0, 49),
)
HARMS_3 = (
    ("kill", "forward", 2, 5),
    ("raise", "commit", 1, 15),
    ("stop", "backward", 0, 25),
    ("kill", "reduce", 1, 35),
    ("kill", "commit", 0, 45),
)
# Of the task's own doing (see Normed): kind, rank, how often it comes to its loss before, phase.
SPECIAL = "assert-1-10-forward+kernel-0-10-forward+assert-0-10-backward+kernel-1-10-backward"
SPECIAL_STEPS = 90
NAMED = [["device_lost", 1], ["rank_hung", 0], ["device_lost", 0], ["rank_hung", 1]]
LATE_SPECIAL = "assert-1-10-commit+kernel-0-10-reduce+kernel-1-10-commit"
LATE_NAMED = [["device_lost", 1], ["rank_hung", 0], ["rank_hung", 1]]
OOM = "oom-1-10-forward+oom-0-10-backward"
FAULT_FREE_S, FAULTS_S, LAST_S = 55, 75, 70
LAST_LEAST_S = 40  # left to the last ones by the comparison of repairs
TWO = (*EXACT, "use_amp=false", "num_workers=1")
THREE = (*EXACT, "num_workers=0")


def measure(facts):
    """Without faults, all at once; then the faults of two ranks and single kills, for their seconds; then the rest."""
    folder = Path(tempfile.mkdtemp(prefix="gpu_shared_"))
    try:
        _measure(facts, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _measure(facts, folder):
    words = ("--max-steps", STEPS)
    special = ("--max-steps", SPECIAL_STEPS)
    one_kill = ("--inject", "kill:rank=1,step=20")
    runs = {
        "fault_free_2": Launch(folder / "p2", *TWO, *words, task="Normed", world=2),
        "fault_free_3": Launch(folder / "p3", *THREE, *words, task="Normed", world=3),
        "fault_free_special": Launch(folder / "ps", *TWO, *special, task="Normed", world=2),
        "fault_free_2_again": Launch(folder / "p2b", *TWO, *words, task="Normed", world=2),
        "not_deterministic": Launch(
            folder / "nd", "use_amp=false", *words, *one_kill, task="Normed", world=2
        ),
    }
    facts.measure("preload_s", by_hand.preload)
    forks = [fork for world_size in (2, 3) for fork in _sums(facts, world_size)]
    finish(runs.values(), limit_s=min(FAULT_FREE_S, facts.left_s))
    for fork in forks:
        if fork is not None:
            fork.finish(FAULT_FREE_S)
    fault_free = {name: run.digest for name, run in runs.items()}
    for name, run in runs.items():
        beside = (
            fault_free["fault_free_2"]
            if name in ("fault_free_2_again", "not_deterministic")
            else None
        )
        facts.measure(name, _write_facts, run, facts.under(name), beside)

    faults_2 = Launch(folder / "f2", *TWO, *words, *inject(HARMS_2), task="Normed", world=2)
    finish([faults_2], limit_s=min(FAULTS_S, facts.left_s - 5))
    facts.measure(
        "faults_2",
        _write_facts,
        faults_2,
        facts.under("faults_2"),
        fault_free["fault_free_2"],
        expected(HARMS_2),
    )

    limit_s = min(repairs.LIMIT_S, facts.left_s - LAST_LEAST_S)
    facts.measure("repairs", repairs.compare, facts.under("repairs"), folder, limit_s=limit_s)

    last = {
        "faults_3": (
            Launch(folder / "f3", *THREE, *words, *inject(HARMS_3), task="Normed", world=3),
            fault_free["fault_free_3"],
            expected(HARMS_3),
        ),
        "special": (
            Launch(folder / "s", *TWO, *special, f"task.plan={SPECIAL}", task="Normed", world=2),
            fault_free["fault_free_special"],
            NAMED,
        ),
        "late_special": (
            Launch(
                folder / "l", *TWO, *special, f"task.plan={LATE_SPECIAL}", task="Normed", world=2
            ),
            fault_free["fault_free_special"],
            LATE_NAMED,
        ),
        "oom": (
            Launch(folder / "o", *TWO, *words, f"task.plan={OOM}", task="Normed", world=2),
            fault_free["fault_free_2"],
            [["out_of_memory", 1], ["out_of_memory", 0]],
        ),
    }
    finish([run for run, _, _ in last.values()], limit_s=min(LAST_S, facts.left_s - 3))
    for name, (run, like, culprits) in last.items():
        facts.measure(name, _write_facts, run, facts.under(name), like, culprits)


def _write_facts(run, facts, fault_free=None, culprits=None):
    run.write_facts(facts, fault_free=fault_free, culprits=culprits)


def _sums(facts, world_size):
    """Ranks that compare; they run beside."""
    port = sums.free_port()
    at = facts.under(f"sums_{world_size}")
    environment = {} if rehearses() else {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return [
        at.start(f"rank{rank}", sums.compare, rank, world_size, port, **environment)
        for rank in range(world_size)
    ]
