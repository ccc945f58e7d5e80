"""What people and schedulers ask of a run at any moment: to stop, to stop at once, for a checkpoint."""

from __future__ import annotations

import pytest

from ddp_runner.kernel.rules.exits import ExitCode, StopReason
from ddp_runner.kernel.rules.faults import Fault, FaultKind
from ddp_runner.kernel.rules.lifecycle import RankState
from ddp_runner.kernel.rules.stopping import PRESS_GAP_S, StopSignal
from ddp_runner.kernel.wire.events import CheckpointSaved, RepairedInPlace
from tests.supervisor.judging import assert_done
from tests.supervisor.simulated import SAVE_EVERY


def test_a_stop_during_a_repair_is_kept(simulate):
    """The save is still owed: the world forms again, then stops after a step."""
    run = simulate()
    run.to_step(15)
    run.kill(1)
    run.pass_time(0.02)
    run.supervisor.ask_stop(StopReason.PREEMPTED)
    ending = run.run_to_end()
    assert ending.exit_code == ExitCode.PREEMPTED
    assert run.best < 25


@pytest.mark.parametrize("is_lost", [False, True], ids=["without faults", "with its rank"])
def test_a_checkpoint_that_is_asked_for_is_made_once(simulate, is_lost):
    """Also where the rank that was asked dies before it makes it; then nobody hears of it again."""
    run = simulate()
    run.to_step(13)
    run.supervisor.ask_save()
    if is_lost:
        run.kill(0)
    run.to_step(22)
    run.kill(1)
    run.to_step(29)
    saved = [event["step"] for event in run.events("checkpoint_saved")]
    (asked_for,) = (step for step in saved if step % SAVE_EVERY)
    assert 13 < asked_for < 20
    assert_done(run)


def test_a_checkpoint_from_before_the_roll_back_answers_the_request(simulate):
    """It is all there is of the branch that is followed: nobody hears of the request again."""
    run = simulate()
    run.to_step(13)
    run.supervisor.ask_save()
    fault = Fault(kind=FaultKind.NON_FINITE, rank=-1, step=13, cause="too many", at_ns=0)
    run.supervisor.on_message(
        RepairedInPlace(rank=0, fault=fault, action="rolled back", seconds=0.1, steps_lost=9),
        0,
    )
    run.supervisor.on_message(
        CheckpointSaved(rank=0, step=5, path="5.pt", blocked_s=0.0, size_bytes=1, sha256="5"), 0
    )
    run.kill(0)
    run.to_step(29)
    saved = [event["step"] for event in run.events("checkpoint_saved")]
    assert [step for step in saved if step % SAVE_EVERY] == [5]
    assert_done(run)


def test_a_checkpoint_asked_for_before_training_comes_with_its_first_step(simulate):
    """It waits for the ranks; one asked for with a stop is the one that the stop makes."""
    run = simulate()
    run.supervisor.ask_save()
    run.run_until(lambda: run.events("checkpoint_saved"))
    assert [event["step"] for event in run.events("checkpoint_saved")] == [1]
    run.to_step(13)
    run.supervisor.ask_stop(StopReason.PREEMPTED)
    run.supervisor.ask_save()
    assert run.run_to_end().exit_code == ExitCode.PREEMPTED
    assert len(run.events("save_asked")) == 1


@pytest.mark.parametrize("signals", [1, 2], ids=["before training", "again"])
def test_what_arrives_after_the_end_changes_nothing(simulate, signals):
    """A stop that ends at once may be in one batch with the last word of a world that forms."""
    run = simulate()
    if signals == 2:
        run.to_step(15)
        run.kill(1)
        run.run_until(lambda: len(run.events("forming")) == 2)
    run.run_until(lambda: run.world.ranks[1].state is RankState.FORMING)
    for _ in range(signals):
        run.supervisor.ask_stop(StopReason.INTERRUPTED, by=StopSignal.INTERRUPT)
        run.clock.now_s += 2 * PRESS_GAP_S
    run.supervisor.advance()
    ended = run.ending
    assert ended.exit_code == ExitCode.INTERRUPTED
    for _ in range(10):
        run._turn()
    assert all(rank.trains for rank in run.processes.values() if rank.rank >= 0 and not rank.dead)
    run.supervisor.fail("ValueError: a bug on the way out")
    assert run.ending is ended
    assert ("ERROR", "ValueError: a bug on the way out") in run.outputs.said


@pytest.mark.parametrize("number", [StopSignal.INTERRUPT, StopSignal.TERMINATE, StopSignal.OTHER])
def test_a_stop_that_is_asked_for_again_at_once_is_one_stop(simulate, number):
    """Kernel, shell and scheduler repeat themselves; what was asked for is done."""
    run = simulate()
    run.to_step(15)
    reason = StopReason.PREEMPTED
    for _ in range(3):
        run.supervisor.ask_stop(reason, by=number)
        run.clock.now_s += 0.02
    ending = run.run_to_end()
    assert ending.exit_code == ExitCode.PREEMPTED
    assert run.checkpoint == run.best > 15
    assert "at once" not in ending.reason


@pytest.mark.parametrize(
    ("number", "after_s"), [(StopSignal.INTERRUPT, 0.4), (StopSignal.TERMINATE, 3.1)]
)
def test_a_person_who_asks_again_ends_a_run_at_once(simulate, number, after_s):
    """Also one whose last save is being made; the last line says what there is."""
    for is_given_up in (False, True):
        run = simulate(max_restarts=0 if is_given_up else 10, hang_min_s=500.0)
        run.alone_save_s = 50.0
        run.to_step(15)
        run.sleep(*((1,) if not is_given_up else ()))
        run.supervisor.ask_stop(StopReason.INTERRUPTED, by=number)
        if is_given_up:
            run.kill(2)
            run.run_until(lambda one=run: one.events("last_save_asked"))
        run.pass_time(after_s)
        assert run.ending is None
        run.supervisor.ask_stop(StopReason.INTERRUPTED, by=number)
        ending = run.run_to_end(within_s=1.0)
        assert ending.exit_code == (ExitCode.GAVE_UP if is_given_up else ExitCode.INTERRUPTED)
        assert "newest checkpoint: step 10" in run.supervisor.run_end.closing_words()
