"""Finds the start of a stage: its weights and counts, or the other stage in which the run resumes."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import NoReturn

from ddp_runner.checkpoint.catalog import Catalog
from ddp_runner.checkpoint.manifest import Manifest, checkpoint_name
from ddp_runner.checkpoint.store import CheckpointStore, Loaded
from ddp_runner.config.ways_on import resume_as_given
from ddp_runner.core.run_stages import (
    AVERAGE,
    BEST,
    Found,
    StageOfFile,
    begins_with,
    changed_stages,
    refuse_other_list,
    stage_to_enter,
    steps_before,
)
from ddp_runner.core.settings import Settings
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.step.runtime import Runtime
from ddp_runner.kernel.wire.messages import OtherStage
from ddp_runner.system.launch_folder import at_launch
from ddp_runner.training.state import TrainState


class OtherStageError(Exception):
    """The newest checkpoint that verifies is of another stage of this run, which goes on from there."""

    def __init__(self, stage: StageOfFile) -> None:
        super().__init__(f"the newest checkpoint is of stage {stage.name}")
        self.stage = stage


# INVARIANT own-stage: a rank trains from a checkpoint of its own stage, or begins that stage with the one that
# it begins at; any other has all ranks start again in the stage that it is of.
# Broken if: a checkpoint is restored without a look at its stage.
# Guarded by: test_a_run_goes_on_in_the_stage_it_was_stopped_in.
def of_this_stage(settings: Settings, loaded: Loaded | None) -> Loaded | None:
    """``loaded`` where the run goes on from it; None where the stage, or the run, begins.

    Raises OtherStageError where it is of another stage, and BadInputError where it is of a run of other ones.
    """
    if loaded is None:
        return None
    place, where, resume = settings.stage, str(loaded.path), settings.run.resume
    stage = StageOfFile.from_about(loaded.manifest.about)
    if place is None:
        if stage is None:
            return loaded
        expected = f"{where} is of stage {stage.name} of a run of stages: give those, or take it as --init-from"
        raise BadInputError(*resume_as_given(resume), expected)
    if stage is None:
        expected = f"{where} is of a run without stages: take it as the first one's init_from"
        raise BadInputError(*resume_as_given(resume), expected)
    refuse_other_list(place.names, stage, where=where, resume=resume)
    found = Found(step=loaded.manifest.step, stage=stage, where=where)
    if (other := stage_to_enter(place, found)) is not None:
        raise OtherStageError(other)
    return None if begins_with(place, found) else loaded


def is_of_stage(settings: Settings, loaded: Loaded) -> bool:
    """Return True if a state was captured in the stage of ``settings``; always, without stages."""
    stage, place = StageOfFile.from_about(loaded.manifest.about), settings.stage
    if place is None or stage is None:
        return place is None and stage is None
    return (stage.number, stage.first_step) == (place.number, place.first_step)


def note_changed_stages(settings: Settings, state: TrainState, loaded: Loaded) -> None:
    """Have ``state`` keep which stages that are over have other settings now than they were made with."""
    stage = StageOfFile.from_about(loaded.manifest.about)
    if settings.stage is None or stage is None:
        return
    lines = [
        f"stage {name} was made with other settings than it has now"
        for name in changed_stages(settings.stage, stage)
    ]
    state.changes = tuple(dict.fromkeys([*state.changes, *lines]))


def begin_of(settings: Settings) -> Manifest | None:
    """Return the manifest of the checkpoint with which the stage begins; None if the run begins with it."""
    if not steps_before(settings.stage):
        return None
    folder = at_launch(settings.run.checkpoint_dir)
    for entry in Catalog(folder).entries():
        if entry.step == steps_before(settings.stage) and entry.manifest is not None:
            return entry.manifest
    path = folder / checkpoint_name(steps_before(settings.stage))
    found = CheckpointStore(folder, keep_last=1).load(str(path))
    return None if found is None else found.manifest


@contextlib.contextmanager
def of_its_stage(settings: Settings) -> Iterator[None]:
    """Name the stage in a BadInputError that is raised while its start weights are read."""
    try:
        yield
    except BadInputError as error:
        place = settings.stage
        if place is None or not place.begins_with or error.option != "--init-from":
            raise
        option = f"stage {place.name}: init_from"
        expected = f"{error.value}: {error.expected}"
        raise BadInputError(option, place.begins_with, expected) from error


def go_on_counting(settings: Settings, state: TrainState) -> None:
    """Have a state that begins a stage count on from the stage before."""
    before = begin_of(settings)
    if before is None:
        return
    state.samples, state.changes = before.samples, tuple(before.changes)
    tokens = before.about.get("tokens")
    if isinstance(tokens, (int, float)) and not isinstance(tokens, bool):
        state.tokens = float(tokens)
    place = settings.stage
    if place is not None and place.begins_with.removesuffix(AVERAGE) == BEST:
        catalog = Catalog(at_launch(settings.run.checkpoint_dir))
        if (taken := catalog.best(place.before)) is not None:
            gone = catalog.best_is_gone(taken, place.before)
            state.changes += (f"stage {place.name} begins with the best: {gone}",) if gone else ()


def leave_for(stage: StageOfFile, runtime: Runtime) -> NoReturn:
    """Have all ranks start again in that stage: this process waits for its end."""
    rank = runtime.rank_info.rank
    runtime.report(OtherStage(rank=rank, number=stage.number, first_step=stage.first_step))
    while True:
        signal.pause()
