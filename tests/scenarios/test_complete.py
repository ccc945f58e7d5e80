"""A run that is complete, started again: the result of then stands, and what has no effect is named."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import sys
import textwrap

import pytest

from tests import ready

from .conftest import filled_once
from .harness import Outputs, Run, poll
from .test_names import SHORT, TASK
from .test_refusals import contents

STEPS = 12
PYTHON = (sys.executable, "program.py")


@pytest.fixture
def complete(tmp_path, tmp_path_factory, worker_id):
    """A folder with a task and the completed run of it, made once for all test processes."""

    def make(folder):
        folder.mkdir()
        (folder / "mine.py").write_text(f"import helper\n{textwrap.dedent(TASK)}")
        (folder / "helper.py").write_text("RATE = 1\n")
        with Run(folder, "--task", "mine.py", *SHORT, STEPS, task=None) as run:
            assert run.wait() == 0, run.console

    made = filled_once(tmp_path_factory, worker_id, make, "a complete run")
    shutil.copytree(made, tmp_path, symlinks=True, dirs_exist_ok=True)
    found = Outputs(tmp_path)
    found.logs, found.checkpoints = tmp_path / "logs" / "mine", tmp_path / "checkpoints" / "mine"
    return found


def again(complete, *words):
    """What a further launch says; it must end as done."""
    words = ("--task", "mine.py", *SHORT, STEPS, *words)
    with Run(complete.folder, *words, task=None) as run:
        assert run.wait() == 0, run.console
    return run.console


def test_a_complete_run_started_again_keeps_its_result(complete):
    """Every figure of then stands; what was changed in vain is named, also the task's file."""
    before, files = complete.summary(), contents(complete.checkpoints)
    kept = {name: (complete.logs / name).read_bytes() for name in ("summary.json", "config.yaml")}
    assert before["final_loss"] > 0
    assert before["goodput"] > 0
    said = again(complete)
    assert f"already complete: {STEPS} of {STEPS} steps, nothing to train" in said
    assert said.count("already complete") == 1
    assert "without effect" not in said
    assert "has changed" not in said
    assert f"{before['final_loss']:.4f}" in said
    assert "WARNING" not in said
    with (complete.folder / "mine.py").open("a") as file:
        file.write("# a thought\n")
    said = again(complete, "lr=0.5", "log_interval=3")
    assert "not applied to it: log.log_interval 10 -> 3, optim.learning_rate 0.01 -> 0.5" in said
    assert "mine.py has changed since" in said
    assert "raise --max-steps to train longer; --name mine-2 or --resume none starts over" in said
    assert {name: (complete.logs / name).read_bytes() for name in kept} == kept
    assert contents(complete.checkpoints) == files
    assert complete.summary() == before
    status = complete.status()
    assert (status["state"], status["step"]) == ("done", STEPS)
    assert len(complete.events("already_complete")) == 2


def test_a_complete_run_whose_summary_is_gone_sums_up_once_more(complete):
    """The weights, the loss and the steps are those of then, from the checkpoint alone."""
    before = complete.summary()
    for path in complete.logs.iterdir():
        path.unlink()
    said = again(complete)
    assert f"already complete: {STEPS} of {STEPS} steps, nothing to train" in said
    assert said.count("already complete") == 1
    after = complete.summary()
    for name in ("status", "run_id", "steps", "samples", "final_loss", "weights_sha256"):
        assert after[name] == before[name], name


def test_a_longer_run_is_not_complete_and_names_the_changed_task(complete):
    """Control: more steps are trained, by the file as it is now; the run is not exact for that."""
    for name in ("mine.py", "helper.py"):
        with (complete.folder / name).open("a") as file:
            file.write("# a thought\n")
    words = ("--task", "mine.py", *SHORT, STEPS + 4)
    with Run(complete.folder, *words, task=None) as run:
        assert run.wait() == 0, run.console
    assert "already complete" not in run.console
    assert "changed: the task's file was edited at step" in run.console
    summary = complete.summary()
    assert summary["steps"] == STEPS + 4
    for name in ("the task's file", "the task's module helper.py"):
        assert summary["inexact_reasons"].count(f"{name} was edited at step {STEPS}") == 1, summary


