"""The order of a tensor's numbers in memory, which kernels may take to be that of another. Moves numbers only."""

from __future__ import annotations

import torch
from torch import Tensor

from ddp_runner.training.components.several_optimizers import entries_of


# INVARIANT laid-out-alike: what belongs to a parameter, as its moments, has its numbers in the same order
# in memory: torch's fused kernels walk through both side by side, as they lie there.
# Broken if: a state that came over the wire, contiguous, is taken for a parameter in channels_last.
# Guarded by: test_a_replacement_of_a_channels_last_model_gets_its_moments_in_order.
def laid_out_as(tensor: Tensor, like: Tensor) -> Tensor:
    """``tensor``, or a copy of it, with its numbers where those of ``like`` are, if they are of one shape."""
    if tensor.shape != like.shape or tensor.stride() == like.stride():
        return tensor
    if tensor.layout is not torch.strided or like.layout is not torch.strided:
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def lay_out_moments(optimizer: torch.optim.Optimizer) -> None:
    """Give what the optimizer has for each parameter that parameter's order."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for entry in entries_of(optimizer, parameter):
                for key, value in entry.items():
                    if isinstance(value, Tensor):
                        entry[key] = laid_out_as(value, parameter)
