"""``data.preload`` in a trainer of one process: what it refuses, what it frees, and that nothing changes."""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from ddp_runner import DDPTrainer
from ddp_runner.config import from_flat, refuse_for_loops
from ddp_runner.features.preload import child as preloading
from ddp_runner.features.preload.child import preloaded
from ddp_runner.features.preload.memory import PreloadedDataset
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.training.loading.preloaded_data import refuse_unfit
from ddp_runner.training.task import Datasets
from ddp_runner.training.workload import build_workload

SAMPLES = 40


class Squares(Dataset):
    """Counts how often it is asked."""

    deterministic = True
    read = 0

    def __init__(self, samples=SAMPLES):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        Squares.read += 1
        x = torch.randn(5, generator=torch.Generator().manual_seed(index))
        return x, x.sum().unsqueeze(0)


class Random(Squares):
    """Says nothing of being the same each time; may draw for one sample."""

    deterministic = False
    draws_at = -1

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return (x + torch.rand(1) if index == self.draws_at else x), y


class Stream(IterableDataset):
    """Has no index."""

    def __iter__(self):
        return iter(())


class SquaresTask:
    """``keeps``: it holds on to its data."""

    def __init__(self, keeps=False):
        self.keeps = keeps
        self.kept = None

    def build_model(self):
        return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.1), nn.Linear(8, 1))

    def build_datasets(self):
        train = Squares()
        self.kept = train if self.keeps else None
        return Datasets(train=train, validation=Squares(9))

    def loss(self, model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])


