"""Three machines with a checkpoint folder of their own each: the coordinator is lost, and two of them choose another one."""

from __future__ import annotations

import shutil
import signal

import pytest

from ddp_runner.features.machines.ballot_file import BallotFile
from ddp_runner.features.machines.rules.majority import is_over
from tests.features.machines.whole_runs.conftest import Nodes
from tests.features.machines.whole_runs.test_two_nodes import SLOW
from tests.scenarios.harness import ended, poll

WORDS = (SLOW, "recovery.elect_coordinator=true", "recovery.node_patience_s=300", "save_interval=0")
LEADS = "this machine coordinates from here on"


@pytest.fixture
def nodes(tmp_path):
    made = Nodes(tmp_path, ranks=1)
    yield made
    made.end()


def start_three(nodes):
    """A run of three machines that has trained, and in which each knows what follows if the first is lost."""
    runs = [nodes.start(number, *WORDS, nnodes="2:3") for number in range(3)]
    runs[0].wait_for_step(12)
    for run in runs[1:]:
        assert "if the coordinator is lost, a majority of the machines" in run.console, run.console
    return runs


def elected(others):
    """The one of them that coordinates, and the other one."""
    poll(lambda: any(LEADS in run.console for run in others), what="an election")
    return sorted(others, key=lambda run: LEADS not in run.console)


def test_two_of_three_machines_elect_a_coordinator_and_lose_no_step(nodes, one_machine):
    """One that is left keeps its ranks' memory, and the same commands on the lost machines follow the new coordinator."""
    first, *others = start_three(nodes)
    first.signal(signal.SIGKILL)
    first.assert_gone()
    second, third = elected(others)
    third.signal(signal.SIGKILL)
    third.assert_gone()
    number = 1 + others.index(third)
    first, third = (nodes.start(one, *WORDS, nnodes="2:3") for one in (0, number))
    assert ended(first, second, third) == (0, 0, 0), second.console
    assert "was elected: following it" in first.console
    for run in (first, second, third):  # the next launch waits for none of the others
        assert is_over([BallotFile(run.checkpoints).read()])
    assert LEADS not in third.console
    summary = second.summary()
    assert (summary["exact"], second.digest) == (True, one_machine(3)), summary


def test_a_coordinator_that_was_away_finds_another_one_elected(nodes, one_machine):
    """It is silent for a while, and ends; nothing that it does counts. Its next start, on an empty disk, hears of the new one."""
    first, *others = start_three(nodes)
    first.signal(signal.SIGSTOP)
    second, third = elected(others)
    first.signal(signal.SIGCONT)
    assert first.wait() == 75, first.console
    assert "a majority has elected another coordinator" in first.console
    shutil.rmtree(first.checkpoints)
    first = nodes.start(0, *WORDS, nnodes="2:3")
    assert ended(first, second, third) == (0, 0, 0), second.console
    assert "this one follows it" in first.console
    assert second.digest == one_machine(3)
