"""``--find-batch-size`` and ``--find-lr`` as processes: what they find, and that they leave the run as it is."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from ddp_runner.__main__ import main
from ddp_runner.cli.from_code.launch import launch
from ddp_runner.cli.parser import split_off_finding
from ddp_runner.features.tuning.find_batch_size import share_of
from ddp_runner.features.tuning.find_learning_rate import Range, range_of
from ddp_runner.kernel.rules.errors import BadInputError
from tests import ready
from tests.scenarios.harness import ROOT

DEADLINE_S = 300.0
# Texts of one length.
GREEDY = """
    import torch
    from torch import nn
    from ddp_runner import Datasets

    LENGTH = 500
    HELD = []

    class Texts(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            return torch.ones(LENGTH)

    class Mine:
        def __init__(self, pause=0.0, pause_beyond=0.0):
            self.pause, self.pause_beyond = pause, pause_beyond

        def build_datasets(self):
            return Datasets(train=Texts())

        def build_model(self):
            return nn.Linear(LENGTH, 1)

        def loss(self, model, batch):
            import time
            time.sleep(self.pause)
            count = len(batch)
            if count == 3:  # more than any system allows
                torch.empty(2**60)
            if count > 3 and not HELD:  # allowed, and more than the limit of this search
                HELD.extend(torch.ones(5_000_000) for _ in range(40))
                time.sleep(self.pause_beyond)
            return model(batch).square().mean()
"""
# A line through points, which a rate above 1 never finds.
LINE = """
    import torch
    from torch import nn
    from ddp_runner import Datasets

    class Line:
        def build_datasets(self):
            x = torch.linspace(-1, 1, 64).unsqueeze(1)
            return Datasets(train=torch.utils.data.TensorDataset(x, 3 * x))

        def build_model(self):
            return nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.1))

        def loss(self, model, batch):
            return nn.functional.mse_loss(model(batch[0]), batch[1])
"""


@pytest.fixture
def start(tmp_path):
    """Start the command in a folder of its own with a task; its temporary folders are ours.

    It is a fork of the ready process unless it ``is_cold``, as where the memory of a rank is measured.
    """
    started = []

    def start(task, *words, is_cold=False):
        work = tmp_path / "work"
        work.mkdir(exist_ok=True)
        (work / "mine.py").write_text(textwrap.dedent(task))
        (tmp_path / "folders").mkdir(exist_ok=True)
        process = subprocess.Popen(
            [sys.executable, "-m", "ddp_runner", "--task", "mine.py", "--cpu", "-n", "2", *words],
            cwd=work,
            env={
                **os.environ,
                **({"PYTHONPATH": str(ROOT)} if is_cold else ready.environment()),
                "PYTHONDONTWRITEBYTECODE": "1",
                "TMPDIR": str(tmp_path / "folders"),
                "HOME": str(tmp_path),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


def ended(process):
    text, errors = process.communicate(timeout=DEADLINE_S)
    return process.returncode, text, errors


def contents(folder):
    """Every file below a folder by its name, with a hash of what it holds; without Python's bytecode."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.parent.name != "__pycache__"
    }


def table_of(text):
    """The rows that a search has shown, by their size."""
    rows = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    return {row[0]: row[1:] for row in rows if row[0].isdecimal()}


@pytest.mark.timeout(400)
def test_the_largest_batch_below_the_limit_is_found(start, tmp_path):
    """One size takes more than the limit, one is refused its memory; nothing is left of any of them."""
    words = ("--find-batch-size", "0.75", "-b", "2", "max_memory_gb=1", "num_workers=0")
    code, text, errors = ended(start(GREEDY, *words))
    assert code == 0, text + errors
    table = table_of(text)
    assert list(table) == ["2", "4", "3"], text
    assert table["2"][-1] == "fits"
    assert float(table["2"][-2].replace(",", "")) > 0
    assert table["4"][-1].startswith("does not fit")
    assert table["3"][-1].startswith("does not fit: out of memory: can't allocate memory")
    assert "limit for each rank: 75% of max_memory_gb=1" in text
    assert re.search(
        r"the largest that fits is 2; to use it:\n +--batch-size 2 +steps of 4 samples, as asked\n",
        text,
    )
    assert list(contents(tmp_path / "work")) == ["mine.py"]
    assert list(tmp_path.glob("folders/ddp_runner*")) == []


@pytest.mark.timeout(400)
def test_a_rank_that_takes_more_than_its_limit_is_ended_in_time(start, tmp_path):
    """By who watches it from outside, at its size: no search of the machine's memory ends the machine."""
    words = ("--find-batch-size", "0.75", "-b", "1", "max_memory_gb=1", "num_workers=0")
    task = GREEDY.replace("count > 3", "count")
    code, text, errors = ended(start(task, *words, "task.pause_beyond=60", is_cold=True))
    assert code == 1, text + errors
    (row,) = table_of(text).values()
    assert row[-1] == "does not fit: a rank was ended beyond the limit"
    assert 0.75 <= float(row[0].removesuffix(" GB")) < 2, "it was ended in time"
    assert "not even batches of 1 fit" in errors
    assert list(tmp_path.glob("folders/ddp_runner*")) == []


