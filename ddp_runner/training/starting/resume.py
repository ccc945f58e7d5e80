"""Finds the checkpoint that a run begins with or rolls back to, compares it, and restores it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddp_runner import config
from ddp_runner.checkpoint.catalog import WORDS
from ddp_runner.checkpoint.entry_names import read_as
from ddp_runner.checkpoint.manifest import checkpoint_name
from ddp_runner.checkpoint.store import CheckpointStore, Loaded
from ddp_runner.core.settings import Settings
from ddp_runner.core.step_schedule import due_after
from ddp_runner.kernel.rules.classify import lacks_memory
from ddp_runner.kernel.rules.election import EMPTY_STEP
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.faults import FaultError
from ddp_runner.kernel.rules.phases import Stage
from ddp_runner.kernel.step.runtime import Runtime
from ddp_runner.system.launch_folder import as_given, at_launch
from ddp_runner.training.saves.save_room import open_slots
from ddp_runner.training.starting.changes import note_changes, tuning_of_changed
from ddp_runner.training.starting.fitting import check_weights, misfit, warn_of_values
from ddp_runner.training.starting.stage_begin import (
    begin_of,
    is_of_stage,
    note_changed_stages,
    of_this_stage,
)
from ddp_runner.training.starting.whole_state import (
    completed_from_begin,
    completed_in_run,
    note_begin,
)
from ddp_runner.training.state import Progress, TrainState
from ddp_runner.training.workload import TaskWorkload, Workload, nothing_left, start_fresh


def load_start(
    settings: Settings, workload: Workload, state: TrainState, store: CheckpointStore
) -> Loaded | None:
    """Fill ``state`` from the checkpoint that ``--resume`` names, or make it a fresh step 0.

    Raises BadInputError where there is none that was asked for by name, or where it is of another
    run, does not fit the model, or lies beyond the end.
    """
    resume, folder = settings.run.resume, settings.run.checkpoint_dir
    which = resume if resume in ("none", *WORDS) else str(at_launch(Path(resume).expanduser()))
    loaded = None if which == "none" else store.load(which, set_bad_aside=True)
    is_found, loaded = loaded is not None, of_this_stage(settings, loaded)
    if loaded is not None:
        where = str(as_given(loaded.path, folder))
        _refuse_other_resume_key(settings, workload, loaded, where=where)
        saved = completed_from_begin(settings, workload, state, loaded)
        _restore(settings, state, saved, where=where)
        _refuse_earlier_end(settings, workload, state, where=where)
        _forget_other_end(settings, workload, state)
        state.begun_step = state.committed_step
        state.is_rehearsed = False  # by another launch
        workload.complete_recipe(loaded.manifest.recipe)
        state.tuning = tuning_of_changed(state.tuning, settings, loaded, recipe=workload.recipe)
        note_changes(loaded, state, recipe=workload.recipe)
        note_changed_stages(settings, state, loaded)
        _note_best(settings, workload, state, store, loaded)
        return loaded
    if settings.run.resume in ("last", "best") and not is_found:
        raise config.no_checkpoint(settings.run.resume, store.directory)
    start_fresh(settings, state)
    note_begin(settings, workload, state)
    return None


def load_copy(
    settings: Settings,
    workload: Workload,
    state: TrainState,
    store: CheckpointStore,
    *,
    runtime: Runtime,
) -> Loaded | None:
    """Fill ``state`` from the copy that a rank of this launch has left in memory, where that is the newest.

    None where a file that verifies is newer, or there is no copy that is whole, or it does not fit.
    """
    slots = open_slots(runtime.rank_info)
    if slots is None or slots.newest_step is None:
        return None
    loaded, wrong = slots.load()
    for line in wrong:
        runtime.logger.warning(line)
    damaged = None if loaded is None else store.catalog.damaged_after(loaded.manifest.step)
    if loaded is None or damaged is None or not is_of_stage(settings, loaded):
        # INVARIANT one-course: what is gone back to lies on the course that the run has taken since.
        # Broken if: a state is taken from a file, and a copy in memory of a later step stays.
        # Guarded by: test_a_copy_that_is_damaged_is_refused.
        slots.clear()
        return None
    store.set_damaged_aside(damaged)
    saved = completed_in_run(settings, workload, state, store, loaded)
    try:
        _restore(
            settings, state, saved, where=str(as_given(loaded.path, settings.run.checkpoint_dir))
        )
    except BadInputError as error:
        slots.clear()
        # Nothing of a half is left where a file comes over it: without one, what is here begins nothing.
        if not store.catalog.entries():
            raise
        runtime.logger.warning(f"{error.expected}: the newest checkpoint file is taken instead")
        return None
    return replace(loaded, rejected=tuple((entry.path, why) for entry, why in damaged))


def leave_other_branch(
    settings: Settings, store: CheckpointStore, *, begun_from: str, say: Callable[[str], None]
) -> None:
    """Set aside what the run does not go on from, before it saves: a roll-back would read that.

    ``begun_from``: the file that was loaded, if one was. The newest has no other branch beside it.
    """
    if settings.run.resume in ("auto", "last"):
        return
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    origin = Path(begun_from) if begun_from else None
    aside = store.catalog.set_other_branch_aside(origin, stamp)
    if aside is not None:
        say(f"checkpoints that this run does not resume from were moved to {aside}")


def newest_to_restore(settings: Settings, state: TrainState, store: CheckpointStore) -> int:
    """The step that :func:`restore_newest` goes back to; EMPTY_STEP where there is none."""
    newest = max((entry.step for entry in store.catalog.to_go_back_to()), default=EMPTY_STEP)
    if newest != EMPTY_STEP:
        return newest
    named = _begun_from(settings, state)
    has_begin = state.begun_step == 0 if named is None else named.is_file()
    if has_begin:
        return state.begun_step
    return max((entry.step for entry in store.catalog.entries()), default=EMPTY_STEP)


# INVARIANT calm-to-go-back-to: a roll-back goes to a state that no skipped step came shortly before.
# Broken if: a best state that was kept all the same is still the newest when one is read.
# Guarded by: test_a_roll_back_passes_over_the_best_that_was_kept_amid_skips.
def _leave_amid_skipped(settings: Settings, state: TrainState, store: CheckpointStore) -> None:
    if len(store.catalog.to_go_back_to()) < len(store.catalog.entries()):
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        store.catalog.set_later_aside(newest_to_restore(settings, state, store), stamp)


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenUp:
    """The start of a process: ``loaded`` is None at the very first start, and if it loads nothing.

    ``run_id``: of the run that is resumed; empty where none is.
    """

    loaded: Loaded | None
    progress: Progress
    run_id: str = ""


def take_up(
    settings: Settings,
    workload: Workload,
    state: TrainState,
    store: CheckpointStore,
    *,
    runtime: Runtime,
    entering: Callable[[Stage], None],
) -> TakenUp:
    """Load what the run starts from, on the rank that does. Raises BadInputError for what does not fit."""
    progress = Progress()
    _leave_doubtful(store, runtime)
    if not runtime.rank_info.loads:
        return TakenUp(loaded=None, progress=progress)
    entering(Stage.CHECKPOINT)
    loaded = load_copy(settings, workload, state, store, runtime=runtime)
    if loaded is not None:
        progress.is_from_memory = True
        return TakenUp(loaded=loaded, progress=progress, run_id=loaded.manifest.run_id)
    loaded = load_start(settings, workload, state, store)
    if loaded is not None or state.begun_with:
        warn_of_values(state, runtime.logger.warning)
    if loaded is not None:
        progress.checkpoint = str(as_given(loaded.path, settings.run.checkpoint_dir))
        if loaded.path.parent.resolve() == store.directory.resolve():
            progress.checkpoint_step = state.committed_step  # else it is to be saved here
        return TakenUp(loaded=loaded, progress=progress, run_id=loaded.manifest.run_id)
    begin = begin_of(settings)
    if begin is None:
        return TakenUp(loaded=None, progress=progress)
    progress.checkpoint = str(Path(settings.run.checkpoint_dir) / begin.file)
    progress.checkpoint_step = state.committed_step
    return TakenUp(loaded=None, progress=progress, run_id=begin.run_id)


def _leave_doubtful(store: CheckpointStore, runtime: Runtime) -> None:
    """Set aside the later states after a roll-back, on disk and in the memory of this machine."""
    info = runtime.rank_info
    if info.not_after < 0:
        return
    slots = open_slots(info) if info.loads or info.local_rank == 0 else None
    if slots is not None:
        slots.clear()
    if info.loads:
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        aside = store.catalog.set_later_aside(info.not_after, stamp)
        if aside is not None:
            runtime.logger.warning(
                f"checkpoints after step {info.not_after:,} are in doubt; moved them to {aside}"
            )


def restore_newest(
    settings: Settings, workload: Workload, state: TrainState, store: CheckpointStore
) -> Loaded | None:
    """Back to this run's newest checkpoint that verifies; before its first one, to what it began with.

    What was learnt since then holds. Returns None where that is step 0. Raises FaultError
    (CHECKPOINT_BAD) where nothing is left.
    """
    tuning = state.tuning  # DDP and loader are made for it
    _leave_amid_skipped(settings, state, store)
    loaded = store.load("auto", set_bad_aside=True)
    named = _begun_from(settings, state)
    try:
        if loaded is None and named is not None:
            loaded = store.load(str(named))
        is_found, loaded = loaded is not None, of_this_stage(settings, loaded)
        if loaded is not None:
            state.restore(completed_in_run(settings, workload, state, store, loaded))
            _forget_other_end(settings, workload, state)
            state.begun_step = state.committed_step
            note_changes(loaded, state, recipe=workload.recipe)  # the file may be of before them
        elif state.begun_step == 0 or is_found:  # a stage begins with what was found
            state.restore(workload.first_state(settings, state, store))
        else:
            raise FaultError(nothing_left(f"no checkpoint is left in {store.directory}"))
    except BadInputError as error:
        # It was there when the run began: no word of the user's is wrong.
        none_yet = f"there is no checkpoint in {store.directory} yet"
        cause = f"{none_yet}, and the start weights of the run are gone ({error})"
        raise FaultError(nothing_left(cause)) from error
    state.tuning = tuning
    return loaded


# INVARIANT no-end-on-the-way: where a run is made longer, the evaluation at its old end counts for nothing that
# later steps follow from, unless the longer run evaluates there too.
# Broken if: a plateau, early stopping or the best knows of an evaluation that a run of that length has not made.
# Guarded by: test_the_evaluation_at_the_old_end_counts_only_where_it_is_due.
def _forget_other_end(settings: Settings, workload: Workload, state: TrainState) -> None:
    step, length = state.committed_step, workload.length
    due = due_after(step, length, log=settings.log, checkpoint=settings.checkpoint)
    if step < length.total_steps and not due.evaluate and not state.monitor.target_reached:
        state.forget_evaluation()


def is_complete(workload: Workload, state: TrainState) -> bool:
    """Return True if the run trains no further step from ``state``."""
    return state.committed_step >= workload.length.total_steps or (
        state.committed_step > 0 and (state.monitor.target_reached or state.improvement.is_over)
    )


def _begun_from(settings: Settings, state: TrainState) -> Path | None:
    """The file that was resumed by its path; where that is a folder, a newer one may be there now."""
    if settings.run.resume in WORDS:
        return None
    path = at_launch(Path(settings.run.resume).expanduser()).resolve()
    if state.begun_step == EMPTY_STEP:
        return path
    return (path if path.is_dir() else path.parent) / checkpoint_name(state.begun_step)


def _note_best(
    settings: Settings,
    workload: Workload,
    state: TrainState,
    store: CheckpointStore,
    loaded: Loaded,
) -> None:
    """Have ``state`` keep where ``--resume best`` goes on from another state than evaluations have found."""
    if settings.run.resume != "best":
        return
    taken = next((one for one in store.catalog.entries() if one.path == loaded.path), None)
    if taken is None:
        return
    if store.catalog.best_step() is None:
        expected = (
            f"no checkpoint in {store.directory} has a metric: give validation data, or use last"
        )
        raise BadInputError(*config.resume_as_given("best"), expected)
    gone = store.catalog.best_is_gone(taken)
    if not workload.monitor.by_evaluations:
        gone = f"step {taken.step:,} is the best checkpoint by its train_loss"
    if gone:
        state.changes = (*state.changes, f"{config.words_of(resume='best')}: {gone}")


def _refuse_other_resume_key(
    settings: Settings, workload: Workload, loaded: Loaded, *, where: str
) -> None:
    old = loaded.manifest.meaning
    # With the salts of the file, without which no secret could be compared.
    new = config.aligned(old, {**workload.resume_key, **config.task_resume_key(settings, like=old)})
    if changes := config.difference(old, new):
        # The recipe of a loop of one's own has no ranks, which its resume key has.
        devices = int(str(workload.recipe.get("ranks", 1))) * len(workload.devices)
        ways = config.ways_on(settings, old=old, new=new, world_size=devices)
        raise BadInputError(
            *config.resume_as_given(settings.run.resume),
            f"{where} is of a run with other settings ({'; '.join(changes)}); {ways}",
        )


def _refuse_earlier_end(
    settings: Settings, workload: Workload, state: TrainState, *, where: str
) -> None:
    """Nothing would be trained, and what would be called done is not what was asked for."""
    end, run = workload.length.total_steps, settings.run
    if state.committed_step <= end:
        return
    given: tuple[str, object] = ("run.steps()", "")
    if isinstance(workload, TaskWorkload):
        is_in_steps = bool(run.max_steps)
        given = ("--max-steps", run.max_steps) if is_in_steps else ("--epochs", run.epochs)
    raise BadInputError(
        *given,
        f"the run would end at step {end}, and {where} is at step {state.committed_step} already; "
        f"give a larger end, another run with {config.own_folder(settings)}, or start fresh with "
        f"{config.words_of(resume='none')}",
    )


def _restore(
    settings: Settings, state: TrainState, saved: Mapping[str, Any], *, where: str
) -> None:
    found = saved.get("model")
    if not isinstance(found, Mapping):
        raise BadInputError(*config.resume_as_given(where), "holds no model")
    weights = read_as(found, state.weights())
    relaid = [name for name in saved.get("relaid", []) if isinstance(name, str)]
    check_weights(
        weights, state, option=config.resume_as_given(where)[0], value=where, relaid=relaid
    )
    try:
        wrong = misfit(saved, state)
        if not wrong:
            state.restore({**saved, "model": weights})
    except Exception as error:  # whatever a part that is none raises where it is read
        if lacks_memory(error):
            raise
        wrong = str(error) or type(error).__name__
    if wrong:
        # It may be half taken over: nothing trains with it, this ends the run.
        raise BadInputError(
            *config.resume_as_given(settings.run.resume), f"{where} does not fit this run: {wrong}"
        )
