"""Hits a random process of a run every second or two until the run ends, and reports what became of it.

By hand: ``python -m tests.soak.storm --runs 20 --world 3 --seed 1 --folder /tmp/storm``. A hit is
SIGKILL, SIGSTOP, SIGSEGV, SIGABRT or SIGBUS to a rank, the zygote, the store, the spare or a loader
worker, or SIGKILL to all ranks at once. Each run must end completed, with the weights of a run without a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.scenarios.harness import TRAIN, Run

TASK = f"{Path(__file__).parents[1] / 'scenarios' / 'stranger.py'}:Classifier"
SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)
ALL_RANKS_EACH = 6  # so many hits, one of them is of all ranks
APART_S = (1.0, 2.0)
PACE_S = 0.05
LIMIT_S = 900.0  # only a run that hangs comes so far
SETTINGS = (
    *("-b", 24, "num_workers=1", "evaluate_every_steps=100", "evaluate_interval=0"),
    *("save_every_steps=50", "save_interval=0", "log_interval=50", "log.display=plain"),
    *("--max-restarts", 100_000),
)


@dataclass(slots=True, kw_only=True)
class Result:
    """One run that was hit, and how it ended."""

    seed: int
    exit_code: int
    is_exact: bool
    same_weights: bool
    hits: int
    hits_of: dict[str, int] = field(default_factory=dict)  # SIGNAL process -> how often
    incidents: int = 0
    steps_lost: int = 0
    all_ranks_dead: int = 0  # incidents after which no rank had the state
    copies_taken: int = 0  # from memory, where no rank was left
    unexplained_loss: int = 0  # steps lost by another incident: must be none
    wall_s: float = 0.0
    last_lines: str = ""

    @property
    def is_sound(self) -> bool:
        """Whether the run ended as it must."""
        return (
            self.exit_code == 0
            and self.is_exact
            and self.same_weights
            and not self.unexplained_loss
        )


def train(folder: Path, steps: int, world: int, *settings: object) -> Run:
    """A run that has just been started."""
    words = (*SETTINGS, "--max-steps", steps, *settings)
    return Run(folder, *words, world=world, task=TASK, command=TRAIN)


def kind_of(name: str) -> str:
    """What the process is, without its number."""
    return name.removeprefix("ddp:").rstrip("0123456789. ")


def hit(run: Run, draw: random.Random) -> str:
    """Signal a process of the run, the supervisor aside; which and how.

    Not while nothing but a zygote is left: its import may take longer than what lies between two hits.
    """
    found = [one for one in run.processes() if one.pid != run.process.pid]
    if not any(kind_of(one.name) in ("rank", "spare") for one in found):
        return ""
    if draw.randrange(ALL_RANKS_EACH) == 0:
        return kill_all_ranks(one.pid for one in found if kind_of(one.name) == "rank")
    victim, number = draw.choice(found), draw.choice(SIGNALS)
    try:
        os.kill(victim.pid, number)
    except ProcessLookupError:
        return ""
    return f"{number.name} {kind_of(victim.name)}"


def kill_all_ranks(pids: Iterable[int]) -> str:
    """One directly after the other, as the kernel or a person does it; who was."""
    killed = 0
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed += 1
    return f"SIGKILL all {killed} ranks" if killed else ""


def storm(run: Run, draw: random.Random) -> list[str]:
    """Hit the run until it ends, from its first step on; returns the hits."""
    run.wait_for_event("world_formed")
    hits: list[str] = []
    give_up_s = time.monotonic() + LIMIT_S
    while run.process.poll() is None:
        assert time.monotonic() < give_up_s, f"still running:\n{run.console[-4000:]}"
        next_s = time.monotonic() + draw.uniform(*APART_S)
        while run.process.poll() is None and time.monotonic() < next_s:
            time.sleep(0.02)
        what = hit(run, draw) if run.process.poll() is None else ""
        if what:
            hits.append(what)
            print(f"{time.strftime('%H:%M:%S')} {what}", file=run.hits_file, flush=True)
    return hits


def run_once(folder: Path, *, steps: int, world: int, seed: int, digest: str) -> Result:
    """One run under a storm."""
    with (
        train(folder, steps, world, f"task.pace_s={PACE_S}") as run,
        (folder / "hits.txt").open("w", encoding="utf-8") as run.hits_file,
    ):
        hits = storm(run, random.Random(seed))
        code = run.wait()
    try:
        summary = run.summary()
    except OSError:
        summary = {"faults": [], "exact": False, "weights_sha256": None, "wall_s": 0.0}
    faults = summary["faults"]
    return Result(
        seed=seed,
        exit_code=code,
        is_exact=bool(summary["exact"]),
        same_weights=summary["weights_sha256"] == digest,
        hits=len(hits),
        hits_of=dict(Counter(hits).most_common()),
        incidents=sum(record["event"] == "plan" for record in run.events()),
        steps_lost=sum(fault["steps_lost"] for fault in faults),
        all_ranks_dead=sum(fault["all_ranks_dead"] for fault in faults),
        copies_taken=len(run.events("copy_taken")),
        unexplained_loss=unexplained_loss(faults),
        wall_s=summary["wall_s"],
        last_lines="" if code == 0 else run.console[-3000:],
    )


def unexplained_loss(faults: list[dict[str, object]]) -> int:
    """Steps lost where no incident since the repair before says that all ranks were dead."""
    lost, is_reported = 0, False
    for fault in faults:
        is_reported |= bool(fault["all_ranks_dead"])
        if fault["steps_lost"]:
            lost += 0 if is_reported else int(str(fault["steps_lost"]))
            is_reported = False
    return lost


def calm(folder: Path, *, steps: int, world: int) -> tuple[str, float]:
    """Weights and time of the run without a fault."""
    with train(folder, steps, world, f"task.pace_s={PACE_S}") as run:
        assert run.wait(LIMIT_S, hurries=False) == 0, run.console
    return run.digest, run.summary()["wall_s"]


def main(words: list[str]) -> int:
    """As many runs as asked for; 0 where all are sound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--world", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args(words)
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="storm_"))
    digest, calm_s = calm(folder / "calm", steps=asked.steps, world=asked.world)
    results = []
    for seed in range(asked.seed, asked.seed + asked.runs):
        place = folder / f"run_{seed}"
        result = run_once(place, steps=asked.steps, world=asked.world, seed=seed, digest=digest)
        results.append(result)
        print(json.dumps(asdict(result)), flush=True)
        if result.is_sound:
            shutil.rmtree(place)
    print(json.dumps(totals(results, calm_s=calm_s)), flush=True)
    if asked.folder is None and all(result.is_sound for result in results):
        shutil.rmtree(folder)
    return 0 if all(result.is_sound for result in results) else 1


def totals(results: list[Result], *, calm_s: float) -> dict[str, object]:
    """What the benchmark file wants to know."""
    hits_of: Counter[str] = Counter()
    for result in results:
        hits_of.update(result.hits_of)
    walls = sorted(result.wall_s for result in results)
    return {
        "runs": len(results),
        "sound": sum(result.is_sound for result in results),
        "hits": sum(result.hits for result in results),
        "incidents": sum(result.incidents for result in results),
        "steps_lost": sum(result.steps_lost for result in results),
        "all_ranks_dead": sum(result.all_ranks_dead for result in results),
        "copies_taken": sum(result.copies_taken for result in results),
        "wall_s": [walls[0], walls[len(walls) // 2], walls[-1]],
        "calm_s": calm_s,
        "hits_of": dict(hits_of.most_common()),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
