"""Builds what a trainer trains: task, data, model, optimizer, and the state it starts from."""

from __future__ import annotations

import copy
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import IterableDataset

from ddp_runner import config
from ddp_runner.checkpoint.catalog import WORDS
from ddp_runner.checkpoint.codec import stored_bytes
from ddp_runner.checkpoint.entry_names import load_bare_state, read_as
from ddp_runner.checkpoint.manifest import checkpoint_name
from ddp_runner.checkpoint.store import CheckpointStore, Loaded, load_weights
from ddp_runner.collective.device import await_free
from ddp_runner.core.classify import lacks_memory
from ddp_runner.core.election import EMPTY_STEP
from ddp_runner.core.faults import BadInputError, Fault, FaultError, FaultKind
from ddp_runner.core.launch_plan import group_backend
from ddp_runner.core.phases import Stage
from ddp_runner.core.settings import Settings
from ddp_runner.core.step_schedule import RunLength, run_length
from ddp_runner.data.order import SampleOrder
from ddp_runner.data.quarantine import Quarantine
from ddp_runner.data.stream import StreamOrder, StreamPosition
from ddp_runner.data.workers.count import AUTO
from ddp_runner.training.changes import note_changes, tuning_of_changed
from ddp_runner.training.components.ema import Ema
from ddp_runner.training.components.loss_monitor import LossMonitor
from ddp_runner.training.components.loss_spikes import LossSpikes
from ddp_runner.training.components.optimizer import build_optimizer
from ddp_runner.training.components.precision import Precision
from ddp_runner.training.components.rng import seed_all
from ddp_runner.training.components.tuning import Tuning
from ddp_runner.training.exactness.side_state import SideState
from ddp_runner.training.fitting import check_values, check_weights, misfit
from ddp_runner.training.runtime import RankInfo
from ddp_runner.training.state import TrainState
from ddp_runner.training.task import Datasets, Task
from ddp_runner.training.task_import import BUILT_IN_TASKS, load_task, task_sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Everything that stays the same for a whole run on this rank."""

    task: Task
    datasets: Datasets
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

    @property
    def validation_samples(self) -> int:
        """How many there are; 0 without validation."""
        validation = self.datasets.validation
        return 0 if validation is None else len(validation)  # type: ignore[arg-type] # map-style


def build_workload(
    settings: Settings, rank_info: RankInfo, *, entering: Callable[[Stage], None] = lambda _: None
) -> tuple[Workload, TrainState]:
    """The workload, and a state that is still empty. Raises BadInputError for what a user can correct.

    ``entering`` is called as each stage begins.
    """
    device = torch.device(rank_info.device)
    torch.use_deterministic_algorithms(settings.run.deterministic)
    if settings.run.deterministic:
        torch.backends.cudnn.benchmark = False  # it times kernels, and so chooses by chance
        # What is read before it is written is an error all the same, and filling costs bandwidth.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    device_free_bytes = await_free(device, rank_info.device_free_bytes)
    entering(Stage.DATA)
    # INVARIANT seeded-before-user-code: what a task shuffles or splits by a global generator is the same
    # on every rank, in a replacement and at a resume. Broken if: user code runs before it.
    # Guarded by: test_data_that_is_shuffled_where_it_is_made_is_the_same_everywhere.
    seed_all(settings.run.seed)
    task = load_task(settings)
    datasets = task.build_datasets()
    global_batch = settings.data.batch_size * rank_info.world_size
    order = _sample_order(settings, datasets, global_batch, rank_info.world_size)
    length = run_length(
        steps_per_epoch=order.steps_per_epoch,
        epochs=settings.run.epochs,
        max_steps=settings.run.max_steps,
    )
    seed_all(settings.run.seed)
    entering(Stage.MODEL)
    model = task.build_model()
    _refuse_shapeless(model, settings)
    model = model.to(device)
    _refuse_sparse_gradients(model, settings)
    key = dict(config.resume_key(settings, world_size=rank_info.world_size))
    named = "a stream" if isinstance(order, StreamOrder) else f"{order.dataset_size} samples"
    key["data fingerprint"] = datasets.fingerprint or named
    workload = Workload(
        task=task,
        datasets=datasets,
        order=order,
        length=length,
        global_batch=global_batch,
        device=device,
        backend=backend_of(settings, device),
        resume_key=key,
        recipe=_recipe(settings, rank_info, task, total_steps=length.total_steps),
        settings_digest=config.digest(settings),
        parameters=sum(p.numel() for p in model.parameters()),
        device_free_bytes=device_free_bytes,
    )
    state = _empty_state(settings, model, device, workload=workload)
    try:
        stored_bytes(state.capture())
    except TypeError as error:  # reported now, not at the first save
        raise BadInputError("--task", settings.run.task, f"its {error}") from error
    return workload, state


def _recipe(
    settings: Settings, rank_info: RankInfo, task: Task, *, total_steps: int
) -> dict[str, Any]:
    device = torch.device(rank_info.device)
    is_own = settings.run.task not in BUILT_IN_TASKS
    found = config.Surroundings(
        total_steps=total_steps,
        ranks=rank_info.world_size,
        device=device.type,
        precision=Precision(use_amp=settings.optim.use_amp, device=device).name,
        backend=backend_of(settings, device),
        threads=torch.get_num_threads() if device.type == "cpu" else 0,
        torch=versions()["torch"],
        task_file=task_sha256(settings.run.task),
        own_task_reads_model=is_own and bool(getattr(task, "takes_settings", False)),
    )
    return dict(config.recipe(settings, found))


def _refuse_shapeless(model: nn.Module, settings: Settings) -> None:
    named = (*model.named_parameters(), *model.named_buffers())
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
                f"{name or 'its model'} has sparse gradients, which are neither clipped nor"
                " compared here: make it with sparse=False",
            )


def _sample_order(
    settings: Settings, datasets: Datasets, global_batch: int, world_size: int
) -> SampleOrder:
    if _is_stream(datasets.validation):
        raise BadInputError("--task", settings.run.task, "its validation data must be map-style")
    if _is_stream(datasets.train):
        return _stream_order(settings, datasets.train, global_batch)
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
    if size < global_batch:
        raise BadInputError(
            "--batch-size",
            settings.data.batch_size,
            f"times {world_size} ranks needs {global_batch} samples a step, the data has {size}; "
            "take a smaller batch, fewer ranks or more data",
        )
    return SampleOrder(seed=settings.run.seed, dataset_size=size, global_batch_size=global_batch)


def _is_stream(dataset: Any) -> bool:
    return isinstance(dataset, IterableDataset) or (
        hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
    )


def _stream_order(settings: Settings, dataset: Any, global_batch: int) -> StreamOrder:
    """The order of an iterable dataset, as long as it says it is, or as the run."""
    data, run = settings.data, settings.run
    if data.num_workers not in (AUTO, 0):
        raise BadInputError(
            "data.num_workers",
            data.num_workers,
            "must be 0 with an iterable dataset: its items are loaded in the rank itself",
        )
    size = run.max_steps * global_batch
    if hasattr(dataset, "__len__"):
        size = len(dataset)
    elif not size:
        raise BadInputError(
            "--max-steps", 0, "must say how long to train: the training data has no length"
        )
    if size < global_batch:
        raise BadInputError(
            "--batch-size",
            data.batch_size,
            f"needs {global_batch} samples a step, the data has {size}",
        )
    return StreamOrder(
        seed=run.seed, dataset_size=size, global_batch_size=global_batch, shuffle=False
    )


def backend_of(settings: Settings, device: torch.device) -> str:
    """The process group's backend on ``device``."""
    return group_backend(settings, is_on_gpu=device.type != "cpu")


