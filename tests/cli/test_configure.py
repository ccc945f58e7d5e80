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
from ddp_runner.config import resolve
from ddp_runner.observe.gpus import Gpu, VisibleGpus

ROOT = Path(__file__).resolve().parents[2]
CPU = Machine(gpus=VisibleGpus(why_none="none"), cores=2)
GPU = Machine(
    gpus=VisibleGpus(gpus=(Gpu(index=0, uuid="GPU-1", name="H100", memory="80 GB"),)), cores=16
)


def configure(typed, *words, cwd, home):
    """Its exit code and what stood on the terminal; ``typed`` is what a person types."""
    master, slave = pty.openpty()
    os.write(master, typed.encode())
    with subprocess.Popen(
        [sys.executable, "-m", "ddp_runner", "configure", *words],
        cwd=cwd,
        env={**os.environ, "HOME": str(home), "PYTHONPATH": str(ROOT), "TERM": "dumb"},
        stdin=slave,
        stdout=slave,
        stderr=slave,
    ) as process:
        os.close(slave)
        shown = b""
        with contextlib.suppress(OSError):  # once the other side is closed
            while True:
                shown += os.read(master, 4096)
    os.close(master)
    return process.returncode, shown.decode()


def test_answers_on_a_terminal_become_a_file_that_runs_take(tmp_path):
    """Enter keeps what is usual, a wrong answer is asked again, and what stood there besides stays."""
    home, file = tmp_path / "home", tmp_path / "home" / ".config" / "ddp_runner.yaml"
    answers = ["synthetic", "", "cpu", "1", "many", "16", "", "", "", "", "1"]
    code, shown = configure("\n".join([*answers, ""]), cwd=tmp_path, home=home)
    assert code == 0, shown
    assert "data.batch_size=many: must be a whole number, 1 or more" in shown
    assert f"{file} is written" in shown
    chosen = {"run.task": "synthetic", "run.device": "cpu", "run.nproc_per_node": 1}
    chosen |= {"data.batch_size": 16, "checkpoint.keep_last": 1}
    assert yaml.safe_load(file.read_text()) == chosen

    file.write_text(file.read_text() + "seed: 7\ntask.hidden: [1, 2]\n")
    code, shown = configure("\n" * 4 + "8\n" + "\n" * 5, cwd=tmp_path, home=home)
    assert code == 0, shown
    del chosen["data.batch_size"]  # as it is anyway
    assert yaml.safe_load(file.read_text()) == {**chosen, "seed": 7, "task.hidden": [1, 2]}
    assert resolve(files=[file]).settings.run.seed == 7

    code, shown = configure("\n" * 3 + "\x04", "--preset", "small", cwd=tmp_path, home=home)
    assert code == 130, shown
    assert not (tmp_path / "presets").exists(), "nothing before the last answer"
    code, shown = configure("\n" * 10, "--preset", "small", cwd=tmp_path, home=home)
    assert code == 0, shown
    text = (tmp_path / "presets" / "small.yaml").read_text()
    assert yaml.safe_load(text) is None
    assert [line[2:].partition(":")[0] for line in text.splitlines()[1:]] == list(QUESTIONS)


def test_without_a_terminal_nobody_can_be_asked(tmp_path, monkeypatch, capsys):
    """Exit 2 with the way to do without, and nothing is written."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["configure"]) == 2
    error = capsys.readouterr().err
    assert f"needs a terminal to ask on; without one, write {tmp_path}/.config/ddp" in error
    assert main(["configure", "--preset", "a/b"]) == 2
    assert "--preset=a/b: must be a plain name" in capsys.readouterr().err
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


def test_answers_that_do_not_fit_each_other_are_asked_again():
    """With the line that a run would end with; what was answered is the default then."""
    ask, shown = answering(("run.device", "cuda"), ("data.batch_size", "4"), ("run.device", "cpu"))
    said = []
    answers = ask_all(CPU, {}, ask=ask, say=said.append)
    assert len(said) == 1
    assert said[0].startswith("run.device=cuda: no GPU can be used")
    assert answers == {"run.device": "cpu", "data.batch_size": "4"}
    assert shown["data.batch_size"] == "4"


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
