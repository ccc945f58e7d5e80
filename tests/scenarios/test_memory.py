"""Memory that does not suffice, in whole runs: what is changed, and that the numbers stay right."""

from __future__ import annotations

import pytest
import torch

from tests.scenarios.cgroups import memory_cgroup
from tests.scenarios.conftest import NO_SPARE, PATIENT
from tests.scenarios.harness import WORKLOAD, Run
from tests.scenarios.hungry import LIMITED

pytestmark = pytest.mark.whole_run

PLAIN = f"{WORKLOAD}:PacedTask"
HUNGRY = f"{WORKLOAD.with_name('hungry.py')}:HungryTask"
GREEDY = f"{WORKLOAD.with_name('hungry.py')}:GreedyTask"
LOADS = f"{WORKLOAD.with_name('hungry.py')}:NeedsMemoryToLoadTask"
SMOOTH = f"{WORKLOAD.with_name('hungry.py')}:SmoothTask"
REFUSED = f"{WORKLOAD.with_name('hungry.py')}:RefusedInOptimizerTask"
STEPS = ("--max-steps", 24, "save_every_steps=10", "save_interval=0")
# Where memory does not suffice, and from which step on. Saves are at 10 and 20, an evaluation at 12.
PLACES = (
    ("data", 1),
    ("forward", 3),
    ("reduce", 5),
    ("checkpoint", 9),
    ("evaluate", 11),
    ("backward", 13),
    ("optimizer", 15),
    ("commit", 17),
    ("forming", 17),
    ("compare", 19),
)
SETTINGS = ("-b", 8, "num_workers=0", "--audit", "log.display=plain", *PATIENT)


def finish(folder, *arguments, task=PLAIN, world=2, code=0, **how):
    with Run(folder, *SETTINGS, *arguments, task=task, world=world, **how) as run:
        assert run.wait() == code, run.console
        return run


@pytest.fixture
def calm(made_once):
    """Twenty-four steps in which memory suffices."""
    return made_once(*SETTINGS, *STEPS, "recovery.warm_spare=false", task=SMOOTH, world=2)


def assert_trained_alike(run, calm):
    """Each rank took the same samples in each step, and the weights differ by rounding only."""
    for ours, theirs in zip(run.audit(2), calm.audit(2), strict=True):
        assert {step: line["indices"] for step, line in ours.items()} == {
            step: line["indices"] for step, line in theirs.items()
        }
    ours, theirs = (
        torch.load(max(one.checkpoints.glob("step_*.pt")), weights_only=True)["model"]
        for one in (run, calm)
    )
    for name, weights in ours.items():
        # One update changes each weight by about the rate, which is a thousand times as much.
        torch.testing.assert_close(weights, theirs[name], rtol=0, atol=1e-6)


def test_lack_of_memory_in_any_phase_changes_no_sample_and_no_number(tmp_path, calm):
    """On one rank, on the other and on all; halved, grown back, at last single samples: the result is the fault-free one."""
    asked = []
    for number, (phase, step) in enumerate(PLACES):
        rank = (0, "all", 1)[number % 3]
        if phase in ("commit", "checkpoint"):
            rank = 0  # of all ranks inside their optimizer, nobody would have a state
        asked += ["--inject", f"oom:rank={rank},step={step},phase={phase}"]
    run = finish(tmp_path, *STEPS, "regrow_micro_batch=3", *asked, task=SMOOTH)
    summary = run.summary()
    assert {fault["kind"] for fault in summary["faults"]} == {"out_of_memory"}
    assert all(fault["steps_lost"] == 0 for fault in summary["faults"])
    met = {event["phase"] for event in run.events("fault") if event["kind"] == "out_of_memory"}
    assert met == {phase for phase, _ in PLACES} - {"commit"}
    assert summary["exact"] is False
    assert_trained_alike(run, calm)


def test_what_an_optimizer_has_half_made_is_never_used(made_once, tmp_path):
    """A real limit, in the middle of making its state: the rank is replaced by one that needs less."""
    short = ("--max-steps", 3)
    calm = made_once(*SETTINGS, *short, "task.rank=7", task=REFUSED, world=2)
    run = finish(tmp_path, *short, "task.rank=1", task=REFUSED)
    summary = run.summary()
    assert {fault["kind"] for fault in summary["faults"]} == {"out_of_memory"}
    (half_made,) = run.folder.glob("half_made_*")
    assert 0 < int(half_made.read_text()) < 22
    (reason,) = summary["inexact_reasons"]
    assert reason.startswith("micro-batches of 4 samples from step")
    for ours, theirs in zip(run.audit(2), calm.audit(2), strict=True):
        for step in (1, 2, 3):
            assert ours[step]["indices"] == theirs[step]["indices"]
            losses = [float.fromhex(each[step]["loss_hex"]) for each in (ours, theirs)]
            assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def limit(run, cgroup):
    """Eight samples take 480 MB; the rank that needs them waits until there is less."""
    run.wait_for_event("spare_ready")  # which takes room of its own
    cgroup.leave_room(360 * 2**20)
    (run.folder / LIMITED).touch()


