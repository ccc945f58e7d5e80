"""Which plan follows from which incident."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddp_runner.core.settings import RecoverySettings
from ddp_runner.kernel.rules.classify import Attribution
from ddp_runner.kernel.rules.election import EMPTY_STEP, ReplicaProgress
from ddp_runner.kernel.rules.exits import RunStatus
from ddp_runner.kernel.rules.faults import Fault, FaultKind, Origin
from ddp_runner.kernel.rules.recovery import (
    NEVER_RETRIED,
    GiveUp,
    Incident,
    ReplaceRanks,
    WorldFacts,
    backoff_s,
    is_short_for_steps,
    plan_recovery,
    regrow_delay_s,
)

SETTINGS = RecoverySettings(max_restarts=4, restart_window_s=100.0, no_progress_generations=3)


def incident(
    kind=FaultKind.RANK_KILLED,
    *,
    step=10,
    at_s=1000.0,
    committed=10,
    cause="x",
    formed=True,
    phase="",
    rank=1,
    generation=None,
    origin=Origin.OWN,
    done_between=0,
):
    fault = Fault(kind=kind, rank=rank, step=step, cause=cause, phase=phase, origin=origin)
    return Incident(
        attribution=Attribution(culprit=fault, causes=(fault,), victims=()),
        at_s=at_s,
        committed_step=committed,
        ever_formed=formed,
        generation=generation,
        done_between=done_between,
    )


def killed(rank=1, **facts):
    """SIGKILL from outside, or SIGSTOP: who did it may do it again, and the run is not to blame."""
    return incident(rank=rank, origin=Origin.OUTSIDE, **facts)


def crashed(rank=1, *, where="in loss, task.py:31", phase="forward", **facts):
    """SIGSEGV: sent by somebody, or a crash of the user's code."""
    cause = f"rank {rank} killed (SIGSEGV {where})"
    return incident(rank=rank, phase=phase, cause=cause, origin=Origin.UNCLEAR, **facts)


def plan(now, history=(), *, lost=(1,), newest=10, parked=()):
    replicas = tuple(ReplicaProgress(rank=rank, committed_step=step) for rank, step in parked)
    filled = newest > EMPTY_STEP
    world = WorldFacts(lost=lost, filled=filled, newest_step=newest, present=3, parked=replicas)
    return plan_recovery(now, world=world, history=history, settings=SETTINGS)


def test_a_killed_rank_alone_is_replaced_at_once():
    """Survivors keep process and state, and the first fault after progress costs no waiting."""
    assert plan(incident()) == ReplaceRanks(ranks=(1,), reader=None, delay_s=0.0)


def test_with_no_replica_left_one_rank_loads_the_checkpoint():
    """All dead: the newest checkpoint is the source, read once."""
    answer = plan(incident(), lost=(0, 1, 2), newest=EMPTY_STEP)
    assert answer == ReplaceRanks(ranks=(0, 1, 2), reader=0, delay_s=0.0)


def test_a_rank_that_raised_is_replaced_where_another_one_has_a_state():
    """Its process may no longer be as it should: a clean replica is the better source."""
    answer = plan(incident(FaultKind.RANK_RAISED), lost=(0,), parked=[(1, 10)])
    assert answer == ReplaceRanks(ranks=(0, 1), reader=None, delay_s=0.0)


@pytest.mark.parametrize(
    ("parked", "kept"),
    [([(0, 10), (1, 10), (2, 10)], 0), ([(0, 9), (1, 10), (2, 10)], 1), ([(2, 10)], 2)],
)
def test_with_no_replica_left_the_newest_rank_that_raised_is_kept(parked, kept):
    """An exception costs no committed step, even where every rank has raised it."""
    lost = tuple(rank for rank in range(3) if rank not in dict(parked))
    answer = plan(incident(FaultKind.RANK_RAISED), lost=lost, newest=EMPTY_STEP, parked=parked)
    ranks = tuple(rank for rank in range(3) if rank != kept)
    assert answer == ReplaceRanks(ranks=ranks, reader=None, delay_s=0.0, kept=kept)


def test_a_rank_that_raised_ahead_of_all_others_is_kept():
    """It alone has the newest committed step."""
    answer = plan(incident(FaultKind.RANK_RAISED), lost=(), newest=10, parked=[(1, 11)])
    assert answer == ReplaceRanks(ranks=(), reader=None, delay_s=0.0, kept=1)


