"""Machines that join, die, stop, are cut off and come back at random: two halves never both go on.

That is asserted wherever a simulated rank forms, commits or publishes (:mod:`.simulated_nodes`).
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddp_runner.kernel.rules.exits import RunStatus
from tests.features.machines.simulated_nodes import NodesSimulation
from tests.supervisor.judging import assert_generations_grow

RANKS = 2  # a machine
EXAMPLES = int(os.environ.get("NODES_EXAMPLES", "15"))  # by hand: hundreds


def _restart(run, machine):
    if machine.is_running:
        machine.kill()
    elif machine.is_on:
        run.start(machine)


def _power(machine):
    if machine.is_on:
        machine.lose_power()


def _on(run, machine):
    """A machine takes longer to start than it takes to be missed."""
    if not machine.is_on:
        run.pass_time(4.0)
    if not machine.is_running:
        run.start(machine)


def _join(run):
    if len(run.followers) + 1 < run._asked.most:
        run.add_machine()


HARMS = {
    "kill a rank": lambda run, machine, rank: run.kill(rank),
    "freeze a rank": lambda run, machine, rank: run.freeze(rank),
    "a rank raises": lambda run, machine, rank: run.fail(rank),
    "kill the zygote": lambda run, machine, rank: (
        machine.started and run.signal(machine.zygote.pid)
    ),
    "kill a supervisor, or start it": lambda run, machine, rank: _restart(run, machine),
    "power off": lambda run, machine, rank: _power(machine),
    "power on": lambda run, machine, rank: _on(run, machine),
    "stop a supervisor": lambda run, machine, rank: setattr(machine, "is_stopped", True),
    "supervisors go on": lambda run, machine, rank: _go_on(run),
    "cut": lambda run, machine, rank: run.cut(machine.number),
    "cut what it sends": lambda run, machine, rank: run.cut(machine.number, back=False),
    "cut what it hears": lambda run, machine, rank: run.cut(machine.number, out=False),
    "heal": lambda run, machine, rank: run.heal(),
    "reset a link": lambda run, machine, rank: [wire.break_off() for wire in machine.wires],
    "a slow network": lambda run, machine, rank: setattr(run, "delay_s", 0.2),
    "a fast network": lambda run, machine, rank: setattr(run, "delay_s", 0.0005),
    "stop the coordinator": lambda run, machine, rank: setattr(run, "is_coordinator_stopped", True),
    "one more machine": lambda run, machine, rank: _join(run),
}
WAITS_S = (0.0, 0.01, 0.1, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 15.0)


def _go_on(run):
    run.is_coordinator_stopped = False
    for machine in run.followers:
        machine.is_stopped = False


def _end_of_all_trouble(run):
    _go_on(run)
    run.heal()
    run.wake()
    run.delay_s = 0.0005
    for machine in run.followers:
        if run.ending is None:
            _on(run, machine)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 1000),
    nodes=st.sampled_from([2, 3, 4]),
    may_be_fewer=st.booleans(),
    patience_s=st.sampled_from([0.0, 4.0, 30.0]),
    save_s=st.sampled_from([0.0, 5.0]),
    acts=st.lists(
        st.tuples(
            st.sampled_from(sorted(HARMS)),
            st.integers(0, 2),
            st.integers(0, 7),
            st.sampled_from(WAITS_S),
        ),
        min_size=1,
        max_size=12,
    ),
)
def test_two_halves_never_both_go_on(*, seed, nodes, may_be_fewer, patience_s, save_s, acts):
    """Whatever happens whenever: one owner of each generation, one publisher, no living step lost; and it ends."""
    with tempfile.TemporaryDirectory() as folder:
        run = NodesSimulation(
            Path(folder),
            nodes=nodes,
            most=nodes + may_be_fewer,
            least=1 if may_be_fewer else nodes,
            ranks=RANKS,
            seed=seed,
            steps=150,
            conf={"last_call_s": 1.0},
            node_patience_s=patience_s,
            max_restarts=10_000,
            no_progress_generations=1000,
            backoff_max_s=1.0,
            form_timeout_s=10.0,
            startup_timeout_s=20.0,
            hang_min_s=2.0,
            first_step_timeout_s=5.0,
        )
        run.save_s = save_s
        try:
            run.run_until(lambda: run.best >= 5)
            for name, which, rank, wait_s in acts:
                machine = run.followers[which % len(run.followers)]
                HARMS[name](run, machine, rank % (RANKS * (len(run.followers) + 1)))
                run.pass_time(wait_s)
                if run.ending is not None:
                    break
            _end_of_all_trouble(run)
            if run.ending is None:
                run.run_to_end(within_s=3000.0)
            assert run.ending.status is RunStatus.COMPLETED, (run.ending, run.where())
            assert_generations_grow(run)
        finally:
            run.close()
