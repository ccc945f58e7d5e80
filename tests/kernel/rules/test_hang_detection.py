"""Who is hung, from looks at the board: every rule once, and what must not be taken for a hang."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddp_runner.core.settings import RecoverySettings
from ddp_runner.kernel.rules.hang_detection import (
    LONG_PHASE_STEPS,
    Comparisons,
    FirstSteps,
    HangVerdict,
    LongPhases,
    Pace,
    RankLook,
    SharedPauses,
    find_hung,
    late_ranks,
    phase_deadline_s,
)
from ddp_runner.kernel.rules.phases import Phase

SETTINGS = RecoverySettings(
    hang_min_s=2.0,
    hang_factor=10.0,
    first_step_timeout_s=100.0,
    evaluation_timeout_s=50.0,
    checkpoint_timeout_s=40.0,
)
IN_STEP = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


def look(rank, phase, age_s, *, steps_here=20, stopped=False, stopped_s=None, **others):
    return RankLook(
        rank=rank,
        phase=phase,
        age_s=age_s,
        steps_here=steps_here,
        stopped=stopped,
        stopped_s=(age_s if stopped_s is None else stopped_s) if stopped else 0.0,
        **others,
    )


def verdict(*looks, slowest_step_s=0.1, verdicts_in_a_row=0):
    pace = Pace(slowest_step_s=slowest_step_s, verdicts_in_a_row=verdicts_in_a_row)
    return find_hung(looks, pace, SETTINGS)


@pytest.mark.parametrize("phase", IN_STEP)
def test_a_rank_stuck_in_a_phase_is_hung_its_waiting_peers_not(phase):
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
        (Phase.COMPILE, 20, SETTINGS.first_step_timeout_s),
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
    ("first_s", "limit_s"),
    [(None, 100.0), (0.0, 10.0), (0.5, 10.0), (4.0, 40.0), (30.0, 100.0)],
    ids=["nobody knows", "too short to see", "short", "slow", "compiled"],
)
def test_the_first_steps_of_a_later_process_are_no_slower(first_s, limit_s):
    """Ten times as long, and never longer than the setting; a data set may have to skip far."""
    pace = Pace(slowest_step_s=0.1, verdicts_in_a_row=0, first_s=first_s)
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.REDUCE):
        assert phase_deadline_s(look(1, phase, 0.0, steps_here=1), pace, SETTINGS) == limit_s
    assert phase_deadline_s(look(1, Phase.DATA, 0.0, steps_here=1), pace, SETTINGS) == 100.0
    patient = replace(pace, verdicts_in_a_row=1)
    later_s = phase_deadline_s(look(1, Phase.FORWARD, 0.0, steps_here=1), patient, SETTINGS)
    assert later_s == min(100.0, 4 * limit_s)
    old, new = look(0, Phase.REDUCE, limit_s + 1), look(1, Phase.REDUCE, limit_s - 1, steps_here=1)
    assert find_hung([old, new], pace, SETTINGS) is None
    later = replace(new, age_s=limit_s + 0.5)
    assert find_hung([old, later], pace, SETTINGS) == HangVerdict(ranks=(), waited_s=limit_s + 0.5)


@pytest.mark.parametrize(
    ("comparison_s", "steps_here", "limit_s"),
    [(None, 20, 40.0), (0.01, 20, 2.0), (1.5, 20, 15.0), (9.0, 20, 40.0), (0.01, 1, 40.0)],
    ids=["nobody knows", "short", "long", "never longer than the setting", "its first steps"],
)
def test_a_comparison_may_take_ten_times_the_longest_before(comparison_s, steps_here, limit_s):
    """The same bytes are read each time: who hangs there is found as soon as elsewhere."""
    pace = Pace(slowest_step_s=0.1, verdicts_in_a_row=0, comparison_s=comparison_s)
    late = look(1, Phase.COMPARE, 0.0, steps_here=steps_here)
    assert phase_deadline_s(late, pace, SETTINGS) == limit_s
    saves = look(1, Phase.CHECKPOINT, 0.0)
    assert (
        phase_deadline_s(saves, pace, SETTINGS) == 40.0
    )  # of another length each time: the disk's


def test_the_longest_comparison_is_what_was_counted_between_two_looks():
    """Not the sum of all that a long run has made; a new process counts from nothing."""
    comparisons = Comparisons()
    comparisons.observe(0, 0)
    assert comparisons.longest_s is None
    for counted_s in (0.25, 0.5, 0.5, 0.75):
        comparisons.observe(0, int(counted_s * 1e9))
    comparisons.observe(1, int(1.5e9))
    assert comparisons.longest_s == 1.5
    comparisons.observe(1, int(0.25e9))
    assert comparisons.longest_s == 1.5


def test_first_steps_count_once_a_process_has_got_through_them():
    """One that hung in them, and was killed, has shown nothing; its successor starts over."""
    first = FirstSteps()
    first.observe(look(0, Phase.FORWARD, 90.0, steps_here=1), process=10)
    assert first.longest_s is None
    first.observe(look(0, Phase.BACKWARD, 2.0, steps_here=0), process=11)
    first.observe(look(0, Phase.DATA, 50.0, steps_here=2), process=11)
    first.observe(look(0, Phase.FORWARD, 1.0, steps_here=2), process=11)
    assert first.longest_s is None
    first.observe(look(0, Phase.FORWARD, 8.0, steps_here=3), process=11)
    assert first.longest_s == 2.0
    first.observe(look(1, Phase.REDUCE, 60.0, steps_here=3), process=12)
    assert first.longest_s == 2.0


@pytest.mark.parametrize(
    "phase", [*IN_STEP, Phase.REDUCE, Phase.EVALUATE, Phase.CHECKPOINT, Phase.COMPARE]
)
def test_a_stopped_process_is_hung_in_any_phase(phase):
    """The system says so; no deadline of the phase is waited for."""
    stopped = look(1, phase, 2.1, steps_here=0, stopped=True)
    assert verdict(look(0, Phase.FORWARD, 0.1), stopped) == HangVerdict(ranks=(1,), waited_s=2.1)
    briefly = look(1, phase, 1.9, steps_here=0, stopped=True)
    assert verdict(look(0, Phase.FORWARD, 0.1), briefly) is None


def test_a_rank_just_stopped_in_a_long_phase_is_not_hung():
    """What counts is how long it has been stopped; nobody looks for that in a phase's first half second."""
    for stopped_s, is_hung in ((0.1, False), (1.4, False), (1.6, True)):
        stopped = look(1, Phase.EVALUATE, 8.0, stopped=True, stopped_s=stopped_s)
        found = verdict(stopped, look(0, Phase.REDUCE, 8.0))
        assert (found is not None) == is_hung


