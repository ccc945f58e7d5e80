"""Ray's own cluster of several nodes, here: it places the supervisors, one of its nodes is taken away, and the run goes on."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import uuid
from pathlib import Path

import psutil
import pytest
import torch

from tests.features.machines.whole_runs.conftest import SETTINGS
from tests.features.machines.whole_runs.test_scripts import SCRIPT
from tests.scenarios.harness import (
    GONE_WITHIN_S,
    PYTHON_M,
    Run,
    poll,
    processes_with,
    shared_memory,
)

pytest.importorskip("ray", reason="the extra ray is not installed")
pytestmark = [pytest.mark.ray, pytest.mark.whole_run, pytest.mark.timeout(600)]

PACED = (*SETTINGS, "task.pace_s=0.1")


class Cluster:
    """Ray's head, which runs nothing, and nodes of one core each; every process of it carries a mark."""

    def __init__(self):
        from ray.cluster_utils import Cluster as Rays

        self.mark = f"RAY_TEST={uuid.uuid4().hex}"
        # Paths of sockets in there may have a hundred characters, and pytest's folders are long.
        self.folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
        (self.folder / "ray").mkdir()
        self._before = shared_memory()
        name, value = self.mark.split("=")
        self._set = {"RAY_TMPDIR": str(self.folder), "RAY_USAGE_STATS_ENABLED": "0", name: value}
        self._set["PYTHONWARNINGS"] = "ignore"
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self._set.items():
                patch.setenv(name, value)
            # A node that is gone counts as dead after 2 s and not after 20.
            health = {"health_check_period_ms": 500, "health_check_failure_threshold": 4}
            head = {"num_cpus": 0, "include_dashboard": False, "_system_config": health}
            self.rays = Rays(initialize_head=True, head_node_args=head)
        self.nodes = {}

    def add(self):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self._set.items():
                patch.setenv(name, value)
            node = self.rays.add_node(num_cpus=1)
        self.nodes[node.all_processes["raylet"][0].process.pid] = node

    def supervisors(self, name):
        """The processes of this name that run on its nodes."""
        return [one for one in processes_with(self.mark) if one.name == name]

    def placed(self):
        """Everything of ours that runs on its nodes."""
        return [one for one in processes_with(self.mark) if one.name.startswith("ddp:")]

    def remove_node_of(self, name):
        """Take the node away, at once, on which the process of this name runs."""
        (supervisor,) = self.supervisors(name)
        above = [one.pid for one in psutil.Process(supervisor.pid).parents()]
        raylet = next(pid for pid in self.nodes if pid in above)
        self.rays.remove_node(self.nodes.pop(raylet), allow_graceful=False)
        poll(lambda: supervisor not in self.placed(), what="the end of what ran there")

    def end(self):
        self.rays.shutdown()
        for process in processes_with(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        poll(lambda: not processes_with(self.mark), what="the end of the cluster")
        shutil.rmtree(self.folder)
        assert not shared_memory() - self._before


@pytest.fixture(scope="module")
def cluster():
    made = Cluster()
    try:
        for _ in range(3):
            made.add()
        yield made
    finally:
        made.end()


@pytest.fixture
def started(cluster, tmp_path):
    """``started(*words)``: the driver, in the same folder each time."""
    runs = []

    def start(*words, nnodes="2", verb="train", of=PACED):
        task = {"task": None} if verb == "run" else {}
        run = Run(
            tmp_path / "run",
            *("--engine", "ray", "--nnodes", nnodes, *of, *words),
            world=1,
            command=(*PYTHON_M, verb),
            **task,
            environment={"RAY_ADDRESS": cluster.rays.address, "RAY_TMPDIR": str(cluster.folder)},
        )
        runs.append(run)
        return run

    yield start
    for run in runs:
        run.__exit__(None, None, None)
    poll(lambda: not cluster.placed(), timeout_s=GONE_WITHIN_S, what="the end of all supervisors")


def test_a_machine_that_is_removed_costs_no_step_and_no_bit(cluster, started, made_once):
    """First a follower's: Ray starts it elsewhere. Then the coordinator's, and it takes the others' ranks over."""
    run = started()
    run.wait_for_step(5)
    secret = _environment_of(cluster.supervisors("ddp:follower")[0].pid)["DDP_RUNNER_TOKEN"]
    assert len(secret) == 64
    for one in psutil.process_iter(["cmdline"]):
        assert secret not in " ".join(one.info["cmdline"] or ()), one
    cluster.remove_node_of("ddp:follower")
    cluster.add()
    run.wait_for_checkpoint(20)
    assert "is lost; Ray starts it again" in run.console
    (stays,) = cluster.supervisors("ddp:rank1")
    cluster.remove_node_of("ddp:supervisor")
    assert run.wait() == 0, run.console
    assert "the coordinator is now on machine 0" in run.console
    assert "its ranks have kept their memory" in run.console
    pids = [one["pid"] for one in run.events("rank_formed") if one["rank"] == 1]
    assert pids[-1] == stays.pid, pids
    summary = run.summary()
    assert (summary["exact"], run.digest) == (True, made_once(*SETTINGS, world=2).digest)
    written = [path for path in run.folder.rglob("*") if path.is_file()]
    assert len(written) > 5
    assert not [path for path in written if secret.encode() in path.read_bytes()]


def test_it_begins_with_few_and_ends_with_its_driver(cluster, started):
    """A driver that is killed leaves nothing. The same command goes on, takes in what comes, and Ctrl-C saves."""
    few = ("--rdzv-conf", "last_call_timeout=1", "max_steps=1000")
    while len(cluster.nodes) > 1:
        cluster.rays.remove_node(cluster.nodes.popitem()[1], allow_graceful=False)
    refused = started(nnodes="9")
    assert refused.wait() == 2, refused.console
    assert "--nnodes=9: needs 9 with 1 CPU each, and the cluster has " in refused.console
    run = started(*few, nnodes="1:2")
    run.wait_for_checkpoint(12)
    assert len(cluster.placed()) > 4
    run.signal(signal.SIGKILL)
    poll(lambda: not cluster.placed(), timeout_s=30.0, what=f"the end of {cluster.placed()}")
    run = started(*few, nnodes="1:2")
    poll(lambda: "importing" in run.console, what="the coordinator")
    cluster.add()
    poll(lambda: "2 ranks from here on" in run.console, what=f"both ranks: {run.console}")
    run.signal(signal.SIGINT)
    assert run.wait() == 130, run.console
    summary = run.summary()
    assert summary["steps"] > 12
    assert any("of 2 ranks from step" in reason for reason in summary["inexact_reasons"]), summary


def test_a_script_starts_again_on_the_machines_that_ray_has(cluster, started, tmp_path):
    """From its own checkpoint: after a rank is killed, a follower's machine is taken away, and the coordinator's."""
    while len(cluster.nodes) < 3:
        cluster.add()
    script, kept = tmp_path / "train.py", tmp_path / "kept.pt"
    script.write_text(SCRIPT)
    options = ("--max-restarts", 9, "-l", tmp_path / "logs", "recovery.node_patience_s=60")
    run = started(script, 400, kept, "RANK,WORLD_SIZE", verb="run", of=options)
    done = 0
    for name, end in (
        ("ddp:rank1", lambda pid: os.kill(pid, signal.SIGKILL)),
        ("ddp:follower", lambda _: cluster.remove_node_of("ddp:follower")),
        ("ddp:supervisor", lambda _: cluster.remove_node_of("ddp:supervisor")),
    ):
        done = poll(lambda done=done: _done(kept, above=done), what=f"steps: {run.console}")
        end(cluster.supervisors(name)[0].pid)
        if len(cluster.nodes) < 3:
            cluster.add()
    assert run.wait() == 0, run.console
    assert "all 2 ranks start again (attempt 1)" in run.console
    assert "the coordinator is now on machine 0" in run.console
    assert _done(kept, above=0) == 400
    weights = torch.load(kept)["model"]["module.weight"]
    assert weights.item() == -0.5 * 1.5 * 400


def _done(kept, *, above):
    """The steps in the script's checkpoint, once there are more than ``above``; 0 before."""
    if not kept.exists():
        return 0
    done = torch.load(kept)["done"]
    return done if done > above else 0


def _environment_of(pid):
    pairs = Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
    return dict(pair.decode().partition("=")[::2] for pair in pairs if pair)
