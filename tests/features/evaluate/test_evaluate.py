"""A checkpoint is evaluated, and predicts, with no more said than its folder."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ddp_runner import DDPTrainer
from ddp_runner.cli.command import Arguments
from ddp_runner.cli.commands import main, split_command
from ddp_runner.core.step_schedule import RunLength
from ddp_runner.data.order import SampleOrder
from ddp_runner.features.evaluate.evaluate import Asked, Trained
from ddp_runner.features.evaluate.over_data import _each, _stacked, _write, called, length_of_run
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.faults import Fault, FaultError, FaultKind
from ddp_runner.training.task import Datasets, checked_datasets

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from ddp_runner import Datasets

def data(size):
    inputs = torch.randn(size, 3, generator=torch.Generator().manual_seed(size))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())

class Small:
    def __init__(self, width: int = 2):
        self.width = width

    def build_model(self):
        return nn.Linear(3, self.width)

    def build_datasets(self):
        return Datasets(train=data(40), validation=data(17){test})

    def loss(self, model, batch, context):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(model(inputs), labels)
        return loss, {{"step": context.step}}

    def metrics(self, model, batch):
        return {{"accuracy": (model(batch[0]).argmax(1) == batch[1]).float().mean()}}
{more}
"""
PREDICT = """
    def predict(self, model, batch):
        return {"logits": model(batch[0]), "text": ["one"] * len(batch[0])}
"""


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Run a command on the checkpoints of the run, and return its exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        capsys.readouterr()
        code = main([*words, "-c", "saved"])
        if dist.is_initialized():
            dist.destroy_process_group()
        return (code, *capsys.readouterr())

    return run


def trained(folder, *, test="", more="", **settings):
    """The report of a run of ten steps."""
    file = folder / "small.py"
    file.write_text(TASK.format(test=test, more=more))
    config = {
        "task": f"{file}:Small",
        "task.width": 3,
        "checkpoint_dir": "saved",
        "batch_size": 4,
        "epochs": 1,
        "num_workers": 0,
        "optim.precision": "fp32",  # a processor may have a faster type, which predicts in that
    }
    return DDPTrainer(config={**config, **settings}).train()


def inputs_of(size):
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(size))


def test_figures_are_those_of_the_run_and_of_its_test_data(tmp_path, command):
    """With the task's arguments, the average and the step of the checkpoint."""
    report = trained(tmp_path, test=", test=data(9)", ema_decay=0.5)
    code, out, _ = command("evaluate", "--json")
    found = json.loads(out)
    assert (code, found["step"], found["ema"]) == (0, 10, True)
    assert found["samples"] == {"validation": 17, "test": 9}
    figures = found["figures"]
    for name, value in report.figures.items():
        assert figures[name] == pytest.approx(value, abs=1e-6)
    assert figures["validation_step"] == pytest.approx(9)  # that of the last training step
    with torch.no_grad():
        guesses = report.model(inputs_of(9)).argmax(1)
    right = (guesses == (inputs_of(9).sum(1) > 0).long()).float().mean()
    assert figures["test/accuracy"] == pytest.approx(float(right))
    code, out, _ = command("evaluate", "10", "--on", "test", "--no-ema")
    lines = out.splitlines()
    assert code == 0
    assert len(lines) == 2
    assert lines[1].split()[:3] == ["test", "9", "samples"]


@pytest.mark.parametrize("name", ["outputs.pt", "outputs.npy", "outputs.jsonl"])
def test_outputs_are_in_the_order_of_the_samples(tmp_path, command, name):
    """Without a method of the task, they are those of the model."""
    report = trained(tmp_path)
    assert command("predict", "--to", name)[0] == 0
    file = tmp_path / name
    if file.suffix == ".pt":
        found = torch.load(file)
    elif file.suffix == ".npy":
        found = torch.from_numpy(np.load(file))
    else:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert [line["index"] for line in lines] == [*range(17)]
        found = torch.tensor([line["output"] for line in lines])
    with torch.no_grad():
        torch.testing.assert_close(found, report.model(inputs_of(17)))
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".part")]


def test_a_method_of_the_task_says_what_is_written(tmp_path, command):
    """Also what is no tensor; an array cannot hold it."""
    trained(tmp_path, more=PREDICT)
    code, _, errors = command("predict", "--to", "outputs.npy")
    assert code == 2
    assert "holds one array" in errors
    assert command("predict")[0] == 0
    found = torch.load(tmp_path / "predictions.pt")
    assert found["logits"].shape == (17, 3)
    assert found["text"] == ["one"] * 17


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("predict", "--to", "outputs.txt"), "must end in .pt, .npy, .jsonl"),
        (("predict", "--to", "gone/outputs.pt"), "no such folder"),
        (("predict", "--to", "folder.pt"), "--to=folder.pt: is a folder"),
        (("predict", "--to", "/sys/outputs.pt"), "--to=/sys/outputs.pt: "),
        (("evaluate", "--on", "train"), "no such data set; available: validation"),
        (("evaluate", "77"), "has no checkpoint"),
        (("evaluate", "--dry-run"), "is an option of train"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, command, words, said):
    """And exit code 2."""
    trained(tmp_path)
    (tmp_path / "folder.pt").mkdir()
    code, _, errors = command(*words)
    assert code == 2
    assert said in errors
    assert len(errors.splitlines()) == 1