def test_python_gets_the_kept_result(complete):
    """`launch` and `DDPTrainer` return the steps, the loss and the weights of the completed run."""
    before = complete.summary()
    program = """
    import json, sys
    import ddp_runner
    from ddp_runner import DDPTrainer

    if __name__ == "__main__":
        config = {"batch_size": 8, "num_workers": 0, "lr": 0.01, "max_steps": 12}
        config["device"] = "cpu"
        kept = ddp_runner.launch("mine.py", nproc=2, config=config).summary
        config.update({"task": "mine.py", "log_dir": "alone", "checkpoint_dir": "alone"})
        first = DDPTrainer(config=config).train()
        second = DDPTrainer(config=config).train()
        found = [[r.steps, r.loss, r.weights_sha256, r.checkpoint] for r in (first, second)]
        print(json.dumps({"kept": kept, "alone": found}))
    """
    (complete.folder / "program.py").write_text(textwrap.dedent(program))
    forks = ready.environment(programs=True)
    with Run(complete.folder, task=None, command=PYTHON, environment=forks) as run:
        assert run.wait() == 0, run.console
    reported = json.loads(run.console.strip().splitlines()[-1])
    assert reported["kept"] == before
    first, second = reported["alone"]
    assert first == second
    assert first[0] == STEPS
    assert first[1] > 0


def test_under_an_outside_launcher_the_account_of_then_stands(complete):
    """A job of one rank that finds nothing to train writes no summary over the one that is there."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    rank |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    words = ("--task", "mine.py", *SHORT, STEPS, "-b", "16", "--name", "job")
    job = Outputs(complete.folder)
    job.logs = complete.folder / "logs" / "job"
    ends = []
    for _ in range(2):
        with Run(complete.folder, *words, task=None, world=1, variables=rank) as run:
            assert run.wait() == 0, run.console
        ends.append((job.logs / "summary.json").read_bytes())
    assert ends[0] == ends[1]
    assert f"already complete: {STEPS} steps, nothing to train" in run.console
    log = (job.logs / "rank_0.log").read_text()
    assert f"already complete: {STEPS} of {STEPS} steps, nothing to train" in log


FUNCTION_AT_ITS_END = """
import pathlib, time
import torch
import ddp_runner

run = ddp_runner.attach()
model, average = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
net = run.ddp(model)
run.keep(model=model, optimizer=optimizer, average=average)

@run.every(steps=3)
def follow():
    with torch.no_grad():
        average.weight.lerp_(model.weight, 0.5)

for x in run.steps(run.loader(torch.randn(64, 2), batch_size=4), max_steps=6):
    with run.step():
        (net(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step(); optimizer.zero_grad()
pathlib.Path(f"behind_{run.rank}").touch()
while pathlib.Path("hold").exists():
    time.sleep(0.01)
"""


def test_what_a_loops_last_function_has_changed_is_changed_once(tmp_path):
    """The whole run is killed behind its loop: the next launch has the state of after that function."""
    (tmp_path / "loop.py").write_text(FUNCTION_AT_ITS_END)
    words = ("-l", "logs", "-c", "checkpoints", "loop.py")
    (tmp_path / "hold").touch()
    with Run(tmp_path, *words, task=None, verb="run") as run:
        poll(lambda: len([*tmp_path.glob("behind_*")]) == 2, what="the end of the loop")
        run.wait_for_checkpoint(6)
        run.signal(signal.SIGKILL)
        run.assert_gone()
    (tmp_path / "hold").unlink()
    with Run(tmp_path, *words, task=None, verb="run") as run:
        assert run.wait() == 0, run.console
    with Run(tmp_path / "whole", *(*words[:-1], "../loop.py"), task=None, verb="run") as whole:
        assert whole.wait() == 0, whole.console
    assert (run.summary()["exact"], run.digest) == (True, whole.digest)
