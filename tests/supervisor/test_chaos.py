"""Faults at random: any sequence of them ends with the run complete."""

from __future__ import annotations

import random

import pytest

from ddp_runner.kernel.rules.exits import RunStatus
from ddp_runner.kernel.rules.lifecycle import RunState
from tests.supervisor.judging import assert_done, assert_generations_grow, plans
from tests.supervisor.simulated import SPARE


def test_a_random_plan_injects_nothing_while_a_rank_is_dying(simulate):
    """On a busy machine that takes a while, and what is injected then would never be noticed."""
    spec = "random:mtbf_s=0.01,times=3,kinds=kill"
    run = simulate(ranks=2, run_options={"inject": (spec,)})
    run.run_until(lambda: run.events("world_formed"))
    for process in run.processes.values():
        process.unending = True
    run.run_until(lambda: run.events("injected"))
    run.pass_time(0.5)
    assert len(run.events("injected")) == 1
    for process in list(run.processes.values()):
        process.unending = False
        if process.pid == run.world.ranks[run.events("injected")[0]["rank"]].pid:
            run.signal(process.pid)
    assert_done(run)
    assert len(run.events("injected")) == len(plans(run)) == 3


def test_a_random_plan_goes_on_when_its_victim_is_given_up(simulate):
    """Control: that process dies, but nobody takes its place."""
    spec = "random:mtbf_s=0.01,times=2,kinds=kill"
    run = simulate(min_ranks=1, slot_failures_max=1, run_options={"inject": (spec,)})
    assert_done(run)
    assert [len(plan["dropped"]) for plan in run.events("plan")] == [1, 1]
    assert len(run.events("injected")) == 2


CHAOS = {
    "kill": lambda run, rank: run.kill(rank),
    "freeze": lambda run, rank: run.freeze(rank),
    "leave": lambda run, rank: run.leave(rank),
    "fail": lambda run, rank: run.fail(rank, cause=f"ValueError: {run.random.random()}"),
    "store": lambda run, rank: run.kill(-1),
    "zygote": lambda run, rank: run.kill(-2),
    "spare": lambda run, rank: run.kill(SPARE),
    "spare stops": lambda run, rank: run.freeze(SPARE),
    "spare hangs": lambda run, rank: run.rank(SPARE) and run.sleep(SPARE),
    "thaw": lambda run, rank: [setattr(p, "stopped", False) for p in run.processes.values()],
}


@pytest.mark.parametrize("elastic", [False, True], ids=["fixed", "elastic"])
@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_of_faults_ends_with_the_run_complete(simulate, seed, elastic):
    """Whatever happens whenever, also where stages change: no state is lost while a replica lives, and nothing
    waits for ever."""
    draw = random.Random(seed)
    options = {"min_ranks": 2, "slot_failures_max": 3, "regrow_after": 1.0} if elastic else {}
    stages = {"stage_ends": (40, 45, 150)} if seed % 2 else {"steps": 150}
    run = simulate(
        ranks=draw.choice([2, 3, 4]),
        seed=seed,
        max_restarts=10_000,
        no_progress_generations=1000,
        backoff_max_s=1.0,
        form_timeout_s=10.0,
        startup_timeout_s=20.0,
        hang_min_s=0.5,
        first_step_timeout_s=2.0,
        **stages,
        **options,
    )
    run.to_step(5)
    for _ in range(draw.randrange(3, 15)):
        run.pass_time(draw.choice([0.0, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0]) * draw.random())
        if run.ending is not None or run.supervisor._finished_at_s is not None:
            break
        CHAOS[draw.choice(sorted(CHAOS))](run, draw.randrange(len(run.world.ranks)))
    CHAOS["thaw"](run, 0)
    if run.ending is None:
        run.run_to_end(within_s=3000.0)
    assert run.ending.status is RunStatus.COMPLETED, (run.ending, run.where())
    assert run.supervisor.machine.state is RunState.DONE
    assert_generations_grow(run)
    assert len(run.events("stage_ends")) == max(0, len(run.stage_ends) - 1)