def settings(folder, **more):
    return from_flat(
        {
            "run.task": f"{__name__}:SquaresTask",
            "run.device": "cpu",
            "run.log_dir": str(folder / "logs"),
            "run.checkpoint_dir": str(folder / "checkpoints"),
            "run.max_steps": 12,
            "optim.warmup_steps": 2,
            "data.batch_size": 4,
            "data.num_workers": 0,
            "log.display": "none",
            **more,
        }
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_weights_are_those_of_a_run_that_reads_each_time(tmp_path, workers):
    """Each sample is read once, of training and of validation data, and the run is the same."""
    how = {"log.evaluate_every_steps": 5, "data.num_workers": workers}
    Squares.read = 0
    shared = DDPTrainer(config=settings(tmp_path / "shared", **how, **{"data.preload": True}))
    report = shared.train()
    assert Squares.read == SAMPLES + 9
    plain = DDPTrainer(config=settings(tmp_path / "plain", **how)).train()
    assert report.weights_sha256 == plain.weights_sha256
    assert report.figures == plain.figures


class NamedTask(SquaresTask):
    """Three validation sets, one of them the training data."""

    def build_datasets(self):
        train = Squares()
        return Datasets(
            train=train, validation={"few": Squares(3), "same": train, "more": Squares(9)}
        )


def test_several_validation_sets_are_read_once_too(tmp_path):
    """They share one memory; figures are those of a run that reads each time."""
    task = {"run.task": f"{__name__}:NamedTask", "log.evaluate_every_steps": 5}
    Squares.read = 0
    shared = DDPTrainer(config=settings(tmp_path / "shared", **task, **{"data.preload": True}))
    report = shared.train()
    assert Squares.read == SAMPLES + 3 + 9
    plain = DDPTrainer(config=settings(tmp_path / "plain", **task)).train()
    assert sorted(plain.figures) == ["few/loss", "more/loss", "same/loss"]
    assert report.figures == plain.figures
    assert report.weights_sha256 == plain.weights_sha256


def test_a_stream_cannot_be_preloaded(tmp_path):
    """One line, before anything is read."""
    with pytest.raises(BadInputError, match="needs data with an index") as caught:
        refuse_unfit(settings(tmp_path, **{"data.preload": True}), is_stream=True)
    assert "data.preload=true: " in str(caught.value)
    assert "leave it out" in str(caught.value)
    refuse_unfit(settings(tmp_path), is_stream=True)


class QuietTask(SquaresTask):
    """Data that does not say anything of being the same each time; ``draws``: in its last sample."""

    def __init__(self, draws=False):
        super().__init__()
        self.draws = draws

    def build_datasets(self):
        train = Random()
        train.draws_at = SAMPLES - 1 if self.draws else -1
        return Datasets(train=train, validation=Random(9), collate=mixed)


def mixed(samples):
    """Draws for each batch, as MixUp does."""
    x, y = torch.utils.data.default_collate(samples)
    return x * torch.rand(1), y


def test_data_that_draws_nothing_trains_as_without_preload(tmp_path):
    """Bit for bit, also with a collate function that draws; a line says what was looked at."""
    how = {"run.task": f"{__name__}:QuietTask", "log.evaluate_every_steps": 5}
    shared = DDPTrainer(config=settings(tmp_path / "shared", **how, **{"data.preload": True}))
    report = shared.train()
    (line,) = (one for one in shared._parts.workload.notes if "deterministic" in one)
    assert "the training and the validation data does not say deterministic = True" in line
    plain = DDPTrainer(config=settings(tmp_path / "plain", **how)).train()
    assert report.weights_sha256 == plain.weights_sha256
    assert report.figures == plain.figures


def test_data_that_draws_is_refused_with_its_sample(tmp_path):
    """One line; nothing is trained."""
    how = {"run.task": f"{__name__}:QuietTask", "task.draws": True, "data.preload": True}
    with pytest.raises(BadInputError, match="training sample 39 moves the generator of torch") as e:
        DDPTrainer(config=settings(tmp_path, **how)).train()
    assert str(e.value).startswith("--data.preload=true: ") or "data.preload=true: " in str(e.value)
    assert str(e.value).endswith("leave it out")


@pytest.fixture
def parts(tmp_path):
    """Settings, workload and state of a rank, and what is to be closed at its end."""

    def made(**info):
        wanted = settings(tmp_path, **{"data.preload": True, **info.pop("settings", {})})
        trainer = DDPTrainer(config=wanted)
        runtime = trainer._runtime
        runtime.rank_info = replace(runtime.rank_info, **info)
        workload, state = build_workload(wanted, runtime.rank_info)
        return wanted, workload, state, runtime

    return made


def test_ranks_without_a_supervisor_are_refused(parts):
    """Under torchrun nothing outlives them that they could share."""
    with (
        contextlib.ExitStack() as ending,
        pytest.raises(BadInputError, match=r"needs a supervisor.*train -n 2"),
    ):
        preloaded(*parts(world_size=2, local_world_size=2), ending=ending)


def test_what_nobody_else_holds_is_freed(parts):
    """A dataset may have all its samples in memory, and there would be one of it in each rank."""
    wanted, workload, state, runtime = parts()
    train = weakref.ref(workload.datasets.train)
    assert id(train()) in state.side._apart
    identity = id(train())
    with contextlib.ExitStack() as ending:
        workload = preloaded(wanted, workload, state, runtime, ending=ending)
        gc.collect()
        assert train() is None
        assert identity not in state.side._apart
        assert isinstance(workload.datasets.train, PreloadedDataset)
        assert [given() for given in workload.replaced_data] == [None, None]


def test_what_the_task_holds_stays_apart_from_its_state(parts):
    """It is its data, and nothing that a step changes."""
    wanted, workload, state, runtime = parts(settings={"task.keeps": True})
    train = workload.datasets.train
    with contextlib.ExitStack() as ending:
        workload = preloaded(wanted, workload, state, runtime, ending=ending)
        assert id(train) in state.side._apart
        assert workload.replaced_data[0]() is train


def test_data_that_trains_and_validates_is_read_once(parts):
    """It is one dataset, and one memory."""
    wanted, workload, state, runtime = parts()
    one = workload.datasets.train
    workload = replace(workload, datasets=replace(workload.datasets, validation=one))
    Squares.read = 0
    with contextlib.ExitStack() as ending:
        workload = preloaded(wanted, workload, state, runtime, ending=ending)
    assert Squares.read == SAMPLES
    assert workload.datasets.train is workload.datasets.validation


def test_data_without_room_is_refused_in_one_line(parts, monkeypatch):
    """With what it needs and what there is."""
    wanted, workload, state, runtime = parts()
    reader = preloading.SystemReader

    class Small(reader):
        def _available(self):
            return 2_000

    monkeypatch.setattr(preloading, "SystemReader", Small)
    with (
        contextlib.ExitStack() as ending,
        pytest.raises(
            BadInputError, match=r"needs about [\d.]+ kB .* training data, and 2.0 kB are avail"
        ),
    ):
        preloaded(wanted, workload, state, runtime, ending=ending)


def test_memory_of_the_supervisor_is_used_and_outlives_who_filled_it(parts):
    """Whoever comes later finds the samples there, and reads none."""
    memories = [os.memfd_create(name) for name in ("training", "validation")]
    paths = tuple(f"/proc/{os.getpid()}/fd/{number}" for number in memories)
    Squares.read = 0
    for rank in (1, 0, 1):
        with contextlib.ExitStack() as ending:
            preloaded(*parts(world_size=2, rank=rank, preload=paths), ending=ending)
        assert Squares.read == SAMPLES + 9
    for number in memories:
        os.close(number)


def test_a_loop_of_ones_own_has_no_data_to_preload(tmp_path):
    """It is said before its program begins."""
    with pytest.raises(BadInputError, match=r"data\.preload=true: is for a task"):
        refuse_for_loops(settings(tmp_path, **{"data.preload": True}))
    refuse_for_loops(settings(tmp_path))