def test_a_kernel_kill_halves_the_micro_batch_of_the_successor(tmp_path, calm):
    """In a real container: eight samples at once are killed for, twice four are not."""
    with memory_cgroup() as cgroup:
        if cgroup is None:
            pytest.skip("this machine lets us make no memory cgroup")
        # Before it kills, the kernel takes its time to look for pages that it can drop.
        patience = ("hang_min_s=30", *STEPS)
        with Run(tmp_path, *SETTINGS, *patience, task=GREEDY, cgroup=cgroup.folder) as run:
            limit(run, cgroup)
            assert run.wait() == 0, run.console
    summary = run.summary()
    (fault,) = summary["faults"]
    assert (fault["kind"], fault["rank"], fault["steps_lost"]) == ("out_of_memory", 1, 0)
    assert "killed by the kernel: out of memory" in fault["cause"]
    (reason,) = summary["inexact_reasons"]
    assert reason.startswith("micro-batches of 4 samples from step")
    assert_trained_alike(run, calm)


def test_half_a_micro_batch_leaves_no_sample_alone(tmp_path):
    """Nine samples in pieces of at most four: three times three, and batch normalisation works."""
    run = finish(tmp_path, "-b", 9, "--inject", "oom:rank=1,step=3,phase=forward", "--max-steps", 6)
    summary = run.summary()
    assert summary["inexact_reasons"] == ["micro-batches of 4 samples from step 3"]
    for rank_audit in run.audit(2):
        assert [len(rank_audit[step]["indices"]) for step in sorted(rank_audit)] == [9] * 6


def test_a_passing_shortage_of_memory_ends_no_run_of_single_samples(tmp_path):
    """Nothing is left to halve: the step is done once more, and no bit changes."""
    norm = ("-b", 1, "--max-steps", 8, "task.norm=layer")
    calm = finish(tmp_path / "calm", *norm, NO_SPARE, "task.rank=7", task=HUNGRY)
    oom = ("--inject", "oom:rank=1,step=4", "--inject", "oom:rank=0,step=6,phase=backward")
    run = finish(tmp_path / "run", *norm, "task.rank=7", *oom, task=HUNGRY)
    summary = run.summary()
    assert [fault["kind"] for fault in summary["faults"]] == ["out_of_memory"] * 2
    assert "once more with single samples" in run.console
    assert summary["exact"] is True
    assert run.digest == calm.digest


def test_a_shortage_in_every_update_ends_a_run_of_single_samples(tmp_path):
    """Its peers commit each of these steps, and it follows them: --max-restarts is what ends it."""
    asked = []
    for step in range(3, 9):
        asked += ["--inject", f"oom:rank=1,step={step},phase=optimizer"]
    run = finish(
        tmp_path, "-b", 1, "task.norm=layer", "task.rank=7", "--max-steps", 12,
        "--max-restarts", 3, *asked, task=HUNGRY, code=3,
    )  # fmt: skip
    summary = run.summary()
    assert (summary["status"], summary["exact"]) == ("gave_up", True)
    faults = [(fault["kind"], fault["rank"], fault["step"]) for fault in summary["faults"]]
    assert faults == [("out_of_memory", 1, step) for step in (3, 4, 5, 6)]
    (line,) = [line for line in run.console.splitlines() if ": 4 repairs within an hour" in line]
    assert "at step 6 in" in line, "the cause that was not repaired"
    assert "memory" in line


@pytest.mark.slow  # a kill by the kernel: above; what an evaluation has no room for: test_repaired_in_place
def test_a_kernel_kill_in_an_evaluation_shrinks_the_evaluation_only(tmp_path):
    """In a real container: eight samples at once are killed for, four are not; no bit changes."""
    with memory_cgroup() as cgroup:
        if cgroup is None:
            pytest.skip("this machine lets us make no memory cgroup")
        asked = ("hang_min_s=30", "--max-steps", 14, "task.evaluates=true")
        with Run(tmp_path, *SETTINGS, *asked, task=GREEDY, cgroup=cgroup.folder) as run:
            limit(run, cgroup)
            assert run.wait() == 0, run.console
    summary = run.summary()
    (fault,) = summary["faults"]
    assert (fault["kind"], fault["rank"], fault["steps_lost"]) == ("out_of_memory", 1, 0)
    assert "killed by the kernel: out of memory" in fault["cause"]
    assert "evaluating 4 samples at a time" in (run.logs / "rank_1.log").read_text(encoding="utf-8")
    assert summary["exact"] is True, summary["inexact_reasons"]


@pytest.mark.parametrize("workers", [0, 1])
def test_memory_that_is_refused_while_loading_costs_no_sample(tmp_path, workers):
    """In the rank the micro-batch is halved; a worker is replaced, and no bit changes."""
    run = finish(
        tmp_path, f"num_workers={workers}", "--max-steps", 10, "on_bad_sample=substitute", task=LOADS
    )  # fmt: skip
    summary = run.summary()
    (fault,) = summary["faults"]
    assert (fault["kind"], fault["rank"], fault["steps_lost"]) == ("out_of_memory", 1, 0)
    assert summary["exact"] is (workers == 1), summary["inexact_reasons"]
    assert not (run.logs / "quarantine.jsonl").exists()
    for rank_audit in run.audit(2):
        assert [len(rank_audit[step]["indices"]) for step in sorted(rank_audit)] == [8] * 10


def test_a_rank_above_its_memory_limit_ends_the_run_by_name(tmp_path):
    """max_memory_gb is a hard limit: one clear error, no endless retries."""
    run = finish(tmp_path, *STEPS, "max_memory_gb=0.01", "memory_check_interval=1", code=1)
    reported = [line for line in run.console.splitlines() if line.startswith("ERROR:")]
    assert "max_memory_gb=0.01" in reported[-1]
    assert run.summary()["faults"][0]["kind"] == "out_of_memory"
