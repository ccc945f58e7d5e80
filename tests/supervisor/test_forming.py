"""How long the world may take to form: as long as what each rank has to do for it."""

from __future__ import annotations

import pytest

from ddp_runner.kernel.rules.lifecycle import RankState
from ddp_runner.kernel.rules.phases import Phase
from tests.supervisor.judging import assert_done, plans


@pytest.mark.parametrize(
    "harm", [None, 1, -2], ids=["without faults", "and is killed", "with its zygote"]
)
def test_a_rank_ready_before_its_pid_is_known_does_not_train(simulate, harm):
    """The zygote was held up just after the fork: nobody could end such a rank, or find it stopped."""
    run = simulate(warm_spare=False)
    run.to_step(10)
    run.answers_s = 1.0
    run.kill(1)
    run.run_until(lambda: run.world.ranks[1].state is RankState.READY)
    assert run.world.ranks[1].pid is None
    if harm is not None:
        run.kill(harm)
    assert_done(run)
    assert all(formed["pid"] is not None for formed in run.events("rank_formed"))
    assert {plan[:2] for plan in plans(run)} == {(1, "rank_killed")}


def test_a_rank_that_loads_while_the_world_forms_is_waited_for(simulate):
    """Its loader may have to be repaired; control: one that no longer shows that it waits is not."""
    run = simulate(form_timeout_s=5.0, hang_min_s=2.0)
    run.to_step(12)
    run.is_held = True
    run.kill(1)
    run.run_until(lambda: len(run.events("forming")) == 2)
    for _ in range(60):
        run.pass_time(0.5)
        run.stamp(run.rank(0), Phase.DATA)
    assert len(run.events("forming")) == 2
    run.pass_time(8.0)
    [overdue] = [event for event in run.events("fault") if event["kind"] == "collective_stuck"]
    assert overdue["text"] == "the ranks did not form within 5 s"
    assert overdue["phase"] == "forming"
    assert "store_died" not in {event["kind"] for event in run.events("fault")}  # we renewed it
    run.is_held = False
    assert_done(run)
    assert len(run.events("forming")) == 3


@pytest.mark.parametrize(
    ("phase", "deadlines"),
    [
        (Phase.FORWARD, {"hang_min_s": 8.0}),  # five times that: the first steps before were short
        (Phase.CHECKPOINT, {"checkpoint_timeout_s": 40.0}),
    ],
)
def test_forming_takes_as_long_as_the_phases_that_it_holds(simulate, phase, deadlines):
    """A first backward, a save of before: each has its own time. Control: and no more than that."""
    run = simulate(form_timeout_s=5.0, **deadlines)
    run.to_step(12)
    run.is_held = True
    run.kill(1)
    run.run_until(lambda: len(run.events("forming")) == 2 and run.rank(1).generation == 2)
    run.stamp(run.rank(1), phase)
    run.stamp(run.rank(0), Phase.REDUCE)
    run.pass_time(38.0)
    assert len(run.events("forming")) == 2
    run.pass_time(10.0)
    run.is_held = False
    assert_done(run)
    assert len(run.events("forming")) == 3


def test_a_transfer_that_shows_progress_may_take_longer_than_forming(simulate):
    """Control: once it shows none any more, the world forms again."""
    run = simulate(form_timeout_s=5.0)
    run.to_step(12)
    run.is_held = True
    run.kill(1)
    run.run_until(lambda: len(run.events("forming")) == 2 and run.rank(1).generation == 2)
    for _ in range(40):
        run.pass_time(0.5)
        run.stamp(run.rank(1), Phase.FORMING)
    assert len(run.events("forming")) == 2
    run.pass_time(8.0)
    run.is_held = False
    assert_done(run)
    assert len(run.events("forming")) == 3


@pytest.mark.parametrize("data_s", [0.0, 30.0])
def test_a_wait_for_data_delays_no_verdict_on_later_hangs(simulate, data_s):
    """What a loader's repair took is no pace of the run: ten times that would be minutes."""
    run = simulate(hang_min_s=0.5)
    run.to_step(12)
    run.data_s = data_s
    run.to_step(14)
    run.sleep(1)  # it hangs by itself
    began_s = run.clock.now_s
    run.run_until(lambda: len(run.events("fault")) == 1)
    assert run.clock.now_s - began_s < 2.0
    assert_done(run)


def test_a_start_waits_for_its_ranks_once_all_is_imported(simulate):
    """It does not say that it still imports, after the line with the seconds of that: both count from the beginning."""
    run = simulate(import_s=8.0)
    start, began_s = run.supervisor.start, run.supervisor.recorder.accounting.began_s
    assert start.doing(run.clock.now_s)[0] in ("", "importing")
    run.pass_time(6.0)
    start.look(run.clock.now_s)
    assert start.doing(run.clock.now_s) == ("importing", run.clock.now_s - began_s)
    run.run_until(lambda: any(text.startswith("importing ") for _, text in run.outputs.said))
    assert ("INFO", f"importing {run.clock.now_s - began_s:>15.1f} s") in run.outputs.said
    assert all(not handle.has_begun for handle in run.world.ranks)
    start.look(run.clock.now_s)
    assert start.doing(run.clock.now_s) == ("starting ranks", 0.0)
