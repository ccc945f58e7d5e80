"""What is refused before anything is trained, with the option that would correct it."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch

from ddp_runner.checkpoint.store import CheckpointStore
from ddp_runner.config import from_flat
from ddp_runner.data.quarantine import QuarantineFullError
from ddp_runner.data.stream import StreamOrder
from ddp_runner.data.workers.fetch import BatchKey, SampleReader
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.step.runtime import RankInfo
from ddp_runner.training.exactness.first_step import why_a_device_varies
from ddp_runner.training.starting.fitting import not_finite
from ddp_runner.training.starting.resume import is_complete, load_start
from ddp_runner.training.workload import build_workload
from tests.checkpoint.states import facts_of

STREAMING = Path(__file__).parents[1] / "scenarios" / "streaming.py"
WORKLOAD = STREAMING.with_name("workload.py")


def build(name="StreamTask", file=STREAMING, **settings):
    rank_info = RankInfo(
        rank=0, local_rank=0, world_size=2, local_world_size=2, device="cpu", loads=True
    )
    flat = {"task": f"{file}:{name}", "batch_size": 4, "max_steps": 30, "num_workers": 0}
    return build_workload(from_flat({**flat, **settings}), rank_info)


@pytest.fixture(autouse=True)
def _generators_kept():
    with torch.random.fork_rng():
        yield


def test_a_stream_without_a_length_is_as_long_as_the_run():
    """``--max-steps`` says so; the position is part of the state."""
    workload, state = build()
    assert isinstance(workload.order, StreamOrder)
    assert workload.length.total_steps == 30
    assert workload.resume_key["data fingerprint"] == "a stream"
    assert state.stream is not None


@pytest.mark.parametrize(
    ("datasets", "line"),
    [
        ("None", "returned None; return Datasets(train=...), as in: return Datasets(train=my_data"),
        ("DATA", "returned a TensorDataset; return Datasets(train=that dataset)"),
        (
            "DataLoader(DATA)",
            "returned a DataLoader; return Datasets(train=its dataset): batches ar",
        ),
        ("(DATA, DATA)", "returned a tuple; return Datasets(train=..., validation=...) of the two"),
        ("{'train': DATA}", "returned a dict; return Datasets(train=...)"),
        ("Datasets(train=None)", "returned None as train; give a dataset: "),
        (
            "Datasets(train=DataLoader(DATA))",
            "returned a DataLoader as train; give its dataset: batch",
        ),
        (
            "Datasets(train=DATA, validation=DataLoader(DATA))",
            "returned a DataLoader as validation; ",
        ),
        (
            "Datasets(train=DATA, validation={'a': DataLoader(DATA)})",
            "returned a DataLoader as validati",
        ),
    ],
)
def test_wrong_data_of_a_task_is_one_line_that_helps(tmp_path, datasets, line):
    """A DataLoader as train would have been a stream of whole batches."""
    with pytest.raises(BadInputError) as caught:
        build("Returns", file=_returning(tmp_path, datasets=datasets))
    assert f": build_datasets() {line}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("None", "returned None; return the model, as in: return model"),
        ("nn.Linear", "returned the class Linear; return an instance: Linear(...)"),
        ("(nn.Linear(2, 1), 7)", "returned a tuple; return one torch.nn.Module"),
        (
            "nn.DataParallel(nn.Linear(2, 1))",
            "returned a DataParallel; return the module inside it",
        ),
    ],
)
def test_a_wrong_model_of_a_task_is_one_line_that_helps(tmp_path, model, line):
    """The control is built."""
    with pytest.raises(BadInputError) as caught:
        build("Returns", file=_returning(tmp_path, model=model))
    assert f": build_model() {line}" in str(caught.value)
    assert build("Returns", file=_returning(tmp_path))[0].parameters == 3


def _returning(folder, *, datasets="Datasets(train=DATA)", model="nn.Linear(2, 1)"):
    file = folder / f"returns_{len(list(folder.iterdir()))}.py"
    file.write_text(
        "import torch\nfrom torch import nn\nfrom torch.utils.data import DataLoader, TensorDataset\n"
        "from ddp_runner import Datasets\n"
        "DATA = TensorDataset(torch.zeros(32, 2))\n"
        "class Returns:\n"
        f"    def build_datasets(self): return {datasets}\n"
        f"    def build_model(self): return {model}\n"
        "    def loss(self, model, batch): return model(batch[0]).mean()\n"
    )
    return file


def test_samples_that_come_by_several_numbers_only_can_be_trained(tmp_path):
    """Torch's own fetcher asks such data for a batch at once; every look at a sample does likewise."""
    file = _returning(tmp_path, datasets="Datasets(train=Many(), validation={'a': Many()})")
    many = (
        "from torch.utils.data import Dataset\n"
        "class Many(Dataset):\n"
        "    def __len__(self): return 32\n"
        "    def __getitems__(self, indices): return [DATA[index] for index in indices]\n"
    )
    file.write_text(file.read_text() + many)
    workload, _ = build("Returns", file=file)
    assert workload.order.dataset_size == 32
    samples = SampleReader(workload.datasets.train, seed=1, collate=list)
    (sample,) = samples.load_here(BatchKey(epoch=0, indices=(3,)))
    assert sample[0].tolist() == [0, 0]
    with pytest.raises(BadInputError, match="no such metric"):
        build("Returns", file=file, monitor="unheard")


