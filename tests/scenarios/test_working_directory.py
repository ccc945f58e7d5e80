"""What lies in the folder where the command is given is not executed, unless it is the task's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scenarios.harness import ROOT, Run

MARK = "executed.txt"
STANDARD = (
    *("random", "json", "typing", "tempfile", "selectors", "socket", "subprocess", "signal"),
    *("logging", "queue", "uuid", "runpy", "importlib", "difflib", "venv", "pip", "argparse"),
)
INSTALLED = ("torch", "numpy", "yaml", "psutil", "rich")
PLANTED = f"""\
with open({{folder!r}} + "/{MARK}", "a") as file:
    file.write(__name__ + chr(10))
raise SystemExit("planted")
"""
TASK = """\
import random

import bystander
import torch
from torch.utils.data import TensorDataset

from ddp_runner.training.task import Datasets


class Mine:
    def build_model(self):
        assert 0 <= random.random() < 1  # the standard one: there is no such function in the other
        return torch.nn.Linear(bystander.WIDTH, 1)

    def build_datasets(self):
        x = torch.randn(64, bystander.WIDTH, generator=torch.Generator().manual_seed(1))
        return Datasets(train=TensorDataset(x, x.sum(1, keepdim=True)), validation=None)

    def loss(self, model, batch):
        import queue

        assert queue.Queue().empty()
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
"""
SHORT = ("-b", "4", "--max-steps", "6", "num_workers=0", "optim.warmup_steps=2")
CHECKOUT = {"DDP_RUNNER_PYTHON": sys.executable}


@pytest.fixture
def planted(tmp_path):
    """A folder with a task, its neighbour, and files that leave a mark when they are imported."""
    text = PLANTED.format(folder=str(tmp_path))
    for name in (*STANDARD, *INSTALLED):
        (tmp_path / f"{name}.py").write_text(text)
    for package in ("ddp_runner", "multiprocessing"):
        (tmp_path / package).mkdir()
        for file in ("__init__.py", "__main__.py"):
            (tmp_path / package / file).write_text(text)
    (tmp_path / "mine.py").write_text(TASK)
    (tmp_path / "bystander.py").write_text("WIDTH = 2\n")
    return tmp_path


def executed(folder: Path) -> str:
    mark = folder / MARK
    return mark.read_text() if mark.exists() else ""


def answer(folder: Path, *command: object, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env={**clean, **CHECKOUT, **variables},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.parametrize("path", ["", ":", ":/no/such/folder:"])
def test_nothing_in_the_working_directory_is_executed(planted, path):
    """No command imports what lies there, also where an empty part of PYTHONPATH names the folder."""
    script = ROOT / "launch_training.sh"
    doctor = [["doctor", "--json"]] if path == ":" else []  # which starts processes of its own
    for words in (["--help"], ["environment"], *doctor):
        done = answer(planted, script, *words, PYTHONPATH=path)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
    assert executed(planted) == ""


def test_a_python_that_keeps_its_path_safe_loses_nothing_of_it(planted):
    """Where Python adds no folder of its own, none is taken off."""
    done = answer(planted, ROOT / "launch_training.sh", "--version", PYTHONSAFEPATH="1")
    assert (done.returncode, executed(planted)) == (0, ""), done.stderr
    assert done.stdout.startswith("ddp_runner ")


def test_python_m_and_launch_leave_the_folder_out_too(planted, tmp_path_factory):
    """`python -m` looks there before any line of ours runs; from ours on it does not."""
    for name in (*STANDARD, *INSTALLED):
        if name not in ("random", "torch", "yaml"):
            (planted / f"{name}.py").unlink()
    (planted / "ddp_runner" / "__init__.py").unlink()
    (planted / "ddp_runner" / "__main__.py").unlink()
    done = answer(planted, sys.executable, "-m", "ddp_runner", "--help", PYTHONPATH=str(ROOT))
    assert (done.returncode, executed(planted)) == (0, ""), done.stderr
    program = tmp_path_factory.mktemp("elsewhere") / "program.py"
    program.write_text("import ddp_runner\nddp_runner.launch(arguments=['--help'])\n")
    done = answer(planted, sys.executable, program, PYTHONPATH=str(ROOT))
    assert done.stdout.startswith("ddp_runner - "), done.stderr
    assert executed(planted) == ""


@pytest.mark.whole_run
def test_a_run_executes_its_task_and_what_the_task_imports_alone(planted):
    """The task's neighbour is found, in every rank; one named like an installed module is not."""
    command = (str(ROOT / "launch_training.sh"), "train")
    environment = {**CHECKOUT, "PYTHONPATH": ":"}
    with Run(planted, *SHORT, task="mine:Mine", command=command, environment=environment) as run:
        assert run.wait() == 0, run.console
    assert run.summary()["steps"] == 6
    assert executed(planted) == ""


@pytest.mark.whole_run
def test_launch_searches_the_programs_folder_behind_the_standard_library(planted):
    """What the program could import, its run can; what lies beside it takes nobody's place."""
    program = planted / "program.py"
    program.write_text(
        "import sys\n"
        "sys.path.append(sys.path.pop(0))\n"  # else it could import nothing itself
        "import yaml, ddp_runner.cli.from_code.launch, ddp_runner.cli.train\n"
        "import mine\n"
        "sys.path.insert(0, sys.path.pop())\n"
        "if __name__ == '__main__':\n"
        f"    words = ['--cpu', *{SHORT!r}]\n"
        "    print(ddp_runner.cli.from_code.launch.launch(mine.Mine, nproc=1, arguments=words).exit_code)\n"
    )
    done = answer(planted, sys.executable, program, PYTHONPATH=str(ROOT))
    assert done.stdout.splitlines()[-1:] == ["0"], (done.stdout, done.stderr)
    assert executed(planted) == ""
