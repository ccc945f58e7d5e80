"""A program's own model, loader and optimizer as a Task: what of them is taken over, and why the rest is refused.

Wraps no module and steps no optimizer: that is what trains any Task.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from ddp_runner import config as configuration
from ddp_runner.data.epoch_loader import SafeDataLoader
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.step.runtime import Runtime
from ddp_runner.training.components.lr_schedule import OwnRates
from ddp_runner.training.components.optimizer_state import load_optimizer_state
from ddp_runner.training.loading.stream_order import is_stream
from ddp_runner.training.local_runtime import LocalRuntime
from ddp_runner.training.state import Trained, TrainState
from ddp_runner.training.task import (
    Batch,
    ConfiguresOptimizers,
    Datasets,
    Loss,
    LossInContext,
    StepContext,
    checked_model,
)

if TYPE_CHECKING:
    from ddp_runner.core.settings import OptimSettings
    from ddp_runner.core.step_schedule import RunLength

_STEP, _EPOCH = "step", "epoch"
# Settings of what a program's own optimizer, and its scheduler, decide.
_OF_OPTIMIZER = (
    *("optimizer", "learning_rate", "weight_decay", "beta1", "beta2", "momentum", "epsilon"),
    *("schedule", "schedule_steps", "warmup_steps", "decay_steps", "min_learning_rate"),
    *("train_layers", "unfreeze"),
)
_FORMS = (
    'must return one torch optimizer, (optimizer, scheduler) or {"optimizer": ..., "scheduler": ...,'
    ' "interval": "step" or "epoch"}'
)
# What a loop by hand computes with, unless somebody says otherwise.
_AS_BY_HAND: Mapping[str, object] = {"optim.precision": "fp32", "optim.max_grad_norm": None}


class Objects(TypedDict, total=False):
    """The arguments of ``DDPTrainer(model=..., train_loader=...)``."""

    model: nn.Module
    train_loader: DataLoader[Any] | SafeDataLoader
    optimizer: torch.optim.Optimizer
    criterion: Callable[..., Tensor]
    loss: Callable[..., Loss]
    scheduler: LRScheduler
    scheduler_interval: str
    val_loader: DataLoader[Any] | SafeDataLoader


# What a loader has where nobody has said a word: then the run's settings may.
_UNSAID: Mapping[str, object] = {
    "data.batch_size": 1,
    "data.num_workers": 0,
    "data.pin_memory": False,
    "data.prefetch_factor": 2,
    "data.loader_timeout_s": 60.0,
    "run.seed": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Given:
    """The given objects that others use: the engine takes model and optimizer, and the loader is replaced."""

    model: nn.Module
    datasets: Datasets
    optimizer: torch.optim.Optimizer | None
    scheduler: LRScheduler | None
    is_by_epoch: bool


class ReadyObjects:
    """The Task of them. ``config`` is what the run is to be set to, ``lines`` are for people."""

    def __init__(self, objects: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Raise BadInputError for what cannot be taken over, TypeError for names that are none."""
        _refuse_names(objects, config)
        model = checked_model(objects["model"], task="model")
        optimizer, scheduler = objects.get("optimizer"), objects.get("scheduler")
        loader = _Loader(objects["train_loader"], "train_loader")
        validation = objects.get("val_loader")
        self.lines: tuple[str, ...] = loader.lines
        if optimizer is not None:
            self.lines += _fit(optimizer, model)
        self.given = Given(
            model=model,
            datasets=loader.datasets(
                None if validation is None else _Loader(validation, "val_loader")
            ),
            optimizer=optimizer,
            scheduler=scheduler,
            is_by_epoch=_is_by_epoch(optimizer, scheduler, objects.get("scheduler_interval")),
        )
        self._criterion, self._loss = _loss_of(objects, model)
        taken = loader.settings
        if isinstance(validation, (DataLoader, SafeDataLoader)) and validation.batch_size:
            taken["data.evaluation_batch_size"] = validation.batch_size
        self.config = _composed(config, taken, is_optimizer_given=optimizer is not None)
        self._replicas = loader.replicas
        self._is_shared_out = loader.replicas is None and not is_stream(loader.dataset)
        self.__qualname__ = type(model).__name__  # which names the run

    def train_in(self, runtime: Runtime, *, folder: str) -> None:
        """Adapt to the place where this rank trains. Raises BadInputError for a loader of another number of ranks.

        As with DistributedDataParallel, all ranks begin with the weights of rank 0. ``folder``: of checkpoints.
        """
        info = runtime.rank_info
        runtime.rank_info = replace(info, loads=info.rank == 0)
        world_size = info.world_size
        if self._replicas not in (None, world_size):
            expected = (
                f"its DistributedSampler is for {self._replicas} ranks, and there are {world_size}"
            )
            raise BadInputError("train_loader", "", expected)
        if self._is_shared_out and world_size > 1:
            self.lines += (
                f"train_loader: each of the {world_size} ranks takes its part of the samples",
            )
        if isinstance(self._criterion, nn.Module):
            self._criterion.to(info.device)
        if isinstance(runtime, LocalRuntime):
            runtime.lines = (*self.lines, _not_repaired(world_size, folder))

    def build_model(self) -> nn.Module:
        """The one that there is."""
        return self.given.model

    def build_datasets(self) -> Datasets:
        """Return the datasets of the loaders."""
        return self.given.datasets

    def loss(self, model: nn.Module, batch: Batch, context: StepContext | None = None) -> Loss:
        """Compute the given loss: of model and batch, of outputs and targets, or the model's own."""
        if self._loss is not None:
            return LossInContext(self._loss)(model, batch, context)
        if self._criterion is None:
            return _models_own(model, batch)
        if not isinstance(batch, (list, tuple)) or len(batch) < 2:
            kind = type(batch).__name__
            raise TypeError(
                f"criterion= needs batches of inputs and targets, and train_loader gives a {kind}:"
                " give loss=, a function of model and batch"
            )
        *inputs, targets = batch
        found: Tensor = self._criterion(model(*inputs), targets)
        return found