def test_a_stream_has_no_workers_unless_some_are_asked_for():
    """``auto``, the default, is none there."""
    workload, _ = build(num_workers="auto")
    assert isinstance(workload.order, StreamOrder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_workers": 1}, "data.num_workers=1: must be 0 with an iterable dataset"),
        (
            {"num_workers": "auto", "workers_total": 2},
            "data.workers_total=2: must be 0 with an iterable dataset",
        ),
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
    for quarantine in (state.quarantine, state.validation_quarantines[""]):
        for index in range(replaced):
            quarantine.add(index, reason="broken", step=0, rank=0)
        with pytest.raises(QuarantineFullError):
            quarantine.add(replaced, reason="broken", step=0, rank=0)


def saved_at(step, store, **settings):
    """A workload that ends at step 30, if not ``settings`` say otherwise, and an empty state for it."""
    workload, state = build(**settings)
    state.committed_step = step
    store.save(state.capture(), facts_of(step, meaning=workload.resume_key))
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
        'give a larger end, another run with config={"name": "bytes-2"}, or start fresh with'
        ' config={"resume": "none"}'
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
def test_what_is_asked_for_by_name_must_be_there(tmp_path, which, monkeypatch):
    """A run that was to go on does not start fresh in silence, and reads its own words: a command's or Python's."""
    workload, state = build()
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    monkeypatch.delenv("DDP_RUNNER_COMMAND", raising=False)
    with pytest.raises(BadInputError) as in_python:
        load_start(from_flat({"resume": which}), workload, state, store)
    assert str(in_python.value) == (
        f"resume={which}: there is no checkpoint in {store.directory};"
        ' config={"resume": "auto"} would start at step 0'
    )
    monkeypatch.setenv("DDP_RUNNER_COMMAND", "ddp-runner")
    with pytest.raises(BadInputError) as of_command:
        load_start(from_flat({"resume": which}), workload, state, store)
    assert str(of_command.value) == (
        f"--resume={which}: there is no checkpoint in {store.directory};"
        " --resume auto would start at step 0"
    )


def test_a_refused_resume_has_no_word_that_nobody_gave(tmp_path, monkeypatch):
    """In Python the default need not be written, and an option does not exist."""
    monkeypatch.delenv("DDP_RUNNER_COMMAND", raising=False)
    store = CheckpointStore(tmp_path, keep_last=1)
    saved_at(30, store)
    workload, state = build(seed=2)
    with pytest.raises(BadInputError, match=rf"^resume: {tmp_path}/step_.* other settings"):
        load_start(from_flat({"seed": 2}), workload, state, store)


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
    store.save(state.capture(), facts_of(0, meaning=workload.resume_key))
    settings = from_flat({"resume": "auto"})
    ask = state.model.register_load_state_dict_pre_hook(
        lambda *_: torch.empty(2**62, dtype=torch.uint8)
    )
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        load_start(settings, workload, state, store)
    ask.remove()
    assert load_start(settings, workload, state, store) is not None


def put(state, path, value):
    """``value`` in the place of a captured state that ``path`` names."""
    *parts, last = path
    at = state
    for part in parts:
        at = at[part]
    at[last] = value


def wrong_type(*path, dtype):
    def change(state):
        tensor = state
        for part in path:
            tensor = tensor[part]
        put(state, path, tensor.to(dtype))

    return change


def replaced(*path, by):
    return lambda state: put(state, path, by)


MISFITS = {
    "model: 5": (replaced("model", by=5), "holds no model"),
    "no model": (lambda state: state.pop("model"), "holds no model"),
    "int64": (wrong_type("model", "0.weight", dtype=torch.int64), "0.weight int64 where"),
    "float64": (wrong_type("model", "0.weight", dtype=torch.float64), "0.weight float64 where"),
    "complex": (wrong_type("model", "0.weight", dtype=torch.complex64), "0.weight complex64"),
    "no tensor": (replaced("model", "0.weight", by="text"), "0.weight str where the model has"),
    "shape": (replaced("model", "0.weight", by=torch.zeros(1)), "0.weight 1 where the model has"),
    "optimizer: 5": (replaced("optimizer", by=5), "optimizer is int"),
    "no optimizer": (lambda state: state.pop("optimizer"), "it lacks optimizer"),
    "groups": (replaced("optimizer", "param_groups", by=[1]), "does not fit this run"),
    "no groups": (replaced("optimizer", "param_groups", by=[]), "groups of parameters"),
    "moment's shape": (
        replaced("optimizer", "state", 0, "exp_avg", by=torch.zeros(3)),
        "exp_avg of 0.weight is float32 3",
    ),
    "moment's type": (
        wrong_type("optimizer", "state", 0, "exp_avg", dtype=torch.int64),
        "exp_avg of 0.weight is int64",
    ),
    "counters: 5": (replaced("counters", by=5), "counters is int instead of a dict"),
    "no counters": (lambda state: state.pop("counters"), "it lacks counters"),
    "a counter": (replaced("counters", "samples", by="many"), "counters.samples is str"),
    "half a step": (replaced("counters", "committed_step", by=2.5), "committed_step is float"),
    "before step 0": (replaced("counters", "committed_step", by=-1), "committed_step is -1"),
    "tuning": (replaced("tuning", "micro_batch_size", by="8"), "tuning.micro_batch_size is str"),
    "more tuning": (replaced("tuning", "of_later", by=1), "does not fit this run"),
    "monitor": (replaced("monitor", by=None), "does not fit this run"),
    "losses": (replaced("monitor", "losses", by=["x"]), "does not fit this run"),
    "quarantine": (replaced("quarantine", by=[]), "quarantine is list instead of a dict"),
    "bad samples": (replaced("quarantine", "bad", by=[5]), "does not fit this run"),
    "average": (replaced("ema", by=[]), "ema is list instead of a dict"),
    "averages": (replaced("ema", "parameters", "0.weight", by=5), "does not fit this run"),
    "average's type": (
        wrong_type("ema", "parameters", "0.weight", dtype=torch.int64),
        "average is of another model; it differs in: 0.weight",
    ),
}
PACED = {"name": "PacedTask", "file": WORKLOAD, "ema_decay": 0.9}


@pytest.mark.parametrize("kind", MISFITS)
def test_a_checkpoint_of_another_structure_is_one_line(tmp_path, kind):
    """Whatever part of it is none: refused before anything is trained, and nothing is moved."""
    change, reason = MISFITS[kind]
    store = CheckpointStore(tmp_path, keep_last=1)
    workload, state = build(**PACED)
    state.committed_step = 0
    loss = workload.task.loss(state.model, next(iter(batches(workload))))
    loss.backward()
    state.optimizer.step()
    state.ema.update(state.model)
    captured = copy.deepcopy(state.capture())
    change(captured)
    store.save(captured, facts_of(0, meaning=workload.resume_key))
    with pytest.raises(BadInputError) as caught:
        load_start(from_flat({"resume": "auto"}), workload, build(**PACED)[1], store)
    assert caught.value.option == "resume"
    assert reason in str(caught.value)
    assert str(caught.value).isprintable()
    assert (tmp_path / "step_00000000.pt").exists()


def batches(workload):
    return torch.utils.data.DataLoader(workload.datasets.train, batch_size=8)


def test_what_the_run_itself_has_saved_fits(tmp_path):
    """Control: nothing of the above is found in a checkpoint as it is written."""
    store = CheckpointStore(tmp_path, keep_last=1)
    workload, state = build(**PACED)
    state.committed_step = 0
    workload.task.loss(state.model, next(iter(batches(workload)))).backward()
    state.optimizer.step()
    state.ema.update(state.model)
    store.save(state.capture(), facts_of(0, meaning=workload.resume_key))
    _, again = build(**PACED)
    assert load_start(from_flat({"resume": "auto"}), workload, again, store) is not None
    assert not_finite(again) == []


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_begin_no_run(tmp_path, value):
    """The tensor is named; a buffer may hold infinities, of which masks are made."""
    workload, state = build(**PACED)
    weights = copy.deepcopy(state.weights())
    weights["0.weight"].view(-1)[0] = value
    torch.save(weights, tmp_path / "w.pt")
    settings = from_flat({"resume": "none", "init_from": str(tmp_path / "w.pt")})
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    with pytest.raises(
        BadInputError, match=r"w\.pt: holds a value that is not finite .* 0\.weight"
    ):
        load_start(settings, workload, state, store)


@pytest.mark.parametrize(
    ("poison", "parts"),
    [
        (lambda state: state.model[0].weight.data.fill_(math.inf), ["0.weight"]),
        (lambda state: buffer_of(state).fill_(math.nan), ["buffer"]),
        (lambda state: buffer_of(state).fill_(-math.inf), []),
        (lambda state: state.ema.averages()[0].fill_(math.nan), ["0.weight (average)"]),
        (
            lambda state: next(iter(state.optimizer.state.values()))["exp_avg"].fill_(math.nan),
            ["0.weight (exp_avg)"],
        ),
    ],
    ids=["weight", "buffer", "mask", "average", "moment"],
)
def test_values_of_a_state_that_are_not_finite_are_named(poison, parts):
    """All of it, with what it is of; infinities in a buffer are no fault."""
    workload, state = build(**PACED)
    workload.task.loss(state.model, next(iter(batches(workload)))).backward()
    state.optimizer.step()
    state.ema.update(state.model)
    poison(state)
    named = [next(n for n, _ in state.model.named_buffers())] if parts == ["buffer"] else parts
    assert not_finite(state) == named


def buffer_of(state):
    return next(buffer for buffer in state.model.buffers() if buffer.is_floating_point())


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_deterministic_run_leaves_no_choice_to_chance(monkeypatch, deterministic):
    """Neither to cuDNN's timing of kernels; control: else torch is left as it is."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    before = torch.utils.deterministic.fill_uninitialized_memory
    try:
        build(deterministic=deterministic)
        assert torch.are_deterministic_algorithms_enabled() is deterministic
        assert torch.backends.cudnn.benchmark is not deterministic
        assert torch.utils.deterministic.fill_uninitialized_memory is (before and not deterministic)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before


def test_a_run_on_a_gpu_is_exact_only_where_its_kernels_repeat():
    """Reported from the start, not when a repair has shown it."""
    gpu = torch.device("cuda", 0)
    assert "run.deterministic=true" in why_a_device_varies(gpu, is_deterministic=False)
    assert why_a_device_varies(gpu, is_deterministic=True) == ""
    assert why_a_device_varies(torch.device("cpu"), is_deterministic=False) == ""
    assert "another order" in why_a_device_varies(gpu, is_deterministic=True, devices=2)
    assert why_a_device_varies(torch.device("cpu"), is_deterministic=True, devices=2) == ""


CONVOLUTIONS = """
import torch
from torch import nn
from ddp_runner.training.task import Datasets


class Task:
    def build_model(self):
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 1))

    def build_datasets(self):
        return Datasets(train=[torch.ones(3, 3, 3)] * 64)

    def loss(self, model, batch):
        return model(batch).sum()
"""


@pytest.mark.parametrize("channels_last", [True, False])
def test_convolutions_lie_by_channels_last_where_asked(tmp_path, channels_last):
    """Their weights do, also where a run begins once more; the control: torch's own order."""
    (tmp_path / "conv.py").write_text(CONVOLUTIONS)
    workload, state = build(task=f"{tmp_path / 'conv.py'}:Task", channels_last=channels_last)
    weight = state.model[0].weight
    assert weight.is_contiguous(memory_format=torch.channels_last) is channels_last
    settings = from_flat({"channels_last": channels_last, "checkpoint_dir": str(tmp_path / "c")})
    first = workload.first_state(settings, state, CheckpointStore(tmp_path / "c", keep_last=1))
    assert first["model"]["0.weight"].stride() == weight.stride()


@pytest.mark.filterwarnings("ignore:Please use the new API")  # torch 2.9, of its own function
def test_how_exact_matrices_are_multiplied_is_the_task_s_unless_asked():
    """highest leaves what the task, or whoever called, has chosen."""
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        build(**PACED)
        assert torch.get_float32_matmul_precision() == "medium"
        build(**PACED, matmul_precision="high")
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
