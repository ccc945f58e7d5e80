"""The buffers of a model: listed as they are now, kept at a commit, taken back. Never sends them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Buffers:
    """A model's buffers by owner and name, since a module may assign a new tensor at any time.

    Of those outside the model's state, the tensors there were at the start: what a module assigns
    to such a one, as a cache that grows with its input, may have another shape on each rank.
    """

    def __init__(self, model: nn.Module) -> None:
        self._owners = list(persistent_buffers(model).values())
        persistent = {id(tensor) for tensor in self._persistent()}
        self._others = [buffer for buffer in model.buffers() if id(buffer) not in persistent]
        self._values: list[Tensor] = []
        self.keep()

    def live(self) -> list[Tensor]:
        """The tensors that the modules use now, in one order; without the empty ones."""
        found = [*self._persistent(), *self._others]
        return [buffer.detach() for buffer in found if buffer is not None and buffer.numel()]

    def keep(self) -> None:
        """Remember tensors and values as they are now."""
        self._assigned, self._tensors = self._persistent(), self.live()
        if _layouts(self._values) != _layouts(self._tensors):
            self._values = [tensor.clone() for tensor in self._tensors]
        elif self._values:
            torch._foreach_copy_(self._values, self._tensors)

    def drop(self) -> None:
        """Give the modules the tensors and values back that were kept."""
        for (owner, name), kept in zip(self._owners, self._assigned, strict=True):
            if getattr(owner, name) is not kept:
                setattr(owner, name, kept)
        if self._values:
            torch._foreach_copy_(self._tensors, self._values)

    def _persistent(self) -> list[Tensor | None]:
        return [getattr(owner, name) for owner, name in self._owners]


def persistent_buffers(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Where the buffers of the model's state live: name -> (module, attribute).

    A mask that is rebuilt at construction is no part of the state.
    """
    saved = model.state_dict(keep_vars=True).keys()
    owners = {}
    for name, _ in model.named_buffers():
        if name in saved:
            path, _, key = name.rpartition(".")
            owners[name] = (model.get_submodule(path), key)
    return owners


def _layouts(tensors: list[Tensor]) -> list[tuple[torch.Size, torch.dtype, torch.device]]:
    return [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
