"""Names that say what a run is, as configurations of others have them: passed over where true, else answered."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ddp_runner.__main__ import main
from ddp_runner.cli import planning
from ddp_runner.cli.parser import parse_train
from ddp_runner.cli.planning import plan_launch
from ddp_runner.config import RunFacts, facts_of_rank, from_flat, refuse_untrue, resolve
from ddp_runner.config.foreign import FACTS
from ddp_runner.core.plain_rank import PlainRank
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.training.trainer import DDPTrainer
from tests import ready

TRAIN = RunFacts(starter="train", ranks=2, mode="distributed", own_host="here", files=("a/b.yaml",))
SINGLE = RunFacts(starter="train", ranks=1, mode="single")
OVER_TWO = RunFacts(starter="train", ranks=1, mode="data_parallel")
SEVERAL = RunFacts(
    starter="train",
    ranks=4,
    machines=2,
    least_machines=1,
    node_rank=1,
    host="node0",
    port="29400",
    own_host="node1",
)
JOINING = RunFacts(starter="train", ranks=4, machines=2, node_rank=None, host="a", port="1")
RUN = RunFacts(starter="run", ranks=2)
LAUNCHED = facts_of_rank(
    PlainRank(rank=3, world_size=4, local_rank=1, local_world_size=2),
    {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"},
)
IS_SO = [
    (TRAIN, {"nnodes": 1, "num_machines": "1", "node_rank": 0, "machine_rank": "0"}),
    (TRAIN, {"world_size": 2, "rank": 0, "local_rank": 0}),
    (TRAIN, dict.fromkeys(FACTS)),
    (
        TRAIN,
        {"rank": -1, "local_rank": -1, "world_size": "auto", "init_method": "", "nnodes": "null"},
    ),
    (
        TRAIN,
        {"master_addr": "localhost", "rdzv_endpoint": "127.0.0.1:29500", "main_process_ip": "here"},
    ),
    (TRAIN, {"init_method": "env://"}),
    (TRAIN, {"init_method": "tcp://localhost:23456"}),
    (TRAIN, {"enable_distributed": True, "enable_data_parallel": False, "test_model": False}),
    (TRAIN, {"config_name": "b", "distributed": {"world_size": 2, "backend": "gloo"}}),
    (TRAIN, {"config_name": "b.yaml"}),
    (SINGLE, {"enable_distributed": True, "dataparallel": "no"}),
    (SINGLE, {"enable_distributed": False}),
    (OVER_TWO, {"enable_distributed": False, "enable_data_parallel": True}),
    (SEVERAL, {"nnodes": 2, "node_rank": 1, "world_size": 4, "master_addr": "node0"}),
    (SEVERAL, {"nnodes": "1:2", "init_method": "tcp://node0:29400"}),
    (RUN, {"nnodes": 1, "world_size": 2, "enable_distributed": True, "master_addr": "localhost"}),
    (LAUNCHED, {"rank": 3, "local_rank": 1, "world_size": 4, "nnodes": 2, "node_rank": 1}),
    (LAUNCHED, {"init_method": "tcp://node0:29500", "enable_distributed": True}),
    (RunFacts(starter="train", ranks=1, is_dry=True), {"test_model": True}),
]
IS_NOT_SO = [
    (TRAIN, "nnodes", 2, "this run is on one machine: set the number with the option --nnodes N"),
    (RUN, "nnodes", 2, "this run is on one machine: set the number with the option --nnodes N"),
    (LAUNCHED, "num_nodes", 3, "this run is on 2 machines, as it was started: leave it out"),
    (TRAIN, "node_rank", 1, "this run is on one machine: leave it out"),
    (SEVERAL, "machine_rank", 0, "this machine is number 1: leave it out"),
    (
        JOINING,
        "node_rank",
        0,
        "machines are numbered in the order of joining: use the option --node-rank R",
    ),
    (TRAIN, "master_addr", "10.0.0.1", "the ranks of one machine find each other: leave it out"),
    (
        RUN,
        "main_process_ip",
        "h",
        "find each other: leave it out, or use --nnodes N for several machines",
    ),
    (SEVERAL, "master_addr", "other", "the ranks of this run meet at node0:29400: leave it out"),
    (SEVERAL, "init_method", "tcp://node0:1", "the ranks of this run meet at node0:29400"),
    (LAUNCHED, "rdzv_endpoint", "x:2", "the ranks of this run meet at node0:29500: leave it out"),
    (TRAIN, "init_method", "file:///tmp/x", "ranks meet at a store of the run: leave it out"),
    (TRAIN, "world_size", 4, "this run has 2 ranks: set the number with --nproc-per-node N"),
    (
        SEVERAL,
        "world_size",
        2,
        "this run has 4 ranks: set the number with --nproc-per-node N, for each",
    ),
    (LAUNCHED, "world_size", 2, "this run has 4 ranks, as it was started: leave it out"),
    (TRAIN, "rank", 1, "this command starts all ranks (2) and numbers them: leave it out"),
    (LAUNCHED, "local_rank", 0, "this process was started as 1: leave it out"),
    (TRAIN, "enable_distributed", False, "this run is distributed: use mode=single for one rank"),
    (TRAIN, "enable_data_parallel", True, "this run is distributed: use mode=data_parallel"),
    (OVER_TWO, "enable_distributed", True, "this run is data_parallel: use mode=distributed"),
    (RUN, "enable_distributed", "off", "each rank is a process: leave it out"),
    (TRAIN, "enable_distributed", "maybe", "must be true or false"),
    (TRAIN, "test_model", True, "this run trains; use train's option --dry-run for a dry run"),
    (RUN, "test_model", True, "only tasks have a dry run (train --dry-run)"),
    (TRAIN, "config_name", "c", "the settings are those of a/b.yaml: use the option --config FILE"),
    (RUN, "config_name", "c", "no file is read: use the option --config FILE"),
]


@pytest.mark.parametrize(("facts", "given"), IS_SO)
def test_what_is_so_of_a_run_is_passed_over(facts, given, tmp_path):
    """From a mapping as from a file; the settings are those without it."""
    refuse_untrue(given, facts)
    without = {"backend": "gloo"} if "distributed" in given else {}
    assert from_flat(given) == from_flat(without)


@pytest.mark.parametrize(("facts", "name", "value", "line"), IS_NOT_SO)
def test_what_is_not_so_of_a_run_is_answered(facts, name, value, line):
    """By what is, as the run was started."""
    with pytest.raises(BadInputError) as caught:
        refuse_untrue({name: value}, facts)
    assert str(caught.value).startswith(f"{name}={value}: ")
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_fact_is_tried_both_ways():
    """The last word of each name counts, as of a setting."""
    assert set(FACTS) == {name for _, given in IS_SO for name in given} - {"distributed"}
    assert set(FACTS.values()) == {FACTS[name] for _, name, *_ in IS_NOT_SO}
    found = resolve(command_line=[("world_size", "7"), ("world-size", "2")])
    found.refuse_untrue(TRAIN)


def planned(*words):
    return plan_launch(parse_train(["--cpu", "-n", "2", *words]), words=words)


@pytest.mark.parametrize("words", [("--world-size", "2"), ("--local_rank=0",), ("world_size=2",)])
def test_a_launch_is_held_against_its_facts(words, tmp_path, monkeypatch):
    """Options, words, variables and files; each answer names what was written, and where."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("world_size: 4\nbatch_size: 4\n")
    assert planned(*words).world_size == 2
    with pytest.raises(BadInputError, match=r"^run.yaml: world_size=4: this run has 2 ranks"):
        planned("--config", "run.yaml")
    with pytest.raises(BadInputError, match=r"^--enable-data-parallel=true: this run is distrib"):
        planned("--enable-data-parallel", "--", "world_size=2")
    assert planned("--config-name", "run", "world_size=2").settings.data.batch_size == 4
    assert parse_train(["--test-model"]).is_dry
    monkeypatch.setenv("DDP_RUNNER_RANK", "1")
    with pytest.raises(BadInputError, match=r"^DDP_RUNNER_RANK=1: this command starts all ranks"):
        planned()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["--world-size", "3"],
            "--world-size=3: this run has 2 ranks: set the number with --nproc-per-node N",
        ),
        (["nnodes=2"], "--rdzv-endpoint: is needed with several machines"),
        (["--nnodes", "2"], "--rdzv-endpoint: is needed with several machines"),
        (["--test-model"], "--test-model: is for tasks: a program with its own loop"),
        (["training_mode=dataparallel"], "run.mode=data_parallel: is for a task; the script has 2"),
        (["-n", "auto", "mode=single"], "run.mode=single: is for a task; the script has 2 ranks"),
        (["--config-name", "low"], "low.yaml: rank=1: this command starts all ranks (2)"),
    ],
)
def test_run_answers_by_what_it_is(words, line, tmp_path, monkeypatch, capsys):
    """One machine, and a script that is no task of ours."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(planning, "core_count", lambda: 2)
    (tmp_path / "low.yaml").write_text("rank: 1\n")
    (tmp_path / "script.py").write_text("print('ran')\n")
    assert main(["run", "--cpu", "-n", "2", *words, "script.py"]) == 2
    assert line in capsys.readouterr().err


def test_a_trainer_is_held_against_its_place(tmp_path, monkeypatch):
    """Alone it is rank 0 of 1; under another launcher what that has started."""
    monkeypatch.chdir(tmp_path)
    config = {"task": "synthetic", "device": "cpu", "log.display": "none"}
    with pytest.raises(BadInputError, match=r"^world_size=2: this run has 1 rank, as it was start"):
        DDPTrainer(config={**config, "world_size": 2})
    assert DDPTrainer(config={**config, "world_size": 1, "rank": 0}).info()["world_size"] == 1
    with pytest.raises(BadInputError, match=r"^stages: needs a supervisor"):
        DDPTrainer(config={**config, "stage": "tune"})


@pytest.mark.parametrize(
    ("config", "environment", "line"),
    [
        ("{'world_size': 3}", {}, "world_size=3: this run has 1 rank, as it was started"),
        ("{'world_size': 1, 'rank': 0, 'nnodes': 1}", {}, ""),
        (
            "{'world_size': 2, 'rank': 0}",
            {
                "RANK": "1",
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "1",
                "MASTER_ADDR": "a",
                "MASTER_PORT": "1",
            },
            "rank=0: this process was started as 1: leave it out",
        ),
    ],
)
def test_a_loop_of_ones_own_is_held_against_its_place(config, environment, line, tmp_path):
    """Before it waits for anybody."""
    program = tmp_path / "loop.py"
    program.write_text(f"import ddp_runner\nddp_runner.attach({config})\nprint('attached')\n")
    found = subprocess.run(
        [sys.executable, program],
        cwd=tmp_path,
        env={**os.environ, **ready.environment(programs=True), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ("attached" in found.stdout) == (not line), found.stderr
    assert line in found.stderr


def test_a_stage_alone_is_one_of_the_presets(tmp_path, monkeypatch):
    """The file says where to begin, the preset has the list; a name that is not there is one line."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "presets").mkdir()
    (tmp_path / "presets" / "two.yaml").write_text(
        "task: synthetic\nstages:\n- {name: pretrain, max_steps: 4}\n"
        "- {name: tune, max_steps: 4, init_from: scratch_tune}\n"
    )
    (tmp_path / "run.yaml").write_text("stage: tune\n")
    plan = planned("--preset", "two", "--config", "run.yaml")
    assert plan.settings.stage.names[plan.settings.stage.number] == "tune"
    assert (plan.settings.stage.begins_with, plan.settings.run.init_from) == ("", "")
    with pytest.raises(BadInputError, match=r"^--stage=tune: this run has no stages"):
        planned("--config", "run.yaml")
    (tmp_path / "run.yaml").write_text("stage: tun\n")
    with pytest.raises(BadInputError, match=r"^--stage=tun: no such stage; did you mean tune"):
        planned("--preset", "two", "--config", "run.yaml")
    with pytest.raises(BadInputError) as caught:
        planned("init_from=scratch_next_token")
    assert "here that is init_from=scratch, with stage=next_token" in str(caught.value)
