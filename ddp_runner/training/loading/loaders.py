"""Ties a rank's loader to its surroundings: repairs are reported, and waiting counts as life."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ddp_runner import installed
from ddp_runner.core.batch_sizes import micro_batch
from ddp_runner.core.injection import OPTION as INJECT_OPTION
from ddp_runner.core.injection import bad_sample_places
from ddp_runner.core.loader_recovery import VAIN_WAITS_MAX
from ddp_runner.core.settings import Settings
from ddp_runner.data.loader import Loader, LoadObserver, LoadOptions
from ddp_runner.data.loader_faults import SAMPLES_REPLACED, LoadingRepaired
from ddp_runner.data.map_source import MapSource
from ddp_runner.data.order import WholeOrder
from ddp_runner.data.quarantine import FILE_NAME as QUARANTINE_FILE
from ddp_runner.data.quarantine import file_name_of_validation
from ddp_runner.data.shard_source import ShardSource
from ddp_runner.data.shards import ShardPositions
from ddp_runner.data.source import SEVERAL, Cut, Source
from ddp_runner.data.stream import StreamOrder, StreamPosition, StreamSource
from ddp_runner.data.workers.count import (
    asked_workers,
    may_have_workers,
    worker_count,
)
from ddp_runner.data.workers.fetch import SampleReader
from ddp_runner.data.workers.memory_files import collate_batch
from ddp_runner.kernel.group.group import Group
from ddp_runner.kernel.processes.memory_limits import KernelKills
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.faults import Fault, FaultError, FaultKind
from ddp_runner.kernel.rules.hang_detection import longest_phase_s
from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.kernel.step.runtime import Runtime
from ddp_runner.kernel.system.threads import cores_here
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.kernel.wire.events import RepairedInPlace, TuningChanged
from ddp_runner.kernel.wire.messages import LoaderWorkers
from ddp_runner.memory.manager import Loads, MemoryManager
from ddp_runner.system.launch_folder import at_launch
from ddp_runner.training.rank_context import TaskParts
from ddp_runner.training.state import TrainState
from ddp_runner.training.task import Datasets
from ddp_runner.training.workload import TaskWorkload, Workload


def waiting(runtime: Runtime, *, is_leaving: Callable[[], bool]) -> Callable[[], None]:
    """Return the callback of a loader that waits. ``is_leaving``: returns whether the rank must leave."""

    def on_wait() -> None:
        # The loader keeps deadlines of its own; beaten from the main thread, so not while it is stuck.
        runtime.slot.set(Cell.PHASE_SINCE_NS, time.monotonic_ns())
        if is_leaving():
            raise FaultError(_left_waiting(runtime))

    return on_wait


def make_loader(
    settings: Settings,
    workload: Workload,
    datasets: Datasets,
    state: TrainState,
    runtime: Runtime,
    *,
    on_wait: Callable[[], None],
) -> Loader:
    """The loader of this rank's training data."""
    data, rank_info = settings.data, runtime.rank_info
    return Loader(
        _source(settings, workload, datasets, state, runtime),
        total_steps=workload.length.total_steps,
        num_workers=asked_workers(data, local_rank=rank_info.local_rank),
        local_world_size=rank_info.local_world_size,
        options=LoadOptions(
            prefetch_factor=data.prefetch_factor,
            pin_memory=data.pin_memory and workload.device.type == "cuda",
            timeout_s=data.loader_timeout_s,
        ),
        observer=LoadObserver(
            on_workers=lambda pids: runtime.report(
                LoaderWorkers(rank=rank_info.rank, pids=tuple(pids))
            ),
            on_repaired=lambda repaired: _report_repair(_with_lost(repaired, state), runtime),
            on_wait=on_wait,
            on_sample=_stamping(
                runtime, sign=1, is_stream=isinstance(state.stream, StreamPosition)
            ),
            log=runtime.logger.info,
            kills=KernelKills(),
        ),
    )


def _source(
    settings: Settings,
    workload: Workload,
    datasets: Datasets,
    state: TrainState,
    runtime: Runtime,
) -> Source[Any]:
    """The source of the training data, by the kind of position that its state has."""
    rank_info = runtime.rank_info
    cut = Cut(
        order=workload.order.in_version(state.order_version),
        rank=rank_info.rank,
        world_size=rank_info.world_size,
        micro_batch_size=micro_batch(settings.data, devices=rank_info.devices),
    )
    bad = _bad_places(settings, workload, world_size=rank_info.world_size)
    match state.stream:
        case StreamPosition() as position:
            return StreamSource(
                datasets.train,
                cut,
                position=position,
                log=runtime.logger.info,
                collate_fn=datasets.collate,
                on_other=partial(_report_inexact, runtime),
            )
        case ShardPositions() as positions:
            return ShardSource(
                datasets.train,
                cut,
                positions=positions,
                ends_at_once=settings.data.stream_end == "drop",
                collate_fn=datasets.collate,
                on_other=partial(_report_inexact, runtime),
                quarantine=state.quarantine,
            )
    left = runtime.slot.get(Cell.SAMPLE)  # by a process before this one
    runtime.slot.set(Cell.SAMPLE, 0)
    dataset = datasets.train
    for part in installed.parts("child") if bad else ():
        if hasattr(part, "bad_samples"):
            dataset = part.bad_samples(
                dataset,
                bad,
                order=lambda: workload.order.in_version(state.order_version),
                world_size=rank_info.world_size,
            )
    return MapSource(
        SampleReader(
            dataset,
            seed=settings.run.seed,
            collate=datasets.collate or collate_batch,
            worker_init=datasets.worker_init,
        ),
        cut,
        quarantine=state.quarantine,
        suspect=left - 1 if left > 0 else None,
    )


