"""The learning rate as a pure function of the step: there is no schedule state to lose."""

from __future__ import annotations

import copy
import math
import warnings
from typing import TYPE_CHECKING, Any

import torch

from ddp_runner.core.step_schedule import steps_of, warmup_of
from ddp_runner.kernel.rules.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp_runner.core.settings import OptimSettings

_TIMESCALE = (
    10_000  # steps of inverse_sqrt without a warm-up, as Hugging Face's transformers has it
)


def learning_rate(step: int, *, total_steps: int, settings: OptimSettings) -> float:
    """The rate for the optimizer step number ``step``, counted from 0, of ``total_steps``.

    Linear warm-up to ``learning_rate``, then what ``schedule`` says. What goes down has come to
    ``min_learning_rate`` at the end of the schedule, and holds beyond. Warm-up takes at most half of
    the schedule, so that a run shorter than its warm-up still reaches the full rate.
    """
    peak, floor = settings.learning_rate, settings.min_learning_rate
    end = schedule_end(settings, total_steps=total_steps)
    warmup_steps = warmup_end(settings, total_steps=total_steps)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    match settings.schedule:
        case "constant":
            return peak
        case "inverse_sqrt":
            timescale = warmup_steps or _TIMESCALE
            passed = max(0, min(step, end) - warmup_steps)
            return max(floor, peak * math.sqrt(timescale / (timescale + passed)))
        case "wsd" | "range_test":
            is_test = settings.schedule == "range_test"  # whose last step has the highest rate
            begin = decay_begin(settings, total_steps=total_steps)
            progress = min(1.0, max(0, step - begin) / max(1, end - is_test - begin))
            return (
                floor * (peak / floor) ** progress if is_test else peak + (floor - peak) * progress
            )
        case "linear" | "cosine":
            progress = min(1.0, (step - warmup_steps) / max(1, end - warmup_steps))
            if settings.schedule == "linear":
                return peak + (floor - peak) * progress
            return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def schedule_end(settings: OptimSettings, *, total_steps: int) -> int:
    """The step at which the schedule of a run of ``total_steps`` has come to its end."""
    return settings.schedule_steps or total_steps


def warmup_end(settings: OptimSettings, *, total_steps: int) -> int:
    """The first step after the warm-up."""
    end = schedule_end(settings, total_steps=total_steps)
    return min(warmup_of(settings.warmup_steps, schedule_steps=end), end // 2)


def decay_begin(settings: OptimSettings, *, total_steps: int) -> int:
    """The first step of the decay of wsd, or of a range test, which leaves the warm-up what it takes."""
    end = schedule_end(settings, total_steps=total_steps)
    decay_steps = steps_of(settings.decay_steps, of=end)
    return max(end - decay_steps, warmup_end(settings, total_steps=total_steps))


def schedule_words(settings: OptimSettings, *, total_steps: int) -> str:
    """Return a description such as ``cosine to 0 at step 3,000, after 100 steps of warm-up``."""
    end = f"step {schedule_end(settings, total_steps=total_steps):,}"
    warmup = warmup_end(settings, total_steps=total_steps)
    after = f", after {warmup:,} step{'' if warmup == 1 else 's'} of warm-up" if warmup else ""
    floor = f"{settings.min_learning_rate:g}"
    match settings.schedule:
        case "constant":
            return f"constant{after}"
        case "inverse_sqrt":
            return f"inverse_sqrt, no lower than {floor}, up to {end}{after}"
        case "wsd":
            begin = f"step {decay_begin(settings, total_steps=total_steps):,}"
            return f"wsd, going down from {begin} to {floor} at {end}{after}"
        case "range_test":
            begin = f"step {decay_begin(settings, total_steps=total_steps):,}"
            return f"range_test, going up from {floor} at {begin} to {end}{after}"
        case "linear" | "cosine":
            return f"{settings.schedule} to {floor} at {end}{after}"


def apply_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set ``rate`` in every parameter group, in place where the group holds a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):  # compiled optimizers read it by reference
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


class OwnRates:
    """The options of the groups of a program's own optimizer, as its scheduler has them at each step.

    The scheduler is stepped after each ``every`` steps. Where an older state is trained it is begun again and stepped
    up to there, so what it gives is a function of the step. Without one the options stay as they were given.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: Any, *, every: int) -> None:
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._every = every
        self._taken = 0  # steps of the scheduler
        self._factor = 1.0  # of all rates
        self._options = self._first = self._read()
        self._first_state = None if scheduler is None else copy.deepcopy(scheduler.state_dict())

    def lowered_at(self, step: int, *, factors: Sequence[float]) -> float:
        """The learning rate of the first group for the optimizer step number ``step``, counted from 0.

        That of each group is the scheduler's times the ``factors``; :meth:`apply` sets them.
        """
        self._go_to(step // self._every)
        self._factor = math.prod(factors)
        return float(self._options[0]["lr"]) * self._factor

    def apply(self) -> None:
        """Set the options of all groups, as they were last asked for."""
        self._write(self._options)
        if self._factor != 1.0:
            for group in self._optimizer.param_groups:
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].mul_(self._factor)
                else:
                    group["lr"] *= self._factor

    def words(self) -> str:
        """Return a description such as ``SGD, learning rate 0.1 (2 groups), StepLR``."""
        words = f"{type(self._optimizer).__name__}, learning rate {float(self._first[0]['lr']):g}"
        if len(self._first) > 1:
            words += f" (the first of {len(self._first)} groups)"
        return words + ("" if self._scheduler is None else f", {type(self._scheduler).__name__}")

    def record(self) -> str:
        """The numbers of all groups, as text: others make other weights."""
        numbers = [
            {k: _plain(v) for k, v in group.items() if isinstance(_plain(v), (int, float, list))}
            for group in self._first
        ]
        return "; ".join(
            ", ".join(f"{key} {value}" for key, value in sorted(group.items())) for group in numbers
        )

    def _go_to(self, count: int) -> None:
        if self._scheduler is None or count == self._taken:
            return
        if count < self._taken:
            self._scheduler.load_state_dict(copy.deepcopy(self._first_state))
            self._options, self._taken = self._first, 0
        self._write(self._options)  # schedulers go on from what stands in the groups
        with warnings.catch_warnings():  # torch cannot know that the optimizer has made these steps
            warnings.simplefilter("ignore", UserWarning)
            while self._taken < count:
                self._scheduler.step()
                self._taken += 1
        self._options = self._read()

    def _read(self) -> list[dict[str, Any]]:
        return [
            {k: copy.deepcopy(v) for k, v in group.items() if k not in ("params", "param_names")}
            for group in self._optimizer.param_groups
        ]

    def _write(self, options: list[dict[str, Any]]) -> None:
        if len(self._optimizer.param_groups) != len(options):
            expected = "was given another parameter group in training: give it all of them at first"
            raise BadInputError("optimizer", type(self._optimizer).__name__, expected)
        for group, own in zip(self._optimizer.param_groups, options, strict=True):
            for key, value in own.items():
                if isinstance(value, torch.Tensor) and isinstance(group[key], torch.Tensor):
                    group[key].copy_(value)  # compiled optimizers read it by reference
                else:
                    group[key] = value


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value
