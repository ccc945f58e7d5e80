"""The quarantine: which sample stands in for a bad one, and how ranks come to know it."""

from __future__ import annotations

import json

import pytest

from ddp_runner.data.quarantine import Quarantine, QuarantineFullError

SIZE = 40


def make(seed=7, bad_max=5):
    return Quarantine(seed=seed, dataset_size=SIZE, bad_max=bad_max)


def add(quarantine, index):
    return quarantine.add(index, reason="broken", step=3, rank=1)


def test_good_samples_stand_for_themselves():
    """Control: nothing is replaced that was not found bad."""
    quarantine = make()
    add(quarantine, 4)
    assert [quarantine.stand_in(i) for i in range(SIZE) if i != 4] == [
        i for i in range(SIZE) if i != 4
    ]


def test_the_stand_in_is_the_same_for_ever():
    """It depends on seed and index only, so a resumed run and another version continue it."""
    quarantine = make()
    assert [add(quarantine, index) for index in (0, 1, 2)] == [37, 38, 36]
    assert add(make(seed=8), 0) != 37


def test_the_stand_in_does_not_depend_on_what_else_is_known():
    """In whatever order ranks find bad samples, they end with the same stand-ins."""
    first, second = make(bad_max=SIZE), make(bad_max=SIZE)
    bad = [*range(0, SIZE, 2)]
    at_once = [add(first, index) for index in bad]
    for index in reversed(bad):
        add(second, index)
    found = [first.stand_in(index) for index in bad]
    assert found == [second.stand_in(index) for index in bad]
    assert not set(found) & set(bad)
    kept = [
        (before, after) for before, after in zip(at_once, found, strict=True) if before not in bad
    ]
    assert len(kept) > 2
    assert all(before == after for before, after in kept), "while fewer were known"


def test_ranks_share_one_file(tmp_path):
    """What one rank finds, the others take over; it is written once, with all that people ask for."""
    path = tmp_path / "quarantine.jsonl"
    ours, theirs = make(), make()
    ours.attach(path, run_id="r1")
    theirs.attach(path, run_id="r1")
    replacement = add(ours, 4)
    assert add(theirs, 4) == replacement
    theirs.refresh()
    assert theirs.stand_in(4) == replacement
    (line,) = path.read_text().splitlines()
    record = json.loads(line)
    assert record == {
        "run_id": "r1", "index": 4, "reason": "broken", "step": 3, "rank": 1,
        "replacement": replacement,
    }  # fmt: skip


def test_a_torn_line_and_another_run_are_passed_over(tmp_path):
    """Another run in the same folder has its own data; a cut-off line is no knowledge."""
    path = tmp_path / "quarantine.jsonl"
    path.write_text('{"run_id": "old", "index": 5, "reason": "x"}\n{"run_id": "r1", "ind')
    quarantine = make()
    quarantine.attach(path, run_id="r1")
    assert len(quarantine) == 0


def test_another_stage_of_the_run_has_samples_of_its_own(tmp_path):
    """Its data are others: what is bad there is not bad here."""
    path = tmp_path / "quarantine.jsonl"
    before, after, beside = make(), make(), make()
    before.attach(path, run_id="r1", stage="pre 1f")
    add(before, 4)
    after.attach(path, run_id="r1", stage="tune 2e")
    beside.attach(path, run_id="r1", stage="pre 1f")
    assert (len(after), len(beside)) == (0, 1)
    assert json.loads(path.read_text())["stage"] == "pre 1f"


def test_a_checkpoint_carries_it():
    """With another log folder the record in the state is enough."""
    before, after = make(), make()
    replacement = add(before, 4)
    after.merge(json.loads(json.dumps(before.to_record())))
    assert after.stand_in(4) == replacement


def test_the_budget_is_for_all_ranks(tmp_path):
    """What others have replaced counts, and a message names the setting."""
    path = tmp_path / "quarantine.jsonl"
    ours, theirs = make(bad_max=1), make(bad_max=1)
    ours.attach(path, run_id="r1")
    theirs.attach(path, run_id="r1")
    add(ours, 4)
    with pytest.raises(QuarantineFullError, match="max_bad_samples=1"):
        add(theirs, 5)
    with pytest.raises(QuarantineFullError, match="on_bad_sample=substitute"):
        add(make(bad_max=0), 5)
