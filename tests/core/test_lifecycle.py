"""The state tables of a run and of a rank."""

from __future__ import annotations

import pytest

from ddp_runner.core.lifecycle import (
    RANK_TABLE,
    RUN_TABLE,
    Machine,
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
            spawned   got_ready  form_sent  got_formed  abort_sent  abort_heard  got_finished  exited
starting    -         ready      -          -           same        -            -             dead
ready       -         -          forming    -           same        same         finished      dead
forming     -         ready      -          training    aborting    -            -             dead
training    -         ready      -          -           aborting    -            finished      dead
aborting    -         ready      -          same        same        leaving      finished      dead
leaving     -         ready      -          same        same        same         finished      dead
finished    -         -          -          -           same        same         -             dead
dead        starting  -          -          -           same        -            -             -
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


def test_what_is_over_stays_over():
    """Neither an ended run nor a dead process comes back by anything but a new process."""
    for ended in (RunState.DONE, RunState.FAILED):
        assert {after for (state, _), after in RUN_TABLE.items() if state is ended} == {ended}
    leaves = {
        event for (state, event), after in RANK_TABLE.items() if state is RankState.DEAD != after
    }
    assert leaves == {RankEvent.SPAWNED}
    trains = {state for (state, _), after in RANK_TABLE.items() if after is RankState.TRAINING}
    assert trains == {RankState.FORMING}, "nobody trains in a generation that it has not formed"


@pytest.mark.parametrize("state", list(RunState))
@pytest.mark.parametrize("event", list(RunEvent))
def test_every_pair_of_the_run_table_moves_or_raises(state, event):
    """A pair is either a row of the table or an error that names both; nothing is half there."""
    machine = Machine(RUN_TABLE, state)
    if (state, event) in RUN_TABLE:
        assert machine.advance(event) is RUN_TABLE[state, event]
        assert machine.state is RUN_TABLE[state, event]
    else:
        with pytest.raises(ValueError, match=f"{event.value} is not possible in {state.value}"):
            machine.advance(event)
        assert machine.state is state


@pytest.mark.parametrize("state", list(RankState))
@pytest.mark.parametrize("event", list(RankEvent))
def test_every_pair_of_the_rank_table_moves_or_raises(state, event):
    """The same for a rank."""
    machine = Machine(RANK_TABLE, state)
    if (state, event) in RANK_TABLE:
        assert machine.advance(event) is RANK_TABLE[state, event]
    else:
        with pytest.raises(ValueError, match="is not possible"):
            machine.advance(event)


@pytest.mark.parametrize("state", [s for s in RankState if s is not RankState.DEAD])
def test_a_rank_may_die_in_every_state(state):
    """SIGKILL asks nobody: a live rank's exit is possible everywhere."""
    assert RANK_TABLE[state, RankEvent.EXITED] is RankState.DEAD


@pytest.mark.parametrize("state", list(RankState))
def test_an_abort_may_be_sent_to_a_rank_in_every_state(state):
    """The supervisor aborts a whole generation without asking who is where."""
    assert (state, RankEvent.ABORT_SENT) in RANK_TABLE


@pytest.mark.parametrize("state", [s for s in RunState if s is not RunState.DONE])
def test_a_run_may_be_given_up_unless_it_is_done(state):
    """There is always a way out but from success."""
    assert RUN_TABLE[state, RunEvent.GAVE_UP] is RunState.FAILED
    assert (RunState.DONE, RunEvent.GAVE_UP) not in RUN_TABLE


def test_an_impossible_event_tells_the_history():
    """The error carries what led there, since the moment itself cannot be seen again."""
    machine = Machine(RANK_TABLE, RankState.DEAD)
    machine.advance(RankEvent.SPAWNED)
    with pytest.raises(ValueError, match="dead -spawned-> starting"):
        machine.advance(RankEvent.GOT_FORMED)