def _empty_state(
    settings: Settings,
    model: nn.Module,
    device: torch.device,
    *,
    workload: Workload,
    task: Task | None = None,
) -> TrainState:
    """``task``: the one that made ``model``, where it is not the workload's own."""
    order, validation_samples = workload.order, workload.validation_samples
    return TrainState(
        model=model,
        optimizer=build_optimizer(model, settings.optim, device=device),
        precision=Precision(use_amp=settings.optim.use_amp, device=device),
        ema=Ema(model, settings.optim.ema_decay) if settings.optim.ema_decay else None,
        monitor=LossMonitor(
            target_loss=settings.run.target_loss,
            max_errors_per_epoch=settings.recovery.max_errors_per_epoch,
        ),
        loss_spikes=LossSpikes.watched_as(settings),
        quarantine=_empty_quarantine(settings, order.dataset_size),
        validation_quarantine=(
            _empty_quarantine(settings, validation_samples) if validation_samples else None
        ),
        stream=StreamPosition() if isinstance(order, StreamOrder) else None,
        side=SideState(
            model,
            task or workload.task,
            apart=(workload.datasets.train, workload.datasets.validation),
        ),
        tuning=Tuning(
            micro_batch_size=settings.data.micro_batch_size or settings.data.batch_size,
            evaluation_batch_size=settings.data.batch_size,
            find_unused_parameters=settings.ddp.find_unused_parameters is not False,
        ),
    )


