"""Commands as functions of a program: ``ddp_runner.run``, ``bench`` and ``find_batch_size``."""

from __future__ import annotations

import json

import pytest

import ddp_runner
from ddp_runner.kernel.rules.errors import BadInputError
from tests import ready

SCRIPT = """
import json, sys
import torch.distributed as dist
dist.init_process_group("gloo")
print(json.dumps([sys.argv[1:], dist.get_world_size()]), flush=True)
dist.barrier()  # without it a rank may be gone while gloo still connects the other one
dist.destroy_process_group()
"""
TINY = {
    "batch_size": 4,
    "num_workers": 0,
    "device": "cpu",
    "hidden_size": 16,
    "num_layers": 1,
    "num_heads": 2,
    "seq_len": 16,
    "vocab_size": 64,
}


@pytest.fixture(autouse=True)
def in_its_folder(tmp_path, monkeypatch):
    """The runs are forks of the ready process."""
    monkeypatch.chdir(tmp_path)
    for name, value in ready.environment().items():
        monkeypatch.setenv(name, value)


def test_a_script_runs_as_under_the_command(tmp_path, capfd):
    """With the words of the command; the result has the summary of the run."""
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ("--cpu", "--max-restarts=2", "-l", "logs/here")
    result = ddp_runner.run("train.py", ["--x", "1"], nproc_per_node=2, options=options)
    assert (result.exit_code, result.log_dir) == (0, tmp_path / "logs" / "here")
    assert (result.summary["status"], result.summary["world_size"]) == ("completed", 2)
    assert json.dumps([["--x", "1"], 2]) in capfd.readouterr().out


def test_a_script_that_is_not_there_is_an_error_of_the_caller(tmp_path):
    """Nothing is started, nor written."""
    with pytest.raises(BadInputError, match=r"none\.py"):
        ddp_runner.run("none.py", nproc_per_node=2)
    assert list(tmp_path.iterdir()) == []


def test_a_benchmark_gives_what_the_command_prints(tmp_path):
    """The run's folders are left alone."""
    found = ddp_runner.bench("synthetic", nproc=1, config=TINY, steps=5)
    assert {part["name"] for part in found["parts"]} >= {"forward_ms", "backward_ms"}
    assert list(tmp_path.iterdir()) == []


def test_the_largest_batch_is_a_number(tmp_path, capsys):
    """And each size that was tried is shown, also where only sys.stdout reaches the reader."""
    config = {**TINY, "batch_size": 32, "dataset_size": 64}
    size = ddp_runner.find_batch_size("synthetic", nproc=1, config=config, share=0.5)
    assert size in (32, 64)
    assert f"the largest that fits is {size}" in capsys.readouterr().out
    with pytest.raises(BadInputError, match="share"):
        ddp_runner.find_batch_size("synthetic", nproc=1, config=config, share=7)


def test_a_script_that_runs_itself_is_refused(tmp_path, capfd):
    """Its ranks would run it again without end."""
    (tmp_path / "train.py").write_text('import ddp_runner\nddp_runner.run("train.py")\n')
    result = ddp_runner.run("train.py", nproc_per_node=1, options=("--cpu",))
    assert result.exit_code == 1
    found = capfd.readouterr()
    assert "run() was called while a rank imported this file" in found.out + found.err
