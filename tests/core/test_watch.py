"""Who is hung, from looks at the board: every rule once, and what must not be taken for a hang."""

from __future__ import annotations

import pytest

from ddp_runner.core.phases import Phase
from ddp_runner.core.settings import RecoverySettings
from ddp_runner.core.watch import (
    HangVerdict,
    Pace,
    RankLook,
    SharedPauses,
    find_hung,
    late_ranks,
    phase_deadline_s,
)

SETTINGS = RecoverySettings(
    hang_min_s=2.0,
    hang_factor=10.0,
    first_step_timeout_s=100.0,
    evaluation_timeout_s=50.0,
    checkpoint_timeout_s=40.0,
)
IN_STEP = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


def look(rank, phase, age_s, *, steps_here=20, stopped=False):
    return RankLook(rank=rank, phase=phase, age_s=age_s, steps_here=steps_here, stopped=stopped)


def verdict(*looks, slowest_step_s=0.1, verdicts_in_a_row=0):
    pace = Pace(slowest_step_s=slowest_step_s, verdicts_in_a_row=verdicts_in_a_row)
    return find_hung(looks, pace, SETTINGS)


@pytest.mark.parametrize("phase", IN_STEP)
def test_a_rank_that_stays_in_a_phase_of_its_step_is_hung_and_its_waiting_peers_are_not(phase):
    """The others wait in the collective for it, however long."""
    peers = [look(0, Phase.REDUCE, 2.0), look(2, Phase.REDUCE, 9.0)]
    assert verdict(*peers, look(1, phase, 2.1)) == HangVerdict(ranks=(1,), waited_s=2.1)
    assert verdict(*peers, look(1, phase, 1.9)) is None


def test_the_deadline_follows_the_pace_of_the_run():
    """Slow is not hung: ten times the slowest recent step, and two seconds at the least."""
    slow = look(1, Phase.FORWARD, 29.0)
    assert verdict(look(0, Phase.REDUCE, 29.0), slow, slowest_step_s=3.0) is None
    assert verdict(look(0, Phase.REDUCE, 31.0), look(1, Phase.FORWARD, 31.0), slowest_step_s=3.0)


@pytest.mark.parametrize(
    ("phase", "steps_here", "limit_s"),
    [
        (Phase.EVALUATE, 20, 50.0),
        (Phase.CHECKPOINT, 20, 40.0),
        (Phase.COMPARE, 20, 40.0),
        (Phase.FORWARD, 0, 100.0),
        (Phase.FORWARD, 2, 100.0),
        (Phase.FORWARD, 3, 2.0),
    ],
)
def test_evaluations_saves_and_first_steps_have_deadlines_of_their_own(phase, steps_here, limit_s):
    """Compilation and a long validation are no hang; what is settable has an end all the same."""
    pace = Pace(slowest_step_s=0.1, verdicts_in_a_row=0)
    late = look(1, phase, 0.0, steps_here=steps_here)
    assert phase_deadline_s(late, pace, SETTINGS) == limit_s
    before = look(1, phase, limit_s - 0.1, steps_here=steps_here)
    after = look(1, phase, limit_s + 0.1, steps_here=steps_here)
    assert verdict(look(0, Phase.REDUCE, 1.0), before) is None
    assert verdict(look(0, Phase.REDUCE, 1.0), after) == HangVerdict(
        ranks=(1,), waited_s=limit_s + 0.1
    )


@pytest.mark.parametrize(
    "phase", [*IN_STEP, Phase.REDUCE, Phase.EVALUATE, Phase.CHECKPOINT, Phase.COMPARE]
)
def test_a_stopped_process_is_hung_in_any_phase(phase):
    """The system says so; no deadline of the phase is waited for."""
    stopped = look(1, phase, 2.1, steps_here=0, stopped=True)
    assert verdict(look(0, Phase.FORWARD, 0.1), stopped) == HangVerdict(ranks=(1,), waited_s=2.1)
    briefly = look(1, phase, 1.9, steps_here=0, stopped=True)
    assert verdict(look(0, Phase.FORWARD, 0.1), briefly) is None


def test_a_collective_in_which_all_wait_is_stuck_and_nobody_is_blamed():
    """Some skipped it, or it cannot finish: the youngest wait decides."""
    waiting = [look(rank, Phase.REDUCE, age_s) for rank, age_s in enumerate((9.0, 2.5))]
    assert verdict(*waiting) == HangVerdict(ranks=(), waited_s=2.5)
    assert verdict(waiting[0], look(1, Phase.REDUCE, 1.5)) is None