def test_a_kept_process_that_raises_again_is_replaced_first():
    """What broke may be the process, such as a file that it holds open; a fresh one shows that."""
    kept = replace(incident(FaultKind.RANK_RAISED, at_s=900.0), kept=1)
    again = incident(FaultKind.RANK_RAISED)
    answer = plan(again, [kept], lost=(), newest=EMPTY_STEP, parked=[(1, 10)])
    assert answer == ReplaceRanks(ranks=(1,), reader=1, delay_s=0.5)
    assert isinstance(plan(again, [kept, again]), GiveUp)


def test_the_same_error_counts_whoever_is_first():
    """Ranks that all raise, each with words of its own, take turns at being the culprit."""
    first, second = (
        Fault(kind=FaultKind.RANK_RAISED, rank=rank, step=10, cause=f"sample {rank} is empty")
        for rank in (0, 1)
    )
    made = incident(FaultKind.RANK_RAISED)
    before, now = (
        replace(made, attribution=Attribution(culprit=causes[0], causes=causes, victims=()), kept=0)
        for causes in ((first, second), (second, first))
    )
    assert isinstance(plan(now, [before]), GiveUp)


def test_an_error_that_a_late_rank_raises_is_its_first():
    """All raise it once in a step, one after the others have been replaced; control: a replacement raises it."""
    made = incident(FaultKind.RANK_RAISED)
    first, late = (
        replace(made, attribution=Attribution(culprit=one, causes=(one,), victims=()))
        for one in (
            Fault(kind=FaultKind.RANK_RAISED, rank=rank, step=10, cause="ValueError: once")
            for rank in (0, 1)
        )
    )
    assert plan(late, [first], lost=(1,)) == ReplaceRanks(ranks=(1,), reader=None, delay_s=0.5)
    assert isinstance(plan(first, [first, late]), GiveUp)


def test_a_rank_that_raised_before_it_had_a_state_is_no_source():
    """Control: the checkpoint is, then."""
    raised = [(0, EMPTY_STEP), (1, EMPTY_STEP)]
    answer = plan(incident(FaultKind.RANK_RAISED), lost=(2,), newest=EMPTY_STEP, parked=raised)
    assert answer == ReplaceRanks(ranks=(0, 1, 2), reader=0, delay_s=0.0)


def test_nobody_lost_means_nobody_replaced():
    """A broken collective among living ranks only needs a new generation."""
    assert plan(incident(), lost=()) == ReplaceRanks(ranks=(), reader=None, delay_s=0.0)


@pytest.mark.parametrize("kind", sorted(NEVER_RETRIED, key=lambda kind: kind.value))
def test_a_cause_that_stays_is_never_retried(kind):
    """Trying again with the same bad input only wastes time."""
    answer = plan(incident(kind))
    assert isinstance(answer, GiveUp)
    assert answer.status is RunStatus.FAILED


def test_the_same_error_at_the_same_step_is_the_users():
    """A retry that fails alike is no accident."""
    earlier = incident(FaultKind.RANK_RAISED, cause="ValueError: no", at_s=900.0, committed=9)
    answer = plan(incident(FaultKind.RANK_RAISED, cause="ValueError: no"), [earlier])
    assert isinstance(answer, GiveUp)
    assert answer.status is RunStatus.FAILED


@pytest.mark.parametrize(
    "earlier",
    [
        incident(FaultKind.RANK_RAISED, cause="ValueError: no", step=9, committed=9),
        incident(FaultKind.RANK_RAISED, cause="KeyError: other", committed=9),
        incident(FaultKind.RANK_KILLED, cause="ValueError: no", committed=9),
    ],
)
def test_another_error_or_step_is_retried(earlier):
    """Control: only the very same error at the very same step counts."""
    assert isinstance(
        plan(incident(FaultKind.RANK_RAISED, cause="ValueError: no"), [earlier]), ReplaceRanks
    )


def test_a_worker_that_is_killed_again_says_nothing_of_the_run():
    """What its rank raises then comes from outside, however often at one step; the newest state stays."""
    died = incident(
        FaultKind.RANK_RAISED, cause="RuntimeError: worker", origin=Origin.OUTSIDE, at_s=0.0
    )
    answer = plan(died, [replace(died, kept=1)] * 3, newest=9, parked=((1, 10),))
    assert isinstance(answer, ReplaceRanks)
    assert answer.kept == 1


TRACEBACK = """Traceback (most recent call last):
  File "/x/step.py", line 40, in loss
    return check(batch)
  File "/x/task.py", line {line}, in check
    raise ValueError(f"no {{batch}}")
ValueError: {text}
"""


