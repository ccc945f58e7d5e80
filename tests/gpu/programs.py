"""Programs of users on one GPU: their own loops, frameworks in place; and eight ranks of a task."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from tests.gpu.facts import rehearses
from tests.gpu.launches import EXACT, Launch, finish, inject

TESTS = Path(__file__).resolve().parents[1]
LOOP = TESTS / "scenarios" / "loops" / "classifier.py"
DOCUMENTED = TESTS.parent / "docs" / "examples" / "my_loop.py"
HARMS = (
    ("kill", "forward", 1, 5),
    ("raise", "optimizer", 0, 8),
    ("kill", "reduce", 0, 11),
    ("kill", "commit", 1, 14),
    ("stop", "forward", 0, 17),
)
ALONE = (("raise", "forward", 0, 5), ("raise", "reduce", 0, 9), ("kill", "reducing", 0, 13))
EIGHT = (("kill", "forward", 7, 9), ("kill", "reduce", 3, 19), ("raise", "backward", 0, 29))
GPU = () if rehearses() else ("gpu",)
TRAINER = (TESTS / "integrations" / "trained.py", "accumulate", "cosine", "evaluate", "long", *GPU)
ACCELERATOR = (TESTS / "integrations" / "accelerated.py", "long", *GPU)
LIGHTNING = (TESTS / "integrations" / "fitted.py", "long", *GPU)
OWN = (LOOP, "--steps", 24)
# By name: the program, its ranks, and the harm that one of its two runs takes.
PROGRAMS = {
    "loop": ((*OWN, "--own-loader", "--workers", 1), 2, HARMS),
    "loop_fp16": ((*OWN, "--fp16", "--accumulate", 2), 2, HARMS[:2]),
    "loop_alone": (OWN, 1, ALONE),
    "documented": ((DOCUMENTED,), 2, HARMS[:3]),
    "transformers": (TRAINER, 2, HARMS[:4]),
    "transformers_fp16": ((*TRAINER, "fp16") if GPU else TRAINER, 2, HARMS[:1]),
    "transformers_alone": (TRAINER, 1, ALONE),
    "accelerate": (ACCELERATOR, 2, HARMS[:4]),
    "accelerate_alone": (ACCELERATOR, 1, ALONE),
    "lightning": (LIGHTNING, 2, HARMS[:4]),
    "lightning_alone": (LIGHTNING, 1, ALONE),
}
AT_ONCE = 10  # runs
ROUND_S, EIGHT_S = 60, 40


def measure(facts):
    """Each program twice, with harm and without; then eight ranks."""
    folder = Path(tempfile.mkdtemp(prefix="gpu_programs_"))
    try:
        _programs(facts, folder)
        _eight(facts, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _programs(facts, folder):
    names = list(PROGRAMS)
    at_once = max(1, AT_ONCE // 2)
    for chosen in (names[at : at + at_once] for at in range(0, len(names), at_once)):
        runs = {}
        for name in chosen:
            program, world, harms = PROGRAMS[name]
            at = folder / name
            runs[name] = [
                Launch(at / kind, *EXACT, *inject(harm), program=program, world=world)
                for kind, harm in (("plain", ()), ("harmed", harms))
            ]
        both = [run for pair in runs.values() for run in pair]
        finish(both, limit_s=min(ROUND_S, facts.left_s - 3))
        for name, (plain, harmed) in runs.items():
            facts.measure(f"{name}_plain", _write, plain, facts.under(f"{name}_plain"))
            facts.measure(name, _write, harmed, facts.under(name), plain.digest)


def _eight(facts, folder):
    """As many ranks as a machine has GPUs, on one of them."""
    words = (*EXACT, "use_amp=false", "num_workers=0", "--max-steps", 40)
    runs = [
        Launch(folder / kind, *words, *inject(harm), task="Normed", world=8)
        for kind, harm in (("eight_plain", ()), ("eight", EIGHT))
    ]
    finish(runs, limit_s=min(EIGHT_S, facts.left_s - 3))
    for run, like in zip(runs, (None, runs[0].digest), strict=True):
        facts.measure(run.folder.name, _write, run, facts.under(run.folder.name), like)


def _write(run, facts, fault_free=None):
    run.write_facts(facts, fault_free=fault_free)
