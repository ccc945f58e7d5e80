"""Builds what a trainer trains: task, data, model, optimizer, and the state it starts from."""

from __future__ import annotations

import copy
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ddp_runner import config
from ddp_runner.checkpoint.codec import stored_bytes
from ddp_runner.checkpoint.stage_weights import with_start_weights
from ddp_runner.checkpoint.store import CheckpointStore
from ddp_runner.core import batch_sizes
from ddp_runner.core.improvement import ImprovementRules
from ddp_runner.core.launch_plan import group_backend
from ddp_runner.core.monitor import Monitor
from ddp_runner.core.run_stages import steps_before
from ddp_runner.core.settings import Settings
from ddp_runner.core.step_schedule import RunLength, run_length
from ddp_runner.data.draws import Draws, SamplerDraws
from ddp_runner.data.order import SampleOrder
from ddp_runner.data.quarantine import Quarantine
from ddp_runner.data.stream import StreamOrder
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.faults import Fault, FaultError, FaultKind
from ddp_runner.kernel.rules.phases import Stage
from ddp_runner.kernel.step.runtime import RankInfo
from ddp_runner.system.launch_folder import at_launch
from ddp_runner.training.components.buffers import own_memory_of_buffers
from ddp_runner.training.components.ema import build_ema
from ddp_runner.training.components.improvement_watch import ImprovementWatch
from ddp_runner.training.components.layer_plan import LayerPlan, layer_plan
from ddp_runner.training.components.loss_monitor import LossMonitor
from ddp_runner.training.components.loss_spikes import LossSpikes
from ddp_runner.training.components.optimizer import build_optimizer
from ddp_runner.training.components.optimizer_state import hidden_state
from ddp_runner.training.components.precision import Precision
from ddp_runner.training.components.recompute import checkpoint_activations
from ddp_runner.training.components.start_weights import frozen_entries
from ddp_runner.training.components.sync_batchnorm import SyncedNorms
from ddp_runner.training.components.tuning import Tuning, searches_at_first
from ddp_runner.training.exactness.side_state import SideState
from ddp_runner.training.figures.measuring import build_objects
from ddp_runner.training.loading.equal_shares import refuse_unequal_shares
from ddp_runner.training.loading.preloaded_data import refuse_unfit
from ddp_runner.training.loading.ready_objects import (
    OwnOptimizer,
    ReadyObjects,
    ReadyState,
    own_optimizer,
)
from ddp_runner.training.loading.stream_order import (
    is_stream,
    named_data,
    position_in,
    stream_order,
    too_little,
)
from ddp_runner.training.loading.validation_data import (
    DEFAULT_COLLATE,
    monitor_for,
    refuse_unfit_validation,
)
from ddp_runner.training.local_state.local_state import LocalState
from ddp_runner.training.saves.described import described
from ddp_runner.training.starting.begin import begin_with
from ddp_runner.training.starting.stage_begin import go_on_counting, of_its_stage
from ddp_runner.training.starting.task_import import (
    BUILT_IN_TASKS,
    load_task,
    task_modules,
    task_sha256,
)
from ddp_runner.training.state import DataState, Trained, TrainState, Watches
from ddp_runner.training.step import SparseGradientError
from ddp_runner.training.task import (
    Datasets,
    HasLayerGroups,
    HasLocalState,
    Task,
    TaskLoss,
    checked_datasets,
    checked_model,
)
from ddp_runner.training.task_methods import unused_methods
from ddp_runner.values.generators import seed_all

