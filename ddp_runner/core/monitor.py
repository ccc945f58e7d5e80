"""Names the figures of evaluations and the one that judges a run. Knows names and numbers only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ddp_runner.kernel.rules.errors import BadInputError

AUTO, TRAIN_LOSS = "auto", "train_loss"
ALONE = ""  # the name of validation data that has none, since there is no other
LOSS = "loss"
_OF_ALONE = "validation_"
_BETWEEN = "/"  # of the name of validation data and that of a figure

Mode = Literal["min", "max"]


def figure_name(data: str, figure: str) -> str:
    """``validation_loss``, or ``bach/loss`` of validation data that is called ``bach``."""
    return f"{data}{_BETWEEN}{figure}" if data else f"{_OF_ALONE}{figure}"


def is_of_evaluation(name: str) -> bool:
    """Return whether a figure's name is that of an evaluation's figure."""
    return name.startswith(_OF_ALONE) or _BETWEEN in name


def parts_of(name: str) -> tuple[str, str]:
    """Validation data and figure of what :func:`figure_name` gave; no data for any other name."""
    data, between, figure = name.rpartition(_BETWEEN)
    return (data, figure) if between else (ALONE, name.removeprefix(_OF_ALONE))


def chosen(wanted: str, data: Sequence[str]) -> str:
    """The figure that ``checkpoint.monitor`` means. ``data``: the names of the validation data there is."""
    if wanted != AUTO:
        return wanted
    return figure_name(data[0], LOSS) if data else TRAIN_LOSS


def highest_refused(loss: str) -> BadInputError:
    """Why a run is not judged by the highest of a loss: its worst state would be kept as the best."""
    expected = (
        f"the highest {loss} would be the best: name a figure that is to rise, as"
        " checkpoint.monitor=validation_accuracy, or leave checkpoint.mode out"
    )
    return BadInputError("checkpoint.mode", "max", expected)


@dataclass(frozen=True, slots=True, kw_only=True)
class Monitor:
    """The figure that decides which state is the best, and which way. The same on all ranks, for a whole run.

    ``by_evaluations``: only states that were evaluated are judged. Else every one that is saved.
    """

    name: str = TRAIN_LOSS
    mode: Mode = "min"
    by_evaluations: bool = True

    def value(self, figures: Mapping[str, float], *, train_loss: float | None) -> float | None:
        """It, as it is now; None while there is none. ``figures``: of the newest evaluation."""
        found = train_loss if self.name == TRAIN_LOSS else figures.get(self.name)
        return found if found is not None and math.isfinite(found) else None

    def signed(self, value: float) -> float:
        """Return the value with a sign that makes lower better; a second call gives the value back."""
        return value if self.mode == "min" else -value

    @property
    def words(self) -> str:
        """``min validation_loss``: what two figures that can be compared have alike."""
        return f"{self.mode} {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best that evaluations have found so far. ``of``: the :attr:`Monitor.words` that it is of."""

    of: str = ""
    step: int = 0
    value: float = math.nan

    def after(self, value: float, *, step: int, monitor: Monitor) -> Best:
        """Return the best after one more evaluation; itself unless the new value is better.

        An evaluation of the same step again replaces its earlier result.
        """
        # What is evaluated before the first step is of no use as an end.
        if step <= 0 or not math.isfinite(value):
            return self
        is_first = self.of != monitor.words
        if is_first or step == self.step or monitor.signed(value) < monitor.signed(self.value):
            return Best(of=monitor.words, step=step, value=value)
        return self
