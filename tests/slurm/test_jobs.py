"""Runs under a real SLURM controller: nodes are taken away, drained, given back; jobs preempted and cancelled."""

from __future__ import annotations

import json
import os
import signal

import torch

from tests.features.machines.whole_runs.conftest import SETTINGS, STEPS, TOKEN
from tests.features.machines.whole_runs.test_scripts import SCRIPT
from tests.processes import poll
from tests.scenarios.harness import ONE_THREAD

PACE = "task.pace_s=0.1"
WHOLE_NODES = ("--exclusive",)


def test_a_preempted_job_and_a_lost_node_cost_no_bit(cluster, job, made_once):
    """It is requeued with exit code 75, and goes on where it was: on the spare node, then on one given back."""
    run = job("slurm.sbatch", PACE, "recovery.node_patience_s=1", nnodes="2", options=WHOLE_NODES)
    run.wait_for_step(5)
    assert cluster.job(run.number)["NodeList"] == "n[1-2]"
    # Drained: what runs there runs on, and no job comes there any more.
    cluster.run("scontrol", "update", "nodename=n2", "state=drain", "reason=test")
    run.wait_for_step(8)
    assert cluster.job(run.number)["Restarts"] == "0"
    urgent = (
        "--parsable",
        "--partition=high",
        "--exclusive",
        "--nodelist=n1",
        "--output=/dev/null",
    )
    cluster.run("sbatch", *urgent, "--wrap=true")
    cluster.wait_for_job(run.number, JobState="RUNNING", Restarts="1")
    assert cluster.job(run.number)["NodeList"] == "n[1,3]"
    cluster.run("scontrol", "update", "nodename=n2", "state=resume")
    cluster.wait_for_node("n2", "idle")
    reached = run.committed()
    run.wait_for_step(reached + 5)
    cluster.take_away("n3")
    cluster.wait_for_job(run.number, JobState="RUNNING", Restarts="2")
    assert cluster.job(run.number)["NodeList"] == "n[1-2]"
    cluster.wait_for_job(run.number, JobState="COMPLETED", ExitCode="0:0")
    summary = run.summary()
    assert (summary["steps"], summary["world_size"]) == (STEPS, 4), run.console
    assert run.console.count("resumed at step") == 2, run.console
    assert run.digest == made_once(*SETTINGS, world=4).digest


def test_a_job_whose_supervisor_is_killed_starts_again(cluster, job, made_once):
    """srun gives the 137 of the killed one, and the others have ended with 75: it is requeued, and goes on."""
    run = job("slurm.sbatch", PACE, nnodes="2", options=WHOLE_NODES)
    run.wait_for_step(5)
    os.kill(cluster.supervisor("n2"), signal.SIGKILL)
    cluster.wait_for_job(run.number, JobState="RUNNING", Restarts="1")
    cluster.wait_for_job(run.number, JobState="COMPLETED", ExitCode="0:0")
    assert run.console.count("resumed at step") == 1, run.console
    assert run.digest == made_once(*SETTINGS, world=4).digest


def test_a_job_that_fails_is_not_started_again(cluster, job):
    """Control: neither is one that has been started often enough."""
    options = (*WHOLE_NODES, "--export=ALL,REQUEUES_MAX=0")
    run = job("slurm.sbatch", PACE, "-b", "none", nnodes="2", options=options)
    cluster.wait_for_job(run.number, JobState="FAILED", ExitCode="2:0", Restarts="0")
    run = job("slurm.sbatch", PACE, nnodes="2", options=options, folder="other")
    run.wait_for_step(5)
    os.kill(cluster.supervisor("n2"), signal.SIGKILL)
    cluster.wait_for_job(run.number, JobState="FAILED", ExitCode="137:0", Restarts="0")


def test_a_spare_node_steps_in_and_scancel_ends_for_good(cluster, job):
    """In the place of a lost node, of whose job no step is lost; the cancelled run saves, and is not requeued."""
    options = (*WHOLE_NODES, "--nodes=3")
    run = job("slurm.sbatch", PACE, "max_steps=600", nnodes="2", options=options)
    run.wait_for_step(5)
    (lost,) = (name for name in ("n2", "n3") if cluster.ranks(name))
    (spare,) = {"n2", "n3"} - {lost}
    stays = cluster.ranks("n1")
    cluster.take_away(lost)
    poll(lambda: cluster.ranks(spare), every_s=0.1, what=f"ranks on {spare}: {run.console}")
    reached = run.committed()
    run.wait_for_step(reached + 10)
    assert cluster.ranks("n1") >= stays
    assert cluster.job(run.number)["JobState"] == "RUNNING"
    down = ("state=down", "reason=test")  # as SLURM would find out in half a minute
    cluster.run("scontrol", "update", f"nodename={lost}", *down)
    cluster.run("scancel", run.number)
    poll((run.logs / "summary.json").exists, what=f"the end: {run.console}")
    cluster.wait_for_job(run.number, JobState="CANCELLED", Restarts="0")
    summary = run.summary()
    faults = [(fault["kind"], fault["steps_lost"]) for fault in summary["faults"]]
    assert (summary["status"], faults) == ("preempted", [("node_lost", 0)]), run.console
    manifests = [json.loads(path.read_text()) for path in run.checkpoints.glob("step_*.json")]
    assert max(manifest["step"] for manifest in manifests) == summary["steps"], run.console
    poll(lambda: not cluster.ranks(), what=f"the end of {cluster.ranks()}")


