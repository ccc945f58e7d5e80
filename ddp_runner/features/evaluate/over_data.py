"""A checkpoint's model over the data of its task, in one process: figures, or an output for each sample."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ddp_runner.cli.command import show
from ddp_runner.core.monitor import ALONE, LOSS
from ddp_runner.core.step_schedule import RunLength, run_length
from ddp_runner.data.loader import MicroBatch
from ddp_runner.kernel.replica.loss import read_loss
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.exits import ExitCode
from ddp_runner.kernel.rules.faults import FaultError
from ddp_runner.kernel.rules.secrets import hidden_texts, without_secrets
from ddp_runner.kernel.step.runtime import RankInfo
from ddp_runner.kernel.system.user_errors import traceback_text
from ddp_runner.observe.format import printable
from ddp_runner.observe.logger import DDPLogger
from ddp_runner.training.exactness.apart import stand_apart
from ddp_runner.training.figures.evaluation import Evaluator, OneRank, figures_of
from ddp_runner.training.figures.measuring import Meter
from ddp_runner.training.helpers import Helpers
from ddp_runner.training.loading.batch_copy import to_device
from ddp_runner.training.loading.loaders import evaluation_loader
from ddp_runner.training.local_runtime import Aside
from ddp_runner.training.starting.begin import begin_with
from ddp_runner.training.state import TrainState
from ddp_runner.training.task import Predicts, TaskLoss
from ddp_runner.training.workload import TaskWorkload, build_workload, empty_quarantine

if TYPE_CHECKING:
    from ddp_runner.core.settings import Settings
    from ddp_runner.data.loader import Loader
    from ddp_runner.features.evaluate.evaluate import Asked

_TEST, _VALIDATION = "test", "validation"


def evaluate(asked: Asked, *, as_json: bool) -> int:
    """Print the metrics of each data set and return the exit code. Raises BadInputError."""
    return _guarded(asked, lambda: _evaluate(asked, as_json=as_json))


def predict(asked: Asked, *, to: Path) -> int:
    """Write the outputs to the file ``to`` and return the exit code. Raises BadInputError."""
    return _guarded(asked, lambda: _predict(asked, to=to))


def _guarded(asked: Asked, perform: Callable[[], None]) -> int:
    """Do it. What the task raises is shown, and the exit code is 1."""
    hidden = hidden_texts(asked.settings.task, os.environ)
    try:
        perform()
    except BadInputError:
        raise
    except FaultError as error:
        text = f"ddp_runner: error: {error.fault.without(hidden).cause}\n"
    except Exception as error:  # noqa: BLE001 - the top of a command: a task may raise anything
        text = without_secrets(traceback_text(error), hidden)
    else:
        return ExitCode.DONE
    print(printable(text), end="", file=sys.stderr)
    return ExitCode.FAILED


@contextmanager
def called(name: str) -> Iterator[None]:
    """Have a sample that cannot be loaded named as one of the data set ``name``."""
    try:
        yield
    except FaultError as error:
        fault = error.fault
        cause = re.sub(r"^validation sample\b", f"{name or _VALIDATION} sample", fault.cause)
        raise FaultError(replace(fault, cause=cause)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """The model of a checkpoint, and what it computes with.

    ``names``: of its data sets, in order. ``ranks``: of its run, which evaluate so many batches at once.
    """

    settings: Settings
    workload: TaskWorkload
    state: TrainState
    runtime: Aside
    names: tuple[str, ...]
    ranks: int

    def loader(self, name: str) -> Loader:
        """Open the loader of a data set; to be closed."""
        log = self.settings.log
        batches = (log.evaluate_batches or self.settings.run.limit_batches) * self.ranks
        settings = replace(self.settings, log=replace(log, evaluate_batches=batches))
        return evaluation_loader(settings, self.workload, self.state, self.runtime, name=name)


def _built(asked: Asked) -> _Model:
    settings = asked.settings
    is_on_gpu = settings.run.device != "cpu" and torch.cuda.is_available()
    info = RankInfo(
        rank=0,
        local_rank=0,
        world_size=1,
        local_world_size=1,
        device="cuda:0" if is_on_gpu else "cpu",
        loads=True,
    )
    workload, state = build_workload(settings, info)
    stand_apart(rank=0, world_size=1, backend=workload.backend)
    begin_with(settings, state)
    length = length_of_run(asked, workload)
    state.committed_step, state.first_step = asked.step, length.first_step
    workload = replace(workload, length=length, loss=TaskLoss(workload.task, length))
    workload.loss.turn_to(asked.step, is_training=False)
    given = workload.datasets
    sets = {**given.validation_sets, **given.test_sets}
    names = _chosen(asked, tuple(sets), tuple(given.validation_sets))
    workload = replace(
        workload, datasets=replace(given, validation={name: sets[name] for name in names})
    )
    state.validation_quarantines = {
        name: empty_quarantine(settings, size) for name, size in workload.validation_samples.items()
    }
    return _Model(
        settings=settings,
        workload=workload,
        state=state,
        runtime=Aside(info, DDPLogger(rank=0)),
        names=tuple(workload.validation_samples),
        ranks=asked.trained.ranks,
    )


def length_of_run(asked: Asked, workload: TaskWorkload) -> RunLength:
    """Return the length of the checkpoint's run or stage, whose ranks took more samples a step than this process."""
    order, run, trained = workload.order, asked.settings.run, asked.trained
    batch = min(trained.batch or order.global_batch_size, order.dataset_size)
    return run_length(
        steps_per_epoch=replace(order, global_batch_size=batch).steps_per_epoch,
        epochs=run.epochs,
        max_steps=run.max_steps,
        first_step=trained.first_step,
    )


