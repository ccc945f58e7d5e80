"""The result of ``run.ddp(model)``: it is called like DistributedDataParallel, and is the bare module between steps."""

from __future__ import annotations

import contextlib
import gc
import sys
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from ddp_runner.training.own_loop.misuse import misuse


class Wrapping(Protocol):
    """A generation's replica of the module, while a step is made."""

    def forward(self, *args: Any, **named: Any) -> Any:
        """Call the module as a rank among others."""
        ...

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward within adds to this rank's own gradients only."""
        ...


class AttachedModule(nn.Module):
    """The module of a loop of the user's own. ``module`` is the bare one, as of DDP.

    With gradients it may be called within ``run.step()`` only; without them anywhere, and no other rank
    hears of it.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._wrapping: list[Wrapping] = []  # in a list, so that it is no part of this module

    def use(self, wrapping: Wrapping | None) -> None:
        """Call the module through ``wrapping`` from now on; None calls it directly."""
        self._wrapping[:] = [] if wrapping is None else [wrapping]

    def forward(self, *args: Any, **named: Any) -> Any:
        """The module's outputs."""
        if self._wrapping and torch.is_grad_enabled():
            return self._wrapping[0].forward(*args, **named)
        return self.module(*args, **named)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context like that of DDP: backward within it changes only this rank's gradients."""
        return self._wrapping[0].no_sync() if self._wrapping else contextlib.nullcontext()


def refuse_unfit(net: AttachedModule, *, ranks: int) -> None:
    """Raise BadInputError for a net that is compiled, and for one whose gradients this many ranks cannot sum."""
    _refuse_compiled(net)
    for name, one in net.module.named_modules() if ranks > 1 else ():
        if isinstance(one, (nn.Embedding, nn.EmbeddingBag)) and one.sparse:
            where = f"{name} of the net" if name else "the net"
            raise misuse(
                f"{where} has sparse gradients, which are not summed over ranks here: make it with sparse=False"
            )


def _refuse_compiled(net: AttachedModule) -> None:
    """Raise BadInputError for a net that is compiled: it would trace what forms and repairs; the model alone may be."""
    is_compiled = net._compiled_call_impl is not None  # noqa: SLF001 - by net.compile()
    if not is_compiled and "torch._dynamo.eval_frame" in sys.modules:
        holders = gc.get_referrers(net)
        is_compiled = any(isinstance(one, dict) and one.get("_orig_mod") is net for one in holders)
    if is_compiled:
        raise misuse(
            "the net is compiled as it was wrapped: compile the model first, run.ddp(torch.compile(model))"
        )
