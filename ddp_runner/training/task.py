"""The Task interface: what a user writes, and how ``--task`` finds it. Never trains anything."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ddp_runner.core.monitor import ALONE
from ddp_runner.core.settings import Settings
from ddp_runner.kernel.replica.loss import Weighted
from ddp_runner.kernel.rules.errors import BadInputError

if TYPE_CHECKING:
    from ddp_runner.core.step_schedule import RunLength

Loss = Tensor | Weighted | tuple[Tensor | Weighted, Mapping[str, Tensor | float]]
_NO_LOADER = "batches are made here, of -b samples, by Datasets(collate=...)"
_TEST = "test"
Batch = Any  # whatever the dataset's samples collate to: a tensor, tuple or mapping of tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Datasets:
    """Map-style datasets. ``fingerprint`` names the data's content.

    ``validation`` may be None, or several by name, such as ``{"all": a, "bach": b}``: each is evaluated by
    itself, and its figures are called ``bach/loss``.

    Only the commands ``evaluate`` and ``predict`` read ``test``; a run never does.

    ``train`` may be an iterable dataset: the whole stream, the same on every rank, which keeps its
    share of it. It needs a length or ``--max-steps``, and resumes exactly if it, or its iterator,
    has ``state_dict`` and ``load_state_dict``.

    ``collate`` makes a batch of a list of training samples, as a DataLoader's ``collate_fn`` (torch's
    is the default); it must be importable or a function of the task's. What it draws is repeatable with
    map-style data only. ``validation_collate`` does so for validation data: torch's own unless given, as
    training's may mix samples.

    ``weights`` has a number for each training sample: an epoch's samples are drawn in proportion to them,
    with ``replacement`` or each once, heavy ones earlier: a function of seed and epoch, as the order is.
    ``shuffle=False`` takes them in the data's own order. ``sampler`` is a torch ``Sampler`` that gives the samples of
    an epoch, of all ranks together. ``worker_init(number)`` runs in each loader worker before it loads.

    A dataset whose ``__getitem__`` draws no random numbers may set ``deterministic = True``; its
    samples are then fetched without seeding first.
    """

    train: Dataset[Any]
    validation: Dataset[Any] | Mapping[str, Dataset[Any]] | None = None
    test: Dataset[Any] | None = None
    fingerprint: str = ""
    notes: Sequence[str] = ()
    collate: Callable[[list[Any]], Batch] | None = None
    validation_collate: Callable[[list[Any]], Batch] | None = None
    weights: Sequence[float] | Tensor | None = None
    replacement: bool = True
    shuffle: bool = True
    sampler: Iterable[int] | None = None
    worker_init: Callable[[int], None] | None = None

    @property
    def validates_by_default_collate(self) -> bool:
        """True if training has a collate function, and evaluations take torch's."""
        is_alone = self.collate is not None and self.validation_collate is None
        return is_alone and bool(self.validation_sets)

    @property
    def validation_sets(self) -> dict[str, Dataset[Any]]:
        """The validation data by name, in order: none, one without a name, or several."""
        given = self.validation
        if given is None:
            return {}
        # A dict of samples by number is map-style data too.
        if isinstance(given, Mapping) and all(isinstance(name, str) for name in given):
            return dict(given)
        return {ALONE: given}  # type: ignore[dict-item] # mypy: as the annotation says

    @property
    def test_sets(self) -> dict[str, Dataset[Any]]:
        """The test data by name: ``test``, if there is some."""
        return {} if self.test is None else {_TEST: self.test}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """The position of a batch in the run: the third argument of ``loss(model, batch, context)``.

    ``step`` and ``epoch`` count from 0; ``total_steps`` is the length of the run in optimizer steps. In evaluations
    ``is_training`` is False, and ``step`` and ``epoch`` are those of the last training step.
    """

    step: int
    epoch: int
    total_steps: int
    is_training: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochContext:
    """The state of the run at the end of an epoch or an evaluation: the argument of a task's hooks.

    ``epoch`` is the epoch of the last step, from 0; ``step`` is the number of optimizer steps so far. ``metrics`` has
    the training loss of the last step as ``loss``, and the metrics of the newest evaluation by name.
    """

    epoch: int
    step: int
    total_steps: int
    rank: int
    world_size: int
    metrics: Mapping[str, float]
    model: nn.Module

    @property
    def is_first(self) -> bool:
        """True on rank 0 only, which may write files for all ranks."""
        return self.rank == 0