def _bad_places(
    settings: Settings, workload: Workload, *, world_size: int
) -> tuple[tuple[int, int], ...]:
    """Return the rank and step of each sample to be made bad. Raises BadInputError if samples have no index."""
    length = workload.length
    bad = bad_sample_places(
        settings.run.inject, world_size=world_size, total_steps=length.total_steps
    )
    if settings.stage is not None:  # those of other stages are bad there
        bad = tuple(one for one in bad if length.first_step <= one[1] < length.total_steps)
    if bad and isinstance(workload.order, StreamOrder):
        expected = "bad_sample needs a dataset whose samples have indices"
        raise BadInputError(INJECT_OPTION, settings.run.inject[0], expected)
    return bad


def watch_memory(settings: Settings, loader: Loads, runtime: Runtime) -> MemoryManager:
    """The memory manager of a rank and of its loader's workers. On a CPU freed memory is kept for the next step."""
    device = torch.device(runtime.rank_info.device)
    manager = MemoryManager(
        settings.memory,
        rank=runtime.rank_info.rank,
        loader=loader,
        log=lambda level, message: getattr(runtime.logger, level)(message),
        device=device if device.type == "cuda" else None,
    )
    if runtime.is_watched and device.type == "cpu":
        manager.keep_freed(ranks_here=runtime.rank_info.local_world_size)
    return manager


def _report_inexact(runtime: Runtime, reason: str) -> None:
    rank, step = runtime.rank_info.rank, runtime.slot.get(Cell.STEP)
    runtime.logger.warning(reason, step=step)
    runtime.report(TuningChanged(rank=rank, step=step, action="", inexact_reason=reason))


def _stamping(
    runtime: Runtime, *, sign: int, is_stream: bool = False
) -> Callable[[int | None], None]:
    """Has the board say which sample is loaded in the rank itself, for whoever finds it stuck.

    The first one of a stream's epoch may fill a buffer, and several at once are many: those may take as long
    as a start.
    """

    def on_sample(index: int | None) -> None:
        runtime.slot.set(Cell.SAMPLE, 0 if index is None else sign * (index + 1))
        if sign > 0:  # an evaluation has a limit of its own, for all of it
            takes_long = index == SEVERAL or (is_stream and index == 0)
            runtime.slot.set(Cell.PHASE, Phase.DATA_BEGIN if takes_long else Phase.DATA)

    return on_sample


def make_validation_loader(parts: TaskParts, group: Group, name: str) -> Loader:
    """The loader of one evaluation of the data called ``name``, for this rank's part of it; to be closed."""
    return evaluation_loader(
        parts.settings,
        parts.workload,
        parts.state,
        parts.runtime,
        name=name,
        share=(group.rank, group.world_size),
        other_pids=lambda: parts.loader.worker_pids,
        on_wait=parts.on_wait,
    )


def evaluation_loader(
    settings: Settings,
    workload: TaskWorkload,
    state: TrainState,
    runtime: Runtime,
    *,
    name: str,
    share: tuple[int, int] = (0, 1),
    other_pids: Callable[[], Sequence[int]] = tuple,
    on_wait: Callable[[], None] = lambda: None,
) -> Loader:
    """The loader of the validation data called ``name``, in its order. ``share``: the rank and the number of ranks.

    ``other_pids``: of the loader workers that the rank has besides.
    """
    batch_size = state.tuning.evaluation_batch_size
    rank, step = runtime.rank_info.rank, state.committed_step
    place, ranks = share
    order = _evaluation_order(
        settings,
        samples=workload.validation_samples[name],
        devices=runtime.rank_info.computing_devices,
        global_batch=batch_size * ranks,
    )
    batches = order.steps_per_epoch
    local_world_size = runtime.rank_info.local_world_size
    workers = worker_count(
        asked_workers(settings.data, local_rank=runtime.rank_info.local_rank),
        local_world_size=local_world_size,
        cores=cores_here(),
    )

    def on_repaired(repaired: LoadingRepaired) -> None:
        # What is trained does not depend on it; the figure does, and the line says so.
        _report_repair(
            replace(repaired, fault=replace(repaired.fault, step=step), inexact_reason=""), runtime
        )

    cut = Cut(order=order, rank=place, world_size=ranks, micro_batch_size=batch_size)
    return Loader(
        _evaluation_source(settings, workload, state, cut, name=name),
        total_steps=batches,
        num_workers=min(workers, batches),
        local_world_size=local_world_size,
        options=LoadOptions(
            prefetch_factor=settings.data.prefetch_factor,
            timeout_s=settings.data.loader_timeout_s,
        ),
        observer=LoadObserver(
            on_workers=lambda pids: runtime.report(
                LoaderWorkers(rank=rank, pids=(*other_pids(), *pids))
            ),
            on_repaired=on_repaired,
            on_wait=on_wait,
            on_sample=_stamping(runtime, sign=-1),
            log=runtime.logger.info,
            kills=KernelKills(),
        ),
    )


