"""A dry run: what it prints is so, and nothing is left of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap

import pytest

from ddp_runner.features.tuning.dry_run_report import (
    COLUMNS,
    ROWS_MAX,
    MemoryFacts,
    ModuleFacts,
    memory_table,
    module_table,
)
from tests import ready

TASK = """
    import torch
    from torch import nn
    from ddp_runner import Datasets

    class Mine:
        def __init__(self, fails=False, token="", asks=False):
            self.fails, self.token, self.asks = fails, token, asks

        def build_datasets(self):
            data = torch.utils.data.TensorDataset(torch.ones(64, 100), torch.ones(64, 1))
            return Datasets(train=data, notes="64 rows of ones")

        def build_model(self):
            model = nn.Sequential(nn.Linear(100, 50), nn.Tanh(), nn.Linear(50, 1))
            model[0].bias.requires_grad_(False)
            return model

        def loss(self, model, batch):
            if self.fails:
                raise RuntimeError(f"no such thing with {self.token}")
            if self.asks:
                torch.distributed.all_reduce(torch.ones(1))
            return nn.functional.mse_loss(model(batch[0]), batch[1])
"""


def started(folder, *words, **environment):
    return subprocess.run(
        [sys.executable, "-m", "ddp_runner", "--dry-run", "--cpu", *words],
        cwd=folder,
        env={**os.environ, **ready.environment(), "HOME": str(folder), **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def dry_run(folder, *words):
    task = folder / "mine.py"
    task.write_text(textwrap.dedent(TASK))
    before = task.stat().st_mtime_ns
    done = started(folder, "--task", "mine.py", *words)
    assert [path.name for path in folder.rglob("*")] == ["mine.py"], "it writes nothing at all"
    assert task.stat().st_mtime_ns == before
    return done


def test_a_dry_run_shows_what_runs_and_writes_nothing(tmp_path):
    """Blocks of four ranks, modules with what is frozen, and bytes that can be counted by hand."""
    words = ["-n", "4", "-b", "8", "micro_batch_size=4", "ema_decay=0.9", "max_steps=5"]
    done = dry_run(tmp_path, *words, "optim.optimizer=sgd", "model.dropout=0.5")
    assert done.returncode == 0, done.stderr
    shown = done.stdout
    for row in (
        " global batch  32 = 4 x 2 accumulated x 4 ranks\n",
        " model         5,101 parameters: 5,051 trained, 50 frozen\n",
        "64 rows of ones\n",
    ):
        assert row in shown, shown
    rows = [re.split(r" {2,}", line.strip()) for line in shown.splitlines()]
    assert ["0", "Linear", "5,050", "5,000", "float32"] in rows, shown
    assert ["2", "Linear", "51", "yes", "float32"] in rows, shown
    # 4 bytes a number; sgd has one moment; kept: the input and what tanh and both layers give.
    sizes = dict(re.findall(r"^ (\w[\w ,]*?) {2,}(\d[\d.]* k?B)", shown, re.MULTILINE))
    assert sizes["weights and buffers"] == "20.4 kB"
    assert sizes["gradients"] == sizes["optimizer"] == "20.2 kB"
    assert sizes["average"] == "20.4 kB"
    assert sizes["batch"] == "1.6 kB"
    # tanh's output, 4 x 50, and the prediction, 4 x 1, beside the loss, which torch gives up to 16 bytes;
    # the input is the batch's.
    assert sizes["activations"] in ("820 B", "832 B"), shown
    assert "warning: the task mine.py does not read model.dropout: it has no effect\n" in shown
    assert shown.splitlines()[-1].startswith("dry run: forward and backward of 4 samples, loss ")
    assert done.stderr == ""


def test_a_task_that_raises_ends_it_with_1(tmp_path):
    """With its traceback, in which secrets are hidden; bad input stays a line and exit 2."""
    done = dry_run(tmp_path, "-n", "1", "task.fails=true", "task.token=abcdefgh1234")
    assert done.returncode == 1
    assert "RuntimeError: no such thing with ***" in done.stderr
    assert done.stderr.endswith("ddp_runner: error: the dry run failed, as a run would\n")
    done = dry_run(tmp_path, "-n", "2", "task.asks=true")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert done.stderr.endswith(
        "needs the other ranks, which are not here: a dry run is one rank alone\n"
    )
    done = dry_run(tmp_path, "-n", "1", "-b", "65")
    assert (done.returncode, done.stdout.count("\n")) == (2, 0), done.stdout
    assert done.stderr.startswith("ddp_runner: error: --batch-size=65: times 1 rank needs 65")
    assert done.stderr.count("\n") == 1
    done = dry_run(tmp_path, "--dry-run=no")
    assert (done.returncode, done.stderr) == (
        2,
        "ddp_runner: error: --dry-run=no: takes no value\n",
    )


def module(name, **changes):
    known = {"kind": "Linear", "parameters": 10, "trained": 10, "dtypes": ("float32",)}
    return ModuleFacts(name=name, **{**known, **changes})


def test_layers_of_a_list_share_a_row():
    """Those that are alike: of one type, one dtype, and trained or not."""
    layers = [module(f"layers.{number}.up") for number in range(12)]
    layers[3] = module("layers.3.up", trained=0)
    table = module_table(
        [module("", kind="Mine"), *layers, module("v2.head", dtypes=("bf16", "f"))]
    )
    rows = [re.split(r" {2,}", line.strip()) for line in table]
    assert rows[2:] == [
        ["(the model itself)", "Mine", "10", "yes", "float32"],
        ["layers.*.up", "Linear x 11", "110", "yes", "float32"],
        ["layers.3.up", "Linear", "10", "no", "float32"],
        ["v2.head", "Linear", "10", "yes", "bf16, f"],
    ]


def test_a_long_table_is_cut_and_fits_a_terminal():
    """The rest is counted."""
    many = [
        module(f"{'long' * 20}{n:04d}end", parameters=10**12, trained=10**11) for n in range(99)
    ]
    table = module_table(many)
    assert table[-1] == f" and {99 - ROWS_MAX} more"
    assert max(map(len, table)) <= COLUMNS
    assert table[-2].split()[0].endswith("end")


@pytest.mark.parametrize("on_host", [False, True])
def test_an_average_in_host_memory_takes_none_of_the_device(on_host):
    """The sum is of the device alone."""
    facts = MemoryFacts(
        weights=1000,
        gradients=1000,
        optimizer=2000,
        average=4000,
        average_on_host=on_host,
        batch=8000,
        activations=16_000,
        samples=4,
        peak=30_000,
        available=80_000_000_000,
    )
    assert facts.total == 28_000 + 4000 * (not on_host)
    text = "\n".join(memory_table(facts))
    assert ("in host memory" in text) is on_host
    assert "of 80.0 GB on the device" in text
    assert "most at once, here" in text


def test_every_stage_is_tried_with_what_the_one_before_has_built(tmp_path):
    """Each in a process that has imported nothing of the others; the first that would fail ends it."""
    for name, words in (("one", "1"), ("two", "2")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "mine.py").write_text(
            textwrap.dedent(TASK) + "\nfrom beside import SAID\nprint(SAID)\n"
        )
        (folder / "beside.py").write_text(f"SAID = 'module {words}'\n")
    stages = [
        {"name": "first", "max_steps": 3, "run.task": "one/mine.py"},
        {"name": "second", "max_steps": 3, "run.task": "two/mine.py", "ema_decay": 0.5},
        {"name": "third", "max_steps": 3, "init_from": "best:ema", "run.task": "two/other.py"},
    ]
    other = (
        (tmp_path / "two/mine.py")
        .read_text()
        .replace("(100, 50)", "(100, 40)")
        .replace("(50, 1)", "(40, 1)")
    )
    (tmp_path / "two/other.py").write_text(other)
    (tmp_path / "stages.yaml").write_text(json.dumps({"stages": stages}))
    found = sorted(tmp_path.rglob("*"))
    handed_over = tmp_path.parent / f"{tmp_path.name}_handed_over"
    handed_over.mkdir()
    done = started(tmp_path, "--config", "stages.yaml", TMPDIR=str(handed_over))
    assert done.returncode == 2, done.stderr
    assert re.findall(r"stage \w+ \(\d of 3\)|module \d", done.stdout) == [
        *("stage first (1 of 3)", "module 1", "stage second (2 of 3)", "module 2"),
        *("stage third (3 of 3)", "module 2"),
    ]
    assert done.stdout.count("dry run: forward and backward") == 2
    assert "start weights stage first, as it is built" in done.stdout
    assert done.stderr.startswith("ddp_runner: error: --init-from=stage second, as it is built: ")
    assert "0.weight" in done.stderr
    assert sorted(tmp_path.rglob("*")) == found
    assert not list(handed_over.glob("ddp_dry_run_*"))


@pytest.mark.parametrize("columns", [60, 79])
def test_a_table_fits_a_narrow_terminal(columns):
    """Names and types are cut in their middle."""
    rows = [module("encoder.layers.3.attention.out", kind="NonDynamicallyQuantizableLinear")]
    table = module_table(rows, columns=columns)
    assert max(map(len, table)) <= columns
    assert table[-1].split()[-3:] == ["10", "yes", "float32"]