def test_a_collective_in_which_all_wait_is_stuck_and_nobody_is_blamed():
    """Some skipped it, or it cannot finish: the youngest wait decides."""
    waiting = [look(rank, Phase.REDUCE, age_s) for rank, age_s in enumerate((9.0, 2.5))]
    assert verdict(*waiting) == HangVerdict(ranks=(), waited_s=2.5)
    assert verdict(waiting[0], look(1, Phase.REDUCE, 1.5)) is None


@pytest.mark.parametrize(
    ("device_sums", "behind"),
    [
        ((9, 8, 9), (1,)),
        ((9, 8, 7), (2,)),  # rank 1 may wait for rank 2, which waits for nobody
        ((7, 9, 7), (0, 2)),
        ((9, 9, 9), ()),  # all have come: the collective itself is stuck
        ((9, 0, 8), ()),  # where one does not show it, it may be that one
        ((0, 0, 0), ()),
    ],
)
def test_of_ranks_that_wait_those_with_late_devices_are_hung(device_sums, behind):
    """Not before the deadline, and never all of them."""
    young, old = (
        [
            replace(look(rank, Phase.REDUCE, age_s), device_sums=come)
            for rank, come in enumerate(device_sums)
        ]
        for age_s in (1.9, 2.5)
    )
    assert verdict(*young) is None
    assert verdict(*old) == HangVerdict(ranks=behind, waited_s=2.5, by_device=bool(behind))


def test_who_is_late_by_its_phase_is_hung_whatever_devices_show():
    """Its device has come to nothing new because it is given nothing to do."""
    waiting = replace(look(0, Phase.REDUCE, 9.0), device_sums=9)
    late = replace(look(1, Phase.FORWARD, 2.1), device_sums=8)
    assert verdict(waiting, late) == HangVerdict(ranks=(1,), waited_s=2.1)


@pytest.mark.parametrize("phase", IN_STEP)
def test_ranks_that_are_late_together_get_four_times_as_long(phase):
    """A machine that stands still makes all late; who waits for them meanwhile proves nothing."""
    peer = look(0, Phase.REDUCE, 8.5)
    assert verdict(peer, look(1, phase, 7.9), look(2, Phase.FORWARD, 7.8)) is None
    both = HangVerdict(ranks=(1, 2), waited_s=8.1)
    assert verdict(peer, look(1, phase, 8.1), look(2, Phase.FORWARD, 7.8)) == both


def test_a_pause_that_began_earlier_for_one_rank_is_shared():
    """They were not in step to the millisecond; control: one that is well within its time is not in it."""
    late = look(1, Phase.FORWARD, 2.01)
    assert verdict(look(0, Phase.FORWARD, 1.95), late) is None
    assert verdict(look(0, Phase.FORWARD, 0.9), late) == HangVerdict(ranks=(1,), waited_s=2.01)


