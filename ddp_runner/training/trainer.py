"""DDPTrainer: builds what one rank trains a Task with, and has the loop that trains it.

What is around a step, the generations and their faults, is the engine's.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ddp_runner import config as configuration
from ddp_runner.core.modes import Mode
from ddp_runner.core.plain_rank import PlainRank
from ddp_runner.core.settings import Settings
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.kernel.rules.secrets import hidden_texts
from ddp_runner.kernel.step.engine import Engine
from ddp_runner.kernel.step.runtime import RankInfo, Runtime
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.training.figures.phase_times import timed
from ddp_runner.training.figures.train_report import TrainReport
from ddp_runner.training.figures.use_figures import costs_of, tokens_of
from ddp_runner.training.loading.given import with_task_named
from ddp_runner.training.loading.loaders import waiting
from ddp_runner.training.loading.ready_objects import Objects, ReadyObjects
from ddp_runner.training.local_runtime import LocalRuntime, local_runtime
from ddp_runner.training.prepare import begin_start, prepare
from ddp_runner.training.rank_client import engine_of
from ddp_runner.training.rank_context import TaskParts
from ddp_runner.training.starting.built_ahead import BuiltAhead
from ddp_runner.training.task_client import TaskClient, TaskSetup
from ddp_runner.version import VERSION

if TYPE_CHECKING:
    from typing_extensions import Unpack


class DDPTrainer:
    """Trains one rank.

    In a plain script or notebook: ``DDPTrainer(MyTask, config={"epochs": 3}).train().model``. The
    first argument is a task class, or this process's rank; a class may also be the ``task`` of
    ``config``, which is a ``Settings``, or a mapping with flat or nested keys. With several ranks and no
    runtime, every process makes its own trainer. After ``init_process_group`` they train in that group, which stays
    the program's; otherwise MASTER_ADDR and MASTER_PORT name a store, which rank 0 hosts where none runs. Under
    torchrun rank and number are known: without a word about them they are those of
    RANK and WORLD_SIZE, unless DDP_RUNNER_PLAIN_RANK=0 says that each process trains alone.

    Objects that a program has made are trained in the place of a task: ``DDPTrainer(model=model,
    train_loader=loader, optimizer=optimizer, criterion=criterion)``. ``criterion`` is a function of outputs and
    targets; ``loss`` one of model and batch; without both the model's output has a ``loss``. ``scheduler`` is stepped
    after each ``scheduler_interval``, ``step`` or ``epoch``; ``val_loader`` is evaluated. Without ``optimizer`` it is
    the settings'. The loaders' data is loaded by a :class:`SafeDataLoader`. Weights are those of a loop by hand
    over the same batches: fp32, and no clipping, unless ``config`` says otherwise.
    """

    def __init__(
        self,
        rank: int | Callable[..., Any] = 0,
        world_size: int = 1,
        config: Settings | Mapping[str, Any] | None = None,
        *,
        runtime: Runtime | None = None,
        built: BuiltAhead | None = None,
        **objects: Unpack[Objects],
    ) -> None:
        """``built``: what was built ahead of need. ``objects``: as of the class."""
        ready: ReadyObjects | None = None
        if objects:
            if isinstance(config, Settings) or not isinstance(rank, int):
                raise TypeError("with model=, config must be a mapping, and there is no task class")
            ready = ReadyObjects(objects, config or {})
            config = {**ready.config, "task": ready}
        if not isinstance(rank, int):
            if isinstance(config, Settings):
                raise TypeError("with a task class, config must be a mapping")
            rank, config = 0, {**(config or {}), "task": rank}
        origins: Mapping[str, str] = {}
        given: Mapping[str, Any] = {}
        if not isinstance(config, Settings):
            given = with_task_named(config or {})
            config, origins = configuration.from_flat(given), configuration.origins_of(given)
        self.settings = config
        _refuse_unsupervised_stages(config)
        self._runtime = runtime or local_runtime(self.settings, rank, world_size)
        configuration.refuse_untrue(
            given, configuration.facts_of_rank(_as_plain(self._runtime.rank_info), os.environ)
        )
        if ready is not None:
            ready.train_in(self._runtime, folder=self.settings.run.checkpoint_dir)
        if isinstance(self._runtime, LocalRuntime):
            _refuse_measured_shares(config, world_size=self._runtime.rank_info.world_size)
            self._runtime.unread = partial(configuration.unread_warning, config, origins)
        if self.settings.log.phase_times:
            self._runtime.slot = timed(self._runtime.slot, self._runtime.rank_info.device)
        self._runtime.logger.hidden = hidden_texts(self.settings.task, os.environ)
        self._rank_info = self._runtime.rank_info
        self._built = built  # until it is taken
        self._has_begun = False
        self._engine: Engine | None = None  # once there is something to train
        self._parts: TaskParts | None = None  # the same

    def info(self) -> dict[str, Any]:
        """Return the task, device, run and model as plain values; may be called at any time.

        ``task``, ``name``, ``rank``, ``world_size``, ``device``, ``mode``, ``gpu_count`` (of all ranks), ``log_dir``, ``checkpoint_dir``,
        ``versions``; once :meth:`train` has built it also ``run_id``, ``precision``, ``parameters`` and ``trained_parameters`` (numbers
        in them), ``batch_size`` (samples that this rank computes at once), ``global_batch`` (samples of a step
        over all ranks), ``total_steps``, ``steps_per_epoch``, ``committed_step`` (steps that count so far) and ``devices``: of each GPU of this rank ``device``, ``name``,
        ``compute_capability``, ``memory_total_bytes``, ``memory_free_bytes``, ``memory_allocated_bytes``, ``memory_reserved_bytes`` and
        ``memory_efficiency`` (peak of the former over that of the latter).
        """
        return info_of(self.settings, self._runtime, self._parts)

    def performance(self) -> dict[str, float | None]:
        """Return the speed of this process and its resources since it began; may be called at any time.

        ``steps`` that it made, ``train_s`` in them (seconds; the wait for data included, saves and evaluations
        not), ``data_wait_s``, ``checkpoint_s``, ``comparison_s`` and ``evaluation_s``; ``steps_per_s``, ``samples_per_s``
        and ``tokens_per_s`` over all ranks, ``flops_utilization`` (share of the GPUs' peak, 0 to 1) and
        ``data_wait_share`` of ``train_s``; ``peak_rss_bytes``, ``peak_loader_bytes``, ``peak_device_bytes``. None: not known,
        as all rates before the first step.
        """
        return performance_of(self._runtime, self._parts)

    def train(self) -> TrainReport:
        """Train until the end of the run or an agreed stop.

        Raises BadInputError for settings, data or a checkpoint that do not fit, and FaultError for
        a fault that this process does not survive, or where the run ends without it. Without a
        supervisor rank 0 writes ``metrics.jsonl`` and ``summary.json`` into the log folder, and KeyboardInterrupt
        ends the training as it is. Raises RuntimeError if it is called again.
        """
        if self._has_begun:
            raise RuntimeError(
                "train() has been called: make a new DDPTrainer, which resumes from the newest checkpoint"
            )
        self._has_begun = True
        try:
            return self._train()
        except BaseException as error:
            if isinstance(self._runtime, LocalRuntime):
                self._runtime.ended(error)
            raise

    def _train(self) -> TrainReport:
        with contextlib.ExitStack() as ending:
            parts, run_id = self._prepare(ending)
            self._parts = parts
            task = TaskClient(parts, run_id)
            self._engine = engine = engine_of(task, parts)
            ending.enter_context(engine)
            for micro_batches in engine.steps():
                with engine.step() as step:
                    step.result = task.train_step(micro_batches, votes=step.votes)
            parts.device.close()
        assert task.report is not None, "training has ended"
        return task.report

    def _prepare(self, ending: contextlib.ExitStack) -> tuple[TaskParts, str]:
        """Return what this rank trains with, and its run; what has to be closed is left to ``ending``."""
        runtime = self._runtime
        runtime.slot.stamp(Phase.STARTUP, time.monotonic_ns())
        stages = begin_start(runtime)
        built, self._built = self._built, None
        setup = TaskSetup(
            self.settings,
            runtime,
            built=built,
            on_wait=waiting(runtime, is_leaving=self._is_leaving),
            stages=stages,
            ending=ending,
        )
        return prepare(setup, runtime, stages=stages, ending=ending)

    def _is_leaving(self) -> bool:
        return self._engine is not None and self._engine.is_leaving


# What a trainer says of itself to the program that has made it. Changes nothing.


def info_of(settings: Settings, runtime: Runtime, parts: TaskParts | None) -> dict[str, Any]:
    """Return the values of :meth:`DDPTrainer.info`; ``parts``: what was built, once it is."""
    info = runtime.rank_info
    found: dict[str, Any] = {
        "task": settings.run.task,
        "name": settings.run.name,
        "rank": info.rank,
        "world_size": info.world_size,
        "device": info.device,
        "mode": _mode_of(info),
        "gpu_count": 0 if info.device == "cpu" else info.computing_devices,
        "log_dir": settings.run.log_dir,
        "checkpoint_dir": settings.run.checkpoint_dir,
        "versions": {
            "ddp_runner": VERSION,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    if parts is None:
        return found
    workload, state = parts.workload, parts.state
    trained = sum(one.numel() for one in state.model.parameters() if one.requires_grad)
    return {
        **found,
        "run_id": runtime.run_id,
        "precision": state.precision.name,
        "parameters": workload.parameters,
        "trained_parameters": trained,
        "batch_size": state.tuning.micro_batch_size,
        "global_batch": workload.global_batch,
        "total_steps": workload.length.total_steps,
        "steps_per_epoch": workload.length.steps_per_epoch,
        "committed_step": max(0, state.committed_step),
        "devices": [device_record(one) for one in workload.devices if one.type == "cuda"],
    }


def _mode_of(info: RankInfo) -> str:
    """The word of run.mode that the devices are used by, also where nobody has chosen."""
    if info.mode:
        return info.mode.partition(":")[0]
    if info.world_size > 1:
        return str(Mode.DISTRIBUTED.value)
    return str((Mode.DATA_PARALLEL if info.other_devices else Mode.SINGLE).value)


def device_record(device: torch.device) -> dict[str, Any]:
    """A GPU of this rank, and its memory as it is now."""
    found = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.max_memory_reserved(device)
    return {
        "device": str(device),
        "name": found.name,
        "compute_capability": f"{found.major}.{found.minor}",
        "memory_total_bytes": total,
        "memory_free_bytes": free,
        "memory_allocated_bytes": torch.cuda.memory_allocated(device),
        "memory_reserved_bytes": torch.cuda.memory_reserved(device),
        "memory_efficiency": torch.cuda.max_memory_allocated(device) / reserved
        if reserved
        else None,
    }


def performance_of(runtime: Runtime, parts: TaskParts | None) -> dict[str, float | None]:
    """Return the values of :meth:`DDPTrainer.performance`."""
    slot, reading = runtime.slot, runtime.slot.read()
    steps = slot.get(Cell.OWN_STEPS)
    train_s = (reading.productive_ns + reading.data_wait_ns) / 1e9
    found: dict[str, float | None] = {
        "steps": steps,
        "train_s": train_s,
        "data_wait_s": reading.data_wait_ns / 1e9,
        "checkpoint_s": reading.checkpoint_ns / 1e9,
        "comparison_s": reading.comparison_ns / 1e9,
        "evaluation_s": reading.evaluation_ns / 1e9,
    }
    rates: dict[str, float | None] = dict.fromkeys(
        ("steps_per_s", "samples_per_s", "tokens_per_s", "flops_utilization", "data_wait_share")
    )
    peaks: dict[str, float | None] = dict.fromkeys(
        ("peak_rss_bytes", "peak_loader_bytes", "peak_device_bytes")
    )
    if parts is None:
        return {**found, **rates, **peaks}
    peaks.update({name: size for name, size in parts.memory.peaks().items() if name in peaks})
    if steps and train_s > 0:
        steps_per_s = steps / train_s
        rates["steps_per_s"] = steps_per_s
        rates["samples_per_s"] = steps_per_s * parts.workload.global_batch
        rates["data_wait_share"] = reading.data_wait_ns / 1e9 / train_s
        tokens, done = tokens_of(parts), parts.state.committed_step
        if tokens is not None and done > 0:
            tokens_per_s = rates["tokens_per_s"] = tokens / done * steps_per_s
            if (costs := costs_of(parts)) is not None:
                needed, peak = costs
                ranks = runtime.rank_info.world_size
                rates["flops_utilization"] = tokens_per_s * needed / (peak * ranks)
    return {**found, **rates, **peaks}


def _refuse_unsupervised_stages(settings: Settings) -> None:
    if (settings.stages or settings.run.stage) and settings.stage is None:
        expected = "needs a supervisor: start with ddp_runner train, or ddp_runner.launch()"
        raise BadInputError("stages", "", expected)


def _refuse_measured_shares(settings: Settings, *, world_size: int) -> None:
    if settings.data.shares == "auto" and world_size > 1:
        expected = "needs a supervisor, which measures the ranks: give a number for each rank"
        raise BadInputError("data.shares", "auto", expected)


def _as_plain(info: RankInfo) -> PlainRank:
    return PlainRank(
        rank=info.rank,
        world_size=info.world_size,
        local_rank=info.local_rank,
        local_world_size=info.local_world_size,
    )
