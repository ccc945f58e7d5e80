"""Several validation sets, and the figure that a run is judged by: known or refused before the first step."""

from __future__ import annotations

import random
import re
from types import MappingProxyType

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddp_runner.config import from_flat
from ddp_runner.core.monitor import Monitor
from ddp_runner.data.quarantine import file_name_of_validation
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.step.runtime import RankInfo
from ddp_runner.training.task import Datasets
from ddp_runner.training.trainer import DDPTrainer
from ddp_runner.training.workload import build_workload

from .building import bits_of


def numbers(count):
    return TensorDataset(torch.linspace(0, 1, 3 * count).reshape(count, 3))


class Task:
    """``validation``: what it gives. Its model has a buffer that forward writes, in eval mode too."""

    validation = None

    def build_model(self):
        class Counting(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(3, 1)
                self.register_buffer("calls", torch.zeros(()))

            def forward(self, inputs):
                self.calls += 1
                return self.inner(inputs) + random.random() + torch.rand(())

        return Counting()

    def build_datasets(self):
        return Datasets(train=numbers(16), validation=self.validation)

    def loss(self, model, batch):
        loss = model(batch[0]).square().mean()
        return loss, {"spread": loss / 2}

    def figures(self, loss):
        return {"double": 2 * loss}

    def metrics(self, model, batch):
        size = model(batch[0]).sum()
        return {"size": (size, len(batch[0])), "margin_loss": (-size, len(batch[0]))}


class TwoTask(Task):
    validation = MappingProxyType({"all": numbers(5), "bach": numbers(3)})


class OneTask(Task):
    validation = numbers(5)


def settings_of(name, **more):
    flat = {"task": f"{__name__}:{name}", "batch_size": 4, "max_steps": 4, "num_workers": 0}
    return from_flat({**flat, "device": "cpu", **more})


def build(name, **more):
    info = RankInfo(
        rank=0, local_rank=0, world_size=1, local_world_size=1, device="cpu", loads=True
    )
    with torch.random.fork_rng():
        return build_workload(settings_of(name, **more), info)


@pytest.mark.parametrize(
    ("name", "wanted", "found", "mode"),
    [
        ("OneTask", "auto", "validation_loss", "min"),
        ("OneTask", "validation_spread", "validation_spread", "max"),
        ("TwoTask", "auto", "all/loss", "min"),
        ("TwoTask", "bach/loss", "bach/loss", "min"),
        ("TwoTask", "bach/size", "bach/size", "max"),
        ("TwoTask", "all/double", "all/double", "max"),
        ("Task", "auto", "train_loss", "min"),
        ("TwoTask", "train_loss", "train_loss", "min"),
        ("TwoTask", "bach/margin_loss", "bach/margin_loss", "max"),
    ],
)
def test_a_figure_that_evaluations_give_can_be_what_counts(name, wanted, found, mode):
    """A loss, a number beside it, what the task makes of it, or one of its metrics, which may be called a loss."""
    workload, _ = build(name, monitor=wanted, **{"checkpoint.mode": mode})
    judges = found != "train_loss"  # which is known at each step, evaluated or not
    assert workload.monitor == Monitor(name=found, mode=mode, by_evaluations=judges)


@pytest.mark.parametrize(
    ("name", "wanted", "loss"),
    [
        ("Task", "auto", "train_loss"),
        ("OneTask", "auto", "validation_loss"),
        ("OneTask", "validation_loss", "validation_loss"),
        ("TwoTask", "auto", "all/loss"),
        ("TwoTask", "bach/loss", "bach/loss"),
        ("TwoTask", "train_loss", "train_loss"),
    ],
)
def test_the_highest_of_a_loss_is_never_the_best(name, wanted, loss):
    """Which is what a person gets who has named no figure; the cure is in the line."""
    words = f"checkpoint.mode=max: the highest {loss} would be the best: name a figure"
    with pytest.raises(BadInputError, match=re.escape(words)) as error:
        build(name, monitor=wanted, **{"checkpoint.mode": "max"})
    assert "checkpoint.monitor=validation_accuracy" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "wanted", "words"),
    [
        (
            "TwoTask",
            "bach/sise",
            r"did you mean bach/size\? available: auto, train_loss, all/loss,",
        ),
        (
            "TwoTask",
            "validation_loss",
            r"no such metric; .*all/size, bach/double",
        ),
        ("OneTask", "accuracy", "available: auto, train_loss, validation_loss, validation_double"),
        ("Task", "validation_loss", "the task gives no validation data: give some, or take train"),
    ],
)
def test_a_figure_that_nothing_gives_is_refused_with_those_there_are(name, wanted, words):
    """In one line, and the nearest name first."""
    with pytest.raises(BadInputError, match=words) as error:
        build(name, monitor=wanted)
    assert "\n" not in str(error.value)


