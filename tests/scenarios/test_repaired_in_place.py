"""Faults that the rank repairs itself: memory that does not suffice, parameters that are not used."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch

from tests.scenarios.conftest import NO_SPARE, PATIENT
from tests.scenarios.harness import Run
from tests.scenarios.workload import HOLD_NAME

pytestmark = pytest.mark.whole_run

HUNGRY = f"{Path(__file__).with_name('hungry.py')}:HungryTask"
BRANCHING = f"{Path(__file__).with_name('hungry.py')}:BranchingTask"
DRIFTING = f"{Path(__file__).with_name('hungry.py')}:DriftingTask"
BROKEN_BATCHES = f"{Path(__file__).with_name('hungry.py')}:BrokenBatchesTask"
BROKEN_GRADIENTS = f"{Path(__file__).with_name('hungry.py')}:BrokenGradientsTask"
EXPLODING_GRADIENTS = f"{Path(__file__).with_name('hungry.py')}:ExplodingGradientsTask"
PLAIN = f"{Path(__file__).with_name('workload.py')}:PacedTask"
# A rank that repairs itself is not replaced; the tests that lose one besides have a SPARE.
SETTINGS = ("-e", 3, "-b", 8, "num_workers=0", "--audit", "log.display=plain", *PATIENT, NO_SPARE)
SPARE = "recovery.warm_spare=true"
SAVES = ("save_every_steps=10", "save_interval=0", "keep_last=9")


def skipped_steps(run):
    """As rank 0 has it; the console may show the line of a slower rank as another one."""
    return (run.logs / "rank_0.log").read_text(encoding="utf-8").count("step skipped on all ranks")


def newest_save(run, *, before):
    """Step of the newest checkpoint of an earlier step; one may wait for the one before it."""
    steps = [event["step"] for event in run.events("checkpoint_saved")]
    return max(step for step in steps if step < before)


def finish(folder, *arguments, task, world=2, code=0, hurries=True):
    with Run(folder, *SETTINGS, *arguments, task=task, world=world) as run:
        assert run.wait(hurries=hurries) == code, run.console
        return run


@pytest.mark.parametrize(
    ("rank", "where"),
    [(-1, "backward"), (1, "python")],  # any phase, of one and of all: test_memory
)
def test_out_of_memory_halves_the_micro_batch_and_redoes_the_step(tmp_path, rank, where):
    """Under a real address-space limit the same step works in two halves; nothing is skipped."""
    run = finish(tmp_path, f"task.rank={rank}", f"task.where={where}", task=HUNGRY)
    summary = run.summary()
    assert {fault["kind"] for fault in summary["faults"]} == {"out_of_memory"}
    assert all(fault["steps_lost"] == 0 for fault in summary["faults"])
    if where == "python":
        assert {fault["cause"] for fault in summary["faults"]} == {"out of memory: MemoryError"}
    assert summary["exact"] is False
    assert summary["inexact_reasons"] == ["micro-batches of 4 samples from step 20"]
    for rank_audit in run.audit(2):
        assert sorted(rank_audit) == list(range(1, summary["steps"] + 1))
        assert all(len(record["indices"]) == 8 for record in rank_audit.values())


def test_a_rank_that_falls_behind_while_it_repairs_itself_stays_repaired(tmp_path):
    """Out of memory after the reduction: the others commit, and their state is not the last word."""
    run = finish(
        tmp_path, "--inject", "oom:rank=1,step=5,phase=optimizer", "--max-steps", 10, task=PLAIN
    )
    assert run.summary()["inexact_reasons"] == ["micro-batches of 4 samples from step 5"]
    saved = torch.load(run.checkpoints / "step_00000010.pt", weights_only=True)
    assert saved["tuning"]["micro_batch_size"] == 4
    resumed = finish(tmp_path, "--max-steps", 12, task=PLAIN)
    assert resumed.summary()["steps"] == 12
    reasons = resumed.summary()["inexact_reasons"]
    assert reasons[0] == "micro-batches of 4 samples from step 5", "also in the next launch"
    # Twelve steps instead of ten are another schedule.
    assert all(" at step 10" in reason for reason in reasons[1:])
    another = finish(tmp_path, "--max-steps", 2, "--resume", "none", task=PLAIN)
    assert another.summary()["exact"] is True, "a run of its own"


def test_an_evaluation_out_of_memory_shrinks_the_evaluation_only(tmp_path):
    """Training keeps its micro-batches, and so every bit; what is evaluated stays the same.

    Control: what is asked for where there is no limit is no fault.
    """
    part = "evaluate_batches=1"  # of two
    unlimited = ("task.where=python", "task.room_mb=0", "task.sample_mb=60")
    calm = finish(tmp_path / "calm", part, *unlimited, task=HUNGRY)
    assert calm.summary()["faults"] == []
    run = finish(tmp_path / "run", part, "task.where=evaluate", task=HUNGRY)
    summary = run.summary()
    assert {fault["kind"] for fault in summary["faults"]} == {"out_of_memory"}
    assert summary["exact"] is True
    assert summary["weights_sha256"] == calm.summary()["weights_sha256"]
    assert summary["figures"] == pytest.approx(calm.summary()["figures"], rel=1e-5)


def test_a_sample_that_does_not_fit_alone_ends_the_run(tmp_path):
    """Halving ends at one sample; then it is an error, with what was asked for."""
    run = finish(tmp_path, "task.sample_mb=4000", "task.norm=layer", task=HUNGRY, code=1)
    assert "out of memory" in run.console
    assert "4194304000 bytes" in run.console
    assert "trying again would not help" in run.console


@pytest.fixture
def branching(made_once):
    """``branching(ranks)``: a branch that these ranks do not always take, with the safe default."""
    compared = "replica_check_steps=1"
    return lambda ranks: made_once(*SETTINGS, compared, f"task.ranks={ranks}", task=BRANCHING)


@pytest.mark.parametrize(
    ("ranks", "setting"),
    [("any", "find_unused_parameters=false"), ("1", "static_graph=true")],
)
def test_an_unused_parameter_is_named_and_the_same_step_redone(branching, tmp_path, ranks, setting):
    """Found before any optimizer ran; DDP is rebuilt and the result is that of the safe setting."""
    run = finish(tmp_path, f"task.ranks={ranks}", setting, task=BRANCHING)
    summary = run.summary()
    (fault,) = summary["faults"]
    assert fault["kind"] == "reduction_unfinished"
    assert "side.weight" in fault["cause"]
    assert fault["steps_lost"] == 0
    # Two ranks: a sum of two numbers has one order, so no bit differs.
    assert run.digest == branching(ranks).digest


def test_a_parameter_left_out_just_before_a_save_is_never_saved_unreduced(tmp_path):
    """DDP would report it at the next forward only, and after the last step never."""
    asked = (
        "--max-steps",
        20,
        "--inject",
        "unused:rank=1,step=9",
        "--inject",
        "unused:rank=0,step=19",
    )
    saves = ("save_every_steps=10", "save_interval=0")
    safe = finish(tmp_path / "safe", *asked, *saves, task=PLAIN)
    run = finish(tmp_path / "run", *asked, *saves, "find_unused_parameters=false", task=PLAIN)
    # The first fault turns the search on; the step of the second needs it no less.
    (fault,) = run.summary()["faults"]
    assert (fault["kind"], fault["step"]) == ("reduction_unfinished", 9)
    assert "4.weight, 4.bias" in fault["cause"]
    for step in (10, 20):
        weights = [
            torch.load(one.checkpoints / f"step_{step:08}.pt", weights_only=True)["model"]
            for one in (safe, run)
        ]
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_expected_branches_and_equal_replicas_are_no_fault(branching):
    """Control: with the default the very same task runs without faults, compared at every step."""
    run = branching("any")
    summary = run.summary()
    assert (summary["faults"], run.events("fault_tolerated")) == ([], [])
    assert summary["exact"] is True


def test_auto_stops_searching_for_unused_parameters_until_it_is_wrong(branching, tmp_path):
    """A branch that is rare: relaxed too early, found by the reduction, never relaxed again."""
    run = finish(tmp_path, "find_unused_parameters=auto", "relax_after_steps=3", task=BRANCHING)
    # That a switch of the model's was not put back with the step is reported beside it, if at all.
    (relaxed, returned) = [event for event in run.events("tuning_changed") if event["action"]]
    assert "find_unused_parameters=False" in relaxed["action"]
    assert "find_unused_parameters=True" in returned["action"]
    (fault,) = run.summary()["faults"]
    assert fault["kind"] == "reduction_unfinished"
    assert "side.weight" in fault["cause"]
    # Two ranks: a sum of two numbers has one order, so no bit differs.
    assert run.digest == branching("any").digest


def test_a_micro_batch_grows_back_and_the_checkpoint_knows_the_size(tmp_path):
    """Out of memory once, tried again after six steps; again too much, and tried later."""
    run = finish(
        tmp_path, "regrow_micro_batch=6", "--max-steps", 30, "save_interval=0", "save_every_steps=14",
        "--inject", "oom:rank=1,step=5,phase=forward", "--inject", "oom:rank=0,step=12,phase=backward",
        task=PLAIN,
    )  # fmt: skip
    changes = [(event["step"], event["action"]) for event in run.events("tuning_changed")]
    smaller = "micro-batches of 4 samples, same global batch"
    larger = "trying micro-batches of 8 samples"
    assert changes == [(5, smaller), (11, larger), (12, smaller), (24, larger)]
    assert [fault["kind"] for fault in run.summary()["faults"]] == ["out_of_memory"] * 2
    saved = torch.load(run.checkpoints / "step_00000014.pt", weights_only=True)
    assert saved["tuning"]["micro_batch_size"] == 4
    for audit in run.audit(2):
        assert all(len(record["indices"]) == 8 for record in audit.values())


@pytest.fixture
def undisturbed(made_once):
    """The digest of the drifting task where nothing drifts."""
    steps = ("--max-steps", 40, "recovery.warm_spare=false")
    return made_once(*SETTINGS, *steps, "task.rank=7", task=DRIFTING, world=2).digest


def test_what_one_rank_alone_has_is_never_saved(tmp_path, undisturbed):
    """Of two replicas nobody can be believed: the checkpoint before rank 0 changed can.

    Rank 0 saves; at the interval, the comparison would come long after three more saves.
    """
    run = finish(
        tmp_path, *SAVES, "task.rank=0", "task.part=optimizer",
        "--max-steps", 40, task=DRIFTING,
    )  # fmt: skip
    (fault,) = run.summary()["faults"]
    newest = newest_save(run, before=25)
    lost = fault["step"] - newest
    assert (fault["kind"], fault["steps_lost"]) == ("replica_diverged", lost)
    assert fault["step"] <= 30, "at the first save since"
    assert "no majority" in fault["cause"]
    assert f"rolled back to step {newest}" in run.console
    # Steps 21 to 40 without what had changed: the run that nothing happened to.
    assert (run.digest, run.summary()["exact"]) == (undisturbed, True)


def test_a_rank_0_that_alone_has_changed_is_healed_before_it_saves(tmp_path):
    """Three ranks: the save waits for the majority's state, and no step is lost."""
    run = finish(tmp_path, *SAVES, "task.rank=0", "--max-steps", 40, task=DRIFTING, world=3)
    (fault,) = run.summary()["faults"]
    assert (fault["kind"], fault["rank"], fault["steps_lost"]) == ("replica_diverged", 0, 0)
    assert "4.weight" in fault["cause"]
    assert (fault["recovered_s"] is None, run.summary()["exact"]) == (False, False)
    assert fault["step"] <= 30, "at the first save since"
    (repaired,) = run.events("repaired")
    saved = {event["step"]: event["id"] for event in run.events("checkpoint_saved")}
    # Some steps later where the thread of the save that was dropped had not ended yet.
    made = min(step for step in saved if step >= fault["step"])
    assert made < fault["step"] + 10, "made up for, before another one comes due"
    assert saved[made] > repaired["id"]


