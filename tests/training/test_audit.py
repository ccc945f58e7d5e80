"""Lines that a rank has not written because it died of a step that the others committed."""

from __future__ import annotations

import json

import pytest

from ddp_runner.config import from_flat
from ddp_runner.data.order import SampleOrder, share
from ddp_runner.data.quarantine import Quarantine
from ddp_runner.training.audit import (
    GenerationMembers,
    audit_path,
    complete_audits,
    open_audit,
    who_completes,
)

ORDER = SampleOrder(seed=3, dataset_size=24, global_batch_size=6)
CREW = GenerationMembers(generation=4, slots=(0, 2), first_step=5)


@pytest.fixture
def settings(tmp_path):
    return from_flat({"log_dir": str(tmp_path), "audit": True})


def write(settings, slot, *steps, torn=""):
    file = open_audit(settings, slot, warn=pytest.fail)
    for step in steps:
        file.write(generation=4, step=step, epoch=0, indices=[step], loss=1.0)
    file.close()
    with audit_path(settings, slot).open("a") as raw:
        raw.write(torn)


def records(settings, slot):
    return [json.loads(line) for line in audit_path(settings, slot).read_text().splitlines()]


def complete(settings, *, step, members=CREW, quarantine=None, slots=CREW.slots):
    complete_audits(
        settings,
        members,
        slots=slots,
        step=step,
        order=ORDER,
        quarantine=a_quarantine() if quarantine is None else quarantine,
        loss=0.5,
        warn=pytest.fail,
    )


def a_quarantine():
    return Quarantine(seed=0, dataset_size=ORDER.dataset_size, bad_max=1)


@pytest.mark.parametrize("torn", ["", '{"generation": 4, "st'], ids=["whole", "torn"])
def test_a_missing_line_of_the_newest_step_is_written_later(settings, torn):
    """The dead rank's samples are in the weights, so they are in its audit; a torn line makes room."""
    write(settings, 0, 6, 7)
    write(settings, 2, 6, torn=torn)
    complete(settings, step=7)
    (_, added) = records(settings, 2)
    assert (added["step"], added["generation"], added["epoch"]) == (7, 4, 1)
    assert added["indices"] == share(ORDER.indices(6), rank=1, world_size=2).tolist()
    assert float.fromhex(added["loss_hex"]) == 0.5
    assert len(records(settings, 0)) == 2


def test_a_replaced_sample_stands_in_the_line(settings):
    """What was trained on counts, not what the order names."""
    quarantine = a_quarantine()
    first, *others = share(ORDER.indices(6), rank=1, world_size=2).tolist()
    instead = quarantine.add(first, reason="broken", step=6, rank=1)
    write(settings, 2, 6)
    complete(settings, step=7, quarantine=quarantine)
    assert records(settings, 2)[-1]["indices"] == [instead, *others]


def test_a_rank_that_died_before_its_first_line_gets_its_file(settings):
    """The first step of a run may be the one."""
    write(settings, 0, 6)
    complete(settings, step=6)
    assert [record["step"] for record in records(settings, 2)] == [6]


@pytest.mark.parametrize(
    ("members", "step"),
    [(None, 7), (CREW, 5), (CREW, 0)],
    ids=["new process", "no step yet", "empty"],
)
def test_nothing_is_written_for_steps_of_other_generations(settings, members, step):
    """Control: who joined since was no part of the step."""
    write(settings, 0, 4)
    complete(settings, step=step, members=members)
    assert [record["step"] for record in records(settings, 0)] == [4]
    assert not audit_path(settings, 2).exists()


def test_who_writes_on_another_machine_is_left_to_that(settings):
    """Its file is in another folder: here there would be a second one of that name."""
    write(settings, 0, 6)
    complete(settings, step=7, slots=(0,))
    assert [record["step"] for record in records(settings, 0)] == [6, 7]
    assert not audit_path(settings, 2).exists()


@pytest.mark.parametrize("line", ["not ours", "[]", '{"step": null}', "{}"])
def test_a_line_that_is_none_of_ours_ends_no_repair(settings, line):
    """Whoever may write in the folder can put one there; ours is written after it."""
    write(settings, 0, 7)
    write(settings, 2, torn=f"{line}\n")
    complete(settings, step=7)
    assert json.loads(audit_path(settings, 2).read_text().splitlines()[1])["step"] == 7


def test_a_step_that_is_done_once_more_is_marked(settings):
    """By the same process after a roll-back, and by one of another launch, also a second time."""
    write(settings, 0, 6, 7, 8, 7)
    write(settings, 0, 7)
    write(settings, 0, 8, 9)
    marks = [(one["step"], one.get("again", False)) for one in records(settings, 0)]
    once, again = [6, 7, 8], [7, 7, 8]
    assert marks == [(n, False) for n in once] + [(n, True) for n in again] + [(9, False)]


@pytest.mark.parametrize(
    ("folders", "steps", "expected"),
    [
        ((0, 0, 0, 0), (7, 7, -1, 7), {0: 0}),
        ((0, 0, 0, 0), (-1, 7, 7, 7), {0: 1}),  # who is the source
        ((0, 0, 1, 1), (7, 7, -1, 7), {0: 0, 1: 3}),
        ((0, 0, 1, 1), (6, -1, 7, 7), {1: 2}),
        ((0, 0, 1, 1), (7, 7, -1, -1), {0: 0}),
        ((0, 0, 1, 0), (7, 7, 7, 7), {0: 0, 1: 2}),  # some share a folder
    ],
)
def test_each_folder_of_logs_has_one_rank_that_completes_it(folders, steps, expected):
    """The lowest that is at the newest step: it has made that, and nobody else writes there."""
    assert who_completes(folders, steps=steps) == expected