def _empty_quarantine(settings: Settings, dataset_size: int) -> Quarantine:
    may_replace = settings.data.on_bad_sample == "substitute"
    bad_max = settings.data.max_bad_samples if may_replace else 0
    return Quarantine(seed=settings.run.seed, dataset_size=dataset_size, bad_max=bad_max)


def load_start(
    settings: Settings, workload: Workload, state: TrainState, store: CheckpointStore
) -> Loaded | None:
    """Fill ``state`` from the checkpoint that ``--resume`` names, or make it a fresh step 0.

    Raises BadInputError where there is none that was asked for by name, or where it is of another
    run, does not fit the model, or lies beyond the end.
    """
    loaded = (
        None
        if settings.run.resume == "none"
        else store.load(settings.run.resume, set_bad_aside=True)
    )
    if loaded is not None:
        _refuse_other_resume_key(settings, workload, loaded)
        _restore(settings, state, loaded.state, where=str(loaded.path))
        _refuse_earlier_end(settings, workload, state, where=str(loaded.path))
        state.begun_step = state.committed_step
        state.is_rehearsed = False  # by another launch
        state.tuning = tuning_of_changed(state.tuning, settings, loaded, recipe=workload.recipe)
        note_changes(loaded, state, recipe=workload.recipe)
        return loaded
    if settings.run.resume in ("last", "best"):
        raise BadInputError(
            "--resume",
            settings.run.resume,
            f"there is no checkpoint in {store.directory}; --resume auto starts at step 0 then",
        )
    _start_fresh(settings, state)
    return None


def _start_fresh(settings: Settings, state: TrainState) -> None:
    """Make ``state``, with a model that was just built, the one of step 0."""
    if settings.run.init_from:
        weights = read_as(load_weights(Path(settings.run.init_from)), state.weights())
        check_weights(weights, state, option="--init-from", value=settings.run.init_from)
        check_values(weights, state, option="--init-from", value=settings.run.init_from)
        load_bare_state(state.model, weights)
        state.buffers.keep()
    state.committed_step = state.begun_step = 0


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
        say(f"checkpoints that this run does not go on from are now in {aside}")


def newest_to_restore(settings: Settings, state: TrainState, store: CheckpointStore) -> int:
    """The step that :func:`restore_newest` goes back to; EMPTY_STEP where there is none."""
    newest = max((entry.step for entry in store.catalog.entries()), default=EMPTY_STEP)
    if newest != EMPTY_STEP:
        return newest
    named = _begun_from(settings, state)
    has_begin = state.begun_step == 0 if named is None else named.is_file()
    return state.begun_step if has_begin else EMPTY_STEP


def _begun_from(settings: Settings, state: TrainState) -> Path | None:
    """The file that was resumed by its path; where that is a folder, a newer one may be there now."""
    if settings.run.resume in WORDS:
        return None
    path = Path(settings.run.resume).expanduser().resolve()
    if state.begun_step == EMPTY_STEP:
        return path
    return (path if path.is_dir() else path.parent) / checkpoint_name(state.begun_step)


