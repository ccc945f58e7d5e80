"""Completes the states of files that leave out what their run has begun with. Decides no resume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddp_runner.checkpoint.left_out import left_out, start_record
from ddp_runner.checkpoint.store import CheckpointStore, Loaded
from ddp_runner.core.settings import Settings
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.faults import FaultError
from ddp_runner.training.components.start_weights import completed
from ddp_runner.training.starting.begin import begin_with
from ddp_runner.training.state import TrainState
from ddp_runner.training.workload import Workload, nothing_left


def note_begin(settings: Settings, workload: Workload, state: TrainState) -> None:
    """The model is as the run begins: where files leave out what stays so, keep by hash what that is."""
    if state.only_trained:
        state.note_start(init_from=settings.run.init_from, later=workload.later_names)


def completed_from_begin(
    settings: Settings, workload: Workload, state: TrainState, loaded: Loaded
) -> Mapping[str, Any]:
    """The whole state of ``loaded``, by what this launch would begin with, which the model then is.

    Raises BadInputError where that is not what the run of ``loaded`` has begun with.
    """
    if not left_out(loaded.state) and not state.only_trained:
        return loaded.state
    begin_with(settings, state)
    note_begin(settings, workload, state)
    saved = completed(loaded.state, state.weights())
    if saved is None:
        raise BadInputError("--init-from", settings.run.init_from, _other_begin(loaded))
    return saved


def completed_in_run(
    settings: Settings,
    workload: Workload,
    state: TrainState,
    store: CheckpointStore,
    loaded: Loaded,
) -> Mapping[str, Any]:
    """The same for a state that the run goes back to: by the weights that it has, or its begin made again.

    Raises FaultError where neither is what the run has begun with.
    """
    saved = completed(loaded.state, state.weights())
    if saved is not None:
        return saved
    try:
        saved = completed(loaded.state, workload.first_state(settings, state, store)["model"])
    except BadInputError as error:
        cause = f"{loaded.path} leaves out the start weights of the run, which are gone ({error})"
        raise FaultError(nothing_left(cause)) from error
    if saved is None:
        cause = f"{loaded.path} leaves out the start weights of the run, which have changed since"
        raise FaultError(nothing_left(cause))
    return saved


def _other_begin(loaded: Loaded) -> str:
    record = start_record(loaded.state)
    named = record.get("init_from")
    begin = f"--init-from {named}" if named else "the model as it was built, without --init-from"
    return (
        f"{loaded.path} leaves out the {len(left_out(loaded.state))} start weights of its run, which it"
        f" never changed, from {begin} (SHA-256 {str(record['sha256'])[:16]}...): this launch starts with"
        " others; give the same, or start fresh with --resume none"
    )