class ReadyState(TrainState):
    """The state of an optimizer that the program has made: it decides what it updates, and at which rates."""

    def __init__(self, trained: Trained, *, rates: OwnRates, **more: Any) -> None:
        super().__init__(trained, **more)
        self.rates = rates

    def own_rate(self, *, factors: tuple[float, ...]) -> float | None:
        """Return the learning rate of the optimizer and its scheduler."""
        return self.rates.lowered_at(self.own_step, factors=factors)

    def apply_own_rate(self) -> bool:
        """The same for all groups."""
        self.rates.apply()
        return True

    def train_unfrozen(self) -> None:
        """Do nothing: as in a loop by hand, unfrozen parameters that the optimizer lacks are not updated."""

    def update_captured(self, names: list[str]) -> None:
        """Do nothing, like :meth:`train_unfrozen`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnOptimizer:
    """An optimizer that the user has made, with its scheduler. ``lines`` are for people."""

    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler | None = None
    is_by_epoch: bool = False
    lines: tuple[str, ...] = ()

    def rates(self, length: RunLength) -> OwnRates:
        """Return the learning rates as a function of the step."""
        every = length.steps_per_epoch if self.is_by_epoch else 1
        return OwnRates(self.optimizer, self.scheduler, every=every)

    @property
    def recipe(self) -> dict[str, str]:
        """Return a record of how optimizer and scheduler begin: others make other weights."""
        return {"optimizer": OwnRates(self.optimizer, self.scheduler, every=1).record()}

    @property
    def kinds(self) -> dict[str, str]:
        """Return the types of optimizer and scheduler, which a checkpoint belongs to."""
        kinds = {"optimizer": self.optimizer, "scheduler": self.scheduler}
        return {name: type(one).__name__ for name, one in kinds.items() if one is not None}


def own_optimizer(task: object, model: nn.Module, optim: OptimSettings) -> OwnOptimizer | None:
    """Return the optimizer that the program or the task has made; None if the settings name one.

    The parameters of ``model`` are where they are trained. Raises BadInputError for what is no optimizer of it, and
    for settings that it decides.
    """
    if isinstance(task, ReadyObjects):
        given = task.given
        if given.optimizer is None:
            return None
        if given.optimizer.state:  # it has made steps, perhaps on another device
            load_optimizer_state(given.optimizer, given.optimizer.state_dict())
        return OwnOptimizer(
            optimizer=given.optimizer, scheduler=given.scheduler, is_by_epoch=given.is_by_epoch
        )
    if not isinstance(task, ConfiguresOptimizers):
        return None
    usual = type(optim)()
    for name in _OF_OPTIMIZER:
        if (value := getattr(optim, name)) != getattr(usual, name):
            expected = "configure_optimizers() of the task decides that: leave one of them out"
            raise BadInputError(f"optim.{name}", value, expected)
    try:
        inspect.signature(task.configure_optimizers).bind(model)
    except TypeError:
        raise BadInputError("configure_optimizers()", "", "must take the model") from None
    return _configured(task.configure_optimizers(model), model)


def _configured(made: object, model: nn.Module) -> OwnOptimizer:
    """Return what ``configure_optimizers()`` has made. Raises BadInputError for what is none of its forms."""
    scheduler, interval = None, None
    optimizer = made
    if isinstance(made, Mapping):
        unknown = [name for name in made if name not in ("optimizer", "scheduler", "interval")]
        if unknown or "optimizer" not in made:
            raise BadInputError("configure_optimizers()", "", _FORMS)
        optimizer, scheduler = made["optimizer"], made.get("scheduler")
        interval = made.get("interval")
    elif isinstance(made, (tuple, list)):
        if len(made) != 2 or isinstance(made[1], torch.optim.Optimizer):
            raise BadInputError("configure_optimizers()", "", _FORMS)
        optimizer, scheduler = made
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise BadInputError("configure_optimizers()", type(optimizer).__name__, _FORMS)
    lines = _fit(optimizer, model)
    if scheduler is not None:
        interval = interval or _STEP
    is_by_epoch = _is_by_epoch(optimizer, scheduler, interval)
    return OwnOptimizer(
        optimizer=optimizer, scheduler=scheduler, is_by_epoch=is_by_epoch, lines=lines
    )


def _not_repaired(world_size: int, folder: str) -> str:
    what = (
        "this process is not replaced: run the program again to resume"
        if world_size == 1
        else "a lost rank is not replaced alone: the launcher's --max-restarts N starts all again, and they resume"
    )
    return f"{what} from {folder} (a task or attach() under ddp_runner replaces a process alone)"


def _refuse_names(objects: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    known = list(Objects.__annotations__)
    for name in objects:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}=?" if near else f"; there are {', '.join(known)}"
            raise TypeError(f"DDPTrainer() takes no {name}={hint}")
    lacking = [name for name in ("model", "train_loader") if objects.get(name) is None]
    if lacking:
        named = ", ".join(f"{name}=" for name in objects)
        raise BadInputError("DDPTrainer()", "", f"with {named} it needs {lacking[0]}= as well")
    if {"task", "run.task"} & config.keys():
        raise BadInputError(
            "task", "", "is another way to say what is trained: leave it out, or model="
        )


def _fit(optimizer: Any, model: nn.Module) -> tuple[str, ...]:
    """Freeze what the optimizer does not have; a line about it. Raises BadInputError for what is no optimizer of it."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
        raise BadInputError(
            "optimizer",
            kind,
            "must be a torch.optim.Optimizer that was made: SGD(model.parameters(), ...)",
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        expected = "asks for the loss several times a step, which is not in this version"
        raise BadInputError("optimizer", "LBFGS", expected)
    has = {id(one) for group in optimizer.param_groups for one in group["params"]}
    own = list(model.parameters())
    if has - set(map(id, own)):
        expected = "has a parameter that is none of model's: make it of model.parameters()"
        raise BadInputError("optimizer", type(optimizer).__name__, expected)
    left = [one for one in own if one.requires_grad and id(one) not in has]
    for one in left:
        one.requires_grad_(False)
    if not left:
        return ()
    count = sum(one.numel() for one in left)
    return (f"optimizer: {count:,} parameters are not in it, and are frozen",)


def _is_by_epoch(optimizer: Any, scheduler: Any, interval: str | None) -> bool:
    """Return True if the scheduler is stepped after each epoch. Raises BadInputError if that is not given."""
    if scheduler is None:
        if interval is not None:
            raise BadInputError("scheduler_interval", interval, "needs scheduler= as well")
        return False
    kind = type(scheduler).__name__
    if isinstance(scheduler, ReduceLROnPlateau):
        expected = "is optim.plateau_patience=N here, by the figure of checkpoint.monitor"
        raise BadInputError("scheduler", kind, expected)
    if not isinstance(scheduler, LRScheduler):
        raise BadInputError("scheduler", kind, "must be one of torch.optim.lr_scheduler")
    if optimizer is None or scheduler.optimizer is not optimizer:
        raise BadInputError("scheduler", kind, "must be of the optimizer that optimizer= gives")
    if interval not in (_STEP, _EPOCH):
        expected = f"must say after what scheduler= is stepped: {_STEP} or {_EPOCH}"
        raise BadInputError("scheduler_interval", interval or "", expected)
    return interval == _EPOCH


def _loss_of(
    objects: Mapping[str, Any], model: nn.Module
) -> tuple[Callable[..., Tensor] | None, Callable[..., Loss] | None]:
    """A function of outputs and targets, or one of model and batch, or neither.

    Raises BadInputError for both, and for a criterion that would have to be trained.
    """
    criterion, loss = objects.get("criterion"), objects.get("loss")
    if criterion is not None and loss is not None:
        expected = "and loss= both say what the loss is: leave one of them out"
        raise BadInputError("criterion", "", expected)
    is_of_torch = str(getattr(loss, "__module__", "")).startswith("torch.")
    if isinstance(loss, nn.Module) or is_of_torch:
        criterion, loss = loss, None
    for name, one in (("criterion", criterion), ("loss", loss)):
        if one is not None and (isinstance(one, type) or not callable(one)):
            raise BadInputError(
                name,
                getattr(one, "__name__", one),
                "must be a function, or made: CrossEntropyLoss()",
            )
    if isinstance(criterion, nn.Module):
        own = set(map(id, model.parameters()))
        if any(one.requires_grad and id(one) not in own for one in criterion.parameters()):
            expected = "has parameters to train: make it a part of the model, and give loss="
            raise BadInputError("criterion", type(criterion).__name__, expected)
    return criterion, loss


def _models_own(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of a model's output, as models of transformers give it for a batch with labels."""
    try:
        outputs = model(**batch) if isinstance(batch, Mapping) else model(batch)
    except (TypeError, AttributeError) as error:
        if not isinstance(batch, (list, tuple)):
            raise
        raise TypeError(
            f"{error} (without criterion= and loss=, the model is called with the whole batch, a {type(batch).__name__})"
        ) from error
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if not isinstance(loss, Tensor):
        raise TypeError(
            "what the model gives has no loss: give criterion=, of outputs and targets, or loss=, of model and batch"
        )
    return loss


def _composed(
    config: Mapping[str, Any], taken: Mapping[str, object], *, is_optimizer_given: bool
) -> dict[str, Any]:
    """``config`` with what the loaders say. Raises BadInputError where both say something, and not the same."""
    given, origins = configuration.from_flat(config), configuration.origins_of(config)
    added: dict[str, object] = {}
    for key, value in {**_AS_BY_HAND, **taken}.items():
        section, _, name = key.partition(".")
        if origins[key] == "default":
            added[key] = value
            continue
        said = getattr(getattr(given, section), name)
        if key in taken and value not in (said, _UNSAID.get(key)):
            raise BadInputError(key, said, f"the loader has {value}: leave one of them out")
    if is_optimizer_given:
        for name in _OF_OPTIMIZER:
            if origins[f"optim.{name}"] != "default":
                expected = "optimizer= decides that: leave one of them out"
                raise BadInputError(f"optim.{name}", getattr(given.optim, name), expected)
    return {**added, **config}


class _Loader:
    """The parts of a DataLoader, or a SafeDataLoader, that are used: its data, its collation, and its settings."""

    def __init__(self, loader: Any, word: str) -> None:
        """Raise BadInputError for what cannot be. ``word``: what the program calls it."""
        self._word = word
        if not isinstance(loader, (DataLoader, SafeDataLoader)):
            expected = "must be a DataLoader or a SafeDataLoader"
            raise self._refused(expected, type(loader).__name__)
        self._loader = loader
        self.dataset = loader.dataset
        self.lines: tuple[str, ...] = ()
        self.replicas: int | None = None  # of a sampler for several ranks
        sampler, self.batch_size, drop_last = self._sampling()
        self._order = self._order_of(sampler)
        if word == "train_loader" and not is_stream(self.dataset):
            self._note_order(drop_last=drop_last)

    @property
    def settings(self) -> dict[str, object]:
        """The loader's values that are settings here, by key."""
        loader = self._loader
        found: dict[str, object] = {
            "data.batch_size": self.batch_size,
            "data.num_workers": loader.num_workers,
            "data.pin_memory": loader.pin_memory,
        }
        if loader.num_workers and loader.prefetch_factor:
            found["data.prefetch_factor"] = loader.prefetch_factor
        if loader.timeout:
            found["data.loader_timeout_s"] = float(loader.timeout)
        if isinstance(loader, SafeDataLoader):
            found["run.seed"] = loader.seed
        return found

    def datasets(self, validation: _Loader | None) -> Datasets:
        """The data of both."""
        return Datasets(
            train=self.dataset,
            validation=None if validation is None else validation.validation(),
            collate=self._collate(),
            validation_collate=None if validation is None else validation._collate(),  # noqa: SLF001 - of its own class
            worker_init=self._loader.worker_init_fn,
            **self._order,
        )

    def _collate(self) -> Callable[[list[Any]], Any] | None:
        made = self._loader.collate_fn
        return None if made is default_collate else made

    def _sampling(self) -> tuple[Any, int, bool]:
        """Sampler, batch size, and whether the last batch is left out where it is smaller."""
        loader = self._loader
        context = getattr(loader, "multiprocessing_context", None)
        if context is not None and context.get_start_method() != "fork":
            expected = f"its workers are to be started by {context.get_start_method()}, and are forked here"
            raise self._refused(f"{expected}: leave multiprocessing_context out")
        if loader.batch_size is not None:
            return loader.sampler, loader.batch_size, bool(loader.drop_last)
        made = loader.batch_sampler
        if type(made) is BatchSampler:
            return made.sampler, made.batch_size, made.drop_last
        if made is None:
            raise self._refused(
                "its dataset makes the batches itself: give samples, and batch_size="
            )
        expected = f"its batch_sampler {type(made).__name__} makes batches of its own: give batch_size= and sampler="
        raise self._refused(expected)

    def _order_of(self, sampler: Any) -> dict[str, Any]:
        """Return the arguments of :class:`Datasets` for the order of the samples."""
        size = None if is_stream(self.dataset) else self._size()
        if size is None or (sampler is None and isinstance(self._loader, SafeDataLoader)):
            return {"shuffle": getattr(self._loader, "shuffle", True)}
        kind = type(sampler)  # one of theirs, and no other that is made of it
        if kind is SequentialSampler:
            return {"shuffle": False}
        if kind is DistributedSampler:
            self.replicas = sampler.num_replicas
            return {"shuffle": sampler.shuffle}
        if kind is RandomSampler and not sampler.replacement and sampler.num_samples == size:
            return {"shuffle": True}
        if kind is WeightedRandomSampler and sampler.num_samples == len(sampler.weights) == size:
            return {"weights": sampler.weights, "replacement": sampler.replacement}
        if hasattr(sampler, "num_replicas") or hasattr(sampler, "rank"):
            expected = f"its sampler {type(sampler).__name__} gives the samples of one rank: give one of all samples"
            raise self._refused(f"{expected}, which are shared out here")
        return {"sampler": sampler}

    def _size(self) -> int:
        try:
            size = len(self.dataset)  # type: ignore[arg-type] # that is what is being checked
        except TypeError:
            raise self._refused("its dataset has no length (__len__)") from None
        return size

    def validation(self) -> Any:
        """The samples to evaluate: those of the sampler where that leaves some out."""
        if "sampler" not in self._order and "weights" not in self._order:
            return self.dataset
        sampler = self._order.get("sampler")
        if isinstance(sampler, SubsetRandomSampler):
            return Subset(self.dataset, sampler.indices)
        raise self._refused("its sampler draws: give one that takes each sample once, or a Subset")

    def _note_order(self, *, drop_last: bool) -> None:
        if self._order.get("shuffle") and getattr(self._loader, "generator", None) is not None:
            self.lines += (f"{self._word}: run.seed decides the order, not its generator",)
        if drop_last or self.replicas is not None or "sampler" in self._order:
            return
        rest = self._size() % self.batch_size
        if rest:
            self.lines += (
                f"{self._word}: drop_last is on: each step has the whole batch, and an epoch leaves {rest} samples out",
            )

    def _refused(self, expected: str, value: object = "") -> BadInputError:
        return BadInputError(self._word, value, expected)
