"""Where a run of stages begins, goes on, and counts from."""

from __future__ import annotations

import pytest

from ddp_runner.core.run_stages import (
    Begin,
    Found,
    StageOfFile,
    StagePlace,
    begin_at,
    changed_stages,
    is_first_generation,
    refused_line,
    stage_to_enter,
)
from ddp_runner.core.settings import CheckpointSettings, LogSettings
from ddp_runner.core.step_schedule import due_after, last_save_due, run_length
from ddp_runner.data.order import SampleOrder
from ddp_runner.data.stream import StreamOrder
from ddp_runner.kernel.rules.errors import BadInputError

NAMES = ("pre", "tune", "last")
NEEDS_BEFORE = (True, False, False)


@pytest.mark.parametrize("number", [0, 1])
def test_a_refusal_names_its_stage_and_how_to_go_on(number):
    """Once; how to go on only where something was trained."""
    place = StagePlace(names=NAMES, number=number)
    whose = f"stage {place.name}: "
    assert refused_line(place, "wrong", has_trained=False) == f"{whose}wrong"
    assert refused_line(place, f"{whose}wrong", has_trained=False) == f"{whose}wrong"
    said = f"{whose}wrong; correct the stage and run the same command again to resume with it"
    assert refused_line(place, "wrong", has_trained=True) == said


def of(number, first_step, *, names=NAMES, digests=()):
    until = number + 1
    return StageOfFile(
        number=number, first_step=first_step, names=names[:until], digests=digests[:until]
    )


def found(step, stage):
    return Found(step=step, stage=stage, where=f"c/step_{step}.pt")


def begin(*files, wanted="", resume="auto", names=NAMES, alone=NEEDS_BEFORE):
    return begin_at(names, wanted=wanted, resume=resume, found=files, alone=alone)


def refusal(*files, **how):
    with pytest.raises(BadInputError) as caught:
        begin(*files, **how)
    assert str(caught.value).isprintable()
    return str(caught.value)


NEWEST = (found(15, of(1, 12)), found(12, of(0, 0)), found(10, of(0, 0)))


def test_a_launch_goes_on_in_the_stage_of_the_newest_checkpoint():
    """Without any it begins with the first; also where that stage is over, which its ranks find."""
    assert begin() == Begin(number=0)
    assert begin(*NEWEST) == Begin(number=1, first_step=12)
    assert begin(*NEWEST[1:]) == Begin(number=0)
    assert begin(*NEWEST, resume="none") == Begin(number=0)


def test_a_stage_that_is_asked_for_begins_with_the_one_before():
    """A run that has come so far goes on; with resume=none it begins there again."""
    assert begin(*NEWEST[2:], wanted="tune") == Begin(number=1, first_step=10)
    assert begin(*NEWEST, wanted="tune") == Begin(number=1, first_step=12)
    assert begin(*NEWEST, wanted="pre") == begin(*NEWEST)
    assert begin(*NEWEST, wanted="tune", resume="none") == Begin(number=1, first_step=12)
    assert begin(*NEWEST, wanted="last", resume="none") == Begin(number=2, first_step=15)
    assert begin(wanted="tune", alone=(True, True, False)) == Begin(number=1)
    alone = (True, False, True)
    assert begin(*NEWEST[2:], wanted="last", alone=alone) == Begin(number=2, first_step=10)


def test_what_cannot_begin_is_one_line_with_the_cure():
    """Nothing to begin with, another list, a run without stages."""
    line = refusal(wanted="tune")
    assert "of which there is no checkpoint: begin without --stage" in line
    line = refusal(*NEWEST, names=("first", "tune"), alone=(True, False))
    assert (
        "is of stage tune, after the stages pre, tune, and the stages are first, tune now" in line
    )
    assert "--resume none" in refusal(*NEWEST, names=("tune", "pre"), alone=(True, False))
    assert "is of a run without stages" in refusal(found(5, None))


def test_stages_to_come_may_be_others():
    """What a checkpoint knows ends with its own."""
    assert begin(*NEWEST, names=("pre", "tune", "more", "most")).number == 1
    assert begin(*NEWEST, names=("pre", "tune")).number == 1


def test_stages_that_are_over_and_have_changed_are_named():
    """The one that is trained has its own comparison, and later ones are not made yet."""
    place = StagePlace(names=NAMES, number=2, first_step=20, digests=("a", "b", "c"))
    assert changed_stages(place, of(2, 20, digests=("a", "x", "y"))) == ("tune",)
    assert changed_stages(place, of(2, 20, digests=("a", "b", "y"))) == ()