def _chosen(asked: Asked, names: Sequence[str], validation: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the data sets that are asked for. Raises BadInputError where there is none."""
    if not names:
        what = "has no validation or test data: return some from build_datasets()"
        raise BadInputError("--task", asked.settings.run.task, what)
    if not asked.data:
        return tuple(names)
    if asked.data == _VALIDATION and validation:
        return tuple(validation)
    found = tuple(one for one in names if asked.data == one)
    if not found:
        there = ", ".join(dict.fromkeys([one or _VALIDATION for one in names]))
        raise BadInputError("--on", asked.data, f"no such data set; available: {there}")
    return found


def _evaluate(asked: Asked, *, as_json: bool) -> None:
    model = _built(asked)
    workload, state = model.workload, model.state
    device = workload.device
    meter = Meter(workload.task, workload.metrics, device=device)
    helpers = Helpers(workload.task, warn=lambda text: print(text, file=sys.stderr))
    evaluator = Evaluator(
        loss=workload.loss,
        model=state.model,
        precision=state.precision,
        seed=asked.settings.run.seed,
        stop_asked=lambda: None,
        meter=meter if meter.is_on else None,
    )
    rows: dict[str, tuple[int, dict[str, float]]] = {}
    figures: dict[str, float] = {}
    for name in model.names:
        with called(name), closing(model.loader(name)) as loader:
            parts = _parts_of_loss(model, loader.take(0)[0])
        with called(name), closing(model.loader(name)) as loader:
            found = evaluator.evaluate(
                loader, replica=OneRank(device), step=state.own_step, names=parts
            )
        assert found.loss is not None, "nobody stops it"
        rows[name] = found.samples, {LOSS: found.loss, **found.parts, **found.metrics}
        figures |= figures_of(name, found, helpers, loss=found.loss)
    if as_json:
        record = {
            "checkpoint": str(asked.path),
            "step": asked.step,
            "ema": asked.is_average,
            "samples": {name or _VALIDATION: size for name, (size, _) in rows.items()},
            "figures": figures,
        }
        print(json.dumps(record))
        return
    average = ", moving average" if asked.is_average else ""
    show(f"{asked.path} (step {asked.step:,}{average})")
    for name, (samples, values) in rows.items():
        shown = "  ".join(f"{key} {value:.4f}" for key, value in values.items())
        show(f"  {name or _VALIDATION:<12} {samples:>9,} samples  {shown}")


@torch.no_grad()
def _parts_of_loss(model: _Model, first: MicroBatch) -> tuple[str, ...]:
    """Return the names of the numbers next to the loss."""
    state = model.state
    state.model.eval()
    with state.precision.autocast():
        batch = to_device(first.batch, model.workload.device)
        return tuple(read_loss(model.workload.loss(state.model, batch)).parts)


def _predict(asked: Asked, *, to: Path) -> None:
    wanted = asked
    if not asked.data:  # of test data, if there is some
        wanted = replace(asked, data=_VALIDATION)
    model = _built_for_one(asked, wanted)
    outputs: list[Any] = []
    [name] = model.names
    for batch, count in _batches(model, name):
        outputs += _each(_output(model, batch), count)
    _write(outputs, to)
    show(f"{to}: {len(outputs):,} outputs of {asked.path.name} (step {asked.step:,})")


def _built_for_one(asked: Asked, wanted: Asked) -> _Model:
    model = _built(asked)
    if len(model.names) == 1:
        return model
    tests = tuple(name for name in model.names if name == _TEST)
    names = tests or tuple(name for name in model.names if name in (ALONE, wanted.data))
    if len(names) != 1:
        there = ", ".join(name or _VALIDATION for name in model.names)
        raise BadInputError("--on", "", f"is needed, because there are several data sets: {there}")
    return replace(model, names=names)


def _batches(model: _Model, name: str) -> Iterator[tuple[Any, int]]:
    """Yield each batch on its device and the number of its samples, in the order of the samples."""
    with called(name), closing(model.loader(name)) as loader:
        for number in range(loader.total_steps):
            for one in loader.take(number):
                yield to_device(one.batch, model.workload.device), len(one.indices)


@torch.no_grad()
def _output(model: _Model, batch: Any) -> Any:
    module, task = model.state.model, model.workload.task
    module.eval()
    with model.state.precision.autocast():
        if isinstance(task, Predicts):
            return task.predict(module, batch)
        inputs = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
        if not isinstance(inputs, Tensor):
            what = f"its batches are of type {type(batch).__name__}: write predict(model, batch)"
            raise BadInputError("--task", type(task).__name__, what)
        return module(inputs)


def _each(output: Any, count: int) -> list[Any]:
    """Return the output of each sample. Raises BadInputError where the parts of a batch are not known."""
    if isinstance(output, Tensor) and output.ndim and len(output) == count:
        return list(output.float().cpu() if output.dtype == torch.bfloat16 else output.cpu())
    if isinstance(output, Mapping):
        parts = {str(key): _each(value, count) for key, value in output.items()}
        return [{key: values[number] for key, values in parts.items()} for number in range(count)]
    if isinstance(output, list) and len(output) == count:
        return [one.cpu() if isinstance(one, Tensor) else one for one in output]
    shape = f" of shape {tuple(output.shape)}" if isinstance(output, Tensor) else ""
    what = (
        f"returned a {type(output).__name__}{shape} for {count} samples: return a tensor whose first dimension"
        " counts the samples, a list with one entry per sample, or a dict of these"
    )
    raise BadInputError("predict()", "", what)


def _write(outputs: Sequence[Any], to: Path) -> None:
    """Write the file whole or not at all. Raises BadInputError for outputs that its form cannot hold."""
    part = to.with_name(f".{to.name}.part")
    try:
        with part.open("wb") as file:
            if to.suffix == ".jsonl":
                for number, output in enumerate(outputs):
                    line = json.dumps({"index": number, "output": _plain(output)})
                    file.write(line.encode() + b"\n")
            elif to.suffix == ".npy":
                stacked = _stacked(outputs)
                if not isinstance(stacked, Tensor):
                    what = "holds one array: use .pt or .jsonl for dicts, text and unequal shapes"
                    raise BadInputError("--to", to, what)
                np.save(file, stacked.numpy())
            else:
                torch.save(_stacked(outputs), file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(to)
    except OSError as error:
        raise BadInputError("--to", to, error.strerror or str(error)) from error
    finally:
        with suppress(OSError):  # such as that of a read-only file system
            part.unlink(missing_ok=True)


def _stacked(outputs: Sequence[Any]) -> Any:
    """Return one tensor, or a dict of such, where all outputs have one shape; else the list."""
    first = outputs[0] if outputs else None
    if isinstance(first, Tensor):
        is_even = all(isinstance(one, Tensor) and one.shape == first.shape for one in outputs)
        return torch.stack(list(outputs)) if is_even else list(outputs)
    if isinstance(first, dict):
        return {key: _stacked([one[key] for one in outputs]) for key in first}
    return list(outputs)


def _plain(output: Any) -> Any:
    """Return what JSON holds. Raises BadInputError for what it cannot hold."""
    if isinstance(output, (Tensor, np.ndarray, np.generic)):
        return output.tolist()
    if isinstance(output, dict):
        return {str(key): _plain(value) for key, value in output.items()}
    if isinstance(output, (list, tuple)):
        return [_plain(one) for one in output]
    if output is None or isinstance(output, (str, int, float)):
        return output
    what = f"holds no {type(output).__name__}, which predict() returned: take .pt"
    raise BadInputError("--to", ".jsonl", what)