@pytest.mark.timeout(400)
def test_a_range_test_begins_with_a_checkpoint_and_leaves_the_run(
    start, tmp_path, monkeypatch, capsys
):
    """A killed rank changes no bit of its curve; the run's own files stay as they are."""
    own = (
        *("-b", "16"),
        "num_workers=0",
        "optim.optimizer=sgd",
        "optim.momentum=0",
        "max_grad_norm=none",
    )
    code, text, errors = ended(start(LINE, *own, "--max-steps", "3"))
    assert code == 0, text + errors
    work = tmp_path / "work"
    before = contents(work)
    search = ("--find-lr=1e-4:1000:60", "--resume", "last")
    code, text, errors = ended(start(LINE, *own, *search))
    assert code == 0, text + errors
    file = work / "logs" / "mine" / "lr_find.json"
    found = json.loads(file.read_text())
    assert (found["begun_step"], found["exploded"], found["ranks"]) == (3, True, 2)
    assert found["points"][0]["rate"] == pytest.approx(1e-4)
    assert 1e-4 < found["suggestion"]["learning_rate"] < 10
    assert f"    learning_rate={found['suggestion']['learning_rate']:g}\n" in text
    assert "find-lr: 60 steps on 2 ranks, from step 3" in text
    assert "the loss exploded after " in text
    after = contents(work)
    assert after.pop("logs/mine/lr_find.json")
    assert after == before
    kill = ("--inject", "kill:rank=1,step=8", "--inject", "kill:rank=all,step=12")
    code, text, errors = ended(start(LINE, *own, *search, *kill))
    assert code == 0, text + errors
    assert json.loads(file.read_text()) == found, "as without faults, bit for bit"
    monkeypatch.chdir(work)
    other = ("--task", "mine.py", "--cpu", "-n", "1", *own, "--find-lr", "--resume", "best")
    assert main(other) == 2
    assert "other settings (data.batch_size x ranks: 32 -> 16): give" in capsys.readouterr().err
    assert list(tmp_path.glob("folders/ddp_runner*")) == []


@pytest.mark.timeout(400)
def test_ctrl_c_ends_a_search_and_leaves_nothing(start, tmp_path):
    """Exit 130, no folder, and one line."""
    process = start(GREEDY, "--find-batch-size", "-b", "2", "task.pause=1", "num_workers=0")
    deadline_s = time.monotonic() + DEADLINE_S
    while not list(tmp_path.glob("folders/*/2/logs/status.json")):
        assert process.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    code, text, errors = ended(process)
    assert code == 130, text + errors
    assert "find-batch-size: interrupted; everything it started has ended" in text
    assert "Traceback" not in text + errors
    assert list(contents(tmp_path / "work")) == ["mine.py"]
    assert list(tmp_path.glob("folders/ddp_runner*")) == []


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--find-batch-size=1.5",), "--find-batch-size=1.5: must be a share of the memory"),
        (("--find-batch-size", "0"), "--find-batch-size=0: must be a share of the memory"),
        (("--find-batch-size=",), "--find-batch-size='': is empty; give a value, or leave it out"),
        (("--find-batch-size", "micro_batch_size=2"), "data.micro_batch_size=2: leave it out"),
        (("--find-lr=1:0.1",), "--find-lr=1:0.1: must be LOW:HIGH or LOW:HIGH:STEPS"),
        (("--find-lr", "1e-5:1:3"), "--find-lr=1e-5:1:3: must be LOW:HIGH"),
        (("--find-lr=fast",), "--find-lr=fast: must be LOW:HIGH"),
        (("--find-lr", "--dry-run"), "--dry-run: trains nothing, and --find-lr trains"),
        (("--find-lr", "--find-batch-size"), "--find-batch-size: and --find-lr are two commands"),
        (("--find-lr", "--resume", "best"), "--resume=best: there is no checkpoint in"),
        (("--find-lr", "learning_rate=-1"), "learning_rate=-1: must be a number, above 0"),
        (("check", "--find-lr"), "--find-lr: is a command of its own"),
        (("run", "--find-lr", "train.py"), "--find-lr: is for tasks: a program"),
        (("run", "--find-batch-size=0.5", "train.py"), "is for tasks: a program with its own loop"),
        (
            ("schedule=range_test",),
            "min_learning_rate=0.0: must be above 0 with schedule=range_test",
        ),
    ],
)
def test_a_wrong_search_is_one_line(words, line, tmp_path, monkeypatch, capsys):
    """Exit 2 before anything is started, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DDP_RUNNER_COMMAND", "ddp-runner")  # as the command itself does
    own = () if words[0] == "run" else ("--cpu", "-n", "2")
    assert main([*words, *own]) == 2
    out, err = capsys.readouterr()
    assert line in err
    assert (out, err.count("\n")) == ("", 1), err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--find-lr", "--find-batch-size"])
def test_under_another_launcher_a_search_is_refused(option, tmp_path, monkeypatch, capsys):
    """It starts its ranks itself."""
    monkeypatch.chdir(tmp_path)
    torchrun = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**torchrun, "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert main(["--cpu", option]) == 2
    assert f"{option}: starts its ranks itself" in capsys.readouterr().err


def test_launch_from_python_refuses_a_search(tmp_path, monkeypatch):
    """It gives a run's result."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInputError, match="--find-lr: is for the command line"):
        launch("synthetic", nproc=1, arguments=["--cpu", "--find-lr"])
    assert list(tmp_path.iterdir()) == []


def test_a_value_may_be_attached_or_a_word_of_its_own():
    """What is no value is the next word."""
    assert split_off_finding(["--find_batch_size", "90%", "-b", "4"]).words == ("-b", "4")
    found = split_off_finding(["-b", "4", "--find-lr", "lr=3", "--", "--find-lr"])
    assert (found.option, found.value) == ("--find-lr", "")
    assert found.words == ("-b", "4", "lr=3", "--", "--find-lr")
    assert share_of("90%") == share_of("0.9") == 0.9
    assert share_of("") == 0.8
    assert range_of("") == Range(low=1e-7, high=10.0, steps=100)
    value = split_off_finding(["--find-lr", "1e-6:1:200"]).value
    assert range_of(value) == Range(low=1e-6, high=1.0, steps=200)
    with pytest.raises(BadInputError):
        range_of("0:1")
