"""Random plans: faults of data, memory, numbers and disk, at any moment, together with rank faults."""

from __future__ import annotations

import itertools

from ddp_runner.core.injection import InjectKind, draw_injection, parse_injection
from tests.scenarios.conftest import PATIENT
from tests.scenarios.harness import Run

WORLD = 3
PACE_S = 0.02
MTBF_S = 0.15
TICK_S = 0.1
RANK = (InjectKind.KILL, InjectKind.EXIT)
EXACT = (
    *(InjectKind.LOADER_KILL, InjectKind.DISK_FULL, InjectKind.DISK_ERROR),
    *(InjectKind.SLOW_DISK, InjectKind.CORRUPT_CHECKPOINT),
)
CHANGING = (
    *(InjectKind.OOM, InjectKind.UNUSED, InjectKind.DIVERGE, InjectKind.BAD_SAMPLE),
    *(InjectKind.NAN, InjectKind.SPIKE),
)
SETTINGS = (
    *("-b", 8, "num_workers=1", "log.display=plain", "evaluate_interval=0", "save_interval=0"),
    *("save_every_steps=20", "replica_check_steps=2", "recovery.max_restarts=1000"),
    *("find_unused_parameters=false", "on_bad_sample=substitute", "explosion_window=10"),
    *("warmup_steps=5", "recovery.no_progress_generations=20", *PATIENT),
)


def plan_with(*kinds):
    """The first plan that draws each kind once, so that none undoes another; its steps outlast it."""
    names = "+".join(kind.value for kind in kinds)
    for seed in itertools.count():
        spec = f"random:mtbf_s={MTBF_S},seed={seed},kinds={names},times={len(kinds)}"
        plan = parse_injection(spec, world_size=WORLD)
        injections = [
            draw_injection(plan, number, world_size=WORLD) for number in range(len(kinds))
        ]
        if {injection.kind for injection in injections} == set(kinds) and not is_undone(injections):
            lasts_s = sum(injection.wait_s + 2 * TICK_S for injection in injections)
            return spec, int(lasts_s / PACE_S) + 20
    raise AssertionError("there is always one")


def is_undone(injections):
    """Whether one of them ends the process in which another may still be about to happen."""
    return any(
        injection.kind in RANK
        and any(one.rank == injection.rank and one.kind not in RANK for one in injections[:number])
        for number, injection in enumerate(injections)
    )


def train(folder, steps, *arguments):
    with Run(folder, *SETTINGS, "--max-steps", steps, *arguments, world=WORLD) as run:
        assert run.wait(hurries=False) == 0, run.console  # faults come by the clock
    assert run.summary()["steps"] == steps
    return run


def kinds_injected(run):
    return {InjectKind(event["kind"]) for event in run.events("injected")}


def was_given_a_state(run, kind):
    """Whether the rank of this injection has heard another one's state before it was compared: it is sound again."""
    (injected,) = [event for event in run.events("injected") if event["kind"] == kind.value]
    return any(
        event["rank"] == injected["rank"] != event["source"] and event["id"] > injected["id"]
        for event in run.events("rank_formed")
    )


def test_faults_that_change_no_step_cost_no_weight_at_random_moments(tmp_path):
    """Loader workers, disk and checkpoints, with ranks that are killed or exit in between."""
    spec, steps = plan_with(*EXACT, *RANK)
    cheap = ("task.pace_s=0", "num_workers=0", "recovery.warm_spare=false")
    calm = train(tmp_path / "calm", steps, *cheap)
    run = train(tmp_path / "run", steps, "--inject", spec, f"task.pace_s={PACE_S}")
    assert kinds_injected(run) == {*EXACT, *RANK}
    assert (run.digest, run.summary()["exact"]) == (calm.digest, True)


def test_faults_that_change_what_is_computed_are_each_reported_at_random_moments(tmp_path):
    """Memory, numbers and samples, with ranks that are killed or exit: every one has its reason."""
    spec, steps = plan_with(*CHANGING, *RANK)
    run = train(tmp_path, steps, "--inject", spec, f"task.pace_s={PACE_S}", "num_workers=0")
    assert kinds_injected(run) == {*CHANGING, *RANK} - {InjectKind.BAD_SAMPLE}
    kinds = {fault["kind"] for fault in run.summary()["faults"]}
    assert kinds >= {"out_of_memory", "reduction_unfinished", "bad_sample"}, run.console
    assert kinds & {"rank_killed", "rank_exited"}, "two of one rank may be one incident"
    assert "non_finite" in {event["kind"] for event in run.events("fault_tolerated")}
    reasons = "; ".join(run.summary()["inexact_reasons"])
    for words in ("micro-batches of", "replaced"):
        assert words in reasons
    assert ("replica_diverged" in kinds) == ("diverged" in reasons)
    assert "diverged" in reasons or was_given_a_state(run, InjectKind.DIVERGE)
    assert run.summary()["exact"] is False
