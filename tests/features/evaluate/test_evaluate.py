"""A checkpoint is evaluated, and predicts, with no more said than its folder."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ddp_runner import DDPTrainer
from ddp_runner.cli.commands import main, split_command
from ddp_runner.features.evaluate.over_data import _each, _stacked
from ddp_runner.kernel.rules.errors import BadInputError

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
        (("evaluate", "--on", "train"), "no such data set; available: validation"),
        (("evaluate", "77"), "has no checkpoint"),
        (("evaluate", "--dry-run"), "is an option of train"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, command, words, said):
    """And exit code 2."""
    trained(tmp_path)
    code, _, errors = command(*words)
    assert code == 2
    assert said in errors
    assert len(errors.splitlines()) == 1


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
