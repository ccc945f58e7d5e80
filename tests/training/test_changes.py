"""What a resumed run computes otherwise than before is said, kept in its files, and done."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ddp_runner.checkpoint.store import CheckpointStore
from ddp_runner.config import from_flat
from ddp_runner.kernel.step.runtime import RankInfo
from ddp_runner.training.starting.changes import CHANGES_KEPT, changes_since
from ddp_runner.training.starting.resume import load_start, restore_newest
from ddp_runner.training.workload import build_workload
from tests.checkpoint.states import facts_of

WORKLOAD = Path(__file__).parents[1] / "scenarios" / "workload.py"
STEP = 40
# 80 steps, of which a quarter warms up.
USUAL = {
    "task": f"{WORKLOAD}:PacedTask",
    "batch_size": 4,
    "max_steps": 80,
    "num_workers": 0,
    "warmup_steps": 20,
}


@pytest.fixture(autouse=True)
def _generators_kept():
    with torch.random.fork_rng():
        yield


def build(*, world_size=2, **changed):
    rank_info = RankInfo(
        rank=0,
        local_rank=0,
        world_size=world_size,
        local_world_size=world_size,
        device="cpu",
        loads=True,
    )
    settings = from_flat({**USUAL, **changed})
    return settings, *build_workload(settings, rank_info)


def save(store, workload, state, *, step=STEP, **facts):
    """The state as the checkpoint of ``step``, as a rank would write it."""
    state.committed_step = step
    kept = {"meaning": workload.resume_key, "recipe": workload.recipe}
    store.save(state.capture(), facts_of(step, **{**kept, "changes": state.changes, **facts}))


def resumed(folder, *, before=(), step=STEP, world_size=2, **changed):
    """The state of a launch with ``changed`` settings, resumed from one with those of ``before``."""
    store = CheckpointStore(folder, keep_last=3)
    _, workload, state = build(**dict(before))
    save(store, workload, state, step=step)
    settings, workload, state = build(world_size=world_size, **changed)
    assert load_start(settings, workload, state, store) is not None
    return state


def test_the_same_settings_change_nothing(tmp_path):
    """Control, and with others that cannot matter: more workers, another folder."""
    changed = {"num_workers": 2, "log_dir": "x", "log_interval": 3, "target_loss": 1.0}
    assert resumed(tmp_path, **changed).changes == ()


@pytest.mark.parametrize(
    ("changed", "lines"),
    [
        ({"lr": 0.5}, ["optim.learning_rate 0.0001 -> 0.5 at step 40"]),
        (
            {"schedule": "linear", "warmup_steps": 10},
            [
                "optim.schedule cosine -> linear at step 40",
                "optim.warmup_steps 20 -> 10 at step 40",
            ],
        ),
        (
            {"schedule": "wsd", "decay_steps": 0.5},
            [
                "optim.schedule cosine -> wsd at step 40",
                "optim.decay_steps 0.1 -> 0.5 at step 40",
            ],
        ),
        (
            {"schedule_steps": 60},
            [
                "optim.schedule_steps 0 -> 60 at step 40",
                "end of the schedule 80 -> 60 at step 40",
            ],
        ),
        ({"min_lr": 1e-5}, ["optim.min_learning_rate 0.0 -> 1e-05 at step 40"]),
        (
            {"max_steps": 100},
            [
                "end of the schedule 80 -> 100 at step 40, where steps from 21 on had the rates of the length before"
            ],
        ),
        ({"weight_decay": 0.5}, ["optim.weight_decay 0.01 -> 0.5 at step 40"]),
        ({"beta2": 0.5}, ["optim.beta2 0.999 -> 0.5 at step 40"]),
        ({"max_grad_norm": None}, ["optim.max_grad_norm 1.0 -> none at step 40"]),
        ({"micro_batch_size": 2}, ["data.micro_batch_size 4 -> 2 at step 40"]),
        ({"deterministic": True}, ["run.deterministic false -> true at step 40"]),
        ({"bucket_cap_mb": 1}, ["ddp.bucket_cap_mb 25 -> 1 at step 40"]),
        ({"batch_size": 8, "micro_batch_size": 4, "world_size": 1}, ["ranks 2 -> 1 at step 40"]),
        (
            {"ema_decay": 0.9},
            ["optim.ema_decay none -> 0.9 at step 40: an average (EMA) begins again"],
        ),
    ],
)
def test_what_makes_other_steps_is_named_with_both_values_and_the_step(tmp_path, changed, lines):
    """One line each, which the state keeps for the files to come."""
    try:
        state = resumed(tmp_path, **changed)
    finally:
        torch.use_deterministic_algorithms(False)
    assert list(state.changes) == lines
    assert state.capture()["changes"] == lines


def test_a_longer_run_before_its_old_schedule_bends_is_exact(tmp_path):
    """Each step that is over has the rate of the longer run; past the bend, or with another setting, it has not."""
    before = {"schedule": "wsd", "decay_steps": 10, "warmup_steps": 7, "max_steps": 60}
    longer = {**before, "max_steps": 100}
    assert resumed(tmp_path / "1", before=before, **longer).changes == ()
    assert resumed(tmp_path / "2", before=before, step=50, **longer).changes == ()
    (late,) = resumed(tmp_path / "3", before=before, step=55, **longer).changes
    assert "60 -> 100 at step 55, where steps from 51 on" in late
    assert resumed(tmp_path / "4", before=before, **longer, lr=0.5).changes


def test_of_a_schedule_only_what_moves_the_rate_is_named(tmp_path):
    """A constant rate has no end; a warm-up that is over, or one that was cut, may move."""
    constant = {"schedule": "constant"}
    longer = {**constant, "max_steps": 500, "warmup_steps": 7}
    assert resumed(tmp_path / "1", before=constant, **longer).changes == ()
    before = {**constant, "max_steps": 30, "warmup_steps": 100}
    after = {**before, "max_steps": 60}
    since = ", where steps from 0 on had the rates of the length before"
    lines = (f"end of the warm-up 15 -> 30 at step 20{since}",)
    assert resumed(tmp_path / "2", before=before, step=20, **after).changes == lines


@pytest.mark.parametrize(
    ("schedule", "line"),
    [
        ({"warmup_steps": 8}, "end of the warm-up 5 -> 8 at step 10{}"),  # it was cut to half
        ({"warmup_steps": "auto"}, "end of the warm-up 1 -> 3 at step 10{}"),
        ({"warmup_steps": 0.2}, "end of the warm-up 2 -> 6 at step 10{}"),
        ({"warmup_steps": 0, "unfreeze": "*@0.5"}, "unfreezing *@5 -> *@15 at step 10"),
        ({"warmup_steps": 0, "unfreeze": "*@5"}, None),
        ({"warmup_steps": 5}, None),
    ],
)
def test_a_longer_run_says_what_the_steps_that_are_over_had(tmp_path, schedule, line):
    """Also where the rates to come are the same; controls: what does not depend on the length."""
    before = {"schedule": "constant", "max_steps": 10, **schedule}
    found = resumed(tmp_path, before=before, step=10, **{**before, "max_steps": 30}).changes
    since = ", where steps from 0 on had the rates of the length before"
    assert found == (() if line is None else (line.format(since),))


def test_what_plateaus_are_judged_by_is_named_where_they_count(tmp_path):
    """Which loss, and when it is evaluated; the control: without them nothing follows from it."""
    judged = {"monitor": "train_loss", "evaluate_batches": 2}
    line = "checkpoint.monitor auto -> train_loss at step 40"
    waits = {"plateau_patience": 3}
    found = resumed(tmp_path / "1", before=waits, **waits, **judged).changes
    assert found == (line, "log.evaluate_batches 0 -> 2 at step 40")
    assert resumed(tmp_path / "2", **judged).changes == ()


@pytest.mark.parametrize("ends", [("wrap", "drop"), ("drop", "wrap")])
def test_another_end_of_a_stream_is_named(tmp_path, ends):
    """Ranks then draw other samples from the first shard on that ends early."""
    before, after = ends
    found = resumed(tmp_path, before={"data.stream_end": before}, **{"data.stream_end": after})
    assert found.changes == (f"data.stream_end {before} -> {after} at step 40",)


def test_a_setting_that_a_file_lacks_had_its_default(tmp_path):
    """Files of before ``checkpoint.mode`` and ``data.stream_end`` wrote neither."""
    newer = {"plateau_patience": 3, "monitor": "train_loss"}
    store = CheckpointStore(tmp_path, keep_last=3)
    _, workload, state = build(**newer)
    unknown = ("checkpoint.mode", "data.stream_end")
    save(
        store,
        workload,
        state,
        recipe={k: v for k, v in workload.recipe.items() if k not in unknown},
    )
    _, workload, state = build(**newer)
    loaded = store.load("auto")
    assert loaded is not None
    state.restore(loaded.state)
    assert changes_since(loaded, state, recipe=workload.recipe) == ()
    now = {**workload.recipe, "checkpoint.mode": "max", "data.stream_end": "drop"}
    assert set(changes_since(loaded, state, recipe=now)) == {
        "checkpoint.mode min -> max at step 40",
        "data.stream_end wrap -> drop at step 40",
    }


def test_a_decay_that_wsd_does_not_come_to_is_no_change(tmp_path):
    """Nor what cosine does not read; control: one that reaches the last step is named."""
    wsd = {"schedule": "wsd", "decay_steps": 8, "schedule_steps": 200}
    assert resumed(tmp_path / "1", before=wsd, **{**wsd, "decay_steps": 120}).changes == ()
    line = (
        "optim.decay_steps 8 -> 122 at step 40"  # the rate of its first step is still the full one
    )
    assert resumed(tmp_path / "2", before=wsd, **{**wsd, "decay_steps": 122}).changes == (line,)
    assert resumed(tmp_path / "3", decay_steps=7, warmup_steps=0.25).changes == ()


def test_a_file_from_before_other_schedules_has_the_rates_of_then(tmp_path):
    """What its recipe has not is what every run of that version had."""
    store = CheckpointStore(tmp_path, keep_last=3)
    _, workload, state = build()
    newer = ("optim.schedule_steps", "optim.decay_steps", "optim.momentum", "optim.epsilon")
    recipe = {key: value for key, value in workload.recipe.items() if key not in newer}
    save(store, workload, state, recipe=recipe)
    settings, workload, state = build(lr=0.5)
    assert load_start(settings, workload, state, store) is not None
    assert state.changes == ("optim.learning_rate 0.0001 -> 0.5 at step 40",)


@pytest.mark.parametrize("step", [0, 80])
def test_nothing_has_changed_where_no_step_was_computed_or_is_left(tmp_path, step):
    """What was computed before is none of it, or all of it."""
    assert resumed(tmp_path, step=step, lr=0.5).changes == ()


def test_state_that_the_settings_do_not_want_is_named(tmp_path):
    """An average that was kept is gone from the files to come."""
    state = resumed(tmp_path, before={"ema_decay": 0.9})
    line = "optim.ema_decay 0.9 -> none at step 40: the file's average (EMA) is dropped"
    assert state.changes == (line,)
    assert "ema" not in state.capture()


@pytest.mark.parametrize(
    ("ema", "line"), [(0.9, "the file's average (EMA) is dropped"), (None, "")]
)
def test_a_file_without_a_recipe_says_what_it_has(tmp_path, ema, line):
    """One of an older version: its average, its loss scale and its torch are known all the same."""
    store = CheckpointStore(tmp_path, keep_last=3)
    _, workload, state = build(ema_decay=ema)
    save(store, workload, state, recipe={})
    settings, workload, state = build(lr=0.5)
    assert load_start(settings, workload, state, store) is not None
    assert state.changes == ((f"{line} at step {STEP}",) if line else ())


@pytest.mark.parametrize(
    ("had", "has", "what"),
    [
        ("fp16", "fp32", "precision fp16 -> fp32 at step 40: the file's loss scale is dropped"),
        ("fp32", "fp16", "precision fp32 -> fp16 at step 40: the loss scale begins again"),
    ],
)
def test_a_loss_scale_is_named_like_an_average(tmp_path, had, has, what):
    """The scaler belongs to fp16 alone."""
    store = CheckpointStore(tmp_path, keep_last=3)
    _, workload, state = build()
    content = state.capture()
    scales = {"scale": 2.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 9}
    content["scaler"] = {**scales, "_growth_tracker": 0} if had == "fp16" else {}
    content["counters"]["committed_step"] = STEP
    recipe = {**workload.recipe, "precision": had}
    store.save(content, facts_of(STEP, meaning=workload.resume_key, recipe=recipe))
    settings, workload, state = build()
    state.precision.scaler = torch.amp.GradScaler("cpu", enabled=has == "fp16")
    workload = replace(workload, recipe={**workload.recipe, "precision": has})
    assert load_start(settings, workload, state, store) is not None
    assert state.changes == (what,)


def test_what_was_changed_before_is_not_forgotten(tmp_path):
    """Each launch adds its own lines to those of the file; the newest are kept."""
    store = CheckpointStore(tmp_path, keep_last=3)
    _, workload, state = build()
    state.changes = tuple(f"change {number}" for number in range(CHANGES_KEPT))
    save(store, workload, state)
    settings, workload, state = build(lr=0.5)
    assert load_start(settings, workload, state, store) is not None
    assert state.changes[0] == "change 1"
    assert state.changes[-1] == "optim.learning_rate 0.0001 -> 0.5 at step 40"
    assert len(state.changes) == CHANGES_KEPT


def test_a_roll_back_behind_the_change_does_not_forget_it(tmp_path):
    """The newest file may be of the launch before: what is computed from there on is the new way."""
    store = CheckpointStore(tmp_path, keep_last=3)
    _, workload, state = build()
    save(store, workload, state)
    settings, workload, state = build(lr=0.5)
    load_start(settings, workload, state, store)
    state.committed_step = STEP + 5
    restore_newest(settings, workload, state, store)
    assert state.committed_step == STEP
    assert state.changes == ("optim.learning_rate 0.0001 -> 0.5 at step 40",)


def test_what_is_changed_is_done(tmp_path):
    """Decay and betas are those of the settings, not of the file; so is the size of a micro-batch."""
    changed = {"weight_decay": 0.5, "beta1": 0.5, "micro_batch_size": 2}
    state = resumed(tmp_path, **changed, find_unused_parameters=False)
    decays = [group["weight_decay"] for group in state.optimizer.param_groups]
    assert decays == [0.5, 0.0]
    assert {group["betas"] for group in state.optimizer.param_groups} == {(0.5, 0.999)}
    assert (state.tuning.micro_batch_size, state.tuning.find_unused_parameters) == (2, False)


@pytest.mark.parametrize(
    ("setting", "learnt", "searches"),
    [
        ({"find_unused_parameters": True}, False, True),
        ({"find_unused_parameters": "auto"}, False, False),
        ({"find_unused_parameters": False}, True, False),
        ({"static_graph": True}, True, False),
    ],
)
def test_the_search_follows_its_setting_at_a_resume(tmp_path, setting, learnt, searches):
    """It changes no step, so nothing is reported; a step that has needed it counts for more."""
    for found_unused in (False, True):
        store = CheckpointStore(tmp_path / str(found_unused), keep_last=3)
        _, workload, state = build()
        state.tuning = replace(
            state.tuning,
            find_unused_parameters=learnt or found_unused,
            found_unused=found_unused,
        )
        save(store, workload, state)
        settings, workload, state = build(**setting)
        load_start(settings, workload, state, store)
        assert state.tuning.find_unused_parameters is (searches or found_unused)
        assert state.changes == ()


def test_what_was_learnt_holds_while_its_setting_does(tmp_path):
    """A micro-batch that was halved for lack of memory stays so."""
    store = CheckpointStore(tmp_path, keep_last=3)
    _, workload, state = build()
    state.tuning = replace(state.tuning, micro_batch_size=1, reductions=2)
    save(store, workload, state)
    settings, workload, state = build(lr=0.5)
    load_start(settings, workload, state, store)
    assert (state.tuning.micro_batch_size, state.tuning.reductions) == (1, 2)
