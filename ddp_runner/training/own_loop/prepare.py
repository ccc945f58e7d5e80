"""Builds what one rank trains a loop of the user's own with, from what the loop has kept."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ddp_runner import config
from ddp_runner.checkpoint.codec import stored_bytes
from ddp_runner.checkpoint.store import CheckpointStore
from ddp_runner.collective.device_progress import NoDeviceProgress, device_progress
from ddp_runner.config.identity import TOTAL_STEPS
from ddp_runner.core.board import Cell
from ddp_runner.core.errors import BadInputError
from ddp_runner.core.monitor import AUTO, TRAIN_LOSS, Monitor, highest_refused
from ddp_runner.core.phases import Phase, Stage
from ddp_runner.core.settings import JsonValue, Settings
from ddp_runner.core.step_schedule import RunLength
from ddp_runner.data.order import SampleOrder
from ddp_runner.training.changes import report_changes
from ddp_runner.training.fork_safety import make_forks_safe
from ddp_runner.training.loaders import make_loader, waiting, watch_memory
from ddp_runner.training.own_loop.batches import (
    KeptLoader,
    OwnBatches,
    SafeBatches,
    batch_size_of,
    digest_in_memory,
)
from ddp_runner.training.own_loop.declared import OwnLoop
from ddp_runner.training.own_loop.kept import KeptState
from ddp_runner.training.own_loop.parts import Batches, LoopParts
from ddp_runner.training.resume import take_up
from ddp_runner.training.runtime import Runtime
from ddp_runner.training.saving import Saving
from ddp_runner.training.stages import StageClock
from ddp_runner.training.task import Datasets
from ddp_runner.training.workload import Workload, backend_of, versions

ARGUMENTS = "the arguments of the program"


def prepare(
    settings: Settings,
    runtime: Runtime,
    loop: OwnLoop,
    *,
    batches: Iterable[Any],
    length: RunLength,
    accumulate: int,
    arguments: str,
    is_leaving: Callable[[], bool],
    ending: contextlib.ExitStack,
) -> tuple[LoopParts, str]:
    """What this rank trains with, and the run that it resumes; what has to be closed is left to ``ending``.

    Raises BadInputError for what cannot be trained, and for a checkpoint that does not fit.
    """
    _refuse_evaluations(settings)
    info, slot, stages = runtime.rank_info, runtime.slot, StageClock(runtime)
    slot.set(Cell.DIRTY, 0)  # of a predecessor that died inside its optimizer
    make_forks_safe()
    device = torch.device(info.device)
    if isinstance(batches, KeptLoader):
        size, share = len(batches.dataset), batches.batch_size * batches.accumulate
        data = replace(settings.data, batch_size=share, micro_batch_size=batches.batch_size)
        settings = replace(settings, data=data)
    else:  # in batches, where nobody knows how large they are
        share = batch_size_of(batches) * accumulate
        size = length.steps_per_epoch * info.world_size * share
    order = SampleOrder(
        seed=settings.run.seed, dataset_size=size, global_batch_size=share * info.world_size
    )
    state = KeptState(
        loop.kept,
        settings=settings,
        device=device,
        dataset_size=size,
        find_unused_parameters=loop.ddp.find_unused_parameters is True,
    )
    _refuse_unsavable(state)
    workload = Workload(
        order=order,
        length=length,
        global_batch=order.global_batch_size,
        device=device,
        backend=backend_of(settings, device),
        resume_key={"run.seed": settings.run.seed, "ranks": info.world_size},
        recipe=_recipe(runtime, length, arguments=arguments),
        settings_digest=config.digest(settings),
        monitor=Monitor(by_evaluations=False),
        parameters=sum(one.numel() for one in state.model.parameters()),
    )
    data_digest = digest_in_memory(batches)
    store = CheckpointStore(
        Path(settings.run.checkpoint_dir),
        keep_last=settings.checkpoint.keep_last,
        keep_every=settings.checkpoint.keep_every,
        disk=runtime.disk,
    )
    start = take_up(settings, workload, state, store, runtime=runtime, entering=stages.enter)
    stages.enter(Stage.NONE)
    slot.set(Cell.TOTAL_STEPS, length.total_steps)
    on_wait = waiting(runtime, is_leaving=is_leaving)
    loader: Batches
    if isinstance(batches, KeptLoader):
        datasets = Datasets(train=batches.dataset, collate=batches.collate_fn)
        loader = SafeBatches(
            make_loader(settings, workload, datasets, state, runtime, on_wait=on_wait)
        )
    else:
        loader = OwnBatches(
            batches,
            length=length,
            accumulate=accumulate,
            seed=settings.run.seed,
            rank=info.rank,
            say=runtime.logger.info,
            warn=runtime.logger.warning,
            alive=on_wait,
            begins=lambda: slot.stamp(Phase.DATA_BEGIN, time.monotonic_ns()),
        )
    ending.callback(loader.close)
    memory = watch_memory(settings, loader, runtime)
    progress_of_device = (
        device_progress(slot, device, warn=runtime.logger.warning)
        if runtime.is_watched
        else NoDeviceProgress()
    )
    ending.callback(progress_of_device.close)
    saving = Saving(
        settings=settings,
        workload=workload,
        state=state,
        store=store,
        memory=memory,
        runtime=runtime,
        progress=start.progress,
    )
    if start.loaded is not None:
        saving.resumed(start.loaded)
        report_changes(runtime, state, known=start.loaded.manifest.changes)
    parts = LoopParts(
        data_digest=data_digest,
        settings=settings,
        workload=workload,
        state=state,
        loader=loader,
        memory=memory,
        store=store,
        runtime=runtime,
        progress=start.progress,
        saving=saving,
        device=progress_of_device,
    )
    slot.stamp(Phase.STARTUP, time.monotonic_ns())
    return parts, start.run_id


def _refuse_evaluations(settings: Settings) -> None:
    """Refuse settings about evaluations: a loop evaluates by itself, and nothing here knows the results."""
    wanted = settings.checkpoint.monitor
    if wanted not in (AUTO, TRAIN_LOSS):
        expected = (
            "a loop of one's own has no evaluation that is known here: take train_loss or auto"
        )
        raise BadInputError("checkpoint.monitor", wanted, expected)
    if settings.checkpoint.mode == "max":
        raise highest_refused(TRAIN_LOSS)
    for key, is_on in (
        ("run.load_best_at_end", settings.run.load_best_at_end),
        ("log.evaluate_at_start", settings.log.evaluate_at_start),
    ):
        if is_on:
            raise BadInputError(key, "true", "is for a task: leave it out of a loop of one's own")


def _refuse_unsavable(state: KeptState) -> None:
    try:
        stored_bytes(state.capture())
    except TypeError as error:  # said now, not at the first save
        raise BadInputError(
            "run.keep()", "", f"what is kept cannot be saved: its {error}"
        ) from error


def _recipe(runtime: Runtime, length: RunLength, *, arguments: str) -> dict[str, JsonValue]:
    """Return the values of which a change gives the same run other weights."""
    info = runtime.rank_info
    return {
        TOTAL_STEPS: length.total_steps,
        "device": torch.device(info.device).type,
        "threads per rank": torch.get_num_threads() if info.device == "cpu" else 0,
        "torch": versions()["torch"],
        ARGUMENTS: arguments,
    }
