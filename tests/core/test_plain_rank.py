"""Who is one rank of an outside launcher, and who starts ranks itself: from the environment alone."""

from __future__ import annotations

import pytest

from ddp_runner.core.plain_rank import PlainRank, plain_rank, what_is_ignored
from ddp_runner.kernel.rules.errors import BadInputError

MET = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
OF_FOUR = {"RANK": "3", "WORLD_SIZE": "4", **MET}
# As the training operators of Kubernetes set them for each pod, on one GPU a pod or on eight.
POD = {**OF_FOUR, "PET_NNODES": "4", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "3"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({**OF_FOUR, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, (3, 4, 1, 2)),
        ({**OF_FOUR, "TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "0"}, (3, 4, 0, 4)),
        ({**OF_FOUR, "DDP_RUNNER_PLAIN_RANK": "1"}, (3, 4, 3, 4)),
        ({**POD, "LOCAL_RANK": "7", "LOCAL_WORLD_SIZE": "8"}, (3, 4, 7, 8)),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, (0, 1, 0, 1)),
    ],
    ids=["torchrun", "elastic", "asked", "torchrun in a pod", "alone"],
)
def test_who_is_one_rank(environment, expected):
    """Where a launcher names the place on this machine, or the user says so."""
    rank, world_size, local_rank, local_world_size = expected
    assert plain_rank(environment) == PlainRank(
        rank=rank, world_size=world_size, local_rank=local_rank, local_world_size=local_world_size
    )
    assert plain_rank(environment) is not None


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "1", "PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"},
        {"WORLD_SIZE": "8"},
        {"RANK": "1", "WORLD_SIZE": "2"},
        {"LOCAL_RANK": "1"},
        {**OF_FOUR, "LOCAL_RANK": "1", "DDP_RUNNER_PLAIN_RANK": "0"},
        {**POD, "DDP_RUNNER_PLAIN_RANK": "0"},
        POD,
        {"PET_NNODES": "1:4"},
        {"RANK": "1", "WORLD_SIZE": "2", "NNODES": "2"},
    ],
)
def test_who_starts_ranks_itself(environment):
    """RANK and WORLD_SIZE alone may be those of a pod; a single pod trains supervised."""
    assert plain_rank(environment) is None


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK=x: must be a whole number, 0"),
        ({"RANK": "-1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK=-1: must be a whole number"),
        ({"RANK": "", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK='': must be a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "0", "LOCAL_RANK": "0"}, "WORLD_SIZE=0: must be a whole nu"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK=2: must be below WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "a"}, "LOCAL_RANK=a: must be a whole nu"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
            "MASTER_ADDR: must be set with WORLD",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "here"},
            "MASTER_PORT: must be set with WORLD_SIZE above 1",
        ),
        ({**OF_FOUR, "LOCAL_RANK": "0", "MASTER_PORT": "x"}, "MASTER_PORT=x: must be a whole numb"),
        ({**OF_FOUR, "LOCAL_RANK": "0", "MASTER_PORT": "70000"}, "MASTER_PORT=70000: must be at m"),
        ({"DDP_RUNNER_PLAIN_RANK": "1"}, "DDP_RUNNER_PLAIN_RANK=1: needs RANK and WORLD_SIZE"),
        ({"DDP_RUNNER_PLAIN_RANK": "yes"}, "DDP_RUNNER_PLAIN_RANK=yes: must be 1"),
    ],
)
def test_what_cannot_be_is_one_line(environment, line):
    """Which variable, what it holds, and what would be right."""
    with pytest.raises(BadInputError) as raised:
        plain_rank(environment)
    assert str(raised.value).startswith(line)
    assert "\n" not in str(raised.value)


def test_variables_that_mean_no_rank_here_are_mentioned():
    """People should know that they have been seen, and how to have them mean something."""
    assert "DDP_RUNNER_PLAIN_RANK=1" in what_is_ignored({"RANK": "0", "WORLD_SIZE": "1"})
    assert what_is_ignored({"WORLD_SIZE": "8"}).startswith("WORLD_SIZE=8 of the environment is not")
    assert what_is_ignored({"LOCAL_RANK": "1"}) == ""
