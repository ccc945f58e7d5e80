"""``run`` on several machines: what is asked for by options, variables and accelerate's words, as a plan."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ddp_runner.features.machines import launching
from ddp_runner.features.script import parent, run_command

OURS = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
ROWS = [
    (["--nnodes=2", "--rdzv-endpoint=a:7", "--rdzv-id=x"], {}, ((2, 2), None, "a", 7, "x", 0)),
    (
        ["--nnodes=1:4", "--rdzv_endpoint=a", "--node_rank=3"],
        {},
        ((1, 4), 3, "a", 29400, "none", 0),
    ),
    (["--nnodes=2", "--master-addr=a", "--master-port=7"], {}, ((2, 2), None, "a", 7, "none", 0)),
    (
        ["--num_machines=2", "--machine_rank=1", "--main_process_ip=a", "--main_process_port=8"],
        {},
        ((2, 2), 1, "a", 8, "none", 0),
    ),
    (
        ["--nnodes=2", "--rdzv-endpoint=a:7", "--master-port=9"],
        {},
        ((2, 2), None, "a", 7, "none", 9),
    ),
    (
        [],
        {"PET_NNODES": "1:2", "PET_NODE_RANK": "1", "PET_RDZV_ENDPOINT": "a:7", "PET_RDZV_ID": "x"},
        ((1, 2), 1, "a", 7, "x", 0),
    ),
    (
        [],
        {"PET_NNODES": "2", "PET_MASTER_ADDR": "a", "PET_MASTER_PORT": "7"},
        ((2, 2), None, "a", 7, "none", 0),
    ),
    (
        ["-n", "2"],
        {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "7"},
        ((2, 2), 0, "a", 7, "none", 0),
    ),
    (["nnodes=2", "rdzv_endpoint=a:7"], {}, ((2, 2), None, "a", 7, "none", 0)),
]


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """``planned(words, variables)``: the plan and the script of a run that is not begun."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import numpy\nprint(1)\n")
    for name in OURS:
        monkeypatch.delenv(name, raising=False)
    found = SimpleNamespace()

    def supervise(plan, script, *, token_file):
        found.plan, found.script, found.token_file = plan, script, token_file
        return 0

    monkeypatch.setattr(parent, "supervise", supervise)

    def plan(words, variables=(), behind=("train.py", "--lr", "1")):
        for name, value in dict(variables).items():
            monkeypatch.setenv(name, value)
        assert run_command.run(["--cpu", *words, *behind]) == 0
        return found

    return plan


@pytest.mark.parametrize(("words", "variables", "expected"), ROWS)
def test_the_machines_are_those_that_torchrun_would_take(planned, words, variables, expected):
    """Of the endpoint's port no second socket is opened: a store has another."""
    plan = planned(words, variables).plan
    asked = plan.nodes
    found = ((asked.least, asked.most), asked.node_rank, asked.host, asked.port, asked.run_id)
    assert (*found, plan.settings.ddp.port) == expected
    assert plan.world_size == asked.most * plan.ranks_per_node


def test_machines_compare_what_a_script_is_and_is_given(planned):
    """By content, not by its path, which each machine has its own of; a secret is not shown."""
    words = ["--nnodes=2", "--rdzv-endpoint=a:7", "--token-file=t"]
    found = planned(words)
    assert (found.script.path, found.token_file) == ("train.py", "t")
    ours = launching.meeting(found.plan, token=b"t" * 16, silent_s=1.0)
    assert ours.meaning["run"] == "train.py --lr 1"
    assert len(ours.code["train.py"]) == 12
    assert "numpy" in ours.code
    secret = planned(words, behind=("train.py", "--api-key", "abc"))
    assert "abc" not in launching.meeting(secret.plan, token=b"t" * 16, silent_s=1.0).meaning["run"]
    program = planned(words, behind=("--no-python", "cat", "x"))
    assert launching.meeting(program.plan, token=b"t" * 16, silent_s=1.0).meaning["run"] == "cat x"
