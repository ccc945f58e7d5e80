"""Copies of the state in memory on two machines: what is left where no rank has it any more."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.features.machines.whole_runs.conftest import STEPS
from tests.features.machines.whole_runs.test_two_nodes import SLOW
from tests.scenarios.harness import ended, poll


def test_all_ranks_and_the_coordinator_lost_at_once_cost_a_few_steps(nodes, one_machine):
    """SIGKILL of the first machine's supervisor and of the only rank of the second: no file had been made.

    The second machine's supervisor has a copy, of a step within the last few; the same command finds it there.
    """
    every = 4
    settings = (SLOW, f"memory_every={every}", "save_interval=0", "save_every_steps=1000")
    settings += ("recovery.coordinator_wait_s=60",)
    first, second = (nodes.start(number, *settings, ranks=1) for number in (0, 1))
    first.wait_for_step(20)
    lost = second.rank_pid(1)
    first.signal(signal.SIGKILL)
    os.kill(lost, signal.SIGKILL)
    first.assert_gone()
    reached = first.committed()
    poll(lambda: "the coordinator is lost" in second.console, what="a machine on its own")
    poll(lambda: not Path(f"/proc/{lost}").exists(), what="the end of its rank")
    assert not list(first.checkpoints.glob("step_*")) + list(second.checkpoints.glob("step_*"))
    first = nodes.start(0, *settings, ranks=1)
    assert ended(first, second) == (0, 0), first.console + second.console
    assert "node 1 has a newer copy of the state in memory" in first.console
    (taken,) = first.events("copy_taken")
    assert taken["step"] >= reached - 3 * every  # what is known of it was as old as its last status
    assert (taken["rank"], taken["step"] % every) == (1, 0)
    assert (first.summary()["steps"], first.digest) == (STEPS, one_machine(2)), first.console
