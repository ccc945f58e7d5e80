"""The launches before: their faults and the proof of their repairs, by what the journal says of them."""

from __future__ import annotations

import pytest

from ddp_runner.observe.journal import Journal
from ddp_runner.supervisor.reporting.recorder import faults_before, has_open_repairs


def launch(journal, *, run_id="a", took_over=False, kinds=("rank_killed",)):
    journal.write("run_begins", run_id=run_id, **({"took_over": True} if took_over else {}))
    for rank, kind in enumerate(kinds):
        event = {
            "kind": kind,
            "rank": rank,
            "step": 7,
            "text": f"rank {rank} is lost",
            "origin": "own",
        }
        cause = journal.write("fault", **event, host="b", generation=2)
        journal.write("fault", cause=cause, **{**event, "kind": "collective_failed", "rank": 9})
        plan = {"plan": "ReplaceRanks", "culprit": rank, "kind": kind, "victims": [9]}
        journal.write("plan", cause=cause, **plan, replaced=[rank], dropped=[])
        journal.write("repaired", cause=cause, steps_lost=2, seconds=0.5)
    journal.write("fault_tolerated", kind="storage_failed", rank=0, step=9, text="full", action="")


@pytest.fixture
def journal(tmp_path):
    made = Journal(tmp_path / "events.jsonl")
    yield made
    made.close()


def found(tmp_path, **how):
    return [
        (one.kind, one.rank, one.launches_ago)
        for one in faults_before(tmp_path / "events.jsonl", run_id=how.get("run_id", "a"))
    ]


def test_faults_of_a_chain_of_take_overs_are_known(tmp_path, journal):
    """Back to the launch that began from a checkpoint; what that one resumed is not part of it."""
    launch(journal, kinds=("rank_raised",))
    launch(journal)
    launch(journal, took_over=True, kinds=("rank_exited", "rank_hung"))
    assert found(tmp_path) == [
        ("rank_killed", 0, 2),
        ("rank_exited", 0, 1),
        ("rank_hung", 1, 1),
    ]
    (first, *_) = faults_before(tmp_path / "events.jsonl", run_id="a")
    assert (first.step, first.host, first.generation, first.victims) == (7, "b", 2, (9,))
    assert (first.steps_lost, first.seconds) == (2, {"total": 0.5})


def test_another_run_in_the_same_folder_has_no_part_in_it(tmp_path, journal):
    """Control; nor has a journal that is not there, or was torn."""
    launch(journal, run_id="b")
    assert found(tmp_path) == []
    assert faults_before(tmp_path / "none.jsonl", run_id="a") == ()
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event": "run_beg')
    assert found(tmp_path, run_id="b") == [("rank_killed", 0, 1)]


@pytest.mark.parametrize(
    ("events", "is_open"),
    [
        ([("world_formed", {})], False),
        ([("repairs_proved", {"proved": 0, "repairs": 1})], True),
        ([("repairs_proved", {"proved": proved, "repairs": 2}) for proved in (0, 2)], False),
        # A launch that has not formed changes nothing; one that has formed owes what it says itself.
        ([("repairs_proved", {"proved": 0, "repairs": 1}), ("run_begins", {"run_id": "a"})], True),
        (
            [
                ("repairs_proved", {"proved": 0, "repairs": 1}),
                ("run_begins", {"run_id": "a"}),
                ("world_formed", {}),
            ],
            False,
        ),
        ([("repairs_proved", {"proved": 0, "repairs": 1}), ("run_begins", {"run_id": "b"})], False),
    ],
)
def test_what_a_killed_launch_has_not_proved_is_in_its_journal(tmp_path, journal, events, is_open):
    """SIGKILL of the supervisor leaves no summary."""
    journal.write("run_begins", run_id="a")
    for event, fields in events:
        journal.write(event, **fields)
    assert has_open_repairs(tmp_path / "events.jsonl", run_id="a") == is_open
    assert not has_open_repairs(tmp_path / "none.jsonl", run_id="a")
