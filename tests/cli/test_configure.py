"""The questions of ``configure``, on a real terminal and without one, and the file that comes of them."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ddp_runner.__main__ import main
from ddp_runner.cli.configure import QUESTIONS, Machine, ask_all, written
from ddp_runner.cli.parser import parse_train
from ddp_runner.cli.planning import plan_launch
from ddp_runner.config import resolve
from ddp_runner.observe.gpus import Gpu, VisibleGpus

ROOT = Path(__file__).resolve().parents[2]
CPU = Machine(gpus=VisibleGpus(why_none="none"), cores=2)
GPU = Machine(
    gpus=VisibleGpus(gpus=(Gpu(index=0, uuid="GPU-1", name="H100", memory="80 GB"),)), cores=16
)


class Dialogue:
    """``configure`` on a terminal: each answer is typed once its question is there."""

    def __init__(self, *words, cwd, home):
        self._master, slave = pty.openpty()
        self.shown = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ddp_runner", "configure", *words],
            cwd=cwd,
            env={**os.environ, "HOME": str(home), "PYTHONPATH": str(ROOT), "TERM": "dumb"},
            stdin=slave,
            stdout=slave,
            stderr=slave,
        )
        os.close(slave)

    def _read_until(self, *endings):
        """What comes until one of these has come, or the other side is closed."""
        came = ""
        with contextlib.suppress(OSError):
            while not any(ending in came for ending in endings):
                came += os.read(self._master, 4096).decode()
        self.shown += came
        return came

    def answer(self, question, text=""):
        """Wait for that question, whose text begins so, and answer it; what stood before and beside it."""
        came = self._read_until(f"{question}")
        while not came.endswith("): "):
            came += self._read_until("): ")
        os.write(self._master, f"{text}\n".encode())
        return came

    def press(self, keys):
        os.write(self._master, keys.encode())

    def end(self):
        """Read all that is left; the exit code."""
        self._read_until("\0")
        os.close(self._master)
        return self.process.wait(60)


def configure(answers, *words, cwd, home):
    """Its exit code and what stood on the terminal; ``answers`` by the begin of a question, else Enter."""
    dialogue = Dialogue(*words, cwd=cwd, home=home)
    several = "Machines" in answers
    for key, question in QUESTIONS.items():
        if key not in ("node_rank", "rdzv_endpoint") or several:
            texts = next((answers[one] for one in answers if question.startswith(one)), [""])
            for text in texts:
                dialogue.answer(question[:20], text)
    return dialogue.end(), dialogue.shown


def test_answers_on_a_terminal_become_a_file_that_runs_take(tmp_path):
    """Enter keeps what is usual, a wrong answer is asked again, and what stood there besides stays."""
    home, file = tmp_path / "home", tmp_path / "home" / ".config" / "ddp_runner.yaml"
    answers = {
        "Task: bytes": ["synthetic"],
        "Device: auto": ["cpu"],
        "Ranks": ["1"],
        "Samples": ["many", "16"],
        "Checkpoints": ["1"],
        "Compile": ["perhaps", "true"],
    }
    code, shown = configure(answers, cwd=tmp_path, home=home)
    assert code == 0, shown
    assert "data.batch_size=many: must be a whole number, 1 or more" in shown
    assert "run.compile=perhaps: must be true or false" in shown
    assert f"{file} is written" in shown
    chosen = {"run.task": "synthetic", "run.device": "cpu", "run.nproc_per_node": 1}
    chosen |= {"data.batch_size": 16, "run.compile": True, "checkpoint.keep_last": 1}
    assert yaml.safe_load(file.read_text()) == chosen

    file.write_text(file.read_text() + "seed: 7\ntask.hidden: [1, 2]\n")
    code, shown = configure({"Samples": ["8"]}, cwd=tmp_path, home=home)
    assert code == 0, shown
    del chosen["data.batch_size"]  # as it is anyway
    assert yaml.safe_load(file.read_text()) == {**chosen, "seed": 7, "task.hidden": [1, 2]}
    assert resolve(files=[file]).settings.run.seed == 7

    dialogue = Dialogue("--preset", "small", cwd=tmp_path, home=home)
    dialogue.answer("Task: bytes")
    dialogue.answer("File or folder")
    dialogue.press("\x04")
    assert dialogue.end() == 130, dialogue.shown
    assert not (tmp_path / "presets").exists(), "nothing before the last answer"
    code, shown = configure({}, "--preset", "small", cwd=tmp_path, home=home)
    assert code == 0, shown
    text = (tmp_path / "presets" / "small.yaml").read_text()
    assert yaml.safe_load(text) is None
    assert [line[2:].partition(":")[0] for line in text.splitlines()[1:]] == list(QUESTIONS)


def test_each_answer_is_checked_where_it_is_given(tmp_path):
    """GPUs that are not there, machines that no number is, and a place that is none; an empty default is named."""
    (tmp_path / "text.txt").write_text("to be read\n" * 100)
    dialogue = Dialogue("--preset", "cluster", cwd=tmp_path, home=tmp_path)
    dialogue.answer("Task: bytes", "gone.py")
    assert "--task=gone.py: no such file gone.py" in dialogue.answer("Task: bytes")
    assert "(empty): " in dialogue.answer("File or folder", "gone.txt")
    assert "--data=gone.txt: no such file or folder" in dialogue.answer(
        "File or folder", "text.txt"
    )
    dialogue.answer("Device: auto", "cpu")
    assert "(empty): " in dialogue.answer("GPUs", "0,x")
    assert "run.gpus=0,x: must be whole numbers" in dialogue.answer("GPUs", "0,1")
    assert "--gpus=0,1: contradicts --cpu" in dialogue.answer("GPUs", "-")
    dialogue.answer("Ranks", "100000")
    assert "--nproc-per-node=100000: must be at most" in dialogue.answer("Ranks", "1")
    assert "(1): " in dialogue.answer("Machines", "4:2")
    assert "nnodes=4:2: must not begin above its end: 2:4" in dialogue.answer("Machines", "2")
    assert "(empty): " in dialogue.answer("Number of this machine", "2")
    assert "node_rank=2: must be the number of this machine, 0 to 1" in dialogue.answer(
        "Number", "1"
    )
    dialogue.answer("Address where the machines")
    assert "--rdzv-endpoint: is needed" in dialogue.answer(
        "Address where the machines", "node0:99999"
    )
    assert "must have a port of 1 to 65535" in dialogue.answer(
        "Address where the machines", "node0:29500"
    )
    for question in list(QUESTIONS.values())[8:]:
        dialogue.answer(question[:20])
    assert dialogue.end() == 0, dialogue.shown
    file = tmp_path / "presets" / "cluster.yaml"
    machines = {"nnodes": "2", "node_rank": "1", "rdzv_endpoint": "node0:29500"}
    of_run = {"run.device": "cpu", "run.nproc_per_node": 1, "data.path": "text.txt"}
    assert yaml.safe_load(file.read_text()) == {**of_run, **machines}


@pytest.mark.parametrize(
    ("words", "machines"),
    [((), 2), (("--nnodes", "1"), 1), (("--nnodes", "3"), 3), (("--rdzv-endpoint", "b:1"), 2)],
)
def test_machines_of_a_file_are_those_of_the_run(words, machines, tmp_path, monkeypatch):
    """As the questions write them; the options of the command win, and a script is on the same machines."""
    monkeypatch.chdir(tmp_path)
    home = tmp_path / ".config" / "ddp_runner.yaml"
    home.parent.mkdir()
    home.write_text("nnodes: '2'\nnode_rank: '1'\nrdzv_endpoint: a:7\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ("--cpu", "-n", "1", *words)
    nodes = plan_launch(parse_train(words), words=words).nodes
    assert (1 if nodes is None else nodes.most) == machines
    if nodes is not None:
        assert (nodes.node_rank, nodes.host) == (1, "b" if "b:1" in words else "a")
    script = plan_launch(parse_train(["--cpu"]), words=[], has_modes=False)
    assert script.nodes.most == 2


def test_without_a_terminal_nobody_can_be_asked(tmp_path, monkeypatch, capsys):
    """Exit 2 with the way to do without, and nothing is written."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["configure"]) == 2
    error = capsys.readouterr().err
    assert f"needs a terminal to ask on; without one, write {tmp_path}/.config/ddp" in error
    assert main(["configure", "--preset", "a/b"]) == 2
    assert "--preset=a/b: must be a plain file name" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def answering(*answers):
    """What a person answers, in turn; then Enter for ever. And the defaults that were shown."""
    left, shown = list(answers), {}

    def ask(key, question, default):
        del question
        shown[key] = default
        if left and left[0][0] == key:
            return left.pop(0)[1]
        return default

    return ask, shown


