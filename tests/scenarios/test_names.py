"""Several experiments in one folder: each has its name, and a clash says what to type."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import textwrap

from tests import ready

from .harness import Outputs, Run

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddp_runner.training.task import Datasets


class Mine:
    def __init__(self, hidden=8):
        self.hidden = hidden

    def build_model(self):
        return nn.Sequential(nn.Linear(2, self.hidden), nn.ReLU(), nn.Linear(self.hidden, 1))

    def build_datasets(self):
        x = torch.randn(512, 2, generator=torch.Generator().manual_seed(1))
        return Datasets(train=TensorDataset(x, x.prod(1, keepdim=True)))

    def loss(self, model, batch):
        x, y = batch
        return nn.functional.mse_loss(model(x), y)
"""
SHORT = ("-b", "8", "num_workers=0", "lr=0.01", "--max-steps")


def command(folder, *words):
    """A small command in ``folder``, as typed there."""
    return subprocess.run(
        [sys.executable, "-m", "ddp_runner", *words],
        cwd=folder,
        env={**ready.environment(), "PATH": "/usr/bin:/bin", "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def trained(folder, *words):
    """The run that these words start in ``folder``, at its end."""
    with Run(folder, *words, task=None, world=1) as run:
        code = run.wait()
    return code, run.console


def of_name(folder, name):
    found = Outputs(folder)
    found.logs, found.checkpoints = folder / "logs" / name, folder / "checkpoints" / name
    return found


def test_the_second_experiment_in_a_folder_is_a_run_of_its_own(tmp_path):
    """Another task has other folders; the same one with other settings is shown what to type, and obeys."""
    (tmp_path / "mine.py").write_text(textwrap.dedent(TASK))
    small = ("model.hidden_size=16", "model.num_layers=1", "model.seq_len=8")
    for task, name, size in (("synthetic", "synthetic", small), ("mine.py", "mine", ())):
        code, said = trained(tmp_path, "--task", task, *size, *SHORT, "4")
        assert code == 0, said
        found = of_name(tmp_path, name)
        assert found.summary()["status"] == "completed"
        assert (found.summary()["name"], found.status()["name"]) == (name, name)
        assert f"{name} ({found.summary()['run_id']})" in command(tmp_path, "report").stdout
        assert (tmp_path / "logs" / "latest").resolve() == tmp_path / "logs" / name
        assert f"checkpoints/{name}/step_00000004" in command(tmp_path, "report").stdout
        assert command(tmp_path, "checkpoints", "list").stdout.startswith("step        4")
    assert "checkpoints/synthetic/" in command(tmp_path, "report", "--name", "synthetic").stdout

    wider = ("--task", "mine.py", *SHORT, "8", "task.hidden=16")
    code, said = trained(tmp_path, *wider)
    assert code == 2, said
    assert said.count("error: ") == 1, said
    assert "task.hidden: (not set) -> 16" in said
    assert "; --resume none (" in said
    assert "the old settings: no task.hidden" in said
    offered = shlex.split(re.search(r"choose one: (.*?) \(a separate run\)", said)[1])
    assert offered == ["--name", "mine-2"]
    code, said = trained(tmp_path, *wider, *offered)
    assert code == 0, said
    assert of_name(tmp_path, "mine-2").summary()["steps"] == 8
    assert of_name(tmp_path, "mine").summary()["steps"] == 4

    code, said = trained(tmp_path, "--task", "mine.py", *SHORT, "8", "--name", "mine-2")
    assert code == 2, said
    typed = shlex.split(said.rpartition("the old settings: ")[2])
    assert typed == ["task.hidden=16"]
    code, said = trained(tmp_path, "--task", "mine.py", *SHORT, "8", "--name", "mine-2", *typed)
    assert code == 0, said
    code, said = trained(tmp_path, *wider, "--resume", "none")
    assert code == 0, said
    assert of_name(tmp_path, "mine").summary()["steps"] == 8
    assert list((tmp_path / "checkpoints" / "mine").glob("set_aside_*/step_00000004.pt"))


def test_two_runs_of_different_names_in_one_folder_at_once(tmp_path):
    """Neither notices the other; a third of the same name is told to take another one."""
    (tmp_path / "mine.py").write_text(textwrap.dedent(TASK))
    long = ("--task", "mine.py", *SHORT, "1000000", "--audit")
    with (
        Run(tmp_path, *long, task=None, world=1) as one,
        Run(tmp_path, *long, "--name", "b", task=None, world=1) as b,
    ):
        one.logs, one.checkpoints = tmp_path / "logs" / "mine", tmp_path / "checkpoints" / "mine"
        b.logs, b.checkpoints = tmp_path / "logs" / "b", tmp_path / "checkpoints" / "b"
        for run in (one, b):
            run._audit_begin = 0
            run.wait_for_step(2)
        code, said = trained(tmp_path, *long)
        assert code == 2, said
        assert f"another run (pid {one.process.pid}) is using it" in said
        assert "take another --name" in said
        for run in (one, b):
            run.signal(15)
            assert run.wait() == 75, run.console
    assert one.summary()["run_id"] != b.summary()["run_id"]
    assert [one.summary()["faults"], b.summary()["faults"]] == [[], []]
