"""Reads the result of a task's ``loss()``; for an illegal result it makes one line that names the mistake."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ddp_runner.kernel.rules.faults import Fault, FaultError, FaultKind
from ddp_runner.kernel.rules.phases import PHASE_NAMES

PARTS_MAX = 32  # named numbers beside a loss
# What the run's own lines of metrics have.
_OWN_NAMES = {"loss", "learning_rate", "grad_norm", "epoch", "tokens", "loss_scale"} | {
    *("samples_per_s", "data_wait_share", "step_s"),
    *PHASE_NAMES,
}
EXPECTED = "a scalar tensor, (loss, {name: number}) or Weighted(total, weight)"


@dataclass(frozen=True, slots=True)
class Weighted:
    """A loss as a sum, and the weight that it is a sum over, such as the number of tokens that count.

    ``total``: a scalar tensor with a graph. ``weight``: a number or a scalar tensor, 0 or more. A step's
    loss is the sum of all totals over the sum of all weights, over micro-batches and ranks: the same,
    however a step is cut.
    """

    total: Tensor
    weight: Tensor | float


Loss = Callable[[nn.Module, Any], Any]  # a Tensor, a Weighted, or (one of both, {name: number})


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """The result of ``loss()`` for a batch. ``value``: the mean, or the total if there is a ``weight``."""

    value: Tensor
    weight: Tensor | None
    parts: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossForm:
    """The names of the numbers that ``loss()`` returns next to its loss; equal on all ranks, in one order."""

    names: tuple[str, ...] = ()
    is_weighted: bool = False

    @property
    def cells(self) -> int:
        """The number of additional elements that are summed with the gradients."""
        return len(self.names) + self.is_weighted

    def covers(self, output: LossOutput) -> bool:
        """Return True if this form has room for everything in ``output``."""
        return (self.is_weighted or output.weight is None) and output.parts.keys() <= set(
            self.names
        )

    def with_output(self, output: LossOutput) -> LossForm:
        """Return a form that has room for ``output`` too."""
        is_weighted = output.weight is not None
        return self.united([LossForm(names=tuple(output.parts), is_weighted=is_weighted)])

    def united(self, others: Iterable[LossForm]) -> LossForm:
        """Return a form that has room for all of ``others`` too."""
        every = [self, *others]
        return LossForm(
            names=tuple(sorted({name for one in every for name in one.names})),
            is_weighted=any(one.is_weighted for one in every),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossMeans:
    """The means of a step over all ranks: loss, named numbers, and the total weight; None without one."""

    loss: float
    parts: Mapping[str, float]
    weight: float | None


def read_loss(value: object) -> LossOutput:
    """Read the result of ``loss()``. Raises FaultError, which no retry repairs, if it is illegal."""
    parts: Mapping[str, Tensor] = {}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        loss = value[0]
        if isinstance(loss, (Tensor, Weighted)):
            parts, value = _read_parts(value[1], like=loss), loss
    if not isinstance(value, Weighted):
        return LossOutput(value=checked_loss(value), weight=None, parts=parts)
    total = checked_loss(value.total, what="a Weighted whose total is ")
    return LossOutput(value=total, weight=_read_weight(value.weight, like=total), parts=parts)


def checked_loss(value: object, *, what: str = "") -> Tensor:
    """``value`` as a float scalar. Raises FaultError, which no retry repairs, for anything else."""
    if isinstance(value, Tensor):
        if value.dtype is torch.float32 and value.dim() == 0:
            return value  # as nearly always: a view of it would be one more node for backward
        wrong = _wrong_tensor(value)
        if not wrong:
            return value.float().reshape(())
    else:
        wrong = _wrong_object(value)
    raise _user_error(f"loss() returned {what}{wrong}, not {EXPECTED}")


class BadWeightError(ValueError):
    """A weight that is negative or not finite; its text is the number."""


def not_shareable(why: str) -> FaultError:
    """The error of a batch that cannot be cut into parts for several devices."""
    return _user_error(f"a batch cannot be shared out over the devices of a rank: {why}")


def _read_weight(weight: object, *, like: Tensor) -> Tensor:
    """Return the weight as a float scalar. Raises BadWeightError if it is illegal, as far as the host can tell."""
    if isinstance(weight, Tensor) and weight.numel() == 1 and not weight.is_complex():
        if weight.device.type != "cpu":
            return weight.detach().float().reshape(())
        weight = weight.item()
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        shown = f"a tensor of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else ""
        raise _user_error(
            f"loss() returned a Weighted whose weight is {shown or _wrong_object(weight)}, not a number"
        )
    if not 0 <= weight < math.inf:
        raise BadWeightError(f"{weight:g}")
    return torch.tensor(float(weight), device=like.device)


def _read_parts(found: Mapping[Any, Any], *, like: Tensor | Weighted) -> dict[str, Tensor]:
    if len(found) > PARTS_MAX:
        raise _user_error(f"loss() returned {len(found)} named numbers: at most {PARTS_MAX}")
    device = (like.total if isinstance(like, Weighted) else like).device
    parts = {}
    for name, number in found.items():
        if not isinstance(name, str) or not name or name in _OWN_NAMES:
            raise _user_error(f"loss() returned a number named {name!r}: give it a name of its own")
        if isinstance(number, Tensor) and number.numel() == 1 and not number.is_complex():
            parts[name] = number.detach().float().reshape(()).to(device)
        elif isinstance(number, (int, float)):
            parts[name] = torch.tensor(float(number), device=device)
        else:
            kind = type(number).__name__
            shape = f" of shape {tuple(number.shape)}" if isinstance(number, Tensor) else ""
            raise _user_error(f"loss() returned as {name!r} a {kind}{shape}, not a number")
    return parts


def bad_weight(error: BadWeightError, *, rank: int, samples: Sequence[int]) -> FaultError:
    """The error of a weight that is negative or not finite."""
    shown = ", ".join(map(str, samples[:8])) + (", ..." if len(samples) > 8 else "")
    one = "sample" if len(samples) == 1 else "samples"
    return _user_error(
        f"loss() returned a Weighted whose weight is {error}, on rank {rank} for {one} {shown}:"
        " it must be 0 or more"
    )


def no_graph() -> FaultError:
    """The error of a loss that leads to no parameter.

    One rank's batch may hold nothing to learn from; but where that is so on all of them at the very
    first step, the run would train nothing.
    """
    return _user_error(
        "loss() returned a tensor without a graph to the parameters: nothing would be trained; "
        "leave out .detach(), .item() and torch.no_grad()"
    )


def _user_error(cause: str) -> FaultError:
    return FaultError(
        Fault(
            kind=FaultKind.RANK_RAISED,
            rank=-1,
            step=0,
            cause=cause,
            at_ns=time.monotonic_ns(),
            may_retry=False,
        )
    )


def _wrong_tensor(value: Tensor) -> str:
    """Return a description of the mistake and its cure; empty if the tensor is legal."""
    if value.numel() != 1:
        return f"a tensor of shape {tuple(value.shape)} (.mean() makes one number of it)"
    if not value.is_floating_point():
        return f"a tensor of {str(value.dtype).removeprefix('torch.')}"
    return ""


def _wrong_object(value: object) -> str:
    if value is None:
        return "None (is a return missing?)"
    name = type(value).__name__
    kind = f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
    if isinstance(value, Mapping):
        names = ", ".join(str(key) for key in list(value)[:5])
        return f"{kind} of {names or 'nothing'} (return the loss of it)"
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return f"{kind} of {len(value)} (return the loss of it)"
    if isinstance(value, (int, float)):
        return f"a plain {name} (leave out .item() or float())"
    return kind
