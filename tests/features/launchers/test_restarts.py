"""The restarts of one job as one run: what the ranks reported, replayed into the account of a run."""

from __future__ import annotations

import pytest

from ddp_runner.features.launchers.restarts import replay
from ddp_runner.kernel.rules.exits import ExitCode, RunStatus, StopReason
from ddp_runner.kernel.rules.faults import Fault, FaultKind
from ddp_runner.kernel.wire.board import SLOT_BYTES, Board
from ddp_runner.kernel.wire.events import CheckpointSaved, Faulted, RepairedInPlace
from ddp_runner.kernel.wire.messages import Finished, RestartProgress
from ddp_runner.observe.summary import EndOfRun

S = 1_000_000_000


def progress(generation, at_s, step, *, began_s, productive_s=0, formed_s=0, clock="boot", rank=0):
    return RestartProgress(
        rank=rank, generation=generation, run_id="r", clock=clock, began_ns=began_s * S,
        at_ns=at_s * S, step=step, formed_ns=formed_s * S, first_step_ns=formed_s * S,
        spent_ns={"productive": productive_s * S, "data_wait": S},
    )  # fmt: skip


def faulted(generation, rank, kind=FaultKind.COLLECTIVE_FAILED, *, at_s=140, step=30):
    fault = Fault(
        kind=kind, rank=rank, step=step, cause=f"{kind.value}!", detail="d", at_ns=at_s * S
    )
    return Faulted(generation=generation, fault=fault)


def saved(step):
    return CheckpointSaved(
        rank=0, step=step, path=f"{step}.pt", blocked_s=0.0, size_bytes=1, sha256="0"
    )


def repaired(at_s, rank=0):
    fault = Fault(kind=FaultKind.BAD_SAMPLE, rank=rank, step=3, cause="c", at_ns=at_s * S)
    return RepairedInPlace(rank=rank, fault=fault, action="m", seconds=2.0)


def summed_up(reported, *, now_s=180):
    """The summary, as rank 0 writes it at ``now_s``."""
    run = replay(reported)
    slot = Board(memoryview(bytearray(SLOT_BYTES)), 1).slot(0)
    end = EndOfRun(
        status=RunStatus.COMPLETED,
        exit_code=ExitCode.DONE,
        reading=run.reading_of_all(slot.read()),
        finished=[Finished(rank=0, reason=StopReason.COMPLETED, step=40)],
        now_s=now_s,
    )
    return run.accounting.summary(
        end, facts=run.findings, world_size=len(reported), steps_per_epoch=8, own_step_s={}
    )


# Formed 5 s after its launch, saved step 20 after 10 s of steps, and was at step 30 when it broke.
FIRST = [
    progress(1, 100, -1, began_s=100),
    progress(1, 105, 0, began_s=100, formed_s=105),
    progress(1, 120, 20, began_s=100, formed_s=105, productive_s=10),
    saved(20),
    progress(1, 140, 30, began_s=100, formed_s=105, productive_s=18),
]
SECOND = [
    progress(2, 150, -1, began_s=150),
    progress(2, 156, 20, began_s=150, formed_s=156),
    progress(2, 180, 40, began_s=150, formed_s=156, productive_s=12),
]


def silent(generation, began_s):
    return progress(generation, began_s, -1, began_s=began_s, rank=1)


def of(*rest, first=(), second=()):
    """What two ranks reported: rank 0 the progress above, rank 1 ``rest``."""
    return {0: [*FIRST, *first, *SECOND, *second], 1: list(rest)}


def test_the_rank_that_reported_nothing_is_the_one_that_was_lost():
    """Its peers merely lost their connection; what was done behind the checkpoint is counted."""
    made = summed_up(of(silent(1, 100), silent(2, 150), first=[faulted(1, 0)]))
    [record] = made.faults
    assert (record.kind, record.rank, record.victims) == ("rank_exited", 1, (0,))
    assert record.cause == "rank 1 ended without reporting an error: killed, or exited"
    assert record.action == "all ranks restarted by the launcher"
    assert (record.step, record.steps_lost, record.generation) == (30, 10, 1)
    assert (record.detected_s, record.recovered_s, record.seconds) == (40.0, 56.0, {"total": 16.0})
    assert record.all_ranks_dead
    shares = made.time_s
    assert (shares.startup, shares.recovery, shares.data_wait) == (5.0, 16.0, 2.0)
    assert (shares.productive, shares.lost) == (10.0 + 12.0, 8.0)
    assert (made.wall_s, made.checkpoint, made.checkpoint_step) == (80.0, "20.pt", 20)