@runtime_checkable
class Task(Protocol):
    """The interface of a task. A rank makes one instance: ``NAME(settings)``, ``NAME(**task)`` or ``NAME()``.

    A model may be built on any rank and must not depend on it: seeds are set before the call.
    """

    def build_model(self) -> nn.Module:
        """A fresh module on the CPU."""
        ...

    def build_datasets(self) -> Datasets:
        """The data. Raise ``BadInputError`` for what the user can correct."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """The mean loss over the samples of ``batch``, a scalar with a graph to the parameters.

        A step's loss is the mean over its samples: means of micro-batches are weighted by their
        numbers of samples. A mean over anything else, as the tokens of padded samples, is
        ``Weighted(total, weight)``: the step's loss is the sum of totals over the sum of weights, however
        the step is cut. ``(loss, {"recon": recon, "kl": kl})`` of either has those numbers logged, as means
        over all samples of all ranks, in evaluations too.

        A ``loss(self, model, batch, context)`` also receives a :class:`StepContext`.
        """
        ...


class TaskLoss:
    """Calls the ``loss`` of a task, with a :class:`StepContext` if it takes one."""

    def __init__(self, task: Task, length: RunLength | None = None) -> None:
        """``length``: of the run; without it the context is that of an evaluation before the first step."""
        self._loss = LossInContext(task.loss)
        self._length = length
        self._context = StepContext(step=0, epoch=0, total_steps=0, is_training=False)
        if length is not None:
            self.turn_to(length.first_step, is_training=False)

    def __call__(self, model: nn.Module, batch: Batch) -> Loss:
        """Return the loss of ``batch`` at the step of the last :meth:`turn_to`."""
        return self._loss(model, batch, self._context)

    def turn_to(self, step: int, *, is_training: bool) -> None:
        """Have the next losses be those of ``step``, or of an evaluation once ``step`` steps are made."""
        if not self._loss.takes_context or self._length is None:
            return
        length = self._length
        shown = step if is_training else max(length.first_step, step - 1)
        self._context = StepContext(
            step=shown,
            epoch=length.epoch_of(shown),
            total_steps=length.total_steps,
            is_training=is_training,
        )


class LossInContext:
    """Calls a loss with model, batch and, if it takes one, the context: by name, or as a third argument."""

    def __init__(self, loss: Callable[..., Loss]) -> None:
        self._loss = loss
        self._is_named, self._is_third = _takes(loss)

    @property
    def takes_context(self) -> bool:
        """True if the loss has a parameter ``context``, or a third one without a default."""
        return self._is_named or self._is_third

    def __call__(self, model: nn.Module, batch: Batch, context: StepContext | None) -> Loss:
        """Return what the loss returns."""
        if self._is_named:
            return self._loss(model, batch, context=context)
        if self._is_third:
            return self._loss(model, batch, context)
        return self._loss(model, batch)


def _takes(loss: Callable[..., Any]) -> tuple[bool, bool]:
    """Return whether ``loss`` has a parameter ``context`` that can be named, and whether its third is one."""
    try:
        parameters = [*inspect.signature(loss).parameters.values()]
    except (TypeError, ValueError):
        return False, False
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    is_named = any(one.name == "context" and one.kind in names for one in parameters)
    third = [one for one in parameters if one.kind in places][2:3]
    return is_named, any(
        one.name == "context" or one.default is inspect.Parameter.empty for one in third
    )


@runtime_checkable
class ReportsSample(Protocol):
    """A task may also show what it learned, once, at the end (rank 0, bare module, eval mode).

    What it raises is a warning: the training is done and saved by then.
    """

    def sample(self, model: nn.Module) -> str:
        """A short text for people."""
        ...


@runtime_checkable
class NamesLoss(Protocol):
    """A task may also translate its loss into figures for people, such as bits per byte."""

    def figures(self, loss: float) -> Mapping[str, float]:
        """Name -> value, for logs and the summary. What is no number, or raises, is left out with a warning."""
        ...


@runtime_checkable
class CountsTokens(Protocol):
    """A task of which all samples have equally many tokens may also say how many, for tokens in all and per second.

    Where its loss is ``Weighted``, the sum of weights counts instead.
    """

    tokens_per_sample: float


@runtime_checkable
class Measures(Protocol):
    """A task may also measure more than its loss, in evaluations: accuracy, say."""

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, Any]:
        """Name -> the mean over the samples of ``batch``, or ``(sum, weight)``; of one in ``build_metrics()`` what it is updated with.

        Called in eval mode, without gradients. A figure is the sum of all sums over that of all weights, of all
        ranks; a mean weighs as much as its batch has samples.
        """
        ...


@runtime_checkable
class BuildsMetrics(Protocol):
    """An optional interface of a task with :class:`Measures`, for figures that are no sum over a weight."""

    def build_metrics(self) -> Mapping[str, Any]:
        """Name -> an object with ``reset()``, ``update(...)`` and ``compute()``, made once for a process.

        Its tensors and numbers that ``update`` changes are summed over ranks, what each has added to what
        ``reset()`` has left; then ``compute()`` gives the figure on every rank: a number, or a dict of them.
        """
        ...


@runtime_checkable
class HasLayerGroups(Protocol):
    """A task may also name parts of its model, for ``optim.train_layers`` and ``optim.unfreeze``."""

    def layer_groups(self) -> Mapping[str, Sequence[str]]:
        """Name -> patterns of module names, such as ``{"encoder": ["embed", "blocks.*"]}``."""
        ...


@runtime_checkable
class ConfiguresOptimizers(Protocol):
    """A task may also make its own optimizer, with parameter groups, and its schedule."""

    def configure_optimizers(self, model: nn.Module) -> Any:
        """Return a torch optimizer for ``model``, which is on its device, or ``(optimizer, scheduler)``.

        The scheduler is stepped after each step. ``{"optimizer": ..., "scheduler": ..., "interval": "epoch"}`` has it
        stepped after each epoch. Parameters that the optimizer lacks are frozen. Called once per process.
        """
        ...


@runtime_checkable
class Predicts(Protocol):
    """A task may also define the outputs that the command ``predict`` writes."""

    def predict(self, model: nn.Module, batch: Batch) -> Any:
        """Return a tensor whose first dimension counts the samples, a list with one entry per sample, or a dict of these."""
        ...


@runtime_checkable
class EndsEpochs(Protocol):
    """A task may also have a hook for the end of each epoch, for example to draw a picture."""

    def on_epoch_end(self, context: EpochContext) -> None:
        """Inspect the model after an epoch and its evaluation, and before its checkpoint. Every rank calls it.

        If a rank is lost during the call, all ranks call it again. Gradients are off, and the model is in eval mode. The
        hook may write files. Changes to attributes of the task and buffers of the model are rolled back, with a
        warning. Changed parameters are an error. An exception is handled like one in a step.
        """
        ...


@runtime_checkable
class EndsEvaluations(Protocol):
    """A task may also have a hook for the end of each evaluation."""

    def on_evaluation_end(self, context: EpochContext) -> None:
        """Inspect the model and ``context.metrics``; the rules of :meth:`EndsEpochs.on_epoch_end` apply."""
        ...


@runtime_checkable
class HasLocalState(Protocol):
    """A task may also keep per-rank state: an environment, a replay buffer, a generator."""

    def local_state(self) -> Mapping[str, Any]:
        """Return objects by name that ``loss`` changes in place, such as ``{"env": self.env}``.

        Called once per process. Each rank's objects are kept at each step and saved by rank. A replacement of the
        rank receives them, and a repeated step puts them back. An object has ``state_dict()`` and
        ``load_state_dict()``, or is a dict, list, deque, set, array, tensor, generator or any object that pickle can
        copy.
        """
        ...


@runtime_checkable
class Describes(Protocol):
    """A task may also say what else a checkpoint of it belongs to: its tokenizer, say, or its model's form."""

    def describe(self) -> Mapping[str, Any]:
        """Name -> plain value (text, number, bool, None, lists and dicts of these).

        They stand in each checkpoint; a resume whose task describes itself otherwise is refused.
        """
        ...