def test_the_batch_that_is_tried_leaves_nothing_behind():
    """No random number is drawn, no buffer written; control: without it the state is the same."""
    random.seed(5)
    _, plain = build("TwoTask")
    before = random.getstate(), torch.get_rng_state()
    _, tried = build("TwoTask", monitor="bach/size")
    assert bits_of(tried) == bits_of(plain)
    assert tried.model.calls == 0
    assert torch.equal(torch.get_rng_state(), before[1])


class Broken(TensorDataset):
    """Some of its samples cannot be read."""

    broken = frozenset({0, 2})

    def __getitem__(self, index):
        if index in self.broken:
            raise OSError(f"no sample {index}")
        return super().__getitem__(index)


def test_a_broken_sample_is_no_matter_of_the_name_of_a_figure(monkeypatch):
    """It is repaired, or ends the run, where it is evaluated; unless there is no other."""
    monkeypatch.setattr(Task, "validation", Broken(torch.zeros(6, 3)))
    workload, _ = build("Task", monitor="validation_size")
    assert workload.monitor.name == "validation_size"
    monkeypatch.setattr(Broken, "broken", range(6))
    with pytest.raises(OSError, match="no sample 0"):
        build("Task", monitor="validation_size")


def test_metrics_that_give_none_are_refused_at_the_start(monkeypatch):
    """Where a figure of them is to count."""
    monkeypatch.setattr(OneTask, "metrics", lambda self, model, batch: {"size": "3"}, raising=False)
    with pytest.raises(BadInputError, match=r"OneTask: metrics\(\) returned for 'size' a str, not"):
        build("OneTask", monitor="validation_size")


@pytest.mark.parametrize(
    ("validation", "words"),
    [
        ({}, "names none"),
        ({"a b": numbers(2)}, "'a b' needs a name of letters"),
        ({"": numbers(2)}, "'' needs a name of letters"),
        ({"a/b": numbers(2)}, "'a/b' needs a name of letters"),
        ({"a": TensorDataset(torch.zeros(0, 3))}, "'a' is empty: leave it out"),
        ({"a": iter([])}, "'a' must be map-style"),
        ({"a": None}, "'a' has no samples by number"),
    ],
)
def test_validation_data_that_cannot_be_evaluated_is_refused(validation, words, monkeypatch):
    """By its name, before anything is trained."""
    monkeypatch.setattr(Task, "validation", validation)
    with pytest.raises(BadInputError, match=words):
        build("Task")


def test_a_dict_of_samples_by_number_is_one_dataset():
    """As it always was: torch takes it for map-style data."""
    data = {0: (torch.zeros(3),), 1: (torch.ones(3),)}
    assert list(Datasets(train=data, validation=data).validation_sets) == [""]
    assert Datasets(train=data).validation_sets == {}


def test_what_is_known_of_bad_samples_is_kept_by_data_set():
    """And goes with the state; one set has the key and the file that it always had."""
    _, source = build("TwoTask", on_bad_sample="substitute")
    _, other = build("TwoTask", on_bad_sample="substitute")
    source.committed_step = 2
    source.validation_quarantines["bach"].add(1, reason="broken", step=0, rank=0)
    other.restore(source.capture())
    assert len(other.validation_quarantines["bach"]) == 1
    assert len(other.validation_quarantines["all"]) == 0
    assert "validation_quarantine" not in source.capture()
    assert "validation_quarantine" in build("OneTask")[1].capture()
    assert file_name_of_validation("") == "quarantine_validation.jsonl"
    assert file_name_of_validation("bach") == "quarantine_validation_bach.jsonl"


def test_a_state_that_is_received_is_judged_as_where_it_came_from():
    """A resume or a replacement judges by the validation loss, which it has not evaluated itself."""
    workload, source = build("OneTask")
    _, other = build("OneTask")
    source.committed_step = 2
    source.figures = {"validation_loss": 1.5}
    source.best = source.best.after(1.5, step=2, monitor=workload.monitor)
    for step in range(30):
        source.monitor.observe(step=step, epoch=0, loss=0.1, applied=True, overflowed=False)
    other.restore(source.capture())
    assert other.monitored(workload.monitor) == 1.5
    assert other.best == source.best
    other.figures = {}
    assert other.monitored(workload.monitor) is None