def test_a_rank_that_reported_its_own_fault_is_the_culprit():
    """Control: nobody was silent."""
    raised = faulted(1, 1, FaultKind.RANK_RAISED)
    reported = of(silent(1, 100), raised, silent(2, 150), first=[faulted(1, 0, at_s=139)])
    [record] = summed_up(reported).faults
    assert (record.kind, record.rank, record.detail) == ("rank_raised", 1, "d")
    assert record.victims == (0,)


def test_a_restart_that_ended_in_order_has_no_fault():
    """Control: asked to stop, and started again by its scheduler."""
    done = [Finished(rank=rank, reason=StopReason.PREEMPTED, step=30) for rank in (0, 1)]
    reported = of(silent(1, 100), done[1], silent(2, 150), first=[done[0]])
    assert summed_up(reported).faults == ()


def test_several_silent_ranks_are_named_together():
    """All were killed at once: nobody knows who began."""
    [record] = summed_up(of(silent(1, 100), silent(2, 150))).faults
    assert (record.rank, record.cause) == (
        -1,
        "ranks 0,1 ended without reporting an error: killed, or exited",
    )


def test_a_job_that_never_restarted_has_nothing_between():
    """And its own times alone."""
    made = summed_up({0: FIRST, 1: []}, now_s=140)
    assert made.faults == ()
    shares = made.time_s
    assert (shares.startup, shares.productive, shares.lost, shares.recovery) == (5.0, 18.0, 0.0, 0)
    assert made.wall_s == 40.0


def test_two_restarts_that_lose_the_same_steps_count_their_own_work():
    """What the first one lost is not lost again by the second, which also ends before a save."""
    third = [
        progress(3, 190, -1, began_s=190),
        progress(3, 196, 20, began_s=190, formed_s=196),
        progress(3, 220, 60, began_s=190, formed_s=196, productive_s=20),
    ]
    reported = of(silent(1, 100), silent(2, 150), silent(3, 190))
    reported[0] += third
    made = summed_up(reported, now_s=220)
    assert [(record.step, record.steps_lost) for record in made.faults] == [(30, 10), (40, 20)]
    assert (made.time_s.lost, made.time_s.productive) == (8.0 + 12.0, 10.0 + 20.0)


def test_a_restart_that_never_trained_is_part_of_one_recovery():
    """Both faults are over when the third trains; the time between counts once, and lost steps once."""
    third = [
        progress(3, 190, -1, began_s=190),
        progress(3, 196, 20, began_s=190, formed_s=196),
    ]
    reported = {
        0: [*FIRST, faulted(1, 0), SECOND[0], faulted(2, 0, at_s=160, step=0), *third],
        1: [silent(1, 100), silent(2, 150), silent(3, 190)],
    }
    made = summed_up(reported, now_s=200)
    assert [record.recovered_s for record in made.faults] == [96.0, 96.0]
    assert [record.steps_lost for record in made.faults] == [0, 10]
    assert [record.all_ranks_dead for record in made.faults] == [True, False]
    assert (made.time_s.recovery, made.time_s.lost) == (56.0, 8.0)


def test_a_restart_without_word_of_rank_0_is_known_by_others():
    """Its own file may be on a disk that is full."""
    one = progress(1, 105, 0, began_s=100, formed_s=105, rank=1)
    reported = {0: SECOND, 1: [one, faulted(1, 1, FaultKind.REPLICA_DIVERGED), silent(2, 150)]}
    made = summed_up(reported)
    [record] = made.faults
    assert (record.kind, record.rank, record.generation) == ("replica_diverged", 1, 1)
    assert (record.detected_s, record.recovered_s, made.wall_s) == (40.0, 56.0, 80.0)
    assert made.inexact_reasons == ("rank 1's replica had diverged by step 30",)


def test_time_on_another_machine_s_clock_goes_before():
    """Nobody knows how long nothing ran, so it counts as no time; faults move along."""
    other = [progress(1, 1040, 30, began_s=1000, clock="other", productive_s=18, formed_s=1005)]
    made = summed_up({0: [*other, repaired(1010), *SECOND]})
    assert made.wall_s == 40 + 30
    record = made.faults[0]
    assert (record.detected_s, record.recovered_s, record.generation) == (10.0, 12.0, 1)


@pytest.mark.parametrize(("at_s", "generation"), [(130, 1), (170, 2)])
def test_what_a_rank_repaired_belongs_to_its_restart(at_s, generation):
    """Its times count from the first launch on."""
    [first, second] = [repaired(at_s)] * (generation == 1), [repaired(at_s)] * (generation == 2)
    done = Finished(rank=0, reason=StopReason.PREEMPTED, step=30)
    made = summed_up({0: [*FIRST, *first, done, *SECOND, *second]})
    [record] = made.faults
    assert (record.detected_s, record.generation) == (at_s - 100.0, generation)