def raised(text, *, line=7, type_name="ValueError", committed=10):
    """An exception as its rank reports it, with its traceback."""
    made = incident(FaultKind.RANK_RAISED, committed=committed)
    detail = TRACEBACK.format(line=line, text=text)
    fault = replace(made.culprit, cause=f"{type_name}: {text}", detail=detail)
    return replace(made, attribution=Attribution(culprit=fault, causes=(fault,), victims=()))


@pytest.mark.parametrize("text", ["no <Batch at 0x7f3a11>", "no batch 41 of pid 977", "17:03:11"])
def test_an_error_is_the_same_whatever_its_message_holds(text):
    """An address, a number, the time: where and as what it was raised is what counts."""
    answer = plan(raised("no <Batch at 0x7fc2b0>"), [raised(text, committed=9)])
    assert isinstance(answer, GiveUp)
    assert answer.status is RunStatus.FAILED


@pytest.mark.parametrize("changes", [{"line": 8}, {"type_name": "KeyError"}])
def test_an_error_from_another_line_or_of_another_type_is_another_one(changes):
    """Control, with the very same message."""
    answer = plan(raised("no"), [raised("no", committed=9, **changes)])
    assert isinstance(answer, ReplaceRanks)


def test_two_injections_at_one_step_are_two_errors():
    """Injected errors are all raised in the same line: their number distinguishes them."""
    first, second = (raised(f"number {n}", type_name="InjectedError", committed=9) for n in (1, 2))
    assert isinstance(plan(second, [first]), ReplaceRanks)
    assert isinstance(plan(first, [first]), GiveUp)


def test_an_error_before_the_world_ever_formed_is_not_retried():
    """A task that cannot be built will not be built by trying again."""
    assert isinstance(plan(incident(FaultKind.RANK_RAISED, formed=False)), GiveUp)


def test_a_kill_while_starting_is_retried():
    """Control: a signal from outside says nothing about the task."""
    assert isinstance(plan(incident(formed=False)), ReplaceRanks)


def test_three_generations_without_a_step_end_with_the_first_cause():
    """Both are reported: what began it, and what was not repaired."""
    history = [
        incident(at_s=800.0, committed=5),
        incident(FaultKind.RANK_EXITED, at_s=900.0, cause="the first"),
        incident(at_s=950.0, cause="the second"),
    ]
    answer = plan(incident(cause="the third"), history)
    assert isinstance(answer, GiveUp)
    assert answer.status is RunStatus.GAVE_UP
    assert (answer.began.cause, answer.fault.cause) == ("the first", "the third")


def test_a_storm_from_outside_is_no_loop():
    """A rank, the store, all the others, one by one within a step: nobody waits, nothing ends."""
    storm = [
        killed(rank, at_s=900.0 + at, generation=at, phase=phase)
        for at, (rank, phase) in enumerate([(0, "forward"), (-1, ""), (2, "forming")])
    ]
    assert plan(killed(generation=9), storm) == ReplaceRanks(ranks=(1,), reader=None, delay_s=0.0)


def test_kills_in_one_phase_wait_longer_each_time_until_the_budget():
    """Whoever kills it may be a memory watcher: only the number of repairs is bounded."""
    row = [killed(at_s=900.0 + at, generation=at, phase="forward") for at in range(4)]
    waits = [plan(row[at], row[:at]).delay_s for at in range(4)]
    assert waits == [0.0, 0.5, 1.0, 2.0]
    answer = plan(killed(generation=5, phase="forward"), row)
    assert isinstance(answer, GiveUp)
    assert "--max-restarts" in answer.reason


def test_kills_between_do_not_hide_that_a_cause_repeats():
    """What is named is the first of the run's own causes, not who was killed before it."""
    own = {"kind": FaultKind.RANK_EXITED, "rank": 2, "phase": "data"}
    row = [killed(generation=1), incident(**own, generation=2, cause="exit 7")]
    row += [killed(0, generation=3), incident(**own, generation=4, cause="exit 7")]
    answer = plan(incident(**own, generation=5, cause="exit 7"), row)
    assert isinstance(answer, GiveUp)
    assert (answer.fault.cause, answer.fault.rank) == ("exit 7", 2)
    assert "no step committed in 3" in answer.reason


