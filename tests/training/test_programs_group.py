"""Programs that form ranks themselves, by init_process_group or mp.spawn, and then make a DDPTrainer."""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from ddp_runner import DDPTrainer
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.faults import FaultError, FaultKind
from tests.processes import ranks, run_ranks
from tests.training.test_trainer import settings

STEPS = 4


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _named(me, port):
    os.environ.update(
        RANK=str(me.rank), WORLD_SIZE=str(me.world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip


def _train_twice_in_own_group(me, port, configs):
    """As a script does: its own group, used before, between and after two trainings."""
    _named(me, port)
    dist.init_process_group("gloo")
    reports, ones = [], torch.ones(1)
    for config in configs:
        reports.append(replace(DDPTrainer(config=config).train(), model=None))
        dist.all_reduce(ones)
    dist.destroy_process_group()
    return reports, ones.item()


def _train_alone(me, config):
    return replace(DDPTrainer(config=config).train(), model=None)


def _train_spawned(me, port, config):
    """As a function of mp.spawn with rank and world size: nobody hosts a store."""
    _named(me, port)
    report = DDPTrainer(me.rank, me.world_size, config).train()
    return replace(report, model=None)


def test_a_programs_own_group_is_joined_and_stays_its_own(tmp_path):
    """Both trainings make the steps of any two ranks; the program's own sums go on between them."""
    folders = [tmp_path / "one", tmp_path / "two"]
    configs = [settings(folder, max_steps=STEPS) for folder in folders]
    (mine, ones), (theirs, _) = run_ranks(_train_twice_in_own_group, 2, free_port(), configs)
    shas = {report.weights_sha256 for report in (*mine, *theirs)}
    assert len(shas) == 1
    assert ones == 4.0
    config = settings(tmp_path / "spawned", max_steps=STEPS)
    spawned = run_ranks(_train_spawned, 2, free_port(), config)
    assert {report.weights_sha256 for report in spawned} == shas


def test_nobody_waits_for_a_store_that_no_process_hosts(tmp_path):
    """Rank 0 hosts it on the port that is named; before, all waited a minute and failed."""
    began_s = time.monotonic()
    first, second = run_ranks(_train_spawned, 2, free_port(), settings(tmp_path, max_steps=STEPS))
    assert first.weights_sha256 == second.weights_sha256
    assert time.monotonic() - began_s < 50


def _fail_in_own_group(me, port, config):
    _named(me, port)
    dist.init_process_group("gloo")
    try:
        DDPTrainer(config=config).train()
    except FaultError as error:
        me.say(error.fault.kind)
    dist.destroy_process_group()
    return "the program goes on"


def test_a_rank_that_raises_frees_its_peer_in_that_group(tmp_path):
    """The group is the program's to destroy, which it does as always."""
    config = settings(tmp_path, **{"task.raises_at": 3, "task.raises_on": 1})
    with ranks(_fail_in_own_group, 2, free_port(), config) as world:
        kinds = [process.hear() for process in world]
        assert [process.result() for process in world] == ["the program goes on"] * 2
    assert kinds == [FaultKind.COLLECTIVE_FAILED, FaultKind.RANK_RAISED]


def _wait_in_own_group(me, port, config):
    _named(me, port)
    dist.init_process_group("gloo")
    me.say(os.getpid())
    try:
        DDPTrainer(config=config).train()
    except FaultError as error:
        return error.fault.kind
    return None


def test_a_peer_that_is_killed_ends_the_training(tmp_path):
    """There is nobody to replace it: a fault, at once in a collective, within a minute where the store is asked."""
    config = settings(tmp_path, max_steps=1_000_000)
    with ranks(_wait_in_own_group, 2, free_port(), config) as world:
        pids = [process.hear() for process in world]
        log = tmp_path / "logs" / "metrics.jsonl"
        while not log.exists() or log.read_text().count("\n") < 4:
            time.sleep(0.05)
        os.kill(pids[1], signal.SIGKILL)
        assert world[0].result() is FaultKind.COLLECTIVE_FAILED


def _refused(me, port, config, place, environment):
    _named(me, port)
    os.environ.update(environment)
    dist.init_process_group("gloo")
    try:
        DDPTrainer(*place, config=config)
    except BadInputError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return ""


@pytest.mark.parametrize(
    ("place", "environment", "said"),
    [
        ((1, 2), {}, "rank, world_size=1, 2: init_process_group has made this rank 0 of 1"),
        ((), {"DDP_RUNNER_PLAIN_RANK": "0"}, "init_process_group has formed a group"),
    ],
)
def test_what_contradicts_that_group_is_one_line(tmp_path, place, environment, said):
    """Before anything is built."""
    (line,) = run_ranks(_refused, 1, free_port(), settings(tmp_path), place, environment)
    assert said in line