def test_a_plain_script_is_given_the_best_model(tmp_path):
    """And the evaluation before the first step is one of its figures, on no account the best."""
    how = {"log_dir": str(tmp_path / "logs"), "checkpoint_dir": str(tmp_path / "checkpoints")}
    how |= {"evaluate_every_steps": 1, "evaluate_at_start": True, "learning_rate": 0.5}
    how |= {"load_best_at_end": True, "schedule": "constant", "warmup_steps": 0, "keep_last": 9}
    trainer = DDPTrainer(config=settings_of("TwoTask", max_steps=6, save_interval=0, **how))
    with torch.random.fork_rng():
        report = trainer.train()
    best = trainer_best(tmp_path)
    saved = torch.load(tmp_path / "checkpoints" / f"step_{best:08d}.pt", weights_only=True)
    final = torch.load(tmp_path / "checkpoints" / "final.pt", weights_only=True)
    for name, value in report.model.state_dict().items():
        assert torch.equal(value, saved["model"][name])
        assert torch.equal(value, final[name])


def test_evaluations_and_metrics_change_no_bit_of_training(tmp_path):
    """Control: without validation data the last weights, a buffer that forward writes included, are the same."""
    digests = set()
    for name, more in (
        ("Task", {}),
        ("TwoTask", {"evaluate_every_steps": 1, "evaluate_at_start": True, "monitor": "bach/size"}),
    ):
        how = {"log_dir": str(tmp_path / name), "checkpoint_dir": str(tmp_path / f"{name}_c")}
        trainer = DDPTrainer(config=settings_of(name, max_steps=6, save_interval=0, **how, **more))
        with torch.random.fork_rng():
            report = trainer.train()
        digests.add(report.weights_sha256)
        assert bool(report.figures) is (name == "TwoTask")
    assert len(digests) == 1


def trainer_best(folder):
    return int((folder / "checkpoints" / "best").read_text()[5:13])


def soft(samples):
    """As MixUp: labels become shares of two samples."""
    inputs, labels = torch.utils.data.default_collate(samples)
    shares = nn.functional.one_hot(labels, 2).float()
    return (inputs + inputs.flip(0)) / 2, (shares + shares.flip(0)) / 2


def padded(samples):
    rows = [inputs for inputs, _ in samples]
    labels = torch.tensor([int(label) for _, label in samples])
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)[:, :3], labels


class Rows(list):
    """Samples of 3 to 6 numbers, which torch's default collate cannot stack."""

    def __init__(self, count):
        super().__init__((torch.ones(3 + index % 4), index % 2) for index in range(count))


class Mixing(Task):
    """Its metric needs hard labels; ``validation_collate`` as it is set."""

    collates = MappingProxyType({"collate": soft})
    data = TensorDataset(torch.linspace(0, 1, 48).reshape(16, 3), torch.arange(16) % 2)

    def build_model(self):
        return nn.Linear(3, 2)

    def build_datasets(self):
        return Datasets(train=self.data, validation=self.data, **self.collates)

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model, batch):
        inputs, labels = batch
        assert labels.dtype == torch.int64, "mixed labels"
        return {"accuracy": (model(inputs).argmax(1) == labels).float().mean()}


class Padding(Mixing):
    """Evaluations would need its collate function, too."""

    collates = MappingProxyType({"collate": padded})
    data = Rows(16)


class PaddingBoth(Padding):
    collates = MappingProxyType({"collate": padded, "validation_collate": padded})


class PaddingLast(Padding):
    """Without validation data nothing is to be said."""

    def build_datasets(self):
        return Datasets(train=self.data, collate=padded)


def test_evaluations_take_no_collate_of_training_and_say_so(tmp_path):
    """Labels that MixUp has mixed would fail a metric, or give the loss of other samples."""
    folders = {"log_dir": str(tmp_path / "l"), "checkpoint_dir": str(tmp_path / "c")}
    report = DDPTrainer(config=settings_of("Mixing", **folders)).train()
    assert 0 <= report.figures["validation_accuracy"] <= 1
    workload, _ = build("Mixing")
    assert any("give Datasets(validation_collate=...)" in note for note in workload.notes)


@pytest.mark.parametrize("name", ["PaddingBoth", "PaddingLast", "OneTask"])
def test_nothing_is_said_where_nothing_is_left_to_the_default(name):
    """Control: both are given, or there is nothing to evaluate, or no collate at all."""
    workload, _ = build(name)
    assert not any("collate" in note for note in workload.notes)


def test_validation_data_that_the_default_cannot_stack_is_refused_at_once():
    """Not at the first evaluation, an epoch later; the line names what to give."""
    with pytest.raises(BadInputError, match=r"equal size.*validation_collate") as caught:
        build("Padding")
    assert "\n" not in str(caught.value)
