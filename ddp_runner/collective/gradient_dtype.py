"""Gradients that are summed over ranks in another type than they are computed in.

What rides along with them, the signals, stays as exact as it is: each byte of them travels as a whole
number below 256, which every floating-point type has, in a place of its rank's own, where all others add
zero. So nothing is added to a step but these few numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Sent:
    """A bucket on its way: ``tensor`` is to be summed over ranks, then :meth:`taken` gives the bucket."""

    def __init__(
        self,
        buffer: Tensor,
        *,
        dtype: torch.dtype,
        exact: slice | None,
        rank: int,
        world_size: int,
    ) -> None:
        """``exact``: where in ``buffer``, which then is of float32, there are numbers to be summed as they are."""
        self._buffer = buffer
        self._exact = exact
        self._world_size = world_size
        if exact is None:
            self.tensor = buffer.to(dtype)
            return
        own = buffer[exact].contiguous().view(torch.uint8)
        slots = torch.zeros(world_size, own.numel(), dtype=dtype, device=buffer.device)
        slots[rank] = own.to(dtype)
        self.tensor = torch.cat([buffer.to(dtype), slots.view(-1)])

    def taken(self) -> Tensor:
        """The buffer, with the sums in it."""
        size = self._buffer.numel()
        summed = self.tensor[:size].to(self._buffer.dtype)
        if self._exact is not None:
            slots = self.tensor[size:].view(self._world_size, -1).to(torch.uint8)
            summed[self._exact] = slots.view(torch.float32).sum(dim=0)
        return self._buffer.copy_(summed)