FREE_TIMEOUT_S = 30.0  # for the driver to give back what a process held that was killed
STILL_S = 3.0  # without any more of it: somebody else has the rest
FIRST_S = 10.0  # without any of it
_FREE_LOOK_S = 0.1
_AS_FREE_AS = 0.98  # of what was free before


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Everything that stays the same for a whole run on this rank.

    ``notes``: what its data has to say before training, a line each.
    """

    order: SampleOrder
    length: RunLength
    global_batch: int
    device: torch.device
    backend: str
    resume_key: Mapping[str, Any]
    recipe: Mapping[str, Any]
    settings_digest: str
    parameters: int
    device_free_bytes: int = 0  # before this process took any of it
    other_devices: tuple[torch.device, ...] = ()  # which have parts of each batch
    monitor: Monitor = field(default_factory=Monitor)
    notes: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All that this rank computes on; the model is on the first."""
        return (self.device, *self.other_devices)

    @property
    def later_names(self) -> frozenset[str]:
        """The parameters that are frozen only at first, as far as the settings say."""
        return frozenset()

    def complete_recipe(self, before: Mapping[str, Any]) -> None:
        """Add to the recipe what only ``before``, that of a checkpoint, has a value of: nothing of a task."""

    def samplings(self) -> int:
        """Return how often the sampler of the training data has been drawn from; 0 without one."""
        draws = self.order.draws
        return draws.samplings if isinstance(draws, SamplerDraws) else 0

    def first_state(
        self, settings: Settings, state: TrainState, store: CheckpointStore
    ) -> dict[str, Any]:
        """Return the state that the run began with, made once more. Raises FaultError if that is impossible."""
        del settings, state
        raise FaultError(nothing_left(f"there is no checkpoint in {store.directory} yet"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskWorkload(Workload):
    """The same for a Task. ``replaced_data``: what it gave where ``datasets`` are others, if that is still there.

    ``metrics``: the objects of its ``build_metrics()``; ``local``: those of its ``local_state()``.
    """

    task: Task
    loss: TaskLoss
    datasets: Datasets
    norms: SyncedNorms
    layers: LayerPlan
    replaced_data: tuple[Callable[[], Any], ...] = ()
    metrics: Mapping[str, Any] = field(default_factory=dict)
    local: LocalState = field(default_factory=LocalState)

    @property
    def later_names(self) -> frozenset[str]:
        """The names of the parameters of ``optim.unfreeze``."""
        return self.layers.later_names()

    @property
    def validation_samples(self) -> dict[str, int]:
        """The number of samples by the name of the validation data; empty without validation."""
        sizes = {name: len(one) for name, one in self.datasets.validation_sets.items()}  # type: ignore[arg-type] # map-style
        return {name: size for name, size in sizes.items() if size}

    def first_state(
        self, settings: Settings, state: TrainState, store: CheckpointStore
    ) -> dict[str, Any]:
        """See :meth:`Workload.first_state`; for that time there are two models."""
        seed_all(settings.run.seed)
        # A task may keep the model that it makes, for its loss: the one that is trained must stay there.
        task = copy.copy(self.task)
        model = _placed(task.build_model(), settings, self.device)
        trained = set(map(id, state.model.parameters()))
        if not trained.isdisjoint(map(id, model.parameters())):
            is_ready = isinstance(task, ReadyObjects)
            why = (
                "a model that was given ready is not built again"
                if is_ready
                else "the task's build_model() gives the model that was trained instead of a new one"
            )
            none_yet = f"there is no checkpoint in {store.directory} yet"
            raise FaultError(nothing_left(f"{none_yet}, and {why}"))
        self.layers.begin(model)
        own = own_optimizer(task, model, settings.optim)
        first = _empty_state(settings, model, self.device, workload=self, own=own, task=task)
        first.order_version = state.order_version
        first.side.follow(state.side.followed_names())
        start_fresh(settings, first)
        return first.capture()


def _free_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU's memory that no process holds; 0 on the CPU."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0


def await_free(
    device: torch.device,
    wanted_bytes: int,
    *,
    look: Callable[[torch.device], int] = _free_bytes,
    timeout_s: float = FREE_TIMEOUT_S,
    still_s: float = STILL_S,
    first_s: float = FIRST_S,
) -> int:
    """Return what is free once that is about ``wanted_bytes``, stops growing, or the time is up.

    A process that was killed holds its GPU's memory until the driver has taken its context down,
    while the process that replaces it is there already. What other processes have taken meanwhile
    does not come back: nothing more is awaited ``still_s`` after some got free, or ``first_s`` if none does.
    """
    begun_s = grown_s = time.monotonic()
    most: int | None = None
    patience_s = first_s
    while True:
        free, now_s = look(device), time.monotonic()
        if most is None or free > most:
            patience_s = first_s if most is None else still_s
            most, grown_s = free, now_s
        if free >= _AS_FREE_AS * wanted_bytes:
            return free
        if now_s - grown_s > patience_s or now_s - begun_s > timeout_s:
            return free
        time.sleep(_FREE_LOOK_S)


def build_workload(
    settings: Settings, rank_info: RankInfo, *, entering: Callable[[Stage], None] = lambda _: None
) -> tuple[TaskWorkload, TrainState]:
    """The workload, and a state that is still empty. Raises BadInputError for what a user can correct.

    ``entering`` is called as each stage begins.
    """
    device = torch.device(rank_info.device)
    _set_up_torch(settings, device)
    device_free_bytes = await_free(device, rank_info.device_free_bytes)
    entering(Stage.DATA)
    # INVARIANT seeded-before-user-code: what a task shuffles or splits by a global generator is the same
    # on every rank, in a replacement and at a resume. Broken if: user code runs before it.
    # Guarded by: test_data_that_is_shuffled_where_it_is_made_is_the_same_everywhere.
    seed_all(settings.run.seed)
    task = load_task(settings)
    datasets = checked_datasets(task.build_datasets(), task=settings.run.task)
    plan = _planned(settings, datasets, rank_info)
    seed_all(settings.run.seed)
    entering(Stage.MODEL)
    model = _built_model(settings, task, device)
    norms = SyncedNorms(model, is_wanted=settings.ddp.sync_batchnorm, device=device)
    if norms.names:
        refuse_unequal_shares(settings, plan.global_batch, world_size=rank_info.world_size)
    checkpoint_activations(model, settings.memory.activation_checkpointing)
    groups = task.layer_groups() if isinstance(task, HasLayerGroups) else {}
    total_steps = plan.length.own_steps
    layers = layer_plan(model, settings.optim, groups=groups, total_steps=total_steps)
    layers.begin(model)
    own = own_optimizer(task, model, settings.optim)
    metrics = build_objects(task, settings, device)
    workload = TaskWorkload(
        task=task,
        loss=TaskLoss(task, plan.length),
        datasets=datasets,
        metrics=metrics,
        local=_local_state(task, settings, rank_info),
        monitor=monitor_for(settings, task, datasets, model, objects=metrics, device=device),
        norms=norms,
        layers=layers,
        order=plan.order,
        length=plan.length,
        global_batch=plan.global_batch,
        device=device,
        backend=backend_of(settings, device),
        resume_key=_resume_key(settings, rank_info, task, datasets, plan.order, own=own),
        recipe=_recipe(settings, rank_info, total_steps=total_steps, task=task, own=own),
        settings_digest=config.digest(settings),
        parameters=sum(p.numel() for p in model.parameters()),
        device_free_bytes=device_free_bytes,
        other_devices=tuple(map(torch.device, rank_info.other_devices)),
        notes=(
            *_notes_of(task, datasets, own),
            *_notes_on_files(settings, model, layers),
        ),
    )
    state = _empty_state(settings, model, device, workload=workload, own=own)
    state.local = workload.local
    _refuse_unsavable(settings, state)
    return workload, state


def _refuse_unsavable(settings: Settings, state: TrainState) -> None:
    try:
        stored_bytes(state.capture())
    except TypeError as error:  # reported now, not at the first save
        raise BadInputError("--task", settings.run.task, f"its {error}") from error


def _set_up_torch(settings: Settings, device: torch.device) -> None:
    """Have torch compute in this process as the settings say."""
    torch.use_deterministic_algorithms(settings.run.deterministic)
    if settings.run.deterministic:
        torch.backends.cudnn.benchmark = False  # it times kernels, and so chooses by chance
        # What is read before it is written is an error all the same, and filling costs bandwidth.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if settings.run.matmul_precision != "highest":
        torch.set_float32_matmul_precision(settings.run.matmul_precision)
    if device.type == "cuda":
        torch.cuda.set_device(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Which samples each step of the run has."""

    order: SampleOrder
    length: RunLength
    global_batch: int


def _planned(settings: Settings, datasets: Datasets, rank_info: RankInfo) -> _Plan:
    """Plan the samples of the run. Raises BadInputError where the data, the batch and the ranks do not fit."""
    ranks, devices = rank_info.world_size, rank_info.computing_devices
    global_batch = batch_sizes.global_batch(settings.data, world_size=devices)
    if global_batch < ranks:
        expected = f"is less than the {ranks} ranks: each needs a sample"
        raise BadInputError("data.global_batch_size", global_batch, expected)
    refuse_unfit_validation(settings, datasets, is_stream=is_stream)
    batch_sizes.refuse_wrong_parts(settings.data, ranks=ranks, devices=devices)
    order = _sample_order(settings, datasets, global_batch, ranks)
    refuse_unfit(settings, is_stream=isinstance(order, StreamOrder))
    length = run_length(
        steps_per_epoch=order.steps_per_epoch,
        epochs=settings.run.epochs,
        max_steps=settings.run.max_steps,
        first_step=steps_before(settings.stage),
    )
    return _Plan(order=order, length=length, global_batch=global_batch)


def _built_model(settings: Settings, task: Task, device: torch.device) -> nn.Module:
    """Have ``task`` build its model, on ``device``. Raises BadInputError for one that cannot be trained."""
    model = checked_model(task.build_model(), task=settings.run.task)
    _refuse_shapeless(model, settings)
    model = _placed(model, settings, device)
    _refuse_sparse_gradients(model, settings)
    return model


def _resume_key(
    settings: Settings,
    rank_info: RankInfo,
    task: Task,
    datasets: Datasets,
    order: SampleOrder,
    *,
    own: OwnOptimizer | None,
) -> dict[str, Any]:
    """Return what must be the same where a run is resumed."""
    key = dict(config.resume_key(settings, world_size=rank_info.computing_devices))
    key["data fingerprint"] = datasets.fingerprint or named_data(order, datasets.train)
    kinds = {} if own is None else {config.described_key(k): kind for k, kind in own.kinds.items()}
    return key | described(task, settings) | kinds | _key_of_draws(order)


def _key_of_draws(order: SampleOrder) -> dict[str, str]:
    if order.draws is None:
        return {}
    # By weight it is called as versions wrote it whose samples could have lengths, too.
    is_sampler = isinstance(order.draws, SamplerDraws)
    return {"sampler" if is_sampler else "weights and lengths of samples": order.draws.digest()}


def _notes_of(task: Task, datasets: Datasets, own: OwnOptimizer | None) -> tuple[str, ...]:
    given = (datasets.notes,) if isinstance(datasets.notes, str) else tuple(datasets.notes)
    collate = (DEFAULT_COLLATE,) if datasets.validates_by_default_collate else ()
    return (*given, *collate, *(() if own is None else own.lines), *unused_methods(task))


def _notes_on_files(settings: Settings, model: nn.Module, layers: LayerPlan) -> tuple[str, ...]:
    later = layers.later_names()
    if not settings.checkpoint.only_trained or frozen_entries(model, model.state_dict(), but=later):
        return ()
    return (
        "checkpoint.only_trained: nothing is frozen for the whole run, and files have all weights",
    )


def _recipe(
    settings: Settings,
    rank_info: RankInfo,
    *,
    total_steps: int,
    task: Task,
    own: OwnOptimizer | None,
) -> dict[str, Any]:
    device = torch.device(rank_info.device)
    is_own = settings.run.task not in BUILT_IN_TASKS
    found = config.Surroundings(
        total_steps=total_steps,
        ranks=rank_info.world_size,
        device=device.type,
        precision=Precision.of(settings.optim, device).name,
        backend=backend_of(settings, device),
        threads=torch.get_num_threads() if device.type == "cpu" else 0,
        torch=versions()["torch"],
        task_file=task_sha256(settings.run.task),
        task_modules=task_modules(settings.run.task),
        devices=rank_info.devices,
        own_task_reads_model=is_own and bool(getattr(task, "takes_settings", False)),
    )
    return {**config.recipe(settings, found), **({} if own is None else own.recipe)}


def _local_state(task: Task, settings: Settings, rank_info: RankInfo) -> LocalState:
    """Return the per-rank state of ``task``. Raises BadInputError for an object that cannot be kept."""
    if not isinstance(task, HasLocalState):
        return LocalState()
    given = task.local_state()
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        expected = "local_state() must return a mapping {name: object}, such as {'env': self.env}"
        raise BadInputError("--task", settings.run.task, expected)
    local = LocalState(given, option="local_state", is_tasks=True)
    local.belongs_to(rank_info)
    return local


def _placed(model: nn.Module, settings: Settings, device: torch.device) -> nn.Module:
    model = model.to(device)
    if settings.run.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    own_memory_of_buffers(model)
    return model


def _refuse_shapeless(model: nn.Module, settings: Settings) -> None:
    named = (*model.named_parameters(), *model.named_buffers())
    empty = [name for name, tensor in named if tensor.is_meta]
    if empty:
        raise BadInputError(
            "--task",
            settings.run.task,
            f"{empty[0]} of its model is on the meta device and has no numbers: make it on the CPU in build_model()",
        )
    lazy = [name for name, tensor in named if is_lazy(tensor)]
    if lazy:
        raise BadInputError(
            "--task",
            settings.run.task,
            f"{lazy[0]} of its model has no shape yet, it is of a lazy layer: put one batch through the"
            " model in build_model()",
        )


def _refuse_sparse_gradients(model: nn.Module, settings: Settings) -> None:
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise BadInputError(
                "--task",
                settings.run.task,
                str(SparseGradientError(name or "its model")),
            )


def _sample_order(
    settings: Settings, datasets: Datasets, global_batch: int, world_size: int
) -> SampleOrder:
    if is_stream(datasets.train):
        if datasets.weights is not None:
            expected = "weights need map-style data: the samples of a stream are not known ahead"
            raise BadInputError("--task", settings.run.task, expected)
        if settings.run.limit_batches:
            expected = "needs map-style data: limit a stream with --max-steps and evaluate_batches"
            raise BadInputError("--limit-batches", settings.run.limit_batches, expected)
        return stream_order(settings, datasets.train, global_batch, world_size)
    try:
        size = len(datasets.train)  # type: ignore[arg-type] # that is what is being checked
    except TypeError:
        raise BadInputError(
            "--task",
            settings.run.task,
            "its training data must have a length, or be an IterableDataset",
        ) from None
    if size == 0:
        raise BadInputError("--task", settings.run.task, "its training data is empty")
    draws: Draws | SamplerDraws | None
    try:
        draws = Draws.of(size=size, weights=datasets.weights, replacement=datasets.replacement)
        if datasets.sampler is not None:
            draws = own = _of_sampler(settings, datasets, size)
            size = own.size
    except ValueError as error:
        raise BadInputError("--task", settings.run.task, str(error)) from error
    if size < global_batch:
        raise too_little(settings, size=size, global_batch=global_batch, world_size=world_size)
    return SampleOrder(
        seed=settings.run.seed,
        dataset_size=size,
        shuffle=datasets.shuffle or draws is not None,
        global_batch_size=global_batch,
        shares=batch_sizes.shares_of(settings.data),
        draws=draws,
        first_step=steps_before(settings.stage),
        steps_max=settings.run.limit_batches,
    )


def _of_sampler(settings: Settings, datasets: Datasets, size: int) -> SamplerDraws:
    if datasets.weights is not None:
        raise ValueError(
            "its data has weights and a sampler, which both choose samples: leave one of them out"
        )
    if settings.data.on_bad_sample == "substitute":
        expected = "would take samples that the sampler leaves out: leave it out, or the sampler"
        raise BadInputError("data.on_bad_sample", "substitute", expected)
    return SamplerDraws(datasets.sampler, dataset_size=size)


def backend_of(settings: Settings, device: torch.device) -> str:
    """The process group's backend on ``device``."""
    return group_backend(settings, is_on_gpu=device.type != "cpu")


def _empty_state(
    settings: Settings,
    model: nn.Module,
    device: torch.device,
    *,
    workload: TaskWorkload,
    own: OwnOptimizer | None,
    task: Task | None = None,
) -> TrainState:
    """Return a state for ``model``. ``task``: the one that made it, where it is not the workload's own."""
    order = workload.order
    make = TrainState if own is None else partial(ReadyState, rates=own.rates(workload.length))
    state = make(
        Trained(
            model=model,
            optimizer=build_optimizer(model, settings.optim, device=device)
            if own is None
            else own.optimizer,
            precision=Precision.of(settings.optim, device),
            ema=build_ema(model, settings.optim),
        ),
        watches=Watches(
            monitor=LossMonitor(
                target_loss=settings.run.target_loss,
                max_errors_per_epoch=settings.recovery.max_errors_per_epoch,
            ),
            loss_spikes=LossSpikes.watched_as(settings, total_steps=workload.length.own_steps),
            improvement=ImprovementWatch(ImprovementRules.of(settings), monitor=workload.monitor),
        ),
        data=DataState(
            quarantine=empty_quarantine(settings, order.dataset_size),
            validation_quarantines={
                name: empty_quarantine(settings, size)
                for name, size in workload.validation_samples.items()
            },
            stream=position_in(order) if isinstance(order, StreamOrder) else None,
        ),
        only_trained=settings.checkpoint.only_trained,
        side=SideState(
            model,
            task or workload.task,
            apart=(
                *(workload.datasets.train, *workload.datasets.validation_sets.values()),
                *(workload.datasets.sampler, *workload.datasets.test_sets.values()),
                *workload.metrics.values(),
                *workload.local.inner(),
                *(given() for given in workload.replaced_data),
                workload.task.given if isinstance(workload.task, ReadyObjects) else None,
                *(() if own is None else (own.optimizer, own.scheduler)),
            ),
            beside=lambda: {} if own is None else hidden_state({"optimizer": own.optimizer}),
        ),
        tuning=Tuning(
            micro_batch_size=batch_sizes.micro_batch(settings.data, devices=len(workload.devices)),
            evaluation_batch_size=batch_sizes.evaluation_batch(settings.data),
            find_unused_parameters=searches_at_first(settings.ddp),
        ),
    )
    state.first_step = workload.length.first_step
    return state


def empty_quarantine(settings: Settings, dataset_size: int) -> Quarantine:
    """Return the quarantine of a dataset with no known bad sample."""
    may_replace = settings.data.on_bad_sample == "substitute"
    bad_max = settings.data.max_bad_samples if may_replace else 0
    return Quarantine(seed=settings.run.seed, dataset_size=dataset_size, bad_max=bad_max)


def start_fresh(settings: Settings, state: TrainState) -> None:
    """Make ``state``, with a model that was just built, the one of step 0, or of the first of its stage."""
    with of_its_stage(settings):
        begin_with(with_start_weights(settings, path_of=at_launch), state)
    go_on_counting(settings, state)
    state.committed_step = state.begun_step = first = state.first_step
    state.boundary_done_step = first - 1 if settings.log.evaluate_at_start else first


def nothing_left(cause: str) -> Fault:
    """Why a run ends that has no state to go back to."""
    return Fault(
        kind=FaultKind.CHECKPOINT_BAD, rank=-1, step=0, cause=cause, at_ns=time.monotonic_ns()
    )


def versions() -> dict[str, str]:
    """Return the versions that a checkpoint is made with."""
    return {"python": platform.python_version(), "torch": str(torch.__version__)}
