"""``run`` on two machines: a script that knows nothing of this runner, and whatever is lost on either."""

from __future__ import annotations

import os
import re
import signal
import socket

import pytest

from tests.features.machines.whole_runs.conftest import TOKEN, free_port
from tests.scenarios.harness import Run, ended, poll

SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

steps, file, done = int(sys.argv[1]), sys.argv[2], 0
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
torch.nn.init.zeros_(model.module.weight)
if os.path.exists(file):
    saved = torch.load(file)
    model.load_state_dict(saved["model"])
    done = saved["done"]
print("began", done, {name: os.environ[name] for name in sorted(os.environ) if name in sys.argv[3].split(",")}, flush=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
while done < steps:
    optimizer.zero_grad()
    model(torch.full((1, 1), 1.0 + rank)).sum().backward()
    optimizer.step()
    done += 1
    if rank == 0:
        torch.save({"model": model.state_dict(), "done": done}, file)
    dist.barrier()
    time.sleep(0.05)
print("ended with", model.module.weight.item(), flush=True)
dist.destroy_process_group()
"""
NAMES = (
    "RANK,LOCAL_RANK,GROUP_RANK,WORLD_SIZE,LOCAL_WORLD_SIZE,GROUP_WORLD_SIZE,ROLE_RANK,ROLE_WORLD_SIZE,"
    "MASTER_ADDR,TORCHELASTIC_RESTART_COUNT,TORCHELASTIC_MAX_RESTARTS,TORCHELASTIC_RUN_ID"
)


class Machines:
    """Machine ``k`` has a folder, and the script in it; the script's checkpoint is shared."""

    def __init__(self, folder):
        self.folder, self.port, self.runs = folder, free_port(), []

    def start(self, number, *options, nnodes="2", steps=60, script=SCRIPT, **how):
        folder = self.folder / f"node{number}"
        folder.mkdir(exist_ok=True)
        (folder / "train.py").write_text(script)
        words = [
            "--nnodes",
            nnodes,
            "--rdzv-endpoint",
            f"127.0.0.1:{self.port}",
            "--rdzv-id",
            "job",
        ]
        words += ["--node-rank", number, "--max-restarts", 3, "-l", folder / "logs", *options]
        words += ["log.display=plain", "train.py", steps, self.folder / "kept.pt", NAMES]
        token = {"DDP_RUNNER_TOKEN": TOKEN}
        run = Run(folder, *words, world=1, task=None, verb="run", variables=token, **how)
        self.runs.append(run)
        return run

    def log(self, number, attempt):
        """What the rank of a machine has written in an attempt; machine and rank have one number."""
        path = self.folder / f"node{number}" / "logs" / f"attempt_{attempt}" / f"rank_{number}.log"
        return path.read_text() if path.exists() else ""

    def await_begin(self, number, attempt):
        return poll(lambda: "began" in self.log(number, attempt), what=f"attempt {attempt}")


@pytest.fixture
def nodes(tmp_path):
    made = Machines(tmp_path)
    yield made
    for run in made.runs:
        run.__exit__(None, None, None)


def began(text):
    """The step and the variables with which a rank has begun."""
    step, variables = re.search(r"began (\d+) (\{.*\})", text).groups()
    return int(step), dict(re.findall(r"'(\w+)': '([^']*)'", variables))


def test_a_rank_lost_on_one_machine_has_all_start_again_on_both(nodes):
    """From the script's checkpoint, with torchrun's variables; who brings another script is refused."""
    first, second = nodes.start(0), nodes.start(1)
    nodes.await_begin(1, 0)
    poll((nodes.folder / "kept.pt").exists, what="a checkpoint")
    other = nodes.start(2, script=SCRIPT + "# another\n", nnodes="2")
    assert other.wait() == 2
    assert "--node-rank=2: must be the number of this machine, 0 to 1" in other.console
    os.kill(second.rank_pid(1), signal.SIGKILL)
    nodes.await_begin(1, 1)
    assert ended(first, second) == (0, 0), first.console + second.console
    here = socket.gethostname()
    line = f"node 1 ({here}): rank 1 killed (SIGKILL)"
    assert line in first.console, first.console
    assert (
        "all 2 ranks start again (attempt 1); see attempt_0/rank_1.log on node 1" in first.console
    )
    for number in (0, 1):
        for attempt in (0, 1):
            step, variables = began(nodes.log(number, attempt))
            assert (step > 0) == (attempt > 0)
            assert variables == {
                **dict.fromkeys(("RANK", "GROUP_RANK", "ROLE_RANK"), str(number)),
                **dict.fromkeys(("WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"), "2"),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1",
                "TORCHELASTIC_RESTART_COUNT": str(attempt),
                "TORCHELASTIC_MAX_RESTARTS": "3",
                "TORCHELASTIC_RUN_ID": "job",
            }
        assert f"ended with {-0.5 * 1.5 * 60}" in nodes.log(number, 1)
    summary = first.summary()
    assert (summary["status"], summary["world_size"]) == ("completed", 2)
    assert summary["steps"] == 60 - began(nodes.log(0, 1))[0]
    assert [one["host"] for one in summary["attempts"]] == [here, ""]
    assert not (second.logs / "summary.json").exists()


def test_a_script_goes_on_with_fewer_machines_and_more(nodes):
    """A machine is killed, and comes back: it is used at the next start. Ctrl-C on it ends all."""
    how = {"nnodes": "1:2", "steps": 4000}
    first, second = (nodes.start(k, "recovery.node_patience_s=1", **how) for k in (0, 1))
    nodes.await_begin(1, 0)
    poll((nodes.folder / "kept.pt").exists, what="a checkpoint")
    second.signal(signal.SIGKILL)
    nodes.await_begin(0, 1)
    step, variables = began(nodes.log(0, 1))
    assert (step > 0, variables["WORLD_SIZE"], variables["GROUP_WORLD_SIZE"]) == (True, "1", "1")
    second.assert_gone()
    assert f"node 1 ({socket.gethostname()}) is lost" in first.console
    changed = nodes.start(1, **how, script=SCRIPT.replace("0.05", "0.04"))
    assert changed.wait() == 2
    assert "train.py: is " in changed.console
    second = nodes.start(1, **how)
    poll(lambda: "this is node 1" in second.console, what="its welcome")
    os.kill(first.rank_pid(0), signal.SIGKILL)
    nodes.await_begin(1, 2)
    assert began(nodes.log(1, 2))[1]["WORLD_SIZE"] == "2"
    second.signal(signal.SIGINT)
    assert ended(first, second) == (130, 130), first.console + second.console
    causes = [one["cause"] for one in first.summary()["attempts"]]
    assert "node 1" in causes[0]
    assert "SIGKILL" in causes[1]
    assert len(causes) == 3


def test_a_script_starts_again_under_another_coordinator(nodes):
    """SIGKILL of the first machine: the other one takes its place, and both begin again from the script's checkpoint."""
    shared = nodes.folder / "shared"
    first, second = (nodes.start(k, "-l", shared) for k in (0, 1))

    def log(rank, attempt):
        path = shared / f"attempt_{attempt}" / f"rank_{rank}.log"
        return path.read_text() if path.exists() else ""

    poll(lambda: "began" in log(1, 0), what="the first attempt")
    poll((nodes.folder / "kept.pt").exists, what="a checkpoint")
    poll(lambda: "another machine takes over" in second.console, what="a shared lock")
    first.signal(signal.SIGKILL)
    first.assert_gone()
    poll(lambda: "this machine coordinates from here on" in second.console, what="the new one")
    first = nodes.start(0, "-l", shared)
    assert ended(first, second) == (0, 0), first.console + second.console
    assert "has taken this machine's place: following it" in first.console
    assert re.search(r"the coordinator, node 0 \(.+\), is lost", second.console)
    for rank in (0, 1):
        step, variables = began(log(rank, 1))
        assert step > 0
        assert variables["TORCHELASTIC_RESTART_COUNT"] == "1"
        assert variables["WORLD_SIZE"] == "2"
        assert f"ended with {-0.5 * 1.5 * 60}" in log(rank, 1)


def test_three_machines_choose_who_starts_a_script_again(nodes):
    """Each has its own log folder: two of three elect one, and the weights are those of a run without faults."""
    how = ("recovery.elect_coordinator=true", "recovery.node_patience_s=300")
    first, *others = (nodes.start(k, *how, nnodes="2:3") for k in range(3))
    nodes.await_begin(2, 0)
    poll((nodes.folder / "kept.pt").exists, what="a checkpoint")
    for run in others:
        poll(lambda one=run: "a majority of the machines has" in one.console, what="the rule")
    first.signal(signal.SIGKILL)
    first.assert_gone()
    leads = "this machine coordinates from here on"
    poll(lambda: any(leads in run.console for run in others), what="an election")
    new, third = sorted(others, key=lambda run: leads not in run.console)
    first = nodes.start(0, *how, nnodes="2:3")
    assert ended(first, new, third) == (0, 0, 0), new.console + first.console
    assert "was elected: following it" in first.console
    for rank in range(3):
        step, variables = began(nodes.log(rank, 1))
        assert step > 0
        assert (variables["TORCHELASTIC_RESTART_COUNT"], variables["WORLD_SIZE"]) == ("1", "3")
        assert f"ended with {-0.5 * 2.0 * 60}" in nodes.log(rank, 1)
    assert "see attempt_0/rank_0.log on node 0" in new.console
    lost, _ = new.summary()["attempts"]
    assert (lost["rank"], lost["host"]) == (0, socket.gethostname())
    assert f"the coordinator, node 0 ({lost['host']}), is lost" in lost["cause"]
    assert not (third.logs / "summary.json").exists()