def _evaluation_source(
    settings: Settings, workload: TaskWorkload, state: TrainState, cut: Cut, *, name: str
) -> MapSource:
    datasets = workload.datasets
    reader = SampleReader(
        datasets.validation_sets[name],
        seed=settings.run.seed,
        collate=datasets.validation_collate or collate_batch,
    )
    quarantine = state.validation_quarantines[name]
    return MapSource(reader, cut, quarantine=quarantine, phase=Phase.EVALUATE)


def _evaluation_order(
    settings: Settings, *, samples: int, devices: int, global_batch: int
) -> WholeOrder:
    """Return the order of the samples: the same ones however few fit at once, so that figures can be compared."""
    batches_max = settings.log.evaluate_batches or settings.run.limit_batches
    asked = batches_max * settings.data.batch_size * devices
    return WholeOrder(
        seed=settings.run.seed,
        dataset_size=min(asked, samples) or samples,
        global_batch_size=global_batch,
    )


def collective_timeout_s(settings: Settings, *, is_watched: bool) -> float:
    """Long enough for a peer whose loader times out, is repaired and finds a sample that hangs.

    Only what waits for ever inside a collective has to wait so long: a rank that hangs elsewhere
    is found on the board. ``is_watched``: there is a supervisor to find it. Then no wait for a peer
    ends sooner than the time that the supervisor grants that peer, who may be compiling alone.
    """
    waits = VAIN_WAITS_MAX + 1 if may_have_workers(settings.data) else 0
    patience_s = waits * settings.data.loader_timeout_s
    granted_s = longest_phase_s(settings.recovery) if is_watched else 0.0
    return max(settings.ddp.collective_timeout_s, patience_s, granted_s)


def open_quarantine(parts: TaskParts, *, is_first: bool) -> None:
    """Share the bad samples of the run with its other ranks; what is known from before is reported once."""
    quarantine, runtime = parts.state.quarantine, parts.runtime
    folder, place = at_launch(parts.settings.run.log_dir), parts.settings.stage
    stage = "" if place is None else place.data_key
    quarantine.attach(folder / QUARANTINE_FILE, run_id=runtime.run_id, stage=stage)
    for name, of_data in parts.state.validation_quarantines.items():
        path = folder / file_name_of_validation(name)
        of_data.attach(path, run_id=runtime.run_id, stage=stage)
    if len(quarantine) and is_first:
        runtime.logger.info(f"{len(quarantine)} bad samples of before are not tried again")
        runtime.report(
            TuningChanged(
                rank=runtime.rank_info.rank,
                step=parts.state.committed_step,
                action="",
                inexact_reason=SAMPLES_REPLACED,
            )
        )


def _left_waiting(runtime: Runtime) -> Fault:
    return Fault(
        kind=FaultKind.COLLECTIVE_FAILED,
        rank=runtime.rank_info.rank,
        step=runtime.slot.get(Cell.STEP),
        phase=Phase.DATA.label,
        cause="told to leave while it waited for data",
        at_ns=time.monotonic_ns(),
    )


def _with_lost(repaired: LoadingRepaired, state: TrainState) -> LoadingRepaired:
    """Return the repair, not exact if its new workers lack what the data has kept in the old ones."""
    lost = state.take_carried_of_data()
    if repaired.inexact_reason or not lost:
        return repaired
    return replace(repaired, inexact_reason=f"new loader workers lack {', '.join(lost)}")


def _report_repair(repaired: LoadingRepaired, runtime: Runtime) -> None:
    fault, action, rank = repaired.fault, repaired.action, runtime.rank_info.rank
    runtime.logger.warning(f"{fault.cause}; {action} ({repaired.seconds:.2f} s)", step=fault.step)
    runtime.report(
        RepairedInPlace(
            rank=rank,
            fault=fault,
            action=action,
            seconds=repaired.seconds,
            inexact_reason=repaired.inexact_reason,
            kernel_kills=repaired.kernel_kills,
        )
    )
