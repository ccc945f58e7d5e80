"""The state tables of a run and of a rank."""

from __future__ import annotations

from itertools import product

import pytest

from ddp_runner.kernel.rules.lifecycle import (
    IN_WORLD,
    MEMBERSHIP_TABLE,
    NO_PROCESS_LEFT,
    RANK_TABLE,
    RUN_TABLE,
    Machine,
    Membership,
    MembershipEvent,
    RankEvent,
    RankState,
    RunEvent,
    RunState,
)

# What each state makes of each event, written down a second time: "-" is impossible, "same" ignored.
RUN_ROWS = """
            world_formed  incident_began  stop_asked  all_finished  last_save_began  gave_up
starting    running       recovering      stopping    done          saving           failed
running     same          recovering      stopping    done          saving           failed
recovering  running       same            stopping    done          saving           failed
stopping    same          same            same        done          saving           failed
saving      -             same            same        -             -                failed
done        -             same            same        -             -                -
failed      -             same            same        -             -                same
"""
RANK_ROWS = """
            spawned   got_ready  form_sent  got_formed  abort_sent  abort_heard  got_finished  kill_sent  exited
starting    -         ready      -          -           same        -            -             killing    dead
ready       -         -          forming    -           same        same         finished      killing    dead
forming     -         ready      -          training    aborting    -            -             killing    dead
training    -         ready      -          -           aborting    -            finished      killing    dead
aborting    -         ready      -          same        same        leaving      finished      killing    dead
leaving     -         ready      -          same        same        same         finished      killing    dead
killing     -         same       -          same        same        same         finished      same       dead
finished    -         -          -          -           same        same         -             same       ended
ended       starting  -          -          -           same        -            -             same       -
dead        starting  -          -          -           same        -            -             same       -
"""
MEMBERSHIP_ROWS = """
            found_hung  to_replace  replaced  dropped  tried_again  return_failed  taken_back
member      hung        replacing   -         dropped  -            -              -
hung        -           replacing   -         dropped  -            -              -
replacing   same        same        member    dropped  -            -              -
dropped     -           same        -         -        rejoining    -              -
rejoining   -           same        same      -        -            dropped        member
"""


def written(rows, states, events):
    """The table that ``rows`` stand for."""
    (head, *lines) = (line.split() for line in rows.strip().splitlines())
    return {
        (states(state), events(event)): states(state if after == "same" else after)
        for state, *cells in lines
        for event, after in zip(head, cells, strict=True)
        if after != "-"
    }


def test_each_table_has_the_rows_that_are_meant_and_no_other():
    """A row that is missing, too many or wrong is one that somebody has to mean, here too."""
    assert written(RUN_ROWS, RunState, RunEvent) == RUN_TABLE
    assert written(RANK_ROWS, RankState, RankEvent) == RANK_TABLE
    assert written(MEMBERSHIP_ROWS, Membership, MembershipEvent) == MEMBERSHIP_TABLE


def test_what_is_over_stays_over():
    """Neither an ended run nor a dead process comes back by anything but a new process."""
    for ended in (RunState.DONE, RunState.FAILED):
        assert {after for (state, _), after in RUN_TABLE.items() if state is ended} == {ended}
    for gone in NO_PROCESS_LEFT:
        leaves = {event for (state, event), after in RANK_TABLE.items() if state is gone != after}
        assert leaves == {RankEvent.SPAWNED}
    trains = {state for (state, _), after in RANK_TABLE.items() if after is RankState.TRAINING}
    assert trains == {RankState.FORMING}, "nobody trains in a generation that it has not formed"


def test_every_pair_of_the_run_table_moves_or_raises():
    """A pair is either a row of the table or an error that names both; nothing is half there."""
    for state, event in product(RunState, RunEvent):
        machine = Machine(RUN_TABLE, state)
        if (state, event) in RUN_TABLE:
            assert machine.advance(event) is RUN_TABLE[state, event]
            assert machine.state is RUN_TABLE[state, event]
        else:
            with pytest.raises(ValueError, match=f"{event.value} is not possible in {state.value}"):
                machine.advance(event)
            assert machine.state is state


def test_every_pair_of_the_rank_table_moves_or_raises():
    """The same for a rank's process."""
    for state, event in product(RankState, RankEvent):
        assert_moves_or_raises(RANK_TABLE, state, event)


def test_every_pair_of_the_membership_table_moves_or_raises():
    """And for its place in the world."""
    for state, event in product(Membership, MembershipEvent):
        assert_moves_or_raises(MEMBERSHIP_TABLE, state, event)


def assert_moves_or_raises(table, state, event):
    """A pair is either a row of the table or an error that leaves the state as it is."""
    machine = Machine(table, state)
    if (state, event) in table:
        assert machine.advance(event) is table[state, event]
    else:
        with pytest.raises(ValueError, match="is not possible"):
            machine.advance(event)
        assert machine.state is state


def test_a_rank_may_die_in_every_state():
    """SIGKILL asks nobody: a live rank's exit is possible everywhere, and who had finished is no loss."""
    for state in {*RankState} - {*NO_PROCESS_LEFT}:
        after = RankState.ENDED if state is RankState.FINISHED else RankState.DEAD
        assert RANK_TABLE[state, RankEvent.EXITED] is after


def test_a_rank_may_be_aborted_and_killed_in_every_state():
    """The supervisor acts on a whole generation without asking who is where."""
    asked = {*product(RankState, (RankEvent.ABORT_SENT, RankEvent.KILL_SENT))}
    assert asked - RANK_TABLE.keys() == set()


def test_a_killed_rank_does_nothing_any_more_but_end():
    """Whatever it still says was sent before: it never joins, and counts only if it had finished."""
    after = {row for (state, _), row in RANK_TABLE.items() if state is RankState.KILLING}
    assert after == {RankState.KILLING, RankState.FINISHED, RankState.DEAD}


def test_a_dropped_rank_comes_back_only_by_being_taken_back():
    """It is in no generation before that, whatever becomes of its processes meanwhile."""
    back = {
        event
        for (state, event), after in MEMBERSHIP_TABLE.items()
        if state not in IN_WORLD and after in IN_WORLD
    }
    assert back == {MembershipEvent.TAKEN_BACK}
    assert {state for state, event in MEMBERSHIP_TABLE if event is MembershipEvent.DROPPED} == set(
        IN_WORLD
    )


def test_a_run_may_be_given_up_unless_it_is_done():
    """There is always a way out but from success."""
    for state in {*RunState} - {RunState.DONE}:
        assert RUN_TABLE[state, RunEvent.GAVE_UP] is RunState.FAILED
    assert (RunState.DONE, RunEvent.GAVE_UP) not in RUN_TABLE


def test_an_impossible_event_shows_the_history():
    """The error carries what led there, since the moment itself cannot be seen again."""
    machine = Machine(RANK_TABLE, RankState.DEAD)
    machine.advance(RankEvent.SPAWNED)
    with pytest.raises(ValueError, match="dead -spawned-> starting"):
        machine.advance(RankEvent.GOT_FORMED)
