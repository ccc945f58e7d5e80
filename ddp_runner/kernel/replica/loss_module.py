"""The loss inside the module that DDP wraps, and the numbers that ride along with the gradients.

Loss, votes and named numbers are in the gradient of a tiny extra parameter, which DDP sums with the others:
every rank knows everybody's after backward. Computes a batch's loss; sums nothing over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn

from ddp_runner.kernel.replica.data_parallel import loss_over_devices
from ddp_runner.kernel.replica.loss import Loss, LossForm, LossOutput, read_loss


class Signal(IntEnum):
    """The positions of the signals that are summed over ranks together with the gradients."""

    LOSS = 0
    PREEMPT = 1
    INTERRUPT = 2
    SAVE = 3
    TROUBLE = (
        4  # 2**rank of each rank whose own loss was not finite or too high, the first 20 ranks
    )
    # Ranks where a buffer has another shape or type than after the step before, or the loss other parts.
    RELAID = 5
    NEWS = 6  # ranks that follow something beside the model which they have not compared with the others
    NOT_ALL_USED = 7  # ranks that have left out a parameter; written by who sums the gradients


PLAIN_FORM = LossForm()  # one number
_LARGEST = torch.finfo(torch.float32).max


class _InHand:
    """The step in hand. A module's own attributes take ten times as long to set, in every step."""

    __slots__ = ("broken", "has_graph")

    def __init__(self) -> None:
        # Whether a micro-batch of it has been in trouble.
        self.broken: Tensor | bool = False
        self.has_graph = False  # of a loss of it, to any parameter


class LossModule(nn.Module):
    """The module that DDP wraps: the model, the loss, and the parameter whose gradient carries signals."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        *,
        device: torch.device,
        rank: int,
        is_relaid: Callable[[], bool] = lambda: False,
        form: LossForm,
        others: Sequence[torch.device] = (),
    ) -> None:
        """``others``: devices that have parts of each batch, beside ``device``."""
        super().__init__()
        self._devices = (device, *others)
        self._is_relaid = is_relaid
        self.model = model
        self.form = form
        self.seen = form  # with what a loss of this rank's has had beyond it
        # Whatever torch's default type is: numbers of ranks and bits of a mask are summed.
        self.signal = nn.Parameter(
            torch.zeros(len(Signal) + form.cells, device=device, dtype=torch.float32)
        )
        self._loss = loss
        self._own_trouble = 2.0 ** min(rank, 20)
        is_loss, trouble = torch.zeros(2, len(Signal), dtype=torch.float32)
        is_loss[Signal.LOSS] = 1.0
        trouble[Signal.TROUBLE] = self._own_trouble
        self._is_loss, self._trouble = is_loss.bool().to(device), trouble.to(device)
        self._step = _InHand()
        self._wrapped = (model, self.signal)  # found without a search
        self._nothing = torch.zeros((), device=device, dtype=torch.float32)
        self.unit = 1.0  # in which totals and weights are summed

    @property
    def has_graph(self) -> bool:
        """True if a loss of the step in hand has a graph to any parameter."""
        return self._step.has_graph

    def begin_step(self) -> None:
        """Begin a step: no micro-batch of it has been in trouble yet."""
        self._step.broken = self._step.has_graph = False

    def forward(
        self, batch: Any, weight: float, votes: Sequence[float], loss_limit: float, count: float
    ) -> Tensor:
        """The weighted loss of ``batch``; ``votes``: a number for each signal; ``count``: its samples."""
        model, signal = self._wrapped
        output = read_loss(self._computed(model, batch, int(count)))
        self._step.has_graph |= output.value.requires_grad
        share: Tensor | float = weight  # of the whole step that this batch is
        if output.weight is not None:
            share = output.weight * self.unit
            # A weight of a device has not been looked at: a wrong one shows as a loss that is none.
            is_one = output.weight.isfinite().logical_and(output.weight >= 0)
            weighted = torch.where(is_one, output.value * self.unit, math.nan)
        elif self.form.is_weighted:
            share = count * self.unit
            weighted = output.value * share
        else:
            weighted = output.value * weight
        values = list(votes)
        if not self.form.covers(output):
            self.seen = self.seen.with_output(output)
            values[Signal.RELAID] += 1.0
        if self._is_relaid():
            values[Signal.RELAID] += 1.0
        # d(result)/d(signal) = carried, whatever the signal's own value (zero).
        own, limit = weighted.detach(), loss_limit * share
        on_host = own.device.type == "cpu"
        carried = (self._on_host if on_host else self._on_device)(own, limit, values)
        if self.form.cells:
            carried = torch.cat([carried, self._beside(output, weight=weight, share=share)])
        return weighted + torch.dot(signal, carried)

    # Trouble is reported once a step: the numbers are summed over all its micro-batches.

    def _on_host(self, own: Tensor, limit: Tensor | float, values: list[float]) -> Tensor:
        """``values`` with this rank's own loss and trouble; plain numbers take a tenth of the time."""
        number = own.item()
        values[Signal.LOSS] += number
        if not self._step.broken and not (math.isfinite(number) and number <= float(limit)):
            self._step.broken = True
            values[Signal.TROUBLE] += self._own_trouble
        return torch.tensor(values, dtype=torch.float32)

    def _on_device(self, own: Tensor, limit: Tensor | float, values: list[float]) -> Tensor:
        """The same, without a look at the device."""
        if isinstance(limit, Tensor):
            broken = own.isfinite().logical_and(own <= limit).logical_not()
        else:  # what is not finite is no number between these either
            broken = own.clamp(-_LARGEST, min(limit, _LARGEST)).ne(own)
        news = broken
        before = self._step.broken
        if isinstance(before, Tensor):
            news = broken.logical_and(before.logical_not())
            broken = broken.logical_or(before)
        self._step.broken = broken
        carried = torch.where(self._is_loss, own, news * self._trouble)
        if any(values):
            carried += torch.tensor(values, device=own.device, dtype=torch.float32)
        return carried

    def _computed(self, model: nn.Module, batch: Any, count: int) -> Any:
        if len(self._devices) == 1:
            return self._loss(model, batch)
        return loss_over_devices(self._loss, model, batch, devices=self._devices, count=count)

    def _beside(self, output: LossOutput, *, weight: float, share: Tensor | float) -> Tensor:
        """The numbers beside the loss: means over the step's samples once they are summed; the weight last."""
        found = [
            output.parts[name] * weight if name in output.parts else self._nothing
            for name in self.form.names
        ]
        if self.form.is_weighted:
            found.append(self._nothing + share)
        return torch.stack(found)
