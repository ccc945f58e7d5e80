"""A loop of one's own that attaches, on two machines: repaired in place, to the weights of one machine."""

from __future__ import annotations

import os
import shutil
import signal
from types import SimpleNamespace

import pytest

from tests.scenarios.conftest import PATIENT, filled_once
from tests.scenarios.harness import Outputs, Run, ended, poll

LOOP = """
import sys, time
import torch
import ddp_runner
from layers import model_of

run = ddp_runner.attach()
x = torch.randn(512, 8)
data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
model = model_of(8)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20)
net = run.ddp(model)
run.keep(model=model, optimizer=optimizer, scheduler=scheduler)
for inputs, labels in run.steps(run.loader(data, batch_size=4), max_steps=60):
    with run.step():
        loss = torch.nn.functional.cross_entropy(net(inputs), labels)
        run.note(loss=loss)
        loss.backward()
        optimizer.step(); optimizer.zero_grad(); scheduler.step()
    time.sleep(float(sys.argv[1]))
print(f"rank {run.rank} of {run.world_size} is behind its loop")
"""
LAYERS = """
from torch import nn

def model_of(width):
    return nn.Sequential(nn.Linear(width, 24), nn.BatchNorm1d(24), nn.Dropout(0.2), nn.Linear(24, 2))
"""
SLOW = "0.1"  # ranks train on while nothing is heard of their supervisor
OPTIONS = ("save_every_steps=20", "log.display=plain", *PATIENT)


def start(nodes, number, *options, words=(SLOW,), world=2, loop=LOOP):
    """``run`` on a machine with a folder of its own, which has the program too."""
    folder, port = nodes.folder / f"node{number}", getattr(nodes, "port", None)
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "loop.py").write_text(loop, encoding="utf-8")
    (folder / "layers.py").write_text(LAYERS, encoding="utf-8")
    where = ("--nnodes", 2, "--node-rank", number, "--rdzv-endpoint", f"127.0.0.1:{port}")
    run = Run(
        folder,
        *("-l", folder / "logs", "-c", folder / "checkpoints", *OPTIONS),
        *((*where, "--token-file", nodes.token) if port else ()),
        *(*options, "loop.py", *words),
        world=world,
        task=None,
        verb="run",
    )
    nodes.runs.append(run)
    return run


def wait_for_step(run, step):
    """As the coordinator shows it."""
    poll(lambda: (run.status() or {"step": 0})["step"] >= step, what=f"step {step}")


@pytest.fixture
def weights_of_one_machine(tmp_path_factory, worker_id):
    """Those of four ranks there, to whom nothing happens."""

    def make(folder):
        with start(SimpleNamespace(folder=folder, runs=[]), 0, words=("0",), world=4) as run:
            assert run.wait() == 0, run.console

    folder = filled_once(tmp_path_factory, worker_id, make, "a loop on one machine")
    return Outputs(folder / "node0").digest