@pytest.mark.parametrize("phase", IN_STEP)
def test_ranks_that_are_late_together_get_four_times_as_long(phase):
    """A machine that stands still makes all late; who waits for them meanwhile proves nothing."""
    peer = look(0, Phase.REDUCE, 8.5)
    assert verdict(peer, look(1, phase, 7.9), look(2, Phase.FORWARD, 7.8)) is None
    both = HangVerdict(ranks=(1, 2), waited_s=8.1)
    assert verdict(peer, look(1, phase, 8.1), look(2, Phase.FORWARD, 7.8)) == both


def test_a_pause_that_began_earlier_for_one_of_the_ranks_is_shared_all_the_same():
    """They were not in step to the millisecond; control: one that is well within its time is not in it."""
    late = look(1, Phase.FORWARD, 2.01)
    assert verdict(look(0, Phase.FORWARD, 1.95), late) is None
    assert verdict(look(0, Phase.FORWARD, 0.9), late) == HangVerdict(ranks=(1,), waited_s=2.01)


def test_the_last_rank_of_a_shared_pause_gets_its_time_anew_once():
    """The others woke up just before it; late by itself after that, it is hung."""
    pace = Pace(slowest_step_s=0.1, verdicts_in_a_row=0)
    pauses, late = SharedPauses(), look(1, Phase.FORWARD, 5.0)
    observed = [
        pauses.observe(late_ranks([look(0, phase, age_s), late], pace, SETTINGS))
        for phase, age_s in (
            (Phase.FORWARD, 4.9),
            (Phase.BACKWARD, 0.01),
            (Phase.REDUCE, 0.1),
        )
    ]
    assert observed == [None, 1, None]
    assert SharedPauses().observe((1,)) is None, "late alone from the beginning"
    assert verdict(look(0, Phase.REDUCE, 0.1), late) == HangVerdict(ranks=(1,), waited_s=5.0)


def test_the_last_rank_with_a_state_is_spared():
    """All are late, or stopped: one is left to hand its state on, best one outside its optimizer."""
    young, old = look(0, Phase.FORWARD, 8.1), look(1, Phase.FORWARD, 8.2)
    assert verdict(young, old) == HangVerdict(ranks=(1,), waited_s=8.2)
    updating = look(0, Phase.OPTIMIZER, 8.1)
    assert verdict(updating, old) == HangVerdict(ranks=(0,), waited_s=8.2)
    stopped = [look(rank, Phase.REDUCE, 2.5 - rank / 10, stopped=True) for rank in range(3)]
    assert verdict(*stopped) == HangVerdict(ranks=(0, 1), waited_s=2.5)


def test_the_only_rank_of_a_world_is_hung_after_four_times_as_long():
    """Its end costs steps, so it gets the time of a shared pause; an evaluation not four times its own."""
    assert verdict(look(0, Phase.FORWARD, 7.9)) is None
    assert verdict(look(0, Phase.FORWARD, 8.1)) == HangVerdict(ranks=(0,), waited_s=8.1)
    assert verdict(look(0, Phase.EVALUATE, 55.0)) is None
    assert verdict(look(0, Phase.EVALUATE, 56.1)) is not None


@pytest.mark.parametrize("phase", [Phase.IDLE, Phase.STARTUP, Phase.FORMING, Phase.FINISHED])
def test_what_is_watched_elsewhere_is_not_judged_here(phase):
    """Start and forming have their own deadlines; who has finished owes nothing."""
    assert verdict(look(0, Phase.REDUCE, 1.0), look(1, phase, 1e6)) is None


def test_verdicts_without_progress_make_the_next_one_patient():
    """The pause may be real: each verdict in a row waits four times as long, until a step is done."""
    peer, late = look(0, Phase.REDUCE, 7.0), look(1, Phase.FORWARD, 7.0)
    assert verdict(peer, late) is not None
    assert verdict(peer, late, verdicts_in_a_row=1) is None
    assert verdict(peer, look(1, Phase.FORWARD, 8.1), verdicts_in_a_row=1) is not None


@pytest.mark.parametrize("verdicts_in_a_row", [2, 3, 10])
def test_patience_has_an_end(verdicts_in_a_row):
    """Sixteen times the deadline: who hangs at one redone step after another is still found."""
    peer, late = look(0, Phase.REDUCE, 40.0), look(1, Phase.FORWARD, 32.1)
    assert verdict(peer, late, verdicts_in_a_row=verdicts_in_a_row) is not None
    before = look(1, Phase.FORWARD, 31.9)
    assert verdict(peer, before, verdicts_in_a_row=verdicts_in_a_row) is None


def test_a_world_of_nobody_is_not_hung():
    """All have finished."""
    assert verdict() is None