def test_the_last_rank_of_a_shared_pause_gets_its_time_again_once():
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


def test_the_only_rank_of_a_world_has_four_times_as_long():
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


def slow_phase(phases, *, step, lasted_s, process=7, next_process=7, stopped=False):
    """Looks at a rank that stays in one forward, a tick apart, and then at the next phase."""
    for tick in range(int(lasted_s * 10) + 1):
        seen = look(0, Phase.FORWARD, tick / 10, stopped=stopped)
        phases.observe(seen, process=process, since_ns=step, step=step)
    after = look(0, Phase.REDUCE, 0.0)
    phases.observe(after, process=next_process, since_ns=step + 1, step=step)


def test_a_rare_slow_step_lengthens_the_deadline_for_the_next_ones():
    """Three times as long as it was; control: not for ever, and the usual steps stay below."""
    phases = LongPhases()
    slow_phase(phases, step=100, lasted_s=5.0)
    pace = Pace(slowest_step_s=0.02, verdicts_in_a_row=0, longest_phase_s=phases.longest_s(300))
    assert phase_deadline_s(look(0, Phase.FORWARD, 0.0), pace, SETTINGS) == pytest.approx(15.0)
    assert phases.longest_s(100 + LONG_PHASE_STEPS) == 0.0


def test_a_step_that_outlasts_a_verdict_is_remembered_for_good():
    """It was slow, not hung: else its rank would be killed whenever it comes around again."""
    phases = LongPhases()
    phases.doubt(look(0, Phase.FORWARD, 3.0, step=100))
    slow_phase(phases, step=100, lasted_s=5.0)
    assert phases.longest_s(1_000_000) == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("where", "deadline_s"),
    [
        ({}, 2.0),
        ({"sample": 51}, 60.0),
        ({"sample": -51}, 60.0),
    ],
)
def test_a_rank_inside_its_dataset_has_the_time_of_loader_workers(where, deadline_s):
    """The begin of a pass has that of a start. Control: its own code has what the pace gives."""
    pace = Pace(slowest_step_s=0.02, verdicts_in_a_row=0, loading_s=60.0)
    assert phase_deadline_s(look(0, Phase.DATA, 0.0, **where), pace, SETTINGS) == deadline_s
    assert phase_deadline_s(look(0, Phase.DATA_BEGIN, 0.0, **where), pace, SETTINGS) == 100.0
    assert phase_deadline_s(look(0, Phase.FORWARD, 0.0, **where), pace, SETTINGS) == 2.0


def test_the_same_place_has_the_time_of_a_start_after_one_verdict():
    """Control: another step, phase, sample or rank is called hung as soon as before."""
    phases, there = LongPhases(), look(1, Phase.DATA, 3.0, step=7, sample=51)
    phases.doubt(there)
    pace = Pace(slowest_step_s=0.02, verdicts_in_a_row=0, doubted=phases.doubted_places)
    assert phase_deadline_s(there, pace, SETTINGS) == 100.0
    for other in ({"step": 8}, {"phase": Phase.FORWARD}, {"sample": 52}, {"rank": 0}):
        assert phase_deadline_s(replace(there, **other), pace, SETTINGS) == 2.0


def test_the_system_s_word_is_enough_after_two_seconds():
    """However long a rank that is not stopped may take."""
    patient = RecoverySettings(hang_min_s=10.0)
    pace = Pace(slowest_step_s=0.02, verdicts_in_a_row=0)
    stopped = [look(0, Phase.FORWARD, 2.1, stopped=True), look(1, Phase.REDUCE, 2.1)]
    assert find_hung(stopped, pace, patient).ranks == (0,)
    assert find_hung([look(0, Phase.FORWARD, 9.9), stopped[1]], pace, patient) is None


@pytest.mark.parametrize(
    ("changes", "forgets"),
    [({"next_process": 8}, False), ({"stopped": True}, False), ({}, True)],
    ids=["killed", "stopped", "aborted"],
)
def test_a_phase_that_was_cut_says_nothing_of_the_pace(changes, forgets):
    """Controls: a real hang is found as soon the next time."""
    phases = LongPhases()
    if forgets:
        phases.observe(look(0, Phase.FORWARD, 5.0), process=7, since_ns=1, step=9)
        phases.forget_open()
        phases.observe(look(0, Phase.FORWARD, 0.0), process=7, since_ns=2, step=9)
    else:
        slow_phase(phases, step=9, lasted_s=5.0, **changes)
    assert phases.longest_s(9) == 0.0