def test_steps_that_are_not_finite_are_skipped_then_rolled_back(tmp_path):
    """A bad batch is skipped on all ranks; too many lower the rate from a checkpoint on."""
    run = finish(
        tmp_path, "max_errors_per_epoch=2", "save_every_steps=10", "task.count=3",
        task=BROKEN_BATCHES,
    )  # fmt: skip
    summary = run.summary()
    assert "first on rank 1: step skipped on all ranks" in run.console
    assert summary["status"] == "completed"
    assert "learning rate x 0.5" in run.console
    assert summary["exact"] is False
    lines = (run.logs / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    logged = [record for record in map(json.loads, lines) if "samples_per_s" in record]
    assert min(record["samples_per_s"] for record in logged) > 0, "also of steps done once more"


def test_what_is_gone_back_to_is_from_before_the_bad_steps(tmp_path):
    """A save at every second step would stand amid them: gone back to, it would lead into them again."""
    run = finish(
        tmp_path, "max_errors_per_epoch=3", "save_every_steps=2", "task.count=9", "--max-steps", 40,
        task=BROKEN_BATCHES, hurries=False,
    )  # fmt: skip
    saved = [event["step"] for event in run.events("checkpoint_saved")]
    assert not set(saved) & set(range(20, 29)), "no save amid bad steps, nor soon after"
    newest = newest_save(run, before=20)
    assert newest in range(10, 20), "the later, the less time the save before has taken"
    rolled_back = [fault["steps_lost"] for fault in run.summary()["faults"]]
    assert rolled_back == [23 - newest, 4], "four bad steps, the first time also those before them"
    assert f"rolled back to step {newest}, learning rate x 0.25" in run.console
    assert run.summary()["status"] == "completed"


def test_a_roll_back_whose_load_fails_leaves_no_old_state(tmp_path):
    """All stand empty then: rank 0 reads in the next generation, and the lower rate stays agreed on.

    What it passes over, damaged by then, it reports.
    """
    asked = ("max_errors_per_epoch=2", "save_every_steps=10", "save_interval=1", "--max-steps", 40)
    asked += ("task.count=3", "task.forgets=true")
    hold = tmp_path / HOLD_NAME
    hold.write_text("12")
    with Run(tmp_path, *SETTINGS, *asked, task=BROKEN_BATCHES, world=2) as run:
        run.wait_for_checkpoint(10)
        hold.write_text("19")
        run.wait_for_checkpoint(12)  # there is another one to go back to
        hold.unlink()
        assert run.wait() == 0, run.console
    summary = run.summary()
    (fault,) = summary["faults"]
    assert (fault["kind"], fault["rank"]) == ("out_of_memory", 0)
    assert (summary["status"], summary["steps"]) == ("completed", 40)
    assert fault["step"] > 12
    newest = newest_save(run, before=20)
    older = newest_save(run, before=newest)
    assert {event["committed_step"] for event in run.events("rank_formed")[2:]} == {older}
    (noted,) = (
        event for event in run.events("fault_tolerated") if event["kind"] == "checkpoint_bad"
    )
    assert noted["rank"] == 0
    assert f"step_{newest:08}.pt is unusable: " in run.console
    assert any("learning rate lowered" in reason for reason in summary["inexact_reasons"])


def test_a_roll_back_to_the_start_is_done_by_any_successor(tmp_path):
    """It dies while it makes the model again: its successor begins as the launch did, at the lower rate."""
    words = (
        *("max_errors_per_epoch=2", "save_interval=0", "task.at=6", "task.count=3"),
        *("--max-steps", 30),
    )
    undisturbed = finish(tmp_path / "undisturbed", *words, task=BROKEN_BATCHES)
    assert "rolled back to step 0, learning rate x 0.5" in undisturbed.console
    run = finish(tmp_path / "disturbed", *words, "task.dies=true", SPARE, task=BROKEN_BATCHES)
    summary = run.summary()
    (fault,) = summary["faults"]
    assert (fault["kind"], fault["rank"]) == ("rank_killed", 0)
    assert {event["committed_step"] for event in run.events("rank_formed")} == {0}
    assert (summary["status"], summary["steps"], summary["world_size"]) == ("completed", 30, 2)
    assert any("learning rate lowered" in reason for reason in summary["inexact_reasons"])
    assert run.digest == undisturbed.digest


def test_a_rank_that_dies_leaving_the_other_branch_has_a_successor(tmp_path):
    """A roll-back before the first save would find the old checkpoints, were they still there."""
    finish(tmp_path, "--max-steps", 6, task=PLAIN)
    task = PLAIN.replace("workload.py:PacedTask", "hungry.py:DiesLeavingTask")
    run = finish(tmp_path, "--max-steps", 4, "--resume", "none", SPARE, task=task)
    (fault,) = run.summary()["faults"]
    assert (fault["kind"], fault["rank"]) == ("rank_killed", 0)
    assert run.console.count("does not resume from were moved to") == 1


def test_a_gradient_that_is_not_finite_is_traced_to_its_rank(tmp_path):
    """With finite losses: of one rank, of all, and of one that cannot be made to do it again."""
    run = finish(tmp_path, "max_errors_per_epoch=9", "--max-steps", 40, task=BROKEN_GRADIENTS)
    summary = run.summary()
    for origin in ("first on rank 1", "first on ranks 0-1", "on no rank when computed once more"):
        assert f"gradient norm is nan, {origin}: step skipped on all ranks" in run.console
    assert skipped_steps(run) == 3
    noted = [(event["kind"], event["rank"]) for event in run.events("fault_tolerated")]
    assert noted == [("non_finite", 1), ("non_finite", -1), ("non_finite", -1)]
    assert (summary["status"], summary["exact"], summary["faults"]) == ("completed", True, [])


def test_a_gradient_broken_by_one_rank_ends_the_run_with_its_samples(tmp_path):
    """Without a step to spare and without a roll-back; its device is what to suspect."""
    run = finish(
        tmp_path, "max_errors_per_epoch=0", "rollbacks_max=0", "save_interval=0",
        task=BROKEN_GRADIENTS, code=1,
    )  # fmt: skip
    (fault,) = run.summary()["faults"]
    assert (fault["kind"], fault["step"]) == ("non_finite", 10)
    indices = ", ".join(map(str, run.audit(2)[1][10]["indices"]))
    assert f"first on rank 1: suspect its device; samples {indices}" in run.console


def test_the_faults_of_a_step_can_be_injected(tmp_path):
    """Each on another rank of one run: noticed, named, repaired; no step and no sample is lost."""
    specs = (
        "nan:rank=1,step=4",
        "oom:rank=2,step=12,phase=backward",
        "unused:rank=0,step=21",
        "diverge:rank=1,step=26",
    )
    run = finish(
        tmp_path, *(word for spec in specs for word in ("--inject", spec)), "--max-steps", 40,
        "replica_check_steps=10", "save_interval=0", "find_unused_parameters=false",
        task=PLAIN, world=3,
    )  # fmt: skip
    summary = run.summary()
    assert [event["kind"] for event in run.events("injected")] == [
        "nan",
        "oom",
        "unused",
        "diverge",
    ]
    assert [(fault["kind"], fault["rank"], fault["step"]) for fault in summary["faults"]] == [
        ("out_of_memory", 2, 12), ("reduction_unfinished", 0, 21), ("replica_diverged", 1, 30)
    ]  # fmt: skip
    assert "first on rank 1: step skipped on all ranks" in run.console
    for rank_audit in run.audit(3):
        assert sorted(rank_audit) == list(range(1, 41))
        assert all(len(record["indices"]) == 8 for record in rank_audit.values())


def test_explosions_are_skipped_then_rolled_back_then_end_the_run(tmp_path):
    """The end names the samples, and what they came from: every rank, so not a device."""
    run = finish(
        tmp_path, "max_errors_per_epoch=2", "save_every_steps=10", "rollbacks_max=1",
        "explosion_window=10", "warmup_steps=5", "--max-steps", 100,
        "--inject", "spike:rank=all,step=31,times=50", task=PLAIN, code=1,
    )  # fmt: skip
    rolled_back, fault = run.summary()["faults"]
    assert (rolled_back["kind"], rolled_back["step"]) == ("loss_exploded", 34)
    newest = newest_save(run, before=32)
    assert f"rolled back to step {newest}, learning rate x 0.5" in run.console
    assert "first on ranks 0-1: step skipped on all ranks" in run.console
    assert (fault["kind"], fault["step"]) == ("loss_exploded", 34)
    samples = [index for audit in run.audit(2) for index in audit[34]["indices"]]
    assert f"suspect the data or the learning rate; samples {', '.join(map(str, samples))}" in (
        run.console
    )


def test_a_gradient_that_explodes_is_traced_rolled_back_and_ends_the_run(tmp_path):
    """Its loss shows nothing: who it was, and with which samples, comes from the ranks' own norms."""
    run = finish(
        tmp_path, "max_errors_per_epoch=2", "save_every_steps=10", "rollbacks_max=1",
        "explosion_window=10", "warmup_steps=5", "--max-steps", 100,
        task=EXPLODING_GRADIENTS, code=1,
    )  # fmt: skip
    rolled_back, fault = run.summary()["faults"]
    assert (rolled_back["kind"], rolled_back["step"]) == ("loss_exploded", 34)
    newest = newest_save(run, before=32)
    assert f"rolled back to step {newest}, learning rate x 0.5" in run.console
    assert "far above the last steps" in run.console
    assert "first on rank 1: step skipped on all ranks" in run.console
    assert (fault["kind"], fault["step"]) == ("loss_exploded", newest + 3)
    samples = ", ".join(map(str, run.audit(2)[1][newest + 3]["indices"]))
    assert "gradient norm" in fault["cause"]
    assert f"first on rank 1: suspect its device; samples {samples}" in run.console


def test_one_explosion_on_one_rank_costs_that_step_only(tmp_path):
    """Skipped by all; with the rank named that it came from.

    Control: another one, while the warm-up's five steps and ten more are not over, is applied.
    """
    spike = ("--inject", "spike:rank=1,step=12", "--inject", "spike:rank=1,step=24")
    run = finish(
        tmp_path, *spike, "explosion_window=10", "warmup_steps=5", "--max-steps", 40, task=PLAIN
    )
    assert "first on rank 1: step skipped on all ranks" in run.console
    assert skipped_steps(run) == 1
    (noted,) = run.events("fault_tolerated")
    assert (noted["kind"], noted["rank"], noted["step"]) == ("loss_exploded", 1, 24)
    assert run.summary()["faults"] == []
    assert run.summary()["final_loss"] < 10


def test_a_replica_changed_after_the_last_comparison_is_not_the_result(tmp_path):
    """The odd one out is rank 0, whose state the last save takes: it is healed before that."""
    run = finish(
        tmp_path, "save_interval=0", "--inject", "diverge:rank=0,step=15", task=PLAIN, world=3
    )  # fmt: skip
    summary = run.summary()
    (fault,) = summary["faults"]
    assert (fault["kind"], fault["rank"]) == ("replica_diverged", 0)
    assert summary["steps"] == fault["step"]
    assert (summary["status"], summary["exact"]) == ("completed", False)


def test_ranks_that_wait_for_the_last_save_are_not_hung(tmp_path):
    """After a stop the disk takes longer than a step may: nobody is replaced for waiting."""
    slow = (
        "--inject",
        "slow_disk:rank=0,step=4,seconds=6",
        "save_every_steps=0",
        "save_interval=0",
    )
    limits = ("recovery.hang_min_s=2", "recovery.hang_factor=2", "task.pace_s=0.05")
    endless = ("--max-steps", 100_000)
    with Run(tmp_path, *SETTINGS, *slow, *limits, *endless, task=PLAIN, world=2) as run:
        run.wait_for_step(6)
        run.signal(signal.SIGTERM)
        assert run.wait() == 75, run.console
    assert run.summary()["faults"] == []


def test_the_final_loss_is_that_of_the_last_step_that_was_applied(tmp_path):
    """The last step is skipped; a rank that is replaced behind it has not computed its loss."""
    words = ("--max-steps", 12, "--inject", "nan:rank=1,step=11")
    killed = ("--inject", "kill:rank=0,step=11,phase=checkpoint")
    one = finish(tmp_path / "1", *words, task=PLAIN)
    other = finish(tmp_path / "2", *words, *killed, SPARE, task=PLAIN)
    assert skipped_steps(one) == 1
    assert [fault["kind"] for fault in other.summary()["faults"]] == ["rank_killed"]
    assert one.digest == other.digest
    assert other.summary()["final_loss"] == one.summary()["final_loss"] is not None
