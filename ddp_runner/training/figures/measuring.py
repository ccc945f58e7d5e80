"""Computes a task's own evaluation figures: each batch on its rank, and figures of all ranks together."""

from __future__ import annotations

import inspect
import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ddp_runner.core.monitor import LOSS
from ddp_runner.core.settings import Settings
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.faults import Fault, FaultError, FaultKind
from ddp_runner.training.figures.metric_state import (
    METHODS,
    Form,
    MetricState,
    NotSummableError,
    Parts,
    State,
    Sum,
    flat,
    form_of,
    is_whole,
    joined_form,
    kind_of,
    prepare,
    unflat,
)
from ddp_runner.training.task import BuildsMetrics, Measures, Task

FIGURES_MAX = 200  # of one evaluation of one data set
EXPECTED = (
    "{name: mean of the batch} or {name: (sum, weight)}, or for what build_metrics() has what its update()"
    " is called with"
)


class OverRanks(Protocol):
    """The exchange between ranks; every rank calls it at the same places."""

    @property
    def rank(self) -> int:
        """Its place in what they exchange."""
        ...

    def exchange(self, name: str, value: str) -> list[str]:
        """Every rank's text."""
        ...

    def sum_in_place(self, tensor: Tensor) -> None:
        """The sum over ranks."""
        ...


class Alone:
    """There is no other rank."""

    rank = 0

    def exchange(self, name: str, value: str) -> list[str]:
        """Only this one's."""
        del name
        return [value]

    def sum_in_place(self, tensor: Tensor) -> None:
        """It is the sum."""


def build_objects(task: Task, settings: Settings, device: torch.device) -> dict[str, Any]:
    """The metric objects of a task, by name. Raises BadInputError for what is none."""
    if not isinstance(task, BuildsMetrics):
        return {}
    given: object = task.build_metrics()
    if not isinstance(given, Mapping):
        raise _refused(settings, f"its build_metrics() returned {_kind(given)}, not a dict by name")
    if given and not measures(task):
        raise _refused(settings, "it has build_metrics(), and no metrics(model, batch) beside it")
    found: dict[str, Any] = {}
    for name, one in given.items():
        _refuse_name(settings, name)
        lacks = [method for method in METHODS if not callable(getattr(one, method, None))]
        if lacks:
            what = f"its build_metrics() returned for {name!r} {_kind(one)} without {lacks[0]}()"
            raise _refused(settings, what)
        found[name] = one.to(device) if isinstance(one, nn.Module) else one
        try:
            prepare(found[name])
        except NotSummableError as error:
            raise _refused(settings, f"its metric {name!r}: {error}") from error
    return found


def measures(task: Task) -> bool:
    """Return True if the task has a ``metrics(model, batch)``; a method with other arguments does not count."""
    if not isinstance(task, Measures) or not callable(task.metrics):
        return False
    try:
        inspect.signature(task.metrics).bind(None, None)
    except (TypeError, ValueError):
        return False
    return True