@pytest.mark.parametrize(
    ("step", "number", "first_step", "entered"),
    [
        (15, 1, 12, None),  # its own
        (12, 0, 0, None),  # with which it begins
        (10, 0, 0, 0),  # its begin is damaged
        (30, 2, 20, 2),  # whose manifest was missing
        (15, 1, 10, 1),  # which has begun elsewhere
    ],
)
def test_a_checkpoint_of_another_stage_leads_there(step, number, first_step, entered):
    """Unless the stage begins with it."""
    place = StagePlace(names=NAMES, number=1, first_step=12)
    stage = stage_to_enter(place, found(step, of(number, first_step)))
    assert (None if stage is None else stage.number) == entered


def test_what_a_file_says_is_read_back():
    """A record of a stranger, or a torn one, says nothing."""
    place = StagePlace(names=NAMES, number=1, first_step=12, digests=("a", "b", "c"))
    record = StageOfFile.of(place).to_record()
    assert (record["name"], record["names"]) == ("tune", ["pre", "tune"])
    assert StageOfFile.from_about({"stage": record}) == StageOfFile.of(place)
    for other in ({}, {"stage": "tune"}, {"stage": {**record, "number": 7}}, {"stage": {}}):
        assert StageOfFile.from_about(other) is None


def test_what_is_known_of_data_is_of_a_stage_with_its_settings():
    """Another name or digest is another key."""
    places = [
        StagePlace(names=NAMES, number=number, digests=digests)
        for number, digests in ((0, ("a", "b")), (1, ("a", "b")), (1, ("a", "c")))
    ]
    assert len({place.data_key for place in places}) == 3
    assert is_first_generation(1, None)
    assert not is_first_generation(2, None)
    later = StagePlace(names=NAMES, number=1, first_generation=4)
    assert [is_first_generation(number, later) for number in (1, 4, 5)] == [False, True, False]


FIRST = 37  # not a multiple of anything


def test_epochs_and_what_is_due_count_from_the_begin_of_a_stage():
    """Whatever comes before; checkpoints for good are of the run's own steps."""
    log = LogSettings(evaluate_every_steps=4, log_interval=3)
    checkpoint = CheckpointSettings(save_every_steps=6, keep_every=0)
    alone = run_length(steps_per_epoch=5, epochs=3, max_steps=0)
    staged = run_length(steps_per_epoch=5, epochs=3, max_steps=0, first_step=FIRST)
    assert (staged.total_steps, staged.own_steps, staged.epochs) == (FIRST + 15, 15, 3)
    for step in range(16):
        due = due_after(FIRST + step, staged, log=log, checkpoint=checkpoint, replica_check_steps=7)
        assert due == due_after(step, alone, log=log, checkpoint=checkpoint, replica_check_steps=7)
        assert staged.epoch_of(FIRST + step) == alone.epoch_of(step)
        before = last_save_due(step, alone, checkpoint)
        assert last_save_due(FIRST + step, staged, checkpoint) == FIRST + before
    kept = CheckpointSettings(save_every_steps=0, save_interval=0, keep_every=10)
    saves = [due_after(s, staged, log=log, checkpoint=kept).save for s in range(FIRST, FIRST + 15)]
    assert [FIRST + place for place, is_due in enumerate(saves) if is_due] == [40, 50]
    assert last_save_due(FIRST + 5, staged, kept) == 40


@pytest.mark.parametrize("kind", [SampleOrder, StreamOrder])
def test_a_stage_takes_the_samples_of_a_run_of_its_own(kind):
    """In the same order, from the first epoch on, by any rank; steps before it are none of it."""
    alone = kind(seed=3, dataset_size=50, global_batch_size=8)
    staged = kind(seed=3, dataset_size=50, global_batch_size=8, first_step=FIRST)
    for step in range(20):
        assert staged.position(FIRST + step) == alone.position(step)
        assert staged.indices(FIRST + step).tolist() == alone.indices(step).tolist()
        mine = staged.share_of(FIRST + step, rank=1, world_size=3)
        assert mine.tolist() == alone.share_of(step, rank=1, world_size=3).tolist()
    with pytest.raises(ValueError, match=f"at least {FIRST}"):
        staged.position(FIRST - 1)
