"""What an incident says of its faults once everybody has answered."""

from __future__ import annotations

import pytest

from ddp_runner.kernel.recovery.incident import OpenIncident
from ddp_runner.kernel.rules.faults import Fault, FaultKind


@pytest.mark.parametrize(
    ("begun", "note"),
    [
        ({0: 2, 1: 1, 2: 2}, "; collectives begun in this step: rank 1 1, every other 2"),
        ({0: 2, 1: 0, 2: 2}, ""),
        ({0: 2, 1: 2, 2: 2}, ""),
        ({0: 2, 2: 2}, ""),
    ],
    ids=["in one of its own", "in none", "in the same one", "it does not answer"],
)
def test_a_hung_rank_that_waits_in_a_collective_is_reported_as_that(begun, note):
    """Only where it has begun one: who sleeps in its own code is behind the others in any case."""
    hung = Fault(kind=FaultKind.RANK_HUNG, rank=1, step=3, cause="rank 1 hung")
    ended = Fault(kind=FaultKind.RANK_KILLED, rank=1, step=3, cause="rank 1 killed")
    since = {rank: (3, count) for rank, count in begun.items()}
    incident = OpenIncident(
        faults=[hung], began_s=0.0, event_id=1, collectives=since, ended={1: ended}
    )
    [reported] = incident.explained_faults()
    assert (reported.kind, reported.cause) == (FaultKind.RANK_HUNG, f"rank 1 hung{note}")


STUCK = Fault(kind=FaultKind.COLLECTIVE_STUCK, rank=-1, step=3, cause="every rank has waited")


@pytest.mark.parametrize(
    ("begun", "others", "is_disagreement"),
    [
        ({0: (3, 2), 1: (3, 1), 2: (3, 2)}, [], True),
        ({0: (3, 2), 1: (3, 2), 2: (3, 2)}, [], False),
        ({0: (4, 0), 1: (3, 2), 2: (4, 0)}, [], False),
        (
            {0: (3, 2), 1: (3, 1), 2: (3, 2)},
            [Fault(kind=FaultKind.RANK_HUNG, rank=1, step=3, cause="did not leave")],
            False,
        ),
    ],
    ids=["one is elsewhere", "all are there", "a step apart", "one hangs"],
)
def test_ranks_disagree_where_they_have_begun_different_collectives_of_one_step(
    begun, others, is_disagreement
):
    """Who has committed the step counts again; with a rank that hangs it is known what they wait for."""
    incident = OpenIncident(
        faults=[STUCK, *others], began_s=0.0, event_id=1, collectives=begun, ended={}
    )
    reported = incident.explained_faults()[0]
    assert reported.is_disagreement is is_disagreement
    assert ("not in the same one" in reported.cause) is is_disagreement