class Meter:
    """Measures one data set at a time: :meth:`begin`, :meth:`take` for each batch, :meth:`figures`."""

    def __init__(self, task: Task, objects: Mapping[str, Any], *, device: torch.device) -> None:
        self._measure = task.metrics if isinstance(task, Measures) and measures(task) else None
        self._objects = objects
        self._states = {name: MetricState(one) for name, one in objects.items()}
        self._device = device
        self._sums: dict[str, tuple[float, float]] = {}

    @property
    def is_on(self) -> bool:
        """True if there is anything to measure."""
        return self._measure is not None

    def begin(self) -> None:
        """Nothing is measured yet."""
        self._sums = {}
        for state in self._states.values():
            state.begin()

    def take(self, model: nn.Module, batch: Any, *, samples: int) -> None:
        """Measure a batch of so many samples. Raises FaultError, which no retry repairs, for what no task may give."""
        assert self._measure is not None, "asked only where it is"
        given: object = self._measure(model, batch)
        if not isinstance(given, Mapping):
            raise _user_error(f"metrics() returned {_kind(given)}, not {EXPECTED}")
        for name, value in given.items():
            if name in self._objects:
                words = value if isinstance(value, tuple) else (value,)
                self._objects[name].update(*words)
                continue
            if not isinstance(name, str) or not name or name == LOSS or "/" in name:
                raise _user_error(
                    f"metrics() returned a figure named {name!r}: give it another name"
                )
            if isinstance(value, (int, float, np.generic, Tensor)):  # a mean over the batch
                added, weight = _number(name, value) * samples, float(samples)
            elif isinstance(value, tuple) and len(value) == 2:
                added, weight = (_number(name, one) for one in value)
            else:
                raise _user_error(f"metrics() returned for {name!r} {_kind(value)}, not {EXPECTED}")
            total, weights = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = (total + added, weights + weight)
        if len(self._sums) > FIGURES_MAX:
            raise _user_error(f"metrics() returned more than {FIGURES_MAX} names")

    def figures(self, over: OverRanks) -> dict[str, float]:
        """Return the figures by name, of all ranks' samples, the same on each. Every rank must call it."""
        problem, name = "", ""
        changes: dict[str, dict[str, State]] = {}
        try:
            for name, state in self._states.items():
                changes[name] = state.changes()
        except NotSummableError as error:
            problem = f"the metric {name!r} cannot be summed over ranks: {error}"
        forms = {
            name: {p: form_of(v) for p, v in values.items()} for name, values in changes.items()
        }
        mine = json.dumps([problem, self._sums, forms])
        answers = [json.loads(answer) for answer in over.exchange("metrics", mine)]
        if problems := [answer[0] for answer in answers if answer[0]]:
            raise _user_error(problems[0])
        found = _means([sums for _, sums, _ in answers])
        if self._states:
            self._share_states(changes, [each for _, _, each in answers], over)
            for name, one in self._objects.items():
                found |= _computed(name, one.compute())
                one.reset()
        return found

    def _share_states(
        self,
        changes: Mapping[str, Mapping[str, State]],
        answers: Sequence[Mapping[str, Mapping[str, Form]]],
        over: OverRanks,
    ) -> None:
        """Have each object hold the state of all ranks."""
        forms: dict[tuple[str, str], Form] = {}
        for name in self._states:
            for path in sorted({path for each in answers for path in each[name]}):
                known = [each[name][path] for each in answers if path in each[name]]
                try:
                    forms[name, path] = joined_form(known)
                except NotSummableError as error:
                    raise _user_error(f"the metric {name!r}, {path}: {error}") from error
        of_all: dict[str, dict[str, Sum | list[Parts]]] = {name: {} for name in self._states}
        for whole in (True, False):
            places = [place for place, form in forms.items() if is_whole(form) is whole]
            if not places:
                continue
            rows = [
                flat(
                    changes[name].get(path), forms[name, path], rank=over.rank, device=self._device
                )
                for name, path in places
            ]
            row = torch.cat(rows)
            over.sum_in_place(row)
            for (name, path), numbers in zip(
                places, torch.split(row, [one.numel() for one in rows]), strict=True
            ):
                of_all[name][path] = unflat(numbers, forms[name, path])
        for name, state in self._states.items():
            state.take(of_all[name])


def _means(answers: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Sums over weights, over all ranks."""
    found = {}
    for name in sorted({name for each in answers for name in each}):
        pairs = [each[name] for each in answers if name in each]
        total, weight = (math.fsum(values) for values in zip(*pairs, strict=True))
        found[name] = total / weight if weight else math.nan
    return found


def _computed(name: str, given: object) -> dict[str, float]:
    if isinstance(given, Mapping):
        return {f"{name}_{key}": _number(f"{name}_{key}", one) for key, one in given.items()}
    return {name: _number(name, given)}


def _number(name: str, value: object) -> float:
    if isinstance(value, Tensor) and (value.numel() != 1 or value.is_complex()):
        raise _user_error(f"metric {name!r} is a tensor of shape {tuple(value.shape)}, no number")
    try:
        return float(value)  # type: ignore[arg-type] # what is no number raises
    except (TypeError, ValueError) as error:
        raise _user_error(f"metric {name!r} is {_kind(value)}, no number") from error


def _refuse_name(settings: Settings, name: object) -> None:
    if not isinstance(name, str) or not name or name == LOSS or "/" in name:
        raise _refused(settings, f"its build_metrics() has the name {name!r}: give it another")


def _kind(value: object) -> str:
    return "None (is a return missing?)" if value is None else kind_of(value)


def _refused(settings: Settings, what: str) -> BadInputError:
    return BadInputError("--task", settings.run.task, what)


def _user_error(cause: str) -> FaultError:
    return FaultError(user_fault(cause))


def user_fault(cause: str) -> Fault:
    """Return the fault of an illegal result of the task; no retry repairs it."""
    return Fault(
        kind=FaultKind.RANK_RAISED,
        rank=-1,
        step=0,
        cause=cause,
        at_ns=time.monotonic_ns(),
        may_retry=False,
    )
