"""What a person sees of a run while it starts: what it is at, for how long, and what the task prints."""

from __future__ import annotations

import re

import pytest

from tests.scenarios.harness import Run, poll

TASK = """\
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from ddp_runner.training.task import Datasets

print("reading the configuration of my task", flush=True)


def wait_for(name):
    while not Path(name).exists():
        time.sleep(0.01)


class Mine:
    def build_datasets(self):
        print("reading shard 0", flush=True)
        wait_for("data.go")
        x = torch.randn(64, 2, generator=torch.Generator().manual_seed(1))
        return Datasets(train=TensorDataset(x, x.sum(1, keepdim=True)), validation=None)

    def build_model(self):
        wait_for("model.go")
        return torch.nn.Linear(2, 1)

    def loss(self, model, batch):
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
"""
SHORT = ("-b", "4", "--max-steps", "4", "optim.warmup_steps=2", "num_workers=0")
PARTS = ("importing", "building data", "building model", "connecting ranks", "first step")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(TASK)
    return tmp_path


def shown(run: Run, text: str) -> None:
    poll(lambda: text in run.console or run.process.poll() is not None, what=text)
    assert text in run.console, run.console


def test_a_start_shows_what_it_is_at_and_what_the_task_prints(folder):
    """Nothing waits for training: each part is a line with its seconds, each print comes at once."""
    with Run(folder, *SHORT, task="mine.py") as run:
        shown(run, "reading the configuration of my task\n")
        shown(run, "reading shard 0\n")
        shown(run, "building data ... 2 s so far\n")
        assert not run.logs.exists()
        (folder / "data.go").touch()
        shown(run, "building model ... 2 s so far\n")
        (folder / "model.go").touch()
        assert run.wait() == 0, run.console
    took_s = {
        name: float(seconds)
        for name, seconds in re.findall(r"^(\w+(?: \w+)?) +([\d.]+) s$", run.console, re.MULTILINE)
    }
    assert tuple(took_s) == PARTS, run.console
    assert min(took_s["building data"], took_s["building model"]) >= 2.0
    for text in ("reading the configuration of my task", "reading shard 0"):
        assert run.console.count(text) == 1, run.console
    order = [run.console.index(text) for text in ("reading shard 0", *PARTS[1:], "step 4/4")]
    assert order == sorted(order), run.console
    assert (run.logs / "rank_0.log").read_text().count("reading shard 0") == 1
    supervisor_log = (run.logs / "supervisor.log").read_text()
    assert all(f" | {name} " in supervisor_log for name in PARTS)


def test_all_that_a_task_prints_at_import_is_in_the_log(folder):
    """The console shows the first of many lines and says where the others are; each is there once."""
    lines = 'print(*(f"line {n}" for n in range(500)), sep="\\n", flush=True)\n'
    task = (folder / "mine.py").read_text().replace('wait_for("', 'str("')
    (folder / "mine.py").write_text(lines + task)
    with Run(folder, *SHORT, task="mine.py", world=1) as run:
        assert run.wait() == 0, run.console
    log = (run.logs / "supervisor.log").read_text(encoding="utf-8")
    assert re.findall(r"\| line (\d+)$", log, re.MULTILINE) == [str(n) for n in range(500)]
    assert "more lines stand in supervisor.log\n" in run.console


def test_the_display_distinguishes_ranks_that_have_not_begun_from_dead_ones(folder):
    """First they wait, then they build, and it says what; nobody is dead."""
    task = TASK.replace("\n\n\nclass", '\n\n\nwait_for("import.go")\n\n\nclass')
    assert task != TASK
    (folder / "mine.py").write_text(task)
    with Run(folder, *SHORT, "log.display=live", task="mine.py") as run:
        shown(run, "waiting")
        (folder / "import.go").touch()
        shown(run, "building data 0:0")
        (folder / "data.go").touch()
        shown(run, "building model 0:0")
        (folder / "model.go").touch()
        assert run.wait() == 0, run.console
    assert "dead" not in run.console
    assert run.console.count("reading shard 0") == 1


def test_what_a_start_that_fails_has_printed_is_not_said_twice(folder):
    """It was shown when it came, before the news of its end; the dump at the end begins behind it."""
    (folder / "mine.py").write_text(TASK.replace('wait_for("data.go")', "import os; os.abort()"))
    with Run(folder, *SHORT, task="mine.py", world=1) as run:
        assert run.wait() == 3, run.console
    lines = run.console.splitlines()
    assert lines.count("reading shard 0") == run.console.count("reading shard 0") == 3
    assert lines.index("reading shard 0") < next(
        number for number, line in enumerate(lines) if "SIGABRT" in line
    )
    assert run.console.count("Fatal Python error: Aborted") == 1
