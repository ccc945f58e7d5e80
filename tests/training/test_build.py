"""What is refused before anything is trained, with the option that would mend it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ddp_runner.checkpoint.store import CheckpointStore
from ddp_runner.config import from_flat
from ddp_runner.core.faults import BadInputError
from ddp_runner.data.quarantine import QuarantineFullError
from ddp_runner.data.stream import StreamOrder
from ddp_runner.training.build import build_workload, is_complete, load_start
from ddp_runner.training.runtime import Place
from tests.checkpoint.states import facts_of

STREAMING = Path(__file__).parents[1] / "scenarios" / "streaming.py"
WORKLOAD = STREAMING.with_name("workload.py")


def build(name="StreamTask", file=STREAMING, **settings):
    place = Place(rank=0, local_rank=0, world_size=2, local_world_size=2, device="cpu", loads=True)
    flat = {"task": f"{file}:{name}", "batch_size": 4, "max_steps": 30, "num_workers": 0}
    return build_workload(from_flat({**flat, **settings}), place)


@pytest.fixture(autouse=True)
def _generators_kept():
    with torch.random.fork_rng():
        yield


def test_a_stream_without_a_length_is_as_long_as_the_run():
    """``--max-steps`` says so; the position is part of the state."""
    workload, state = build()
    assert isinstance(workload.order, StreamOrder)
    assert workload.length.total_steps == 30
    assert workload.meaning["data fingerprint"] == "a stream"
    assert state.stream is not None


def test_a_stream_has_no_workers_unless_some_are_asked_for():
    """``auto``, the default, is none there."""
    workload, _ = build(num_workers="auto")
    assert isinstance(workload.order, StreamOrder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_workers": 1}, "data.num_workers=1: must be 0 with an iterable dataset"),
        ({"max_steps": 0}, "--max-steps=0: must say how long to train"),
        ({"name": "StreamedValidation"}, "its validation data must be map-style"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(settings, message):
    """One line that says what would be right."""
    with pytest.raises(BadInputError, match=message):
        build(**settings)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("SparseTask", "0 has sparse gradients"),
        ("OddStateTask", r"_extra_state.* is a builtins\.set"),
    ],
)
def test_a_model_that_could_not_be_kept_is_refused(name, message):
    """Before the first step, not at the first save or hand-over."""
    with pytest.raises(BadInputError, match=message):
        build(name)


@pytest.mark.parametrize(("policy", "replaced"), [("substitute", 3), ("stop", 0)])
def test_so_many_bad_samples_are_replaced_as_the_settings_allow(policy, replaced):
    """Of training and of validation; control: none by default, whatever the budget."""
    _, state = build("PacedTask", WORKLOAD, on_bad_sample=policy, max_bad_samples=3)
    for quarantine in (state.quarantine, state.validation_quarantine):
        for index in range(replaced):
            quarantine.add(index, reason="broken", step=0, rank=0)
        with pytest.raises(QuarantineFullError):
            quarantine.add(replaced, reason="broken", step=0, rank=0)


def saved_at(step, store, **settings):
    """A workload that ends at step 30, if not ``settings`` say otherwise, and an empty state for it."""
    workload, state = build(**settings)
    state.committed_step = step
    store.save(state.capture(), **{**facts_of(step), "meaning": workload.meaning})
    return workload, build(**settings)[1]


@pytest.mark.parametrize("which", ["auto", "last", "best", "path"])
def test_a_checkpoint_beyond_the_end_is_refused_in_one_line(tmp_path, which):
    """It names the option, the checkpoint, both steps, and what would be right; nothing is moved."""
    store = CheckpointStore(tmp_path, keep_last=1)
    workload, state = saved_at(31, store)
    before = sorted(tmp_path.iterdir())
    path = tmp_path / "step_00000031.pt"
    asked = from_flat({"resume": str(path) if which == "path" else which, "max_steps": 30})
    with pytest.raises(BadInputError) as caught:
        load_start(asked, workload, state, store)
    assert str(caught.value) == (
        f"--max-steps=30: the run would end at step 30, and {path} is at step 31 already; "
        "give a larger end, another run with --name bytes-2, or start anew with --resume none"
    )
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("step", "loss", "complete"),
    [(30, 9.0, True), (29, 9.0, False), (29, 0.1, True), (0, 0.1, False)],
)
def test_a_run_is_complete_at_its_end_or_at_its_target(step, loss, complete):
    """Then there is no step to train; before it, and before the first step, there is."""
    workload, state = build(target_loss=0.5)
    assert workload.length.total_steps == 30
    state.committed_step = step
    for number in range(20 if step else 0):
        state.monitor.observe(number, 0, loss, True)
    assert is_complete(workload, state) is complete


def test_a_checkpoint_beyond_fewer_epochs_is_refused(tmp_path):
    """Where the epochs are what says when it ends, they are named."""
    store = CheckpointStore(tmp_path, keep_last=1)
    few = {"task": "synthetic", "max_steps": 0, "epochs": 2, "dataset_size": 64}
    workload, state = saved_at(1000, store, **few)
    assert workload.length.total_steps < 1000
    with pytest.raises(
        BadInputError, match=r"--epochs=2: the run would end at step \d+, and .*1000"
    ):
        load_start(from_flat(few), workload, state, store)


def test_a_checkpoint_at_the_end_is_no_fault(tmp_path):
    """Control: a finished run may be launched again; it has nothing to do."""
    store = CheckpointStore(tmp_path, keep_last=1)
    workload, state = saved_at(30, store)
    assert load_start(from_flat({"max_steps": 30}), workload, state, store) is not None
    assert state.committed_step == 30


@pytest.mark.parametrize("which", ["last", "best"])
def test_what_is_asked_for_by_name_must_be_there(tmp_path, which):
    """A run that was to go on does not begin anew in silence."""
    workload, state = build()
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    expected = rf"--resume={which}: there is no checkpoint in {store.directory}; --resume auto"
    with pytest.raises(BadInputError, match=expected):
        load_start(from_flat({"resume": which}), workload, state, store)


def test_auto_starts_at_step_0_where_there_is_nothing(tmp_path):
    """Control: the very first launch, and every one after it, is the same command."""
    workload, state = build()
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    assert load_start(from_flat({"resume": "auto"}), workload, state, store) is None
    assert state.committed_step == 0


def test_memory_that_does_not_suffice_at_a_resume_is_no_misfit(tmp_path):
    """The checkpoint is another run's only where it does not fit."""
    workload, state = build()
    store = CheckpointStore(tmp_path, keep_last=1)
    state.committed_step = 0
    store.save(state.capture(), **{**facts_of(0), "meaning": workload.meaning})
    settings = from_flat({"resume": "auto"})
    ask = state.model.register_load_state_dict_pre_hook(
        lambda *_: torch.empty(2**62, dtype=torch.uint8)
    )
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        load_start(settings, workload, state, store)
    ask.remove()
    assert load_start(settings, workload, state, store) is not None