def test_a_file_system_that_refuses_all_is_one_line(tmp_path, monkeypatch):
    """Not even the unfinished file can be removed from it."""

    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(BadInputError, match=r"outputs.pt: Read-only file system"):
        _write([torch.ones(1)], tmp_path / "outputs.pt")


def test_test_is_another_name():
    """As other trainers have it."""
    assert split_command(["test", "--json"]) == ("evaluate", ["--json"])


@pytest.mark.parametrize("output", [torch.zeros(()), torch.zeros(2, 4), (1, 2, 3), ["one"], None])
def test_outputs_without_an_entry_for_each_sample_are_refused(output):
    """Nobody knows which sample they are of."""
    with pytest.raises(BadInputError, match="for 3 samples"):
        _each(output, 3)


def test_outputs_of_unequal_shapes_stay_a_list():
    """As of sentences of several lengths."""
    outputs = [*_each([torch.zeros(2), torch.zeros(3)], 2)]
    assert [one.shape for one in _stacked(outputs)] == [(2,), (3,)]


def test_epochs_are_those_of_the_runs_ranks_and_stage(tmp_path, command):
    """A run of 4 ranks has 2 steps of 16 samples in an epoch of 40; its stage began at step 6."""
    trained(tmp_path)
    [file] = (tmp_path / "saved").glob("step_*.json")
    manifest = json.loads(file.read_text())
    del manifest["facts_sha256"]
    manifest["recipe"]["ranks"] = 4
    manifest["meaning"]["data.batch_size x ranks"] = 16
    manifest["about"]["stage"] = {"number": 0, "first_step": 6, "names": ["one"]}
    file.write_text(json.dumps(manifest))
    code, out, _ = command("evaluate", "--json", "epochs=5", "evaluate_batches=1")
    assert (code, json.loads(out)["samples"]) == (0, {"validation": 16})
    asked = asked_for(file, "epochs=5")
    assert asked.trained == Trained(ranks=4, batch=16, first_step=6)
    workload = SimpleNamespace(order=SampleOrder(seed=0, dataset_size=40, global_batch_size=4))
    found = length_of_run(asked, workload)
    assert found == RunLength(steps_per_epoch=2, total_steps=16, first_step=6)
    assert found.epoch_of(9) == 1
    manifest["meaning"] = {"run.seed": 1, "ranks": 2}  # as an attached loop writes it
    file.write_text(json.dumps(manifest))
    code, _, errors = command("evaluate")
    assert code == 2
    assert "is of a program's own loop, which has no task" in errors


def asked_for(path, *words, whole=False):
    """What a command line asks for."""
    return Asked.by(Arguments(words=(str(path), *words)), whole=whole)


def test_a_path_may_look_like_a_setting(tmp_path, command):
    """As of one folder for each learning rate; a file that is no checkpoint is named as it was given."""
    trained(tmp_path, checkpoint_dir="lr=0.1", on_bad_sample="substitute")
    [file] = (tmp_path / "lr=0.1").glob("step_*.pt")
    short = file.relative_to(tmp_path)
    assert asked_for(short).step == 10
    assert asked_for(short, whole=True).settings.data.on_bad_sample == "stop"
    with pytest.raises(BadInputError, match="predict cannot use it"):
        asked_for(short, "on_bad_sample=substitute", whole=True)
    code, _, errors = command("evaluate", "lr=0.1/final.pt")
    assert code == 2
    assert "--resume" not in errors
    assert "lr=0.1/final.pt" in errors


def test_nested_outputs_are_lines_of_lists(tmp_path):
    """What no line can hold is an error in one."""
    to = tmp_path / "outputs.jsonl"
    _write([{"l": [torch.ones(2), (np.zeros(1), np.float32(2))]}], to)
    assert json.loads(to.read_text())["output"] == {"l": [[1.0, 1.0], [[0.0], 2.0]]}
    with pytest.raises(BadInputError, match="holds no complex"):
        _write([[1j]], tmp_path / "other.jsonl")
    assert not (tmp_path / "other.jsonl").exists()


def test_a_sample_is_named_as_one_of_its_data_set():
    """It has the number that the data set knows."""
    fault = Fault(
        kind=FaultKind.BAD_SAMPLE, rank=0, step=1, cause="validation sample 4 is bad", at_ns=1
    )
    with pytest.raises(FaultError) as caught, called("test"):
        raise FaultError(fault)
    assert caught.value.fault.cause == "test sample 4 is bad"


def test_validation_data_cannot_be_called_as_the_test_data_is():
    """Their figures would have one name."""
    data = [0]
    with pytest.raises(BadInputError, match="beside test data"):
        checked_datasets(Datasets(train=data, validation={"test": data}, test=data), task="t")
    checked_datasets(Datasets(train=data, validation={"test": data}), task="t")
