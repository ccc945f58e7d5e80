"""``--dry-run``: builds a rank's part and computes one micro-batch, alone. Writes nothing at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddp_runner import config
from ddp_runner.checkpoint.store import CheckpointStore
from ddp_runner.core.launch_plan import LaunchPlan
from ddp_runner.core.settings import Settings
from ddp_runner.data.loader import MicroBatch
from ddp_runner.data.stream import StreamPosition
from ddp_runner.data.workers.count import asked_workers, worker_count
from ddp_runner.features.tuning.dry_run_report import (
    COLUMNS,
    MemoryFacts,
    ModuleFacts,
    memory_table,
    module_table,
)
from ddp_runner.kernel.replica.data_parallel import loss_over_devices
from ddp_runner.kernel.replica.loss import read_loss
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.exits import ExitCode
from ddp_runner.kernel.rules.faults import FaultError
from ddp_runner.kernel.rules.secrets import hidden_texts, without_secrets
from ddp_runner.kernel.step.runtime import RankInfo
from ddp_runner.kernel.system.threads import cores_here
from ddp_runner.kernel.system.user_errors import traceback_text
from ddp_runner.observe.format import printable
from ddp_runner.observe.logger import DDPLogger
from ddp_runner.observe.terminal import fitted
from ddp_runner.training.components.optimizer import bytes_to_come
from ddp_runner.training.exactness.apart import NeedsOthersError, stand_apart
from ddp_runner.training.figures.train_report import block_of, start_notes
from ddp_runner.training.loading.batch_copy import tensors_of, to_device
from ddp_runner.training.loading.loaders import make_loader
from ddp_runner.training.local_runtime import Aside
from ddp_runner.training.starting.whole_state import note_begin
from ddp_runner.training.state import TrainState
from ddp_runner.training.workload import TaskWorkload, build_workload, start_fresh
from ddp_runner.values.generators import seed_step


@dataclass(frozen=True, slots=True, kw_only=True)
class _Workers:
    """Stands for a loader in the start block: a dry run has none, as it loads in its own process."""

    workers: int
    notes: tuple[str, ...] = ()
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Built:
    """The parts that rank 0 of the run would train with."""

    settings: Settings
    workload: TaskWorkload
    state: TrainState
    store: CheckpointStore
    runtime: Aside
    loader: _Workers


def main(
    plan: LaunchPlan, *, weights_to: Path | None = None, named: Callable[[str], str] = str
) -> int:
    """Compute and print; the exit code. Raises BadInputError for what a user can correct.

    ``weights_to``: a file for the weights that were built. ``named``: a text, as people are to read it.
    """
    sys.dont_write_bytecode = True  # beside the task's own file
    hidden = hidden_texts(plan.settings.task, os.environ)
    torch.set_num_threads(plan.threads_per_rank)
    try:
        columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        for line in _lines(plan, hidden, weights_to, columns=columns or COLUMNS + 1):
            print("\n".join(fitted(printable(named(line)), "INFO", columns)), flush=True)
    except BadInputError:
        raise
    except FaultError as error:
        fault = error.fault.without(hidden)
        print(printable(f"ddp_runner: error: {fault.cause}"), file=sys.stderr)
        return ExitCode.FAILED
    except NeedsOthersError as error:
        print(f"ddp_runner: error: {error}: a dry run is one rank alone", file=sys.stderr)
        return ExitCode.FAILED
    except Exception as error:  # noqa: BLE001 - the top of a command: a task may raise anything
        text = traceback_text(error)
        print(printable(without_secrets(text, hidden)), end="", file=sys.stderr)
        print("ddp_runner: error: the dry run failed, as a run would", file=sys.stderr)
        return ExitCode.FAILED
    return ExitCode.DONE


def _lines(
    plan: LaunchPlan, hidden: tuple[str, ...], weights_to: Path | None, *, columns: int
) -> Iterator[str]:
    yield from plan.notes
    built = _build(plan, hidden)
    if weights_to is not None:
        torch.save(built.state.weights(), weights_to)
    yield from block_of(built)
    yield from start_notes(built)
    is_given_all = bool(getattr(built.workload.task, "takes_settings", False))
    for line in config.unread_warning(plan.settings, plan.origins, is_given_all=is_given_all):
        yield f"warning: {line}"
    for entry in built.store.catalog.entries()[:1]:
        if plan.settings.run.resume != "none":
            where = f"{built.store.directory} holds step {entry.step:,}"
            yield f"{where}: a run would go on from there, this one does not read it"
    yield ""
    yield from module_table(list(_modules(built.state.model)), columns=min(columns - 1, COLUMNS))
    yield ""
    began_s = time.monotonic()
    batch = _first_batch(built)
    loss, memory = _compute(built, batch)
    seconds = time.monotonic() - began_s
    yield from memory_table(memory)
    yield ""
    what = f"forward and backward of {memory.samples} samples, loss {loss:.4f}, {seconds:.2f} s"
    yield f"dry run: {what} with loading; nothing was written"


def _build(plan: LaunchPlan, hidden: tuple[str, ...]) -> _Built:
    settings = plan.settings
    info = RankInfo(
        rank=0,
        local_rank=0,
        world_size=plan.world_size,
        local_world_size=plan.world_size,
        device=plan.devices[0].device,
        other_devices=plan.devices[0].others,
        loads=True,
    )
    logger = DDPLogger(rank=0, debug=settings.run.debug)
    logger.hidden = hidden
    workload, state = build_workload(settings, info)
    stand_apart(rank=0, world_size=plan.world_size, backend=workload.backend)
    start_fresh(settings, state)
    note_begin(settings, workload, state)
    asked = asked_workers(settings.data, local_rank=info.local_rank)
    cores = cores_here()
    workers = worker_count(asked, local_world_size=plan.world_size, cores=cores)
    return _Built(
        settings=settings,
        workload=workload,
        state=state,
        store=CheckpointStore(
            Path(settings.run.checkpoint_dir),
            keep_last=settings.checkpoint.keep_last,
            keep_every=settings.checkpoint.keep_every,
        ),
        runtime=Aside(info, logger),
        loader=_Workers(workers=0 if isinstance(state.stream, StreamPosition) else workers),
    )


def _first_batch(built: _Built) -> MicroBatch:
    """The first micro-batch of the run, loaded in this process."""
    alone = replace(
        built.settings,
        run=replace(built.settings.run, inject=()),
        data=replace(built.settings.data, num_workers=0, workers_total=None),
    )
    loader = make_loader(
        alone,
        built.workload,
        built.workload.datasets,
        built.state,
        built.runtime,
        on_wait=lambda: None,
    )
    with contextlib.closing(loader):
        first: MicroBatch = loader.take(0)[0]
        return first


def _compute(built: _Built, micro_batch: MicroBatch) -> tuple[float, MemoryFacts]:
    """Forward and backward as in a step: its loss, and what a rank's memory holds in training."""
    state, device, settings = built.state, built.workload.device, built.settings
    seed_step(seed=settings.run.seed, step=0, rank=0, micro_step=0)
    built.workload.loss.turn_to(built.workload.length.first_step, is_training=True)
    state.model.train()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    batch = to_device(micro_batch.batch, device)
    weights = _storages((*state.model.parameters(), *state.model.buffers()), device)
    given = _storages(tensors_of(batch), device)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.update(_storages((tensor,), device))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with state.precision.autocast():
            output = read_loss(_loss(built.workload, state.model, batch, len(micro_batch.indices)))
        kept.update(_storages((output.value,), device))
    state.precision.scaler.scale(output.value).backward()  # type: ignore[no-untyped-call]
    value = output.value if output.weight is None else output.value / output.weight
    trained = [one for one in state.model.parameters() if one.requires_grad]
    gradients = sum(one.numel() * one.element_size() for one in trained)
    copies = 1 if settings.ddp.gradient_as_bucket_view else 2
    is_on_gpu = device.type == "cuda"
    return float(value.detach()), MemoryFacts(
        weights=sum(weights.values()),
        gradients=gradients * copies,
        optimizer=bytes_to_come(state.optimizer),
        average=0 if state.ema is None else state.ema.bytes_to_come(),
        average_on_host=is_on_gpu and settings.optim.ema_device == "cpu" and state.ema is not None,
        batch=sum(given.values()),
        activations=sum(
            size for place, size in kept.items() if place not in weights and place not in given
        ),
        samples=len(micro_batch.indices),
        peak=torch.cuda.max_memory_allocated(device) if is_on_gpu else None,
        available=torch.cuda.get_device_properties(device).total_memory if is_on_gpu else None,
    )


def _loss(workload: TaskWorkload, model: nn.Module, batch: Any, count: int) -> Any:
    if not workload.other_devices:
        return workload.loss(model, batch)
    return loss_over_devices(workload.loss, model, batch, devices=workload.devices, count=count)


def _storages(tensors: Any, device: torch.device) -> dict[int, int]:
    """Address and size of each piece of the device's memory that holds one of them."""
    found = {}
    for tensor in tensors:
        if tensor.device.type == device.type and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def _modules(model: nn.Module) -> Iterator[ModuleFacts]:
    """Yield the modules that have parameters; a parameter that several share is the first one's."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        own = [one for one in module.parameters(recurse=False) if id(one) not in seen]
        seen.update(map(id, own))
        if own:
            yield ModuleFacts(
                name=name,
                kind=type(module).__name__,
                parameters=sum(one.numel() for one in own),
                trained=sum(one.numel() for one in own if one.requires_grad),
                dtypes=tuple(dict.fromkeys(str(one.dtype).removeprefix("torch.") for one in own)),
            )
