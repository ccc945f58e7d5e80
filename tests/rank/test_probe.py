"""The rehearsal of a repair that ``doctor`` does: real ranks over gloo, and each way in which it fails."""

from __future__ import annotations

import pytest

from tests.kernel.group import silent
from tests.processes import run_ranks

from .failing_probe import run_here

LIMIT_S = 2.0
SLACK_S = 20.0  # of a machine with other work; a rank that is waited for would take minutes


def rehearsed(how, *, world_size=2, limit_s=30.0, backend="gloo"):
    """The answer of a probe over so many ranks; whatever came of it, nothing is left."""
    devices = ["cpu"] * world_size
    ((answer, took_s, left, has_segment),) = run_ranks(run_here, 1, how, backend, devices, limit_s)
    assert left == []
    assert not has_segment
    assert took_s < limit_s + SLACK_S
    return answer


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_form_sum_are_aborted_and_form_again(world_size):
    """The control: what a repair needs works here, within the limit."""
    answer = rehearsed("nothing", world_size=world_size)
    assert answer["failure"] == ""
    assert 0 < answer["seconds"] < 30


@pytest.mark.parametrize(
    ("how", "late"),
    [
        ("stop", "rank 1 in all-reduce"),
        ("segment", "rank 1 in all-reduce"),
        ("hold the interpreter", "rank 1 in all-reduce"),
        ("hear no abort", "rank 0 in abort, rank 1 in abort"),
    ],
)
def test_a_rank_that_hangs_is_named_at_the_limit_and_ended(how, late):
    """The limit is kept, no process stays, and what NCCL would leave in /dev/shm is removed."""
    failure = rehearsed(how, limit_s=LIMIT_S)["failure"]
    assert failure.startswith(f"no end within {LIMIT_S:g} s: ")
    assert late in failure


@pytest.mark.parametrize(
    ("how", "failure"),
    [
        ("kill", "rank 1 was ended by SIGKILL in all-reduce"),
        ("exit", "rank 1 ended with 7 in all-reduce"),
        ("raise", "rank 1 in all-reduce: RuntimeError: CUDA error: out of memory and more lines"),
    ],
)
def test_who_breaks_it_is_named_and_not_who_lost_its_peer(how, failure):
    """Which is seen first is chance: the cause is what has ended, or failed by itself."""
    for _ in range(3):
        assert rehearsed(how)["failure"] == failure


def test_a_sum_that_is_wrong_is_reported():
    """As a broken link between two GPUs would make it."""
    failure = rehearsed("add wrongly")["failure"]
    assert "in all-reduce: ProbeFailedError: the sum is 12 to 12 and not 3" in failure


def test_communicators_that_end_in_silence_are_aborted_in_two_acts():
    """The way that NCCL takes: without the second act, ranks would be held to the limit."""
    assert rehearsed("nothing", world_size=3, backend=silent.BACKEND)["failure"] == ""
    failure = rehearsed("hear no cut", limit_s=LIMIT_S, backend=silent.BACKEND)["failure"]
    assert "rank 0 in abort" in failure