def test_the_same_crash_again_and_again_ends_the_run():
    """The same slot, the same error, the same phase: code that crashes does so each time."""
    row = [crashed(generation=at, step=10) for at in range(2)]
    assert plan(row[1], row[:1]).delay_s == 0.5
    answer = plan(crashed(generation=3), row)
    assert isinstance(answer, GiveUp)
    assert answer.fault.cause == "rank 1 killed (SIGSEGV in loss, task.py:31)"


@pytest.mark.parametrize(
    "other",
    [
        crashed(rank=2),
        crashed(phase="backward"),
        crashed(where="in loss, task.py:32"),
        crashed(where=""),
    ],
    ids=["slot", "phase", "line", "nowhere"],
)
def test_crashes_that_differ_may_have_been_sent(other):
    """Control: somebody who sends SIGSEGV to anybody at any time must not end the run."""
    answer = plan(crashed(), [crashed(), other])
    assert isinstance(answer, ReplaceRanks)


def test_ranks_that_crash_together_repeat_it_whoever_is_first():
    """Each incident has both causes; the order in which they were noticed says nothing."""
    first, second = crashed(0).culprit, crashed(1).culprit
    row = [
        replace(
            crashed(generation=at),
            attribution=Attribution(culprit=causes[0], causes=causes, victims=()),
        )
        for at, causes in enumerate([(first, second), (second, first), (first, second)])
    ]
    assert isinstance(plan(row[2], row[:2]), GiveUp)


def test_what_is_done_between_two_steps_is_progress():
    """At the end of a run no step can be committed: a longer way through its evaluation counts."""
    row = [
        incident(FaultKind.RANK_EXITED, done_between=done, generation=done) for done in (1, 4, 9)
    ]
    assert isinstance(plan(row[2], row[:2]), ReplaceRanks)
    assert isinstance(
        plan(incident(FaultKind.RANK_EXITED, done_between=10, generation=10), row), ReplaceRanks
    )


def test_what_is_done_again_between_two_steps_is_no_progress():
    """Each try starts over: only one that comes further than any before counts."""
    row = [
        incident(FaultKind.RANK_EXITED, done_between=done, generation=at, cause=f"exit {at}")
        for at, done in enumerate((2, 5, 3))
    ]
    answer = plan(incident(FaultKind.RANK_EXITED, done_between=5, generation=4), row)
    assert isinstance(answer, GiveUp)
    assert answer.began.cause == "exit 1"


def test_the_same_error_elsewhere_in_the_last_evaluation_is_retried():
    """All is at one step there. Control: where it was raised before, it is the user's."""
    earlier = incident(FaultKind.RANK_RAISED, cause="OSError: no", done_between=3)
    again = incident(FaultKind.RANK_RAISED, cause="OSError: no", done_between=7)
    assert isinstance(plan(again, [earlier]), ReplaceRanks)
    answer = plan(again, [earlier, again])
    assert isinstance(answer, GiveUp)
    assert answer.status is RunStatus.FAILED


def test_progress_between_failures_resets_the_count():
    """Control: a run that commits steps between its faults goes on."""
    history = [incident(at_s=900.0 + step, committed=step) for step in (7, 8, 9)]
    assert isinstance(plan(incident(), history), ReplaceRanks)


def test_faults_before_lost_steps_are_redone_are_no_lack_of_progress():
    """All died at step 19 and went back: a fault on the way there is the first of its own row."""
    history = [incident(at_s=900.0 + step, committed=19) for step in range(2)]
    assert isinstance(plan(incident(committed=12), history), ReplaceRanks)


def test_ranks_lost_one_after_the_other_in_one_generation_are_one_try():
    """Whoever kills all but one, with a little time between, has not shown that nothing helps."""
    row = [incident(rank=rank, generation=1 + (rank > 1)) for rank in (1, 2, 3)]
    assert isinstance(plan(row[-1], row[:-1], lost=(3,)), ReplaceRanks)
    again = [incident(rank=1, generation=1) for _ in range(3)]
    assert isinstance(plan(again[-1], again[:-1]), GiveUp)


def test_going_back_and_dying_at_the_same_step_again_is_no_progress():
    """A step that kills whoever does it ends the run, however many steps are redone in between."""
    history = [incident(at_s=900.0 + step, committed=19) for step in range(2)]
    assert isinstance(plan(incident(committed=19), history), GiveUp)


