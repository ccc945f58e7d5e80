"""Which machines of an engine are used, with which command, and what follows when one ends."""

from __future__ import annotations

import pytest

from ddp_runner.cli import train
from ddp_runner.core.launch_plan import NodeOptions
from ddp_runner.features.machines import launching
from ddp_runner.features.ray.rules import (
    RESTARTS_MAX,
    Ended,
    Machine,
    Next,
    Share,
    after_end,
    engine_options,
    share_of_a_machine,
    without_engine,
    words_for_machine,
)
from ddp_runner.features.script import run_command
from ddp_runner.kernel.rules.errors import BadInputError

RAY = {"--engine": "ray"}
HEAD = Machine(key="h", name="head", cpus=0, gpus=0)
SMALL = Machine(key="s", name="small", cpus=4, gpus=0)
FOUR = Machine(key="f", name="four", cpus=16, gpus=4)
EIGHT = Machine(key="e", name="eight", cpus=32, gpus=8)


def nodes(least, most):
    return NodeOptions(least=least, most=most, host="x", port=1)


@pytest.mark.parametrize(
    ("options", "environment", "line"),
    [
        ({"--rdzv-endpoint": "a:1"}, {}, "--rdzv-endpoint=a:1: is decided by --engine ray"),
        ({"--node-rank": "0"}, {}, "--node-rank=0: is decided by --engine ray"),
        ({"--token-file": "t"}, {}, "--token-file=***: is decided by --engine ray"),
        ({"--rdzv-conf": "is_host=1"}, {}, "--rdzv-conf=is_host: is decided by --engine ray"),
        ({}, {"PET_NODE_RANK": "1"}, "PET_NODE_RANK=1: is decided by --engine ray"),
        ({"--nnodes": "3:2"}, {}, "--nnodes=3:2: must not begin above its end"),
        ({"--rdzv-conf": "x=1"}, {}, "--rdzv-conf=x=1: is not known here"),
    ],
)
def test_what_contradicts_an_engine_is_named(options, environment, line):
    """It decides who the coordinator is, where, and by which secret."""
    with pytest.raises(BadInputError) as raised:
        engine_options({**RAY, "--nnodes": "2", **options}, environment)
    assert str(raised.value).startswith(line)


def test_an_engine_that_is_not_installed_is_refused():
    """With those that are, and who needs none."""
    with pytest.raises(BadInputError) as raised:
        train.run(["--engine", "slurm"])
    line = "--engine=slurm: must be ray; under SLURM, Kubernetes and ssh each machine starts the command itself"
    assert str(raised.value) == line


def test_an_engine_s_machines_are_a_number_or_a_range():
    """Of an endpoint that a shell has set for something else nothing is taken."""
    found = engine_options({**RAY, "--nnodes": "2:4"}, {"MASTER_ADDR": "node0"})
    assert (found.least, found.most) == (2, 4)
    assert engine_options(RAY, {"NNODES": "3"}).most == 3
    alone = engine_options({**RAY, "--rdzv-conf": "join_timeout=5"}, {})
    assert (alone.least, alone.most, alone.join_timeout_s) == (1, 1, 5.0)


@pytest.mark.parametrize(
    ("machines", "asked", "ranks", "device", "share"),
    [
        ([HEAD, SMALL, SMALL], nodes(2, 2), "auto", "auto", ("CPU", 2)),
        ([SMALL, SMALL], nodes(2, 2), 4, "auto", ("CPU", 4)),
        ([EIGHT, EIGHT], nodes(2, 2), "auto", "auto", ("GPU", 8)),
        ([EIGHT, EIGHT], nodes(2, 2), 2, "auto", ("GPU", 2)),
        ([EIGHT, EIGHT], nodes(2, 2), 2, "cpu", ("CPU", 2)),
        ([EIGHT, FOUR, SMALL], nodes(1, 2), "auto", "auto", ("GPU", 4)),
        ([EIGHT, FOUR, SMALL], nodes(1, 1), "auto", "auto", ("GPU", 8)),
        ([EIGHT, SMALL], nodes(2, 2), "auto", "auto", ("CPU", 2)),
        ([Machine(key="1", name="one", cpus=1, gpus=0)], nodes(1, 1), "auto", "auto", ("CPU", 1)),
    ],
)
def test_each_machine_gives_as_many_as_all_have(machines, asked, ranks, device, share):
    """GPUs where enough machines have them; the same number on all, so that of the least."""
    found = share_of_a_machine(machines, asked=asked, ranks=ranks, device=device)
    assert (found.kind, found.ranks) == share


@pytest.mark.parametrize(
    ("machines", "asked", "ranks", "device", "line"),
    [
        ([HEAD, SMALL], nodes(2, 4), "auto", "auto", "--nnodes=2:4: needs 2 with 2 CPUs each"),
        ([SMALL, SMALL], nodes(2, 2), 8, "auto", "--nnodes=2: needs 2 with 8 CPUs each"),
        ([SMALL, SMALL], nodes(2, 2), "auto", "cuda", "--nnodes=2: needs 2 with 1 GPU each"),
        ([], nodes(1, 1), "auto", "auto", "--nnodes=1: needs 1 with 1 CPU each, and the cluster"),
    ],
)
def test_too_few_machines_are_named_with_what_they_have(machines, asked, ranks, device, line):
    """Before anything is started."""
    with pytest.raises(BadInputError) as raised:
        share_of_a_machine(machines, asked=asked, ranks=ranks, device=device)
    assert str(raised.value).startswith(line)


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["--engine", "ray", "-e", "3"], (["-e", "3"], [])),
        (["a=1", "--Engine=ray"], (["a=1"], [])),
        (["a=1", "--", "--engine", "ray"], (["a=1"], ["--", "--engine", "ray"])),
    ],
)
def test_the_word_for_the_engine_is_left_out(words, kept):
    """A machine is no driver; behind ``--`` there are settings only."""
    assert without_engine(words) == kept


