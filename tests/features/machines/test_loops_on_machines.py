"""A program whose loop attaches, on several machines: it goes on behind its loop, on each of them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from ddp_runner.core.launch_plan import LoopPlan
from ddp_runner.kernel.rules.exits import ExitCode, StopReason
from ddp_runner.kernel.wire.messages import Finished
from tests.features.machines.simulated_nodes import NodesSimulation

BEHIND_S = 60.0  # far longer than a rank of a task has to end


class LoopSimulation(NodesSimulation):
    """Ranks that end :data:`BEHIND_S` after training has."""

    def _set_up(self, plan, selector):
        loop = LoopPlan(path="/program.py", module="", arguments=())
        super()._set_up(replace(plan, loop=loop), selector)

    def _finish(self, process, generation, reason):
        if process.generation == generation and not process.stopped:
            process.generation = 0
            reason = reason or StopReason.COMPLETED
            done = Finished(rank=process.rank, reason=reason, step=process.committed)
            self.send(process, done)
            self.later(BEHIND_S, lambda: self._end(process, exit_code=0))


@pytest.fixture
def behind(tmp_path):
    """Two machines of two ranks each, whose training has just ended."""
    run = LoopSimulation(tmp_path, steps=20)
    run.run_until(lambda: all(handle.has_finished for handle in run.world.ranks))
    yield run
    run.close()


def test_a_program_has_its_time_behind_the_loop_on_every_machine(behind):
    """A cable that is out for a moment, as of a machine that still answers in time, is none."""
    began_s = behind.clock.now_s
    behind.cut(1)
    behind.pass_time(1.0)
    behind.heal()
    assert behind.run_to_end().exit_code is ExitCode.DONE, behind.where()
    assert behind.clock.now_s - began_s > BEHIND_S - 2.0
    assert behind.exit_codes() == [0]


@pytest.mark.parametrize("how", ["kill", "lose_power"])
def test_a_machine_that_is_lost_behind_the_loop_fails_the_run(behind, how):
    """As a rank does that is killed there: nobody knows what its program has left undone."""
    getattr(behind.followers[0], how)()
    ending = behind.run_to_end()
    assert ending.exit_code is ExitCode.FAILED, behind.where()
    begin = r"training had ended, and the program failed behind it: node 1 \(.*\) is lost: "
    assert re.match(begin, ending.reason), ending


def test_a_program_that_fails_behind_the_loop_elsewhere_names_its_log(behind):
    """On the machine that has it."""
    behind.leave(3, code=7)
    ending = behind.run_to_end()
    assert ending.exit_code is ExitCode.FAILED, behind.where()
    assert "rank 3 ended with code 7; see rank_3.log on node 1" in ending.reason
    assert behind.exit_codes() == [1]