def test_the_restart_budget_counts_the_window_only():
    """Old faults are forgotten; as many new ones as the budget end the run."""
    recent = [incident(at_s=950.0 + step, committed=step) for step in range(4)]
    answer = plan(incident(), recent)
    assert isinstance(answer, GiveUp)
    assert answer.status is RunStatus.GAVE_UP
    old = [incident(at_s=100.0 + step, committed=step) for step in range(4)]
    assert isinstance(plan(incident(), old), ReplaceRanks)


def test_a_machine_that_is_lost_spends_no_budget():
    """A link that flaps ends no run that goes on; one that commits nothing in between still does."""
    lost = {"kind": FaultKind.NODE_LOST, "origin": Origin.OUTSIDE}
    often = [incident(at_s=950.0 + step, committed=step, **lost) for step in range(9)]
    assert isinstance(plan(incident(**lost), often), ReplaceRanks)
    assert isinstance(plan(incident(), often), ReplaceRanks)
    own = [incident(at_s=950.0 + step, committed=step) for step in range(4)]
    assert isinstance(plan(incident(**lost), own), ReplaceRanks)
    assert isinstance(plan(incident(), own), GiveUp)


def test_back_off_doubles_to_its_bound():
    """A row of failures waits longer each time, never longer than the bound."""
    waits = [backoff_s(row, SETTINGS) for row in range(10)]
    assert waits[:4] == [0.0, 0.5, 1.0, 2.0]
    assert max(waits) == SETTINGS.backoff_max_s


ELASTIC = RecoverySettings(max_restarts=100, min_ranks=2, slot_failures_max=3)


def elastic_plan(now, history, *, lost=(1,), filled=True, present=3):
    world = WorldFacts(lost=lost, filled=filled, present=present)
    return plan_recovery(now, world=world, history=history, settings=ELASTIC)


def test_a_rank_that_keeps_dying_is_given_up_where_enough_are_left():
    """The third failure of one slot within the window drops it; the others go on."""
    history = [incident(at_s=990.0 + step, committed=step) for step in (3, 5)]
    answer = elastic_plan(incident(), history)
    assert answer == ReplaceRanks(ranks=(), reader=None, delay_s=0.0, dropped=(1,))


@pytest.mark.parametrize(
    ("history_length", "present", "filled"), [(1, 3, True), (2, 2, True), (2, 3, False)]
)
def test_a_rank_is_given_up_neither_soon_nor_below_the_minimum(history_length, present, filled):
    """Controls: fewer failures, too few left, or nobody left with a state."""
    history = [incident(at_s=990.0 + step, committed=step) for step in range(history_length)]
    answer = elastic_plan(incident(), history, present=present, filled=filled)
    assert isinstance(answer, ReplaceRanks)
    assert answer.dropped == ()


def test_a_slot_that_returns_and_dies_at_once_is_no_progress():
    """Giving it up again would go on for ever; control: after a step it is given up again."""
    row = [incident(at_s=980.0 + number, generation=number) for number in range(2)]
    row.append(replace(incident(at_s=990.0, generation=2), dropped=(1,)))
    answer = elastic_plan(incident(generation=3), row)
    assert isinstance(answer, GiveUp)
    assert answer.status is RunStatus.GAVE_UP
    later = elastic_plan(incident(generation=3, committed=11), row)
    assert later == ReplaceRanks(ranks=(), reader=None, delay_s=0.0, dropped=(1,))


def test_a_return_that_did_not_last_is_tried_ever_later():
    """Twice as long each time, up to the window in which its faults count."""
    settings = RecoverySettings(regrow_after=10.0, restart_window_s=60.0)
    assert [regrow_delay_s(count, settings) for count in (0, 1, 2, 3, 9999)] == [10, 20, 40, 60, 60]
    rare = RecoverySettings(regrow_after=100.0, restart_window_s=60.0)
    assert regrow_delay_s(3, rare) == 100.0


def test_a_lost_device_is_given_up_at_once():
    """A broken GPU is not tried again on the same slot."""
    answer = elastic_plan(incident(FaultKind.DEVICE_LOST), [])
    assert isinstance(answer, ReplaceRanks)
    assert answer.dropped == (1,)


def test_running_out_of_memory_in_a_step_costs_no_budget():
    """Each time the micro-batch is halved, which ends by itself."""
    row = [incident(FaultKind.OUT_OF_MEMORY, phase="forward", at_s=990.0 + at) for at in range(8)]
    now = incident(FaultKind.OUT_OF_MEMORY, phase="optimizer")
    assert plan(now, row) == ReplaceRanks(ranks=(1,), reader=None, delay_s=0.0)