def test_a_loop_on_two_machines_loses_no_step_and_no_bit(nodes, weights_of_one_machine):
    """Ranks killed on either, a machine that is silent for a while; others keep their process.

    Who has other arguments, or another file, is refused before.
    """
    silent = "recovery.node_silent_s=2"
    first = start(nodes, 0, silent)
    for how, line in (
        ({"words": ("9",)}, "run=loop.py 9: the coordinator has loop.py 0.1: give all nodes"),
        ({"loop": LOOP.replace("1e-2", "1e-3")}, "loop.py: is "),
    ):
        refused = start(nodes, 1, silent, **how)
        assert refused.wait() == 2, refused.console
        assert refused.console.strip().splitlines()[-1].startswith(f"ddp_runner: error: {line}")
    second = start(nodes, 1, silent)
    wait_for_step(first, 3)
    stays = first.rank_pid(0), first.rank_pid(1), second.rank_pid(2)
    os.kill(second.rank_pid(3), signal.SIGKILL)
    wait_for_step(first, 12)
    assert (first.rank_pid(0), first.rank_pid(1), second.rank_pid(2)) == stays
    os.kill(first.rank_pid(0), signal.SIGKILL)
    wait_for_step(first, (first.status() or {"step": 0})["step"] + 6)
    stays = second.rank_pid(2), second.rank_pid(3)
    second.signal(signal.SIGSTOP)
    poll(lambda: "is lost: nothing was heard" in first.console, what="its loss")
    second.signal(signal.SIGCONT)
    poll(lambda: "its ranks have kept their memory" in first.console, what="its return")
    assert (second.rank_pid(2), second.rank_pid(3)) == stays
    assert ended(first, second) == (0, 0), first.console + second.console
    summary = first.summary()
    assert (summary["exact"], summary["steps"], summary["world_size"]) == (True, 60, 4), summary
    faults = [(fault["kind"], fault["steps_lost"]) for fault in summary["faults"]]
    assert faults == [("rank_killed", 0), ("rank_killed", 0), ("node_lost", 0)], first.console
    assert first.digest == weights_of_one_machine
    # Rank 0's words are on its console, and those of the others in the logs of their machines.
    assert "rank 0 of 4 is behind its loop" in first.console
    for run, rank in ((first, 1), (second, 2), (second, 3)):
        assert f"rank {rank} of 4 is behind its loop" in (run.logs / f"rank_{rank}.log").read_text()
    assert not list(second.checkpoints.glob("step_*"))


def test_a_stopped_loop_resumes_from_whichever_machine_has_its_state(nodes, weights_of_one_machine):
    """SIGTERM on one that does not coordinate saves and ends all with 75; the files then move there."""
    unasked = "save_every_steps=0", "save_interval=0"
    first, second = start(nodes, 0, *unasked), start(nodes, 1, *unasked)
    wait_for_step(first, 10)
    second.signal(signal.SIGTERM)
    assert ended(first, second) == (75, 75), first.console + second.console
    assert "is behind its loop" not in first.console + second.console
    shutil.rmtree(second.checkpoints, ignore_errors=True)
    first.checkpoints.rename(second.checkpoints)
    first, second = start(nodes, 0, *unasked), start(nodes, 1, *unasked)
    assert ended(first, second) == (0, 0), first.console + second.console
    assert "node 1 has a newer checkpoint" in first.console
    summary = first.summary()
    assert (summary["exact"], summary["faults"]) == (True, []), summary
    assert first.digest == weights_of_one_machine


def test_a_loop_goes_on_under_another_coordinator(nodes, weights_of_one_machine):
    """SIGKILL of the first machine's supervisor: the other one takes its place, and the same command follows it."""
    shared = nodes.folder / "shared"
    options = ("save_interval=0", "-c", shared / "kept", "-l", shared / "logs")
    first, second = (start(nodes, number, *options) for number in (0, 1))
    for run in (first, second):
        run.logs, run.checkpoints = shared / "logs", shared / "kept"
    wait_for_step(first, 10)
    pids = second.rank_pid(2), second.rank_pid(3)
    first.signal(signal.SIGKILL)
    first.assert_gone()
    poll(lambda: "this machine coordinates from here on" in second.console, what="the new one")
    first = start(nodes, 0, *options)
    first.logs, first.checkpoints = shared / "logs", shared / "kept"
    wait_for_step(second, 20)
    assert (second.rank_pid(2), second.rank_pid(3)) == pids
    assert ended(first, second) == (0, 0), first.console + second.console
    summary = second.summary()
    assert (summary["exact"], summary["steps"]) == (True, 60), summary
    assert second.digest == weights_of_one_machine
    for rank, run in ((1, first), (2, second)):
        log = (shared / "logs" / f"rank_{rank}.log").read_text()
        assert log.count(f"rank {rank} of 4 is behind its loop") == 1, run.console
