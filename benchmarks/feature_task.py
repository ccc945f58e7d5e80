"""The byte-level language model with its loss in each form that a loss may have: what ``features.py`` trains."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from ddp_runner import Weighted
from ddp_runner.tasks.bytes_lm import BytesTask


class Mean(BytesTask):
    """As it is: the mean over a batch."""


class Sums(BytesTask):
    """The same as a sum and its weight."""

    def loss(self, model: nn.Module, batch: Tensor) -> Any:
        return _sum(model, batch)


class Named(BytesTask):
    """With four named numbers beside it."""

    def loss(self, model: nn.Module, batch: Tensor) -> Any:
        loss = super().loss(model, batch)
        return loss, {name: loss.detach() for name in ("one", "two", "three", "four")}


def _sum(model: nn.Module, batch: Tensor) -> Weighted:
    logits = model(batch[:, :-1].long())
    targets = batch[:, 1:].long()
    total = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return Weighted(total, targets.numel())
