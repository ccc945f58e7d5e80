"""Batch norm over the batches of all ranks, on any device.

Torch's own layer takes GPUs alone, so that it could replace nothing here. On GPUs it would be a second way of the same:
its collectives go past :class:`~ddp_runner.kernel.group.group.Group`, so that an abort may meet a thread inside NCCL
(``nobody-inside-while-aborting``) and a rank that waits for a peer in a layer counts as late (``late-alone``).

One sum over ranks in forward and one in backward for each layer: in forward every rank's mean, spread
and count, each in a place of its own, so that all combine the same numbers in the same order; in
backward the two sums of torch's formula (torch, nn/modules/_functions.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from ddp_runner.kernel.group.group import Group
from ddp_runner.kernel.group.waits import waiting_for_peers
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.wire.board import Slot
from ddp_runner.training.components.other_forward import with_forward

OPTION = "ddp.sync_batchnorm"
_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The ranks of a generation, as a layer needs them."""

    group: Group
    slot: Slot

    @property
    def count(self) -> int:
        """The number of ranks."""
        return self.group.world_size

    def sum(self, tensor: Tensor) -> Tensor:
        """``tensor`` summed over ranks, in place. Every rank must call it, in the same order."""
        # INVARIANT late-alone: who waits for a peer inside forward or backward stands as waiting.
        # Broken if: a layer sums beside this. Guarded by: test_a_rank_that_waits_in_a_layer_is_not_late.
        with waiting_for_peers(self.slot):
            self.group.all_reduce(tensor)
        return tensor

    def placed(self, own: Tensor) -> Tensor:
        """Return every rank's ``own``, one row each."""
        rows = own.new_zeros(self.count, own.numel())
        rows[self.group.rank] = own
        return self.sum(rows)


class SyncedNorms:
    """The layers of one model, and the ranks whose batches they take together; None: each its own."""

    def __init__(self, model: nn.Module, *, is_wanted: bool, device: torch.device) -> None:
        """Every batch norm if that ``is_wanted``; on the CPU torch's SyncBatchNorm in any case.

        Raises BadInputError for a layer that computes in a way of its own.
        """
        self.peers: Peers | None = None
        self.names: tuple[str, ...] = ()
        torch_cannot = (nn.SyncBatchNorm,) if device.type == "cpu" else ()
        kind_wanted = _BatchNorm if is_wanted else torch_cannot
        found = {name: m for name, m in model.named_modules() if isinstance(m, kind_wanted)}
        for name, layer in found.items():
            if type(layer).forward not in _FORWARDS:
                kind = type(layer).__name__
                expected = (
                    f"{name} ({kind}) has a forward of its own: take one of torch's layers there"
                )
                raise BadInputError(OPTION, "true", expected)
        kinds: dict[type, Any] = {
            kind: self._synced(kind) for kind in set(map(type, found.values()))
        }
        for layer in found.values():
            layer.__class__ = kinds[type(layer)]
        self.names = tuple(found)

    def _synced(self, kind: Any) -> Any:
        """``kind`` with a forward over ranks; the object stays itself, under its name."""
        together = torch.compiler.disable(self._together)  # type: ignore[no-untyped-call]

        def forward(layer: _BatchNorm, inputs: Tensor) -> Tensor:
            if not layer.training or self.peers is None or self.peers.count == 1:
                return _BatchNorm.forward(layer, inputs)
            result: Tensor = together(layer, inputs)
            return result

        return with_forward(kind, forward)

    def _together(self, layer: _BatchNorm, inputs: Tensor) -> Tensor:
        assert self.peers is not None, "looked at by who calls"
        layer._check_input_dim(inputs)  # type: ignore[no-untyped-call] # noqa: SLF001
        factor = 0.0 if layer.momentum is None else layer.momentum
        if layer.track_running_stats and layer.num_batches_tracked is not None:
            layer.num_batches_tracked.add_(1)
            if layer.momentum is None:
                factor = 1.0 / float(layer.num_batches_tracked)
        found = _Together.apply(inputs, layer.weight, layer.bias, (layer.eps, self.peers))  # type: ignore[no-untyped-call]
        output, mean, spread, count = found
        if layer.track_running_stats and layer.running_mean is not None:
            assert layer.running_var is not None, "there are both, or none"
            with torch.no_grad():
                layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), factor)
                unbiased = spread / (count - 1)
                layer.running_var.lerp_(unbiased.to(layer.running_var.dtype), factor)
        result: Tensor = output
        return result


class _Together(Function):
    """Output, mean, sum of squared deviations and count, over the batches of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        how: tuple[float, Peers],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``inputs``: N x C x ...; ``how``: what is added to the variance, and the ranks."""
        eps, peers = how
        exact = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
        over = [dim for dim in range(exact.dim()) if dim != 1]
        own_count = exact.numel() // exact.size(1)
        own_mean = exact.sum(over) / max(own_count, 1)
        own_spread = (exact - _shaped(own_mean, exact)).square().sum(over)
        counted = own_mean.new_tensor([float(own_count)])
        rows = peers.placed(torch.cat([own_mean, own_spread, counted])).double()
        channels = exact.size(1)
        means, spreads, counts = rows[:, :channels], rows[:, channels:-1], rows[:, -1:]
        count = counts.sum()
        if exact.device.type == "cpu" and count <= 1:
            raise ValueError("Expected more than 1 value per channel when training, over all ranks")
        mean = (means * counts).sum(0) / count
        spread = (spreads + counts * (means - mean).square()).sum(0)
        scale = (spread / count + eps).rsqrt().to(exact.dtype)
        mean, spread = mean.to(exact.dtype), spread.to(exact.dtype)
        output = (exact - _shaped(mean, exact)) * _shaped(scale, exact)
        if weight is not None:
            output = output * _shaped(weight, exact)
        if bias is not None:
            output = output + _shaped(bias, exact)
        ctx.save_for_backward(inputs, weight, mean, scale, count)
        ctx.peers, ctx.has_bias = peers, bias is not None
        ctx.mark_non_differentiable(mean, spread, count)
        return output.to(inputs.dtype), mean, spread, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients for the rank's own batch; weight and bias get local ones, as in other layers."""
        inputs, weight, mean, scale, count = ctx.saved_tensors
        exact = inputs.to(scale.dtype)
        own = gradients[0].to(scale.dtype)
        over = [dim for dim in range(exact.dim()) if dim != 1]
        deviation = exact - _shaped(mean, exact)
        sums = torch.cat([own.sum(over), (own * deviation).sum(over)])
        of_bias, of_deviation = sums.clone().chunk(2)
        of_weight = None if weight is None else (of_deviation * scale).to(weight.dtype)
        mean_own, mean_deviation = (ctx.peers.sum(sums) / count.to(sums.dtype)).chunk(2)
        # Every rank is in the sum, whoever needs the gradient of its inputs.
        slope = scale if weight is None else scale * weight
        found = own - _shaped(mean_own, exact)
        found = found - deviation * _shaped(mean_deviation * scale.square(), exact)
        of_inputs = (found * _shaped(slope, exact)).to(inputs.dtype)
        bias_gradient = of_bias.to(scale.dtype if weight is None else weight.dtype)
        return of_inputs, of_weight, bias_gradient if ctx.has_bias else None, None


def _shaped(values: Tensor, like: Tensor) -> Tensor:
    """Reshape one number for each channel, to be broadcast over ``like``."""
    return values.view(1, -1, *[1] * (like.dim() - 2))