def short_again(count, **facts):
    """So many shortages of a rank that had nothing left to change, with a step between each two."""
    return [
        replace(
            incident(FaultKind.OUT_OF_MEMORY, committed=at, step=at, at_s=990.0 + at, **facts),
            plain_retry=True,
        )
        for at in range(count)
    ]


@pytest.mark.parametrize("known", [True, False], ids=["repaired in place", "replaced"])
def test_trying_once_more_for_lack_of_memory_costs_budget(known):
    """A rank that is killed in its optimizer at every step goes on with the others: only this ends it."""
    now = replace(incident(FaultKind.OUT_OF_MEMORY, phase="optimizer"), plain_retry=known)
    assert isinstance(plan(now, short_again(3)), ReplaceRanks)
    answer = plan(now, short_again(4, cause="killed by the kernel"))
    assert isinstance(answer, GiveUp)
    assert (answer.status, answer.fault) == (RunStatus.GAVE_UP, now.culprit)
    assert "--max-restarts" in answer.reason


def test_a_repeated_shortage_with_nothing_to_change_is_no_progress():
    """What follows it is not known yet when the third rank in a row has been killed."""
    row = [replace(one, committed_step=10) for one in short_again(2)]
    answer = plan(incident(FaultKind.OUT_OF_MEMORY), row)
    assert isinstance(answer, GiveUp)
    assert answer.status is RunStatus.GAVE_UP


def test_halving_costs_no_budget_after_shortages_that_did():
    """Control: the micro-batch has grown since, and the newest shortage halved it."""
    halved = incident(FaultKind.OUT_OF_MEMORY, phase="forward", at_s=999.0)
    now = incident(FaultKind.OUT_OF_MEMORY, phase="forward")
    assert isinstance(plan(now, [*short_again(9), halved]), ReplaceRanks)


@pytest.mark.parametrize("phase", ["startup", "forming"])
def test_a_shortage_before_any_step_is_no_shortage_of_steps(phase):
    """A dead process may still hold the memory: half a batch would change the run for nothing."""
    fault = incident(FaultKind.OUT_OF_MEMORY, phase=phase).culprit
    assert not is_short_for_steps(fault)
    assert is_short_for_steps(replace(fault, phase="forward")), "control"
    row = [incident(FaultKind.OUT_OF_MEMORY, phase=phase, at_s=990.0 + at) for at in range(3)]
    assert isinstance(plan(incident(FaultKind.OUT_OF_MEMORY, phase=phase)), ReplaceRanks)
    assert isinstance(plan(incident(FaultKind.OUT_OF_MEMORY, phase=phase), row), GiveUp)


@pytest.mark.parametrize("formed", [True, False])
def test_running_out_of_memory_while_starting_is_not_tried_for_ever(formed):
    """Halving a micro-batch helps nobody who has not got so far."""
    row = [
        incident(FaultKind.OUT_OF_MEMORY, phase="startup", formed=formed, at_s=990.0 + at)
        for at in range(3)
    ]
    now = incident(FaultKind.OUT_OF_MEMORY, phase="startup", formed=formed)
    assert isinstance(plan(now, row), GiveUp)
    assert isinstance(plan(now), ReplaceRanks if formed else GiveUp)


def disagreement(*, step=10, kind=FaultKind.COLLECTIVE_STUCK, is_disagreement=True, **facts):
    made = incident(kind, step=step, rank=-1, **facts)
    fault = replace(made.culprit, is_disagreement=is_disagreement)
    return replace(made, attribution=Attribution(culprit=fault, causes=(fault,), victims=()))


def test_ranks_that_disagree_at_the_same_step_twice_are_the_users_error():
    """Once may be an accident; whatever rank gloo ended, the same step goes wrong in every process."""
    first = disagreement(cause="rank 0 was sent 8 bytes")
    assert isinstance(plan(first, lost=(0,)), ReplaceRanks)
    again = plan(disagreement(cause="rank 2 was sent 8 bytes"), [first], lost=(2,))
    assert isinstance(again, GiveUp)
    assert again.status is RunStatus.FAILED


@pytest.mark.parametrize(
    "now", [disagreement(step=11), disagreement(is_disagreement=False)], ids=["elsewhere", "stuck"]
)
def test_another_step_or_a_mere_wait_is_tried_again(now):
    """Control: a collective that all wait in may be the network's fault; the budget counts those."""
    assert isinstance(plan(now, [disagreement()], lost=()), ReplaceRanks)
