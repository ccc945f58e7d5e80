"""What a run on one machine does, on two: early stopping, preloaded data, Ctrl-C, a disk that is read-only."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests import disks
from tests.features.machines.whole_runs.conftest import SETTINGS
from tests.features.machines.whole_runs.test_two_nodes import SLOW
from tests.scenarios import preloaded
from tests.scenarios.harness import Run, ended, poll

KEPT = ("recovery.coordinator_wait_s=60", "save_interval=0")


def test_early_stopping_counts_on_over_a_take_over(nodes, made_once):
    """The evaluations before it are not forgotten: the run ends at the step of one machine's."""
    words = ("evaluate_every_steps=4", "early_stopping_patience=2", "learning_rate=0.3")
    words += ("max_steps=200", *KEPT)
    nodes.ranks = 1
    alone = made_once(*SETTINGS, *words, world=2)
    first, second = (nodes.start(number, "task.pace_s=0.1", *words) for number in (0, 1))
    first.wait_for_step(9)
    first.signal(signal.SIGKILL)
    first.assert_gone()
    first = nodes.start(0, "task.pace_s=0.1", *words)
    assert ended(first, second) == (0, 0), first.console + second.console
    summary = first.summary()
    end = (summary["stop_reason"], summary["steps"], summary["exact"], first.digest)
    assert end == ("early_stopping", alone.summary()["steps"], True, alone.digest)


def test_preloaded_data_is_read_once_on_each_machine(nodes, made_once):
    """Also where one is started again; the weights are those of one machine."""
    task = f"{Path(preloaded.__file__)}:PreloadedTask"
    words = ("data.preload=true", *KEPT)
    alone = made_once(*SETTINGS, *words, world=4, task=task)
    first, second = (nodes.start(number, *words, task=task) for number in (0, 1))
    first.wait_for_step(8)
    os.kill(second.rank_pid(3), signal.SIGKILL)
    first.wait_for_step(15)
    second.signal(signal.SIGKILL)
    second.assert_gone()
    second = nodes.start(1, *words, task=task)
    assert ended(first, second) == (0, 0), first.console + second.console
    assert (first.summary()["exact"], first.digest) == (True, alone.digest)
    for run, times in ((first, 1), (second, 2)):
        read = (run.folder / preloaded.READ_NAME).read_text().splitlines()
        assert len(read) == times * len({tuple(line.split()[1:]) for line in read})


def test_machines_that_a_preset_names_are_those_of_the_run(nodes, one_machine):
    """As configure writes them, on each machine its own file; the command says nothing of machines."""
    runs = []
    for number in (0, 1):
        folder = nodes.folder / f"node{number}"
        (folder / "presets").mkdir(parents=True)
        (folder / "presets" / "cluster.yaml").write_text(
            f"nnodes: '2'\nnode_rank: '{number}'\nrdzv_endpoint: 127.0.0.1:{nodes.port}\n"
        )
        words = ("--preset", "cluster", "--token-file", nodes.token)
        runs.append(Run(folder, *SETTINGS, *words, "world_size=2", world=1))
    nodes.runs += runs
    assert ended(*runs) == (0, 0), runs[0].console + runs[1].console
    assert runs[0].summary()["world_size"] == 2
    assert runs[0].digest == one_machine(2)


@pytest.mark.parametrize("where", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_keys_pressed_on_one_machine_stop_both_saved(nodes, where):
    """Both end with 130, and the same command goes on."""
    nodes.ranks = 1
    words = (SLOW, "save_every_steps=0", "save_interval=0")
    runs = [nodes.start(number, *words) for number in (0, 1)]
    runs[0].wait_for_step(8)
    runs[where].signal(signal.SIGINT)
    assert ended(*runs) == (130, 130), runs[0].console + runs[1].console
    stopped = runs[0].summary()
    assert stopped["checkpoint_step"] == stopped["steps"] >= 8
    runs = [nodes.start(number, *words) for number in (0, 1)]
    assert ended(*runs) == (0, 0), runs[0].console + runs[1].console
    assert runs[0].events("run_begins")[-1]["resumed_step"] == stopped["steps"]


@pytest.mark.parametrize("is_shared", [False, True], ids=["own logs", "shared logs"])
def test_what_a_rank_elsewhere_warns_of_is_on_the_console(nodes, is_shared):
    """Its log may be on its own machine, and to the coordinator its records look like a task's output."""
    nodes.ranks = 1
    words = ("--inject", "bad_sample:rank=1,step=5", "on_bad_sample=substitute")
    words += ("-l", nodes.folder / "logs") if is_shared else ()
    first, second = (nodes.start(number, *words, "--max-steps", 12) for number in (0, 1))
    assert ended(first, second) == (0, 0), first.console + second.console
    assert first.console.count("WARNING: node 1: sample ") == 1, first.console
    assert second.console.count("WARNING: sample ") == 1, second.console


def test_a_log_folder_that_one_machine_cannot_write_costs_a_warning(nodes, one_machine):
    """It becomes read-only amid the run; a rank is replaced there all the same."""
    nodes.ranks = 1
    first, second = nodes.start(0, SLOW), nodes.start(1, SLOW)
    first.wait_for_step(8)
    with disks.read_only(second.logs):
        first.wait_for_step(14)
        os.kill(second.rank_pid(1), signal.SIGKILL)
        poll(lambda: "rank 1 on" in first.console, what="the fault")
        assert ended(first, second) == (0, 0), first.console + second.console
    warned = "audit_rank_1.jsonl cannot be written (Read-only file system)"
    assert warned in first.console
    assert warned in second.console
    assert [fault["kind"] for fault in first.summary()["faults"]] == ["rank_killed"]
    assert (first.summary()["exact"], first.digest) == (True, one_machine(2))


def test_a_machine_whose_folder_is_read_only_is_refused_at_once(nodes):
    """In one line, without a rank; the coordinator waits on for it."""
    nodes.ranks = 1
    logs = nodes.folder / "node1" / "logs"
    logs.mkdir(parents=True)
    first = nodes.start(0, "--max-steps", 4)
    with disks.read_only(logs):
        began_s = time.monotonic()
        refused = nodes.start(1, "--max-steps", 4)
        assert refused.wait() == 2, refused.console
        assert "is on a read-only file system" in refused.console
        assert time.monotonic() < began_s + 60.0
    second = nodes.start(1, "--max-steps", 4)
    assert ended(first, second) == (0, 0), first.console + second.console
