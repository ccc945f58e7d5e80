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
