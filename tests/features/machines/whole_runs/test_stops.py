"""Stops at a bad moment: whoever is there saves what was committed, and all end at once."""

from __future__ import annotations

import signal
import time

import pytest

from tests.features.machines.whole_runs.test_two_nodes import SLOW
from tests.scenarios.harness import ended, poll

UNSAVED = (SLOW, "save_every_steps=0", "save_interval=0", "recovery.coordinator_wait_s=60")


def _newest(run):
    steps = [int(path.stem.removeprefix("step_")) for path in run.checkpoints.glob("step_*.pt")]
    return max(steps, default=0)


def _welcomes(run):
    return run.console.count("this is node 1")


def test_a_stop_does_not_wait_for_a_node_that_is_lost(nodes):
    """Nor for recovery.stop_timeout_s: a scheduler would have killed everything by then."""
    nodes.ranks = 1
    first, second = nodes.start(0, *UNSAVED), nodes.start(1, *UNSAVED)
    first.wait_for_step(8)
    second.signal(signal.SIGKILL)
    poll(lambda: "is lost" in first.console, what="its loss")
    first.signal(signal.SIGINT)
    began_s = time.monotonic()
    assert first.wait() == 130, first.console
    assert time.monotonic() < began_s + 60.0
    assert _newest(first) >= 8, first.console


def test_one_press_of_keys_that_comes_twice_is_one_stop(nodes):
    """A terminal and a parent both pass it on; a follower that took it for two would end unsaved."""
    nodes.ranks = 1
    first, second = nodes.start(0, *UNSAVED), nodes.start(1, *UNSAVED)
    first.wait_for_step(8)
    for run in (second, first, second):
        run.signal(signal.SIGINT)
        time.sleep(0.02)
    assert ended(first, second) == (130, 130), first.console + second.console
    assert _newest(first) >= 8, first.console
    assert "asked to stop" in second.console


@pytest.mark.parametrize("is_stopped", [False, True], ids=["goes on", "is stopped before it forms"])
def test_coordinators_killed_one_after_the_other_lose_no_step(nodes, one_machine, is_stopped):
    """The second before it has formed a world: the third takes the ranks over that the first has formed."""
    nodes.ranks = 1
    first, second = nodes.start(0, *UNSAVED), nodes.start(1, *UNSAVED)
    first.wait_for_step(20)
    pid = second.rank_pid(1)
    for welcomes in (1, 2):
        first.signal(signal.SIGKILL)
        first.assert_gone()
        first = nodes.start(0, *UNSAVED)
        poll(lambda count=welcomes: _welcomes(second) > count, what="its welcome")
    poll(lambda: "its ranks have kept their memory" in first.console, what="their memory")
    assert second.rank_pid(1) == pid
    if is_stopped:
        first.signal(signal.SIGTERM)
        assert ended(first, second) == (75, 75), first.console + second.console
        assert _newest(first) >= 20, first.console
        return
    assert ended(first, second) == (0, 0), first.console + second.console
    assert not first.summary()["faults"], first.console
    assert (first.summary()["exact"], first.digest) == (True, one_machine(2))