def restore_newest(
    settings: Settings, workload: Workload, state: TrainState, store: CheckpointStore
) -> Loaded | None:
    """Back to this run's newest checkpoint that verifies; before its first one, to what it began with.

    What was learnt since then holds. Returns None where that is step 0. Raises FaultError
    (CHECKPOINT_BAD) where nothing is left.
    """
    tuning = state.tuning  # DDP and loader are made for it
    loaded = store.load("auto", set_bad_aside=True)
    named = _begun_from(settings, state)
    try:
        if loaded is None and named is not None:
            loaded = store.load(str(named))
        if loaded is not None:
            state.restore(loaded.state)
            state.begun_step = state.committed_step
            note_changes(loaded, state, recipe=workload.recipe)  # the file may be of before them
        elif state.begun_step == 0:
            state.restore(_first_state(settings, workload, state, store))
        else:
            raise FaultError(_nothing_left(f"no checkpoint is left in {store.directory}"))
    except BadInputError as error:
        # It was there when the run began: no word of the user's is wrong.
        none_yet = f"there is no checkpoint in {store.directory} yet"
        cause = f"{none_yet}, and what the run began with is gone ({error})"
        raise FaultError(_nothing_left(cause)) from error
    state.tuning = tuning
    return loaded


def _first_state(
    settings: Settings, workload: Workload, state: TrainState, store: CheckpointStore
) -> dict[str, Any]:
    """What the run began with, made once more; for that time there are two models."""
    seed_all(settings.run.seed)
    # A task may keep the model that it makes, for its loss: the one that is trained must stay there.
    task = copy.copy(workload.task)
    model = task.build_model().to(workload.device)
    trained = set(map(id, state.model.parameters()))
    if not trained.isdisjoint(map(id, model.parameters())):
        raise FaultError(
            _nothing_left(
                f"there is no checkpoint in {store.directory} yet, and the task's build_model()"
                " gives the model that was trained instead of a new one"
            )
        )
    first = _empty_state(settings, model, workload.device, workload=workload, task=task)
    first.order_version = state.order_version
    first.side.follow(state.side.followed_names())
    _start_fresh(settings, first)
    return first.capture()


def _nothing_left(cause: str) -> Fault:
    return Fault(
        kind=FaultKind.CHECKPOINT_BAD, rank=-1, step=0, cause=cause, at_ns=time.monotonic_ns()
    )


def _refuse_other_resume_key(settings: Settings, workload: Workload, loaded: Loaded) -> None:
    old = loaded.manifest.meaning
    # With the salts of the file, without which no secret could be compared.
    new = config.aligned(old, {**workload.resume_key, **config.task_resume_key(settings, like=old)})
    if changes := config.difference(old, new):
        world_size = workload.global_batch // settings.data.batch_size
        ways = config.ways_on(settings, old=old, new=new, world_size=world_size)
        raise BadInputError(
            "--resume",
            settings.run.resume,
            f"{loaded.path} is of a run with other settings ({'; '.join(changes)}); {ways}",
        )


def _refuse_earlier_end(
    settings: Settings, workload: Workload, state: TrainState, *, where: str
) -> None:
    """Nothing would be trained, and what would be called done is not what was asked for."""
    end, run = workload.length.total_steps, settings.run
    if state.committed_step <= end:
        return
    option, value = ("--max-steps", run.max_steps) if run.max_steps else ("--epochs", run.epochs)
    raise BadInputError(
        option,
        value,
        f"the run would end at step {end}, and {where} is at step {state.committed_step} already; "
        f"give a larger end, another run with {config.own_folder(settings)}, or start fresh with "
        "--resume none",
    )


def is_complete(workload: Workload, state: TrainState) -> bool:
    """Whether ``state`` is one after which this run trains no step."""
    return state.committed_step >= workload.length.total_steps or (
        state.committed_step > 0 and state.monitor.target_reached
    )


def _restore(
    settings: Settings, state: TrainState, saved: Mapping[str, Any], *, where: str
) -> None:
    found = saved.get("model")
    if not isinstance(found, Mapping):
        raise BadInputError("--resume", where, "holds no model")
    weights = read_as(found, state.weights())
    relaid = [name for name in saved.get("relaid", []) if isinstance(name, str)]
    check_weights(weights, state, option="--resume", value=where, relaid=relaid)
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
            "--resume", settings.run.resume, f"{where} does not fit this run: {wrong}"
        )


def versions() -> dict[str, str]:
    """What a checkpoint was made with."""
    return {"python": platform.python_version(), "torch": str(torch.__version__)}