@runtime_checkable
class TakesSettings(Protocol):
    """Marker of the built-in tasks: constructed with the whole ``Settings``."""

    takes_settings: bool

    def __init__(self, settings: Settings) -> None: ...


def checked_datasets(given: object, *, task: str) -> Datasets:
    """Return the result of ``build_datasets()``. Raises BadInputError, which says what to write, if it is illegal."""
    if not isinstance(given, Datasets):
        write = "Datasets(train=...)"
        if given is None:
            write += ", as in: return Datasets(train=my_dataset)"
        elif isinstance(given, DataLoader):
            write = f"Datasets(train=its dataset): {_NO_LOADER}"
        elif isinstance(given, Dataset):
            write = "Datasets(train=that dataset)"
        elif isinstance(given, tuple) and len(given) == 2:
            write = "Datasets(train=..., validation=...) of the two"
        raise BadInputError(
            "--task", task, f"build_datasets() returned {_named(given)}; return {write}"
        )
    found: dict[str, object] = {
        "train": given.train,
        "validation": given.validation,
        "test": given.test,
    }
    if isinstance(given.validation, Mapping):
        found |= {f"validation data {name!r}": one for name, one in given.validation.items()}
    for name, one in found.items():
        if isinstance(one, DataLoader):
            what = (
                f"build_datasets() returned a DataLoader as {name}; give its dataset: {_NO_LOADER}"
            )
            raise BadInputError("--task", task, what)
    _refuse_second_test(given, task)
    if found["train"] is None:
        what = "build_datasets() returned None as train; give a dataset: Datasets(train=my_dataset)"
        raise BadInputError("--task", task, what)
    return given


def _refuse_second_test(given: Datasets, task: str) -> None:
    if given.test is not None and _TEST in given.validation_sets:
        what = (
            f"build_datasets() returned validation data called {_TEST!r} beside test data, whose figures have"
            " that name: give the validation data another one"
        )
        raise BadInputError("--task", task, what)


def checked_model(given: object, *, task: str) -> nn.Module:
    """Return the result of ``build_model()``. Raises BadInputError, which says what to write, if it is illegal."""
    if isinstance(given, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        write = "the module inside it: this run wraps it"
    elif isinstance(given, nn.Module):
        return given
    elif isinstance(given, type):
        write = f"an instance: {given.__name__}(...)"
    elif given is None:
        write = "the model, as in: return model"
    else:
        write = "one torch.nn.Module"
    raise BadInputError("--task", task, f"build_model() returned {_named(given)}; return {write}")


def _named(value: object) -> str:
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