def test_a_machine_gets_the_driver_s_command_and_where_to_meet():
    """Only the first one listens; what stands behind ``--`` stays there."""
    asked = engine_options({**RAY, "--nnodes": "1:2", "--rdzv-id": "j"}, {})
    words = ["--engine", "ray", "--nnodes", "1:2", "-b", "8", "--", "lr=1"]
    place = {"host": "10.0.0.1", "port": 5, "share": Share(kind="GPU", ranks=4)}
    first = words_for_machine(words, asked, **place, number=0)
    assert " ".join(first) == (
        "--nnodes 1:2 -b 8 --nnodes 1:2 --rdzv-endpoint 10.0.0.1:5 --rdzv-id j --rdzv-conf "
        "join_timeout=600,last_call_timeout=30,is_host=1 -- lr=1 run.nproc_per_node=4 "
        "run.device=cuda"
    )
    second = words_for_machine(words, asked, **place, number=1)
    assert [one for one in second if one not in first] == [
        "join_timeout=600,last_call_timeout=30,is_host=0"
    ]
    alone = words_for_machine(["lr=1"], engine_options(RAY, {}), **place, number=0)
    assert alone == ("lr=1", "run.nproc_per_node=4", "run.device=cuda")


@pytest.mark.parametrize(
    ("words", "options", "program"),
    [
        (["-n", "2", "train.py", "--engine", "x"], ["-n", "2"], ["train.py", "--engine", "x"]),
        (["-n2", "--", "train.py", "a"], ["-n2"], ["--", "train.py", "a"]),
        (["--cpu", "-m", "pdb", "a=1"], ["--cpu"], ["-m", "pdb", "a=1"]),
        (["--cpu", "--module=pdb", "-n"], ["--cpu"], ["--module=pdb", "-n"]),
        (["-mpdb"], [], ["-mpdb"]),
    ],
)
def test_of_a_script_the_machine_s_words_come_first(words, options, program, monkeypatch, tmp_path):
    """A script's own words are left alone, be they called as ours."""
    placed = []
    monkeypatch.setattr(launching, "by_engine", lambda on_each, _: placed.append(on_each) or 0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert run_command.run(["--engine", "ray", *words]) == 0
    (found,) = placed
    assert (found.verb, found.owner_option) == ("run", "--log-dir")
    assert list(found.options) == ["--engine", "ray", *options]
    assert list(found.program) == program
    place = {"host": "h", "port": 5, "number": 1, "share": Share(kind="CPU", ranks=4)}
    asked = engine_options({**RAY, "--nnodes": "2"}, {})
    sent = words_for_machine(found.options, asked, **place, program=found.program)
    assert sent[: len(options)] == tuple(options)
    assert sent[-len(program) - 2 :] == ("run.nproc_per_node=4", "run.device=cpu", *program)


RUNS = {"is_stopping": False, "has_begun": True, "recent": 0}


@pytest.mark.parametrize(
    ("ended", "answer", "code"),
    [
        # The coordinator's exit code is the run's.
        ({"is_coordinator": True, "code": 0}, Next.END, 0),
        ({"is_coordinator": True, "code": 75, "is_stopping": True}, Next.END, 75),
        ({"is_coordinator": True, "code": 3}, Next.END, 3),
        # What was killed starts again, where it was or elsewhere, if that goes on and begins nothing.
        ({"is_coordinator": True, "code": -9}, Next.AGAIN, 0),
        ({"is_coordinator": True, "code": None}, Next.ELSEWHERE, 0),
        ({"is_coordinator": True, "code": None, "is_stopping": True}, Next.END, 75),
        ({"is_coordinator": True, "code": None, "recent": RESTARTS_MAX}, Next.END, 3),
        ({"is_coordinator": True, "code": None, "has_its_state": False}, Next.END, 75),
        ({"is_coordinator": True, "code": -9, "starts_again_from_newest": False}, Next.END, 75),
        (
            {"is_coordinator": True, "code": None, "has_begun": False, "has_its_state": False},
            Next.ELSEWHERE,
            0,
        ),
        # Another one comes back as often as its machine is lost, and a few times by itself.
        ({"is_coordinator": False, "code": None, "recent": 9}, Next.AGAIN, 0),
        ({"is_coordinator": False, "code": 75}, Next.AGAIN, 0),
        ({"is_coordinator": False, "code": -9, "recent": RESTARTS_MAX}, Next.LEAVE_OUT, 0),
        ({"is_coordinator": False, "code": 75, "is_stopping": True}, Next.WAIT, 0),
        # Refused: at the begin that is the answer to the command, later it is one machine less.
        ({"is_coordinator": False, "code": 2, "has_begun": False}, Next.END, 2),
        ({"is_coordinator": False, "code": 2}, Next.LEAVE_OUT, 0),
    ],
)
def test_what_follows_when_a_supervisor_ends(ended, answer, code):
    """``code`` None: its machine is lost, and the engine has started the actor on another one."""
    found = after_end(Ended(**{**RUNS, **ended}))
    assert (found.next, found.exit_code) == (answer, code)
