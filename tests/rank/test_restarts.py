"""The restarts of one job as one run: by what the ranks told, on one clock."""

from __future__ import annotations

import pytest

from ddp_runner.core.exits import StopReason
from ddp_runner.core.faults import Fault, FaultKind
from ddp_runner.core.messages import Faulted, Finished, RepairedInPlace, RestartProgress
from ddp_runner.rank.restarts import (
    faults_between,
    mended_record,
    restarts_of,
    seconds_since,
    time_shares,
)

S = 1_000_000_000


def lived(generation, at_s, step, *, began_s, productive_s=0, formed_s=0, clock="boot", rank=0):
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


# Formed 5 s after its launch, saved step 20 after 10 s of steps, and was at step 30 when it broke.
FIRST = [
    lived(1, 100, -1, began_s=100),
    lived(1, 105, 0, began_s=100, formed_s=105),
    lived(1, 120, 20, began_s=100, formed_s=105, productive_s=10),
    lived(1, 140, 30, began_s=100, formed_s=105, productive_s=18),
]
SECOND = [
    lived(2, 150, -1, began_s=150),
    lived(2, 156, 20, began_s=150, formed_s=156),
    lived(2, 180, 40, began_s=150, formed_s=156, productive_s=12),
]


def silent(generation, began_s):
    return lived(generation, began_s, -1, began_s=began_s, rank=1)


def of(*rest, first=(), second=()):
    """What two ranks told: rank 0 the lives above, rank 1 ``rest``."""
    return {0: [*FIRST, *first, *SECOND, *second], 1: list(rest)}


def test_the_rank_that_told_nothing_is_the_one_that_was_lost():
    """Its peers merely lost their connection; what was done behind the checkpoint is counted."""
    told = of(silent(1, 100), silent(2, 150), first=[faulted(1, 0)])
    restarts = restarts_of(told[0])
    [record] = faults_between(restarts, told)
    assert (record.kind, record.rank, record.victims) == ("rank_exited", 1, (0,))
    assert record.cause == "rank 1 ended without a word: killed, or exited"
    assert (record.step, record.steps_lost, record.generation) == (30, 10, 1)
    assert (record.detected_s, record.recovered_s) == (40.0, 56.0)
    shares = time_shares(restarts, [record])
    assert (shares.startup, shares.recovery, shares.data_wait) == (5.0, 16.0, 2.0)
    assert (shares.productive, shares.lost) == (10.0 + 12.0, 8.0)
    assert seconds_since(restarts, 180 * S) == 80.0


def test_a_rank_that_told_its_own_fault_is_the_culprit():
    """Control: nobody was silent."""
    raised = faulted(1, 1, FaultKind.RANK_RAISED)
    told = of(silent(1, 100), raised, silent(2, 150), first=[faulted(1, 0, at_s=139)])
    [record] = faults_between(restarts_of(told[0]), told)
    assert (record.kind, record.rank, record.detail) == ("rank_raised", 1, "d")
    assert record.victims == (0,)


def test_a_restart_that_ended_in_order_has_no_fault():
    """Control: asked to stop, and started again by its scheduler."""
    done = [Finished(rank=rank, reason=StopReason.PREEMPTED, step=30) for rank in (0, 1)]
    told = of(silent(1, 100), done[1], silent(2, 150), first=[done[0]])
    assert faults_between(restarts_of(told[0]), told) == []


def test_several_silent_ranks_are_named_together():
    """All were killed at once: nobody can tell who began."""
    told = of(silent(1, 100), silent(2, 150))
    [record] = faults_between(restarts_of(told[0]), told)
    assert (record.rank, record.cause) == (-1, "ranks 0,1 ended without a word: killed, or exited")


def test_a_job_that_never_restarted_has_nothing_between():
    """And its own times alone."""
    restarts = restarts_of(FIRST)
    assert faults_between(restarts, {0: FIRST, 1: []}) == []
    shares = time_shares(restarts, [])
    assert (shares.startup, shares.productive, shares.lost, shares.recovery) == (5.0, 18.0, 0.0, 0)


def test_time_on_another_machine_s_clock_goes_before():
    """Nobody knows how long nothing ran, so it counts as no time; faults move along."""
    other = [lived(1, 1040, 30, began_s=1000, clock="other", productive_s=18, formed_s=1005)]
    fault = Fault(kind=FaultKind.BAD_SAMPLE, rank=0, step=3, cause="c", at_ns=1010 * S)
    restarts = restarts_of([*other, *SECOND])
    assert seconds_since(restarts, 180 * S) == 40 + 30
    mended = RepairedInPlace(rank=0, fault=fault, remedy="m", seconds=2.0)
    record = mended_record(mended, restarts[:1])
    assert (record.detected_s, record.recovered_s, record.generation) == (10.0, 12.0, 1)


@pytest.mark.parametrize(("at_s", "generation"), [(130, 1), (170, 2)])
def test_what_a_rank_mended_belongs_to_its_restart(at_s, generation):
    """Its times count from the first launch on."""
    fault = Fault(kind=FaultKind.BAD_SAMPLE, rank=0, step=3, cause="c", at_ns=at_s * S)
    mended = RepairedInPlace(rank=0, fault=fault, remedy="m", seconds=2.0)
    record = mended_record(mended, restarts_of([*FIRST, *SECOND]))
    assert (record.detected_s, record.generation) == (at_s - 100.0, generation)