def test_a_lost_node_s_job_starts_again_on_the_spare(cluster, job, made_once):
    """A job a node: the others keep their processes, no step is lost, and the weights are those of one machine."""
    run = job("slurm-array.sbatch", PACE, nnodes="2", options=WHOLE_NODES)
    run.wait_for_step(5)
    lost = cluster.job(f"{run.number}_1")["NodeList"]
    stays = cluster.ranks(cluster.job(f"{run.number}_0")["NodeList"])
    cluster.take_away(lost)
    cluster.wait_for_job(f"{run.number}_1", JobState="RUNNING", Restarts="1")
    assert cluster.job(f"{run.number}_1")["NodeList"] == "n3"
    reached = run.committed()
    run.wait_for_step(reached + 5)
    assert cluster.ranks(cluster.job(f"{run.number}_0")["NodeList"]) == stays
    for task in (0, 1):
        cluster.wait_for_job(f"{run.number}_{task}", JobState="COMPLETED", ExitCode="0:0")
    summary = run.summary()
    faults = [(fault["kind"], fault["steps_lost"]) for fault in summary["faults"]]
    assert (faults, summary["exact"]) == ([("node_lost", 0)], True), run.console
    assert run.digest == made_once(*SETTINGS, world=4).digest


def test_a_lost_coordinator_s_job_follows_the_elected_one(cluster, job, made_once):
    """Each node has a disk of its own: two elect one of them, and the job that starts again on the lost one finds it."""
    options = (*WHOLE_NODES, "--array=0-2", f"--export=ALL,DDP_RUNNER_TOKEN={TOKEN}")
    words = (
        "recovery.elect_coordinator=true",
        "recovery.node_patience_s=300",
        "-n",
        1,
        ONE_THREAD,
        PACE,
    )
    words += ("-l", cluster.local / "logs", "-c", cluster.local / "kept")
    run = job("slurm-array.sbatch", *words, nnodes="2:3", options=options)
    cluster.wait_for_job(f"{run.number}_2", JobState="RUNNING")
    lost, *others = (cluster.job(f"{run.number}_{task}")["NodeList"] for task in range(3))
    run.logs = cluster.disk(lost) / "logs"
    run.wait_for_step(5)
    run.wait_for_line("if the coordinator is lost, a majority of the machines")
    stays = [cluster.ranks(name) for name in others]
    cluster.take_away(lost)
    run.wait_for_line("this machine coordinates from here on")
    cluster.wait_for_node(lost, "down")
    cluster.begin_node(lost)
    cluster.wait_for_job(f"{run.number}_0", JobState="RUNNING", Restarts="1", NodeList=lost)
    run.wait_for_line("was elected: following it")
    assert [cluster.ranks(name) for name in others] == stays
    for task in range(3):
        cluster.wait_for_job(f"{run.number}_{task}", JobState="COMPLETED", ExitCode="0:0")
    (run.logs,) = (
        cluster.disk(name) / "logs"
        for name in others
        if (cluster.disk(name) / "logs" / "summary.json").exists()
    )
    assert run.summary()["exact"], run.console
    assert run.digest == made_once(*SETTINGS, world=3).digest


def test_a_script_starts_again_on_the_nodes_that_are_left(cluster, job, tmp_path):
    """From its own checkpoint: with a spare node after a rank's and a node's end, without one when SLURM requeues the job."""
    script, kept = tmp_path / "train.py", tmp_path / "kept.pt"
    script.write_text(SCRIPT)
    steps = 600
    words = ("run", "--max-restarts", "9", "recovery.node_patience_s=1")
    options = (*WHOLE_NODES, "--nodes=3")
    run = job("slurm.sbatch", *words, script, steps, kept, "", nnodes="2", options=options)
    poll(lambda: _done(kept), every_s=0.1, what=f"steps: {run.console}")
    os.kill(min(cluster.ranks("n1")), signal.SIGKILL)
    run.wait_for_line("all 4 ranks start again (attempt 1)")
    done = _done(kept)
    poll(lambda: _done(kept, above=done), every_s=0.1, what=f"steps: {run.console}")
    (lost,) = (name for name in ("n2", "n3") if cluster.ranks(name))
    (spare,) = {"n2", "n3"} - {lost}
    cluster.take_away(lost)
    poll(lambda: cluster.ranks(spare), every_s=0.1, what=f"ranks on {spare}: {run.console}")
    poll(lambda: _done(kept, above=done), every_s=0.1, what=f"steps: {run.console}")
    assert cluster.job(run.number)["Restarts"] == "0"
    cluster.take_away(spare)  # nobody is left to take its place
    for name in (lost, spare):
        cluster.wait_for_node(name, "down")
    for name in (lost, spare):
        cluster.begin_node(name)
    cluster.wait_for_job(run.number, JobState="RUNNING", Restarts="1")
    cluster.wait_for_job(run.number, JobState="COMPLETED", ExitCode="0:0")
    assert torch.load(kept)["model"]["module.weight"].item() == -0.5 * 2.5 * steps


def _done(kept, *, above=0):
    """The steps in the script's checkpoint, once there are more than ``above``; 0 before."""
    if not kept.exists():
        return 0
    done = torch.load(kept)["done"]
    return done if done > above else 0
