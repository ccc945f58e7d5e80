"""Where a stage begins, what it goes back to, and what leads out of it: with real checkpoints."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from ddp_runner.checkpoint.memory_slots import MemorySlots
from ddp_runner.checkpoint.store import CheckpointStore
from ddp_runner.config import from_flat
from ddp_runner.core.run_stages import StageOfFile, StagePlace
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.step.runtime import RankInfo
from ddp_runner.training.starting.resume import load_start, restore_newest, take_up
from ddp_runner.training.starting.stage_begin import OtherStageError
from ddp_runner.training.workload import build_workload
from tests.checkpoint.states import facts_of

from .test_left_out import PACED
from .test_saving import RecordingRuntime

NAMES = ("pre", "tune")


@pytest.fixture(autouse=True)
def _generators_kept():
    with torch.random.fork_rng():
        yield


def settings_in(tmp_path, number, *, first_step=0, begins_with="previous", names=NAMES, **changes):
    flat = {
        "task": f"{PACED['file']}:{PACED['name']}",
        "batch_size": 4,
        "max_steps": 30,
        "num_workers": 0,
        "checkpoint_dir": str(tmp_path),
        "seed": 5 + number,
    }
    place = StagePlace(
        names=names,
        number=number,
        first_step=first_step,
        begins_with=begins_with if number else "",
        digests=("a", "b"),
    )
    return replace(from_flat({**flat, **changes}), stage=place)


def rank_info():
    return RankInfo(
        rank=0, local_rank=0, world_size=2, local_world_size=2, device="cpu", loads=True
    )


def built(settings):
    return build_workload(settings, rank_info())


def facts(settings, workload, step, *, monitored=None, changes=()):
    """What a run says of its state at that step."""
    return facts_of(
        step,
        monitored=monitored,
        samples=8 * step,
        meaning=dict(workload.resume_key),
        changes=changes,
        recipe=dict(workload.recipe),
        about={"stage": StageOfFile.of(settings.stage).to_record(), "tokens": 3.0 * step},
    )


def save(store, settings, workload, state, *, step, monitored=None, changes=()):
    """A checkpoint of that step, as a run writes it."""
    state.committed_step = step
    made = facts(settings, workload, step, monitored=monitored, changes=changes)
    return store.save(state.capture(), made)


def first_stage(tmp_path, *steps, monitored=()):
    """Checkpoints of the first stage, each with other weights, which are returned by step."""
    settings = settings_in(tmp_path, 0)
    workload, state = built(settings)
    store = CheckpointStore(tmp_path, keep_last=9)
    load_start(settings, workload, state, store)
    weights = {}
    for step, value in zip(steps, monitored or [None] * len(steps), strict=True):
        with torch.no_grad():
            for parameter in state.model.parameters():
                parameter.add_(1.0)
        save(store, settings, workload, state, step=step, monitored=value, changes=("a change",))
        weights[step] = {name: one.clone() for name, one in state.weights().items()}
    return store, weights


def has(state, weights):
    return all(torch.equal(one, weights[name]) for name, one in state.weights().items())


@pytest.mark.parametrize(("word", "step"), [("previous", 12), ("best", 10)])
def test_a_stage_begins_with_the_one_before_and_counts_on(tmp_path, word, step):
    """Its weights alone: optimizer, loss watch and average are new; steps, samples and tokens are not."""
    store, weights = first_stage(tmp_path, 10, 12, monitored=(0.5, 0.7))
    settings = settings_in(tmp_path, 1, first_step=12, begins_with=word)
    workload, state = built(settings)
    assert load_start(settings, workload, state, store) is None
    assert has(state, weights[step])
    assert (state.committed_step, state.begun_step, state.own_step) == (12, 12, 0)
    assert (state.samples, state.tokens, state.changes) == (96, 36.0, ("a change",))
    assert state.optimizer.state == {}
    assert workload.length.total_steps == 42
    assert workload.order.position(12) == (0, 0)


def test_a_stage_whose_best_is_gone_says_so(tmp_path):
    """It begins with the best that there is, and is not exact; control: the best is there."""
    for known, gone in ((10, False), (7, True)):
        folder = tmp_path / str(known)
        store, weights = first_stage(folder, 10, 12, monitored=(0.5, 0.7))
        settings = settings_in(folder, 0)
        workload, state = built(settings)
        made = facts(settings, workload, 12, monitored=0.7)
        made.about["best"] = {"step": known, "value": 0.4}
        state.committed_step = 12
        store.save(state.capture(), made)
        settings = settings_in(folder, 1, first_step=12, begins_with="best")
        workload, state = built(settings)
        load_start(settings, workload, state, store)
        assert has(state, weights[10])
        assert (
            any("best after step 7, of which there is none" in one for one in state.changes) is gone
        )


def test_a_stage_goes_on_from_its_own_checkpoint(tmp_path):
    """Not from its begin, though that is there."""
    store, _ = first_stage(tmp_path, 12)
    settings = settings_in(tmp_path, 1, first_step=12)
    workload, state = built(settings)
    load_start(settings, workload, state, store)
    save(store, settings, workload, state, step=15)
    workload, state = built(settings)
    loaded = load_start(settings, workload, state, store)
    assert (loaded.manifest.step, state.committed_step, state.own_step) == (15, 15, 3)


def test_a_roll_back_before_the_first_save_goes_to_the_begin(tmp_path):
    """Made once more, with the weights of the stage before; also where the own files are gone."""
    store, weights = first_stage(tmp_path, 12)
    settings = settings_in(tmp_path, 1, first_step=12)
    workload, state = built(settings)
    load_start(settings, workload, state, store)
    state.committed_step = 17
    state.begun_step = 15  # by a file that is damaged by now
    with torch.no_grad():
        next(state.model.parameters()).zero_()
    assert restore_newest(settings, workload, state, store) is None
    assert (state.committed_step, state.begun_step, state.samples) == (12, 12, 96)
    assert has(state, weights[12])


@pytest.mark.parametrize("go_back", [load_start, restore_newest])
def test_a_damaged_begin_leads_back_into_the_stage_before(tmp_path, go_back):
    """Whose newest sound checkpoint is gone on from, in that stage."""
    store, _ = first_stage(tmp_path, 10, 12)
    path = tmp_path / "step_00000012.pt"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    settings = settings_in(tmp_path, 1, first_step=12)
    workload, state = built(settings)
    state.committed_step = state.begun_step = 12
    with pytest.raises(OtherStageError) as caught:
        go_back(settings, workload, state, store)
    assert (caught.value.stage.name, caught.value.stage.first_step) == ("pre", 0)


def test_other_stages_than_those_of_a_file_are_refused_or_named(tmp_path):
    """Another name before the own: refused. Other settings there: a reason why the run is not exact."""
    store, _ = first_stage(tmp_path, 12)
    settings = settings_in(tmp_path, 1, first_step=12)
    workload, state = built(settings)
    load_start(settings, workload, state, store)
    save(store, settings, workload, state, step=15)
    other = settings_in(tmp_path, 1, first_step=12, names=("first", "tune"))
    with pytest.raises(BadInputError, match="and the stages are first, tune now"):
        load_start(other, *built(other), store)
    place = replace(settings.stage, digests=("x", "b"))
    changed = replace(settings, stage=place)
    workload, state = built(changed)
    load_start(changed, workload, state, store)
    line = "stage pre was made with other settings than it has now"
    assert state.changes == ("a change", line)
    alone = replace(settings, stage=None)
    with pytest.raises(BadInputError, match="is of stage tune of a run of stages"):
        load_start(alone, *built(alone), store)


def test_a_run_without_stages_is_no_stage(tmp_path):
    """Its checkpoint may be what the first stage begins with."""
    settings = settings_in(tmp_path, 0)
    _, state = built(settings)
    store = CheckpointStore(tmp_path, keep_last=2)
    store.save({**state.capture()}, facts_of(9))
    with pytest.raises(BadInputError, match="is of a run without stages: take it as"):
        load_start(settings, *built(settings), store)


def test_best_without_a_judged_checkpoint_is_one_line(tmp_path):
    """With what to write instead."""
    store, _ = first_stage(tmp_path, 12)
    settings = settings_in(tmp_path, 1, first_step=12, begins_with="best")
    with pytest.raises(
        BadInputError, match="stage tune: init_from=best: no checkpoint of stage pre"
    ):
        load_start(settings, *built(settings), store)


def test_a_model_that_does_not_fit_names_its_stage(tmp_path):
    """And the file, where only a word was written."""
    store, _ = first_stage(tmp_path, 12)
    settings = settings_in(tmp_path, 1, first_step=12, **{"task.width": 16})
    with pytest.raises(BadInputError, match="holds another model") as caught:
        load_start(settings, *built(settings), store)
    assert str(caught.value).startswith("stage tune: init_from=previous: ")
    assert "step_00000012.pt: holds" in str(caught.value)


def copied(settings, *, step):
    """The memory of a supervisor, with a copy of that stage in it; how a rank opens it."""
    workload, state = built(settings)
    state.committed_step = step
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.fill_(7.0)
    found = [os.memfd_create(f"slot{number}") for number in (0, 1)]
    slots = MemorySlots(found)
    slots.make_room([64])
    slots.seal(state.capture(), facts(settings, workload, step))
    return slots, tuple(f"/proc/{os.getpid()}/fd/{one}" for one in found)


@pytest.mark.parametrize(
    ("number", "first_step", "step", "taken"),
    [(1, 12, 14, True), (0, 0, 14, False), (1, 10, 14, False), (1, 12, 11, False)],
    ids=["own", "the one before", "begun elsewhere", "older than a file"],
)
def test_a_copy_in_memory_is_of_one_stage(tmp_path, number, first_step, step, taken):
    """All ranks of a stage are lost: its own copy is gone on from, and any other is forgotten."""
    store, weights = first_stage(tmp_path, 12)
    slots, paths = copied(settings_in(tmp_path, number, first_step=first_step), step=step)
    settings = settings_in(tmp_path, 1, first_step=12)
    workload, state = built(settings)
    runtime = RecordingRuntime(tmp_path)
    runtime.rank_info = replace(rank_info(), memory_slots=paths)
    start = take_up(settings, workload, state, store, runtime=runtime, entering=lambda _: None)
    assert start.progress.is_from_memory == taken
    assert state.committed_step == (14 if taken else 12)
    assert has(state, weights[12]) != taken
    assert slots.newest_step == (14 if taken else None)
