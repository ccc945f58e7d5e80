"""A task class in one's own program, the line that shows how far it is, and the model that comes of it."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from ddp_runner.cli.from_code.launch import RunResult
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.training.loading.given import spec_in_this_process
from ddp_runner.training.local_runtime import ProgressLine
from ddp_runner.training.task import Datasets
from ddp_runner.training.trainer import DDPTrainer
from tests import ready

SHORT = {
    "batch_size": 8,
    "max_steps": 60,
    "learning_rate": 0.05,
    "warmup_steps": 2,
    "num_workers": 0,
    "device": "cpu",
}
PROGRAM = """
import torch
from torch.utils.data import TensorDataset
import ddp_runner

class Mine:
    def build_model(self):
        return torch.nn.Linear(2, 1)
    def build_datasets(self):
        x = torch.randn(640, 2, generator=torch.Generator().manual_seed(1))
        return ddp_runner.Datasets(train=TensorDataset(x, x.sum(1, keepdim=True)), validation=None)
    def loss(self, model, batch):
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
"""


def program(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """``code`` behind the task, as a program of its own."""
    file = folder / "program.py"
    file.write_text(PROGRAM + textwrap.dedent(code))
    return subprocess.run(
        [sys.executable, file],
        cwd=folder,
        env={**os.environ, **ready.environment(programs=True)},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def mine():
    class Mine:
        def build_model(self):
            return torch.nn.Linear(2, 1)

        def build_datasets(self):
            x = torch.randn(640, 2, generator=torch.Generator().manual_seed(1))
            return Datasets(train=TensorDataset(x, x.sum(1, keepdim=True)), validation=None)

        def loss(self, model, batch):
            return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    return Mine


@pytest.mark.parametrize("form", ["first", "task", "run.task", "run", "average"])
def test_a_class_is_trained_and_the_model_comes_back(form, tmp_path, monkeypatch):
    """Also one that no module has by its name; what comes back is ready for use."""
    monkeypatch.chdir(tmp_path)
    task = mine()
    config = {
        "task": {"task": task},
        "run.task": {"run.task": task},
        "run": {"run": {"task": task}},
    }
    settings = {**SHORT, **config.get(form, {})}
    if form == "average":
        settings["ema_decay"] = 0.5
    first = (task,) if form in ("first", "average") else ()
    report = DDPTrainer(*first, config=settings).train()
    assert report.steps == 60
    assert not report.model.training
    with torch.no_grad():
        assert report.model(torch.tensor([[2.0, 3.0]])).item() == pytest.approx(5.0, abs=0.5)
    saved = torch.load(report.checkpoint, weights_only=True)
    weights = saved["ema"]["parameters"] if form == "average" else saved["model"]
    assert torch.equal(report.model.weight, weights["weight"])
    assert torch.equal(saved["model"]["weight"], report.model.weight) == (form != "average")
    assert list(tmp_path.glob("logs/*/rank_0.log"))


def test_a_class_is_named_by_its_module_where_that_has_it():
    """Its own name then stands in messages and files; any other is kept for this process."""
    assert spec_in_this_process("bytes") == "bytes"
    assert spec_in_this_process(Datasets) == "ddp_runner.training.task:Datasets"
    local = mine()
    spec = spec_in_this_process(local)
    module, name = spec.split(":")
    assert getattr(sys.modules[module], name) is local


def test_a_program_sees_how_far_its_training_is_and_nothing_of_torchs(tmp_path):
    """Lines on a pipe; torch's advice about settings that are ours does not stand between them."""
    done = program(
        tmp_path,
        f"""
        report = ddp_runner.DDPTrainer(Mine, config={SHORT!r}).train()
        print("predicts", round(report.model(torch.tensor([[2.0, 3.0]])).item()))
        """,
    )
    assert done.stderr == ""
    # torch 2.9 says on standard output how many peers a rank has.
    lines = [one for one in done.stdout.splitlines() if not one.startswith("[Gloo] ")]
    first, *_, last, predicts = lines
    assert first.startswith("step 1/60  loss ")
    assert last.startswith("step 60/60  loss ")
    assert predicts == "predicts 5"


def test_a_cell_that_is_run_again_says_that_nothing_was_trained(tmp_path, monkeypatch, capsys):
    """Who changed the class in between would take the old model for the new one; errors stay plain."""
    monkeypatch.chdir(tmp_path)
    task, hook = mine(), sys.excepthook
    first = DDPTrainer(task, config=SHORT).train()
    assert "complete" not in capsys.readouterr().out
    again = DDPTrainer(task, config=SHORT).train()
    said = capsys.readouterr().out
    assert said == (
        "already complete: 60 steps, nothing to train; another name, or resume='none', starts fresh\n"
    )
    assert torch.equal(first.model.weight, again.model.weight)
    DDPTrainer(task, config={**SHORT, "max_steps": 70, "learning_rate": 0.01}).train()
    assert "optim.learning_rate 0.05 -> 0.01 at step 60\n" in capsys.readouterr().out
    assert sys.excepthook is hook, "torch puts [rank0]: before all errors of the program"
    assert list(tmp_path.glob("checkpoints/*")) == [tmp_path / "checkpoints/Mine"]


def test_a_refused_launch_has_no_model(tmp_path):
    """In its folder is another run's, which refused it."""
    refused = RunResult(exit_code=2, summary=None, log_dir=tmp_path, checkpoint_dir=tmp_path)
    with pytest.raises(BadInputError, match="was refused and trained nothing"):
        refused.load_model()


@pytest.mark.whole_run
def test_launch_takes_a_class_and_gives_the_model_of_its_last_checkpoint(tmp_path):
    """Three lines from a class to a prediction, with supervised ranks."""
    done = program(
        tmp_path,
        f"""
        if __name__ == "__main__":
            config = {{**{SHORT!r}, "task": Mine, "optim.ema_decay": 0.5}}
            result = ddp_runner.launch(nproc=1, config=config)
            model = result.load_model()
            print("predicts", round(model(torch.tensor([[2.0, 3.0]])).item()), model.training)
            saved = torch.load(result.summary["checkpoint"], weights_only=True)
            print(torch.equal(model.weight, saved["ema"]["parameters"]["weight"]))
            result = ddp_runner.launch(Mine, nproc=1, config={SHORT!r}, arguments=["--name", "b"])
            saved = torch.load(result.summary["checkpoint"], weights_only=True)
            print(torch.equal(result.load_model().weight, saved["model"]["weight"]))
        """,
    )
    said = done.stdout.splitlines()
    assert "predicts 5 False" in said, (done.stdout, done.stderr)
    assert said.count("True") == 2
    assert done.stderr == ""


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_the_line_is_redrawn_where_that_can_be_seen(stream, monkeypatch):
    """In place on a terminal; elsewhere a line every five seconds, and always the last one."""
    monkeypatch.setattr(sys, "stdout", stream)
    now_s = [0.0]
    line = ProgressLine(now_s=lambda: now_s[0])
    for step in range(1, 101):
        line.show(step, 100, {"loss": 1.0 / step, "samples_per_s": 10.0, "step_s": 0.1})
        line.show(step, 100, {"validation_loss": 3.0})
        now_s[0] += 0.11
    line.finish()
    text = stream.getvalue()
    assert text.endswith("\n")
    assert text.rstrip().rpartition("step ")[2].startswith("100/100  loss 0.0100  10.0 samples/s")
    drawn = text.count("step ")
    if stream.isatty():
        assert text.count("\n") == 1
        assert 40 < drawn <= 60
    else:
        assert "\r" not in text
        assert text.count("\n") == drawn == 4
