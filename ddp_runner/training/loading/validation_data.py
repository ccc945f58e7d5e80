"""The validation data of a task, and the figure of it that a run is judged by, refused before the first step.

Evaluates nothing but one batch, and that only where a name must be known.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from ddp_runner.config.suggest import nearest
from ddp_runner.core.monitor import (
    AUTO,
    LOSS,
    TRAIN_LOSS,
    Monitor,
    chosen,
    figure_name,
    highest_refused,
)
from ddp_runner.core.run_stages import uses_best
from ddp_runner.core.settings import Settings
from ddp_runner.data.by_number import gives_by_number, sample_at
from ddp_runner.kernel.replica.loss import read_loss
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.faults import FaultError
from ddp_runner.training.components.precision import Precision
from ddp_runner.training.figures.measuring import Alone, Meter, user_fault
from ddp_runner.training.helpers import Helpers
from ddp_runner.training.loading.batch_copy import to_device
from ddp_runner.training.task import Datasets, Task, TaskLoss
from ddp_runner.values.generators import device_generators, generators_kept

OPTION = "checkpoint.monitor"
DEFAULT_COLLATE = (
    "evaluations make batches by torch's default collate, Datasets(collate=...) is for training alone:"
    " give Datasets(validation_collate=...) for another"
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_TRIED_SAMPLES = 4
_READ_MAX = 64  # of which some may be broken


def refuse_unfit_validation(
    settings: Settings, datasets: Datasets, *, is_stream: Callable[[Any], bool]
) -> None:
    """Raise BadInputError for validation data that cannot be evaluated."""

    def refused(expected: str) -> BadInputError:
        return BadInputError("--task", settings.run.task, expected)

    if isinstance(datasets.validation, Mapping) and not datasets.validation:
        raise refused("its validation data names none: give some by name, or None")
    sets = datasets.validation_sets
    is_named = not any(one is datasets.validation for one in sets.values())
    for name, dataset in sets.items():
        called = f" {name!r}" if is_named else ""
        if is_stream(dataset):
            raise refused(f"its validation data{called} must be map-style")
        if not is_named:
            continue
        if not _NAME.fullmatch(name):
            raise refused(
                f"its validation data{called} needs a name of letters, digits, _, . and -"
            )
        if not gives_by_number(dataset) or not hasattr(dataset, "__len__"):
            raise refused(f"its validation data{called} has no samples by number, or no length")
        if not len(dataset):
            raise refused(f"its validation data{called} is empty: leave it out")


def monitor_for(
    settings: Settings,
    task: Task,
    datasets: Datasets,
    model: nn.Module,
    *,
    objects: Mapping[str, Any],
    device: torch.device,
) -> Monitor:
    """Return the figure of ``checkpoint.monitor``. Raises BadInputError if it does not exist, or is a loss to maximize.

    The losses are known by name. For any other figure one batch is evaluated, which leaves no trace; also if
    training and evaluations have different collate functions, so that a mismatch is refused now.
    """
    wanted, mode = settings.checkpoint.monitor, settings.checkpoint.mode
    sets = {name: one for name, one in datasets.validation_sets.items() if len(one)}  # type: ignore[arg-type] # map-style
    name = chosen(wanted, tuple(sets))
    # Of its training loss a run without validation data asks nobody: where it counts, it is kept where it is judged.
    is_used = uses_best(settings.stage, load_best_at_end=settings.run.load_best_at_end)
    monitor = Monitor(name=name, mode=mode, by_evaluations=name != TRAIN_LOSS or is_used)
    known = [TRAIN_LOSS, *(figure_name(name, LOSS) for name in sets)]
    if monitor.name in known:  # which no metric may be called
        if mode == "max":
            raise highest_refused(monitor.name)
        if not datasets.validates_by_default_collate:
            return monitor
    if sets:
        meter = Meter(task, objects, device=device)
        precision = Precision.of(settings.optim, device)
        with _left_as_it_was(model), precision.autocast():
            for name, dataset in sets.items():
                try:
                    figures = _figures(task, model, dataset, datasets, meter, device=device)
                except FaultError as error:  # of what a task may not give
                    raise BadInputError("--task", settings.run.task, error.fault.cause) from error
                known += [figure_name(name, one) for one in figures]
    if monitor.name in known:
        return monitor
    if not sets:
        expected = "the task gives no validation data: give some, or take train_loss or auto"
    else:
        near = nearest(monitor.name.replace("/", "_"), [one.replace("/", "_") for one in known])
        meant = next((one for one in known if one.replace("/", "_") == near), "")
        hint = f"did you mean {meant}? " if meant else ""
        expected = f"no such metric; {hint}available: {', '.join([AUTO, *known])}"
    raise BadInputError(OPTION, wanted, expected)


def _first_readable(dataset: Any) -> list[Any]:
    """A few samples. One that is broken is repaired, or ends the run, where it is evaluated, not here.

    Raises what the dataset does where none of the first can be read.
    """
    found: list[Any] = []
    problem: Exception | None = None
    for index in range(min(_READ_MAX, len(dataset))):
        try:
            found.append(sample_at(dataset, index))
        except Exception as error:  # noqa: BLE001 - users' code, which may raise anything
            problem = problem or error
        if len(found) == _TRIED_SAMPLES:
            break
    if problem is not None and not found:
        raise problem
    return found


def _figures(
    task: Task,
    model: nn.Module,
    dataset: Any,
    datasets: Datasets,
    meter: Meter,
    *,
    device: torch.device,
) -> list[str]:
    """The names of what a batch of ``dataset`` gives beside its loss."""
    samples = _first_readable(dataset)
    try:
        collated = (datasets.validation_collate or default_collate)(samples)
        batch = to_device(collated, device)
        output = read_loss(TaskLoss(task)(model, batch))
        found = [*Helpers(task, warn=lambda _: None).figures(float(output.value)), *output.parts]
        if meter.is_on:
            meter.begin()
            meter.take(model, batch, samples=len(samples))
            found += meter.figures(Alone())
    except Exception as error:  # users' code, which may raise anything
        if not datasets.validates_by_default_collate or isinstance(error, FaultError):
            raise
        text = str(error).partition("\n")[0]
        what = f"evaluating a batch raised {type(error).__name__}: {text}; {DEFAULT_COLLATE}"
        raise FaultError(user_fault(what)) from error
    return found


@contextlib.contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Random numbers, buffers and mode of the model are put back at the end."""
    was_training = model.training
    buffers = [(one, one.clone()) for one in model.buffers()]
    model.eval()
    try:
        with torch.no_grad(), generators_kept(also=device_generators()):
            yield
    finally:
        model.train(was_training)
        with torch.no_grad():
            for live, was in buffers:
                live.copy_(was)
