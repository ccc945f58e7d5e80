"""A spare that builds ahead what it may have to train, as scripts on simulated processes."""

from __future__ import annotations

import pytest

from ddp_runner.core.board import Cell
from ddp_runner.features.spare.rules import SPARE as SPARE_ROLE
from tests.features.spare.test_parent import another
from tests.supervisor.judging import assert_done
from tests.supervisor.simulated import SPARE, TICK_S


def takes_long_to_build(run, *, rank_bytes=2**30):
    for handle in run.world.ranks:
        handle.slot.set(Cell.BUILD_NS, 10**9)
        run.resident[handle.pid] = rank_bytes


@pytest.mark.parametrize("free_bytes", [2**32, 2**32 - 1])
def test_a_spare_builds_ahead_where_there_is_memory_for_it(simulate, free_bytes):
    """It fits a quarter of what is free; or one that builds nothing."""
    run = simulate(steps=600)
    run.run_until(lambda: all(handle.pid for handle in run.world.ranks))
    takes_long_to_build(run)
    run.free_bytes = free_bytes
    run.run_until(lambda: run.helper(SPARE_ROLE) is not None and run.helper(SPARE_ROLE).is_ready)
    assert run.spare_kinds == ["model" if free_bytes == 2**32 else "cpu"]
    spare = run.rank(SPARE)
    run.kill(1)
    assert_done(run)
    assert [event["pid"] for event in run.events("spare_taken")] == [spare.pid]


def test_a_spare_that_cannot_build_what_ranks_build_is_the_only_one(simulate):
    """A task that asks for its rank, say; the next one builds nothing."""
    run = simulate(steps=600, warm_spare="model")
    run.spare_fails_on = {"model"}
    run.run_until(
        lambda: run.helper(SPARE_ROLE) is not None and run.helper(SPARE_ROLE).is_ready,
        within_s=30.0,
    )
    assert run.spare_kinds == ["model", "cpu"]
    assert run.supervisor.recorder.accounting.faults_total == 0
    assert_done(run)


def test_what_a_spare_cannot_build_is_not_tried_again_after_repairs(simulate):
    """Those that build nothing get ready and become ranks, and say nothing of what building does."""
    run = simulate(steps=3000, warm_spare="model", max_restarts=1000)
    run.spare_fails_on = {"model"}
    spare = None
    for number in range(1, SPARE_ROLE.tries + 2):
        spare = another(run, spare)
        run.kill(1)
        run.run_until(lambda number=number: len(run.events("repaired")) == number)
        assert run.rank(1) is spare
    another(run, spare)
    assert run.spare_kinds[:2] == ["model", "cpu"]
    assert set(run.spare_kinds[1:]) == {"cpu"}
    assert_done(run)


def test_a_spare_that_says_why_it_cannot_build_is_in_no_row(simulate):
    """The ones that build nothing have all their tries."""
    run = simulate(steps=2000, warm_spare="model")
    run.spare_fails_on = {"model"}
    while run.ending is None:
        if run.rank(SPARE) is not None and run.helper(SPARE_ROLE).is_ready:
            run.kill(SPARE)
        run.pass_time(TICK_S / 2)
    assert run.spare_kinds == ["model", *["cpu"] * SPARE_ROLE.tries]


def test_a_spare_that_is_killed_while_it_builds_is_followed_by_another(simulate):
    """Nothing is lost; killed again, perhaps for the memory that it takes, the next one builds nothing."""
    run = simulate(steps=3000, warm_spare="model")
    for _ in range(2):
        run.run_until(lambda: run.rank(SPARE) is not None and not run.helper(SPARE_ROLE).is_ready)
        run.kill(SPARE)
        run.run_until(lambda: run.helper(SPARE_ROLE) is None)
    run.run_until(
        lambda: run.helper(SPARE_ROLE) is not None and run.helper(SPARE_ROLE).is_ready,
        within_s=30.0,
    )
    assert run.spare_kinds == ["model", "model", "cpu"]
    assert run.supervisor.recorder.accounting.faults_total == 0
    assert_done(run)


@pytest.mark.parametrize("times", [1, int(SPARE_ROLE.tries) + 1])
def test_a_spare_that_builds_while_a_rank_is_lost_gives_way(simulate, times):
    """Its building takes from the repair, which has a fork; another one builds afterwards, however often."""
    run = simulate(steps=3000, warm_spare="model", max_restarts=1000)
    for number in range(1, times + 1):
        run.run_until(lambda: run.rank(SPARE) is not None and not run.helper(SPARE_ROLE).is_ready)
        building = run.rank(SPARE)
        run.kill(1)
        run.run_until(lambda number=number: len(run.events("repaired")) == number)
        assert building.dead
    assert run.events("spare_taken") == []
    run.run_until(lambda: run.helper(SPARE_ROLE) is not None and run.helper(SPARE_ROLE).is_ready)
    assert run.spare_kinds == ["model"] * (times + 1)
    assert_done(run)


def test_what_was_built_for_another_stage_is_dropped(simulate):
    """A rank of the next one is never made of it."""
    run = simulate(steps=600, warm_spare="model")
    run.run_until(lambda: run.helper(SPARE_ROLE) is not None and run.helper(SPARE_ROLE).is_ready)
    spare = run.rank(SPARE)
    run.node.settings_record = {**run.node.settings_record}
    run.kill(1)
    run.run_until(lambda: run.events("repaired"))
    assert run.events("spare_taken") == []
    run.run_until(lambda: spare.dead, within_s=5.0)
    assert_done(run)
