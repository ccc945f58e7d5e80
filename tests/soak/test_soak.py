"""Hundreds of faults in one run: the weights of a fault-free run, nothing grows, nothing is left.

By hand: ``SOAK_FAULTS=200 pytest -m soak tests/soak -s``; ``SOAK_SEED`` draws another plan.
"""

from __future__ import annotations

import itertools
import math
import os

import pytest

from ddp_runner.core.injection import InjectKind, draw_injection, parse_injection
from tests.scenarios.harness import TRAIN, Run
from tests.soak.usage import Sampler, assert_no_growth

FAULTS = int(os.environ.get("SOAK_FAULTS", "200"))
SEED = int(os.environ.get("SOAK_SEED", "1"))
WORLD = 3
MTBF_S = 2.0
PACE_S = 0.02
RAISES_APART_S = 0.3  # two alike at one step would be taken for the user's own error
BREAKS = "kill+stop+raise+exit+hang+spin+gil"  # a generation
REPAIRED = "loader_kill+loader_stop+disk_full+disk_error+slow_disk+corrupt_checkpoint"  # or made up for later
KINDS = f"{BREAKS}+{REPAIRED}"
SETTINGS = (
    *("-b", 8, "num_workers=1", "log.display=plain", "log_interval=200", "evaluate_interval=0"),
    *("evaluate_every_steps=150", "save_every_steps=100", "save_interval=0"),
    # A random moment may be the first steps of a process, an evaluation or a save.
    *("recovery.hang_min_s=0.7", "recovery.first_step_timeout_s=4"),
    *("recovery.evaluation_timeout_s=4", "recovery.checkpoint_timeout_s=4"),
    # Chance may hit several times before a step is committed.
    *("recovery.max_restarts=100000", "recovery.no_progress_generations=20"),
)

pytestmark = [pytest.mark.soak, pytest.mark.whole_run, pytest.mark.timeout(7200)]


def random_plan():
    """A spec whose raises keep their distance, how long its faults take, how many break a generation."""
    seed = SEED
    while True:
        spec = f"random:mtbf_s={MTBF_S},seed={seed},kinds={KINDS},times={FAULTS}"
        plan = parse_injection(spec, world_size=WORLD)
        injections = [draw_injection(plan, number, world_size=WORLD) for number in range(FAULTS)]
        if not any(
            one.kind is two.kind is InjectKind.RAISE and two.wait_s < RAISES_APART_S
            for one, two in itertools.pairwise(injections)
        ):
            breaking = sum(injection.kind.value in BREAKS.split("+") for injection in injections)
            return spec, sum(injection.wait_s for injection in injections), breaking
        seed += 1


def digest_without_faults(folder, steps):
    with Run(
        folder, *SETTINGS, "--max-steps", steps, "task.pace_s=0", world=WORLD, command=TRAIN
    ) as run:
        assert run.wait(3600.0) == 0, run.console
    return run.digest


def check_repairs(run, *, injected_least):
    """Every incident was repaired, every injection happened, and no committed step was lost."""
    faults = run.summary()["faults"]
    kinds = {}
    for fault in faults:
        kinds[fault["kind"]] = kinds.get(fault["kind"], 0) + 1
    print(f"{len(faults)} incidents: {kinds}, {run.summary()['time_s']}")
    assert all(fault["recovered_s"] is not None for fault in faults)
    # Chance may hit all ranks before the first is found to hang; only then is a step lost.
    all_lost = sum(len(record["replaced"]) == WORLD for record in run.events("plan"))
    assert sum(fault["steps_lost"] > 0 for fault in faults) <= all_lost
    assert len(run.events("injected")) >= injected_least
    breaks = [one for one in run.events("injected") if one["kind"] in BREAKS.split("+")]
    last_injected_s = breaks[-1]["mono_s"]
    assert run.events("repaired")[-1]["mono_s"] > last_injected_s


def test_random_faults_cost_no_weight_and_nothing_grows(tmp_path):
    """Any kind, any rank, any moment: the digest of a fault-free run, and a supervisor of constant size."""
    spec, waits_s, breaking = random_plan()
    steps = math.ceil(waits_s / PACE_S) + 200
    digest = digest_without_faults(tmp_path / "fault_free", steps)
    settings = ("--max-steps", steps, f"task.pace_s={PACE_S}", "--inject", spec)
    with (
        Run(tmp_path / "faults", *SETTINGS, *settings, world=WORLD, command=TRAIN) as run,
        Sampler(run) as seen,
    ):
        assert run.wait(5 * waits_s + 300.0, hurries=False) == 0, run.console[-4000:]
    assert run.digest == digest
    assert run.summary()["exact"] is True
    check_repairs(run, injected_least=FAULTS)
    assert list(run.checkpoints.glob("step_*.json")), "disks that fail cost no last checkpoint"
    for name in ("ddp:supervisor", "ddp:zygote", "ddp:store"):
        assert_no_growth(name, seen.long_lived(name))
    quarter = len(seen.segments) // 4
    assert max(seen.segments[-quarter:]) <= max(seen.segments[:quarter]) + 2
    # Strikes meet in one incident, the more the longer a hang takes to be found: on a busy machine.
    assert len(run.summary()["faults"]) >= 0.5 * breaking


def test_a_survivor_of_a_hundred_faults_has_not_grown(tmp_path):
    """Rank 0 keeps its process through all of them, and ends as large as it began."""
    faults = min(FAULTS, 100)
    kinds = ("kill", "raise", "exit")
    apart = 10
    specs = [
        f"{kinds[number % 3]}:rank={1 + number % 2},step={20 + apart * number},phase=backward"
        for number in range(faults)
    ]
    steps = 20 + apart * (faults + 1)
    digest = digest_without_faults(tmp_path / "fault_free", steps)
    asked = [word for spec in specs for word in ("--inject", spec)]
    settings = ("--max-steps", steps, "task.pace_s=0.01", *asked)
    with (
        Run(tmp_path / "faults", *SETTINGS, *settings, world=WORLD, command=TRAIN) as run,
        Sampler(run) as seen,
    ):
        assert run.wait(900.0, hurries=False) == 0, run.console[-4000:]
    assert run.digest == digest
    check_repairs(run, injected_least=faults)
    assert len(run.summary()["faults"]) == faults
    formed = [record for record in run.events("rank_formed") if record["rank"] == 0]
    assert len(formed) == faults + 1
    assert len({record["pid"] for record in formed}) == 1
    for name in ("ddp:rank0", "ddp:supervisor", "ddp:zygote", "ddp:store"):
        assert_no_growth(name, seen.long_lived(name))