def test_an_answer_that_does_not_fit_those_before_is_asked_again():
    """With the line that a run would end with."""
    given = (
        ("run.device", "cuda"),
        ("run.device", "cpu"),
        ("run.gpus", "0"),
        ("data.batch_size", "4"),
    )
    ask, shown = answering(*given)
    said = []
    answers = ask_all(CPU, {}, ask=ask, say=said.append)
    assert [line.strip().partition(": ")[0] for line in said] == ["run.device=cuda", "--gpus=0"]
    assert "no GPU can be used" in said[0]
    assert answers == {"run.device": "cpu", "data.batch_size": "4"}
    assert shown["run.gpus"] == ""


def test_gpus_that_are_not_there_are_named_at_once():
    """With those that are there."""
    ask, _ = answering(("run.gpus", "0,1"), ("run.gpus", "0"))
    said = []
    assert ask_all(GPU, {}, ask=ask, say=said.append) == {"run.gpus": "0"}
    assert said == ["  --gpus=0,1: no such GPU: 1; there are 0 (H100)"]


def test_one_machine_has_no_number_and_no_place():
    """They are asked for where there are several, and forgotten where there is one again."""
    ask, shown = answering(("nnodes", "1"))
    known = {"nnodes": "2", "node_rank": "1", "rdzv_endpoint": "a:1"}
    assert ask_all(CPU, known, ask=ask, say=print) == {}
    assert "node_rank" not in shown
    ask, shown = answering()
    assert ask_all(CPU, known, ask=ask, say=print) == known


@pytest.mark.parametrize(
    ("machine", "usual"), [(CPU, ("8", "fp32", "0")), (GPU, ("32", "auto", "auto"))]
)
def test_defaults_are_those_of_the_machine(machine, usual):
    """What a run would take there; nothing of it is written as chosen."""
    ask, shown = answering()
    answers = ask_all(machine, {}, ask=ask, say=print)
    assert answers == {}
    keys = ("data.batch_size", "optim.precision", "data.num_workers")
    assert tuple(shown[key] for key in keys) == usual
    assert f"# data.batch_size: {usual[0]}\n" in written(answers, {}, machine=machine)


def test_defaults_follow_the_device_that_was_answered():
    """Who has a GPU and wants the CPU is offered what suits the CPU."""
    ask, shown = answering(("run.device", "cpu"))
    ask_all(GPU, {}, ask=ask, say=print)
    assert shown["data.batch_size"] == "8"
