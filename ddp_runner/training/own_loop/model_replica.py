"""A user's own module as DDP has it for one generation: called as it is, with signals behind its outputs.

The loss is computed outside, so what rides along with the gradients is tied to the outputs: where the
backward of a step passes them, the extra parameter gets its gradient, and DDP sums that with the others.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ddp_runner.kernel.group.device import DeviceProgress
from ddp_runner.kernel.group.group import Group
from ddp_runner.kernel.replica.loss_module import PLAIN_FORM
from ddp_runner.kernel.replica.replica import Replica, ReplicaSettings
from ddp_runner.kernel.values.nested import OF_FORWARD, rebuilt
from ddp_runner.kernel.wire.board import Slot


class _Tie(torch.autograd.Function):
    """Passes tensors on; in backward, the first input gets a gradient too, of zeros."""

    @staticmethod
    def forward(ctx: Any, signal: Tensor, *tensors: Tensor) -> Any:
        ctx.zeros = torch.zeros_like(signal)
        ctx.set_materialize_grads(False)
        # Not a view for autograd, so a loop may change an output in place as it may a module's; and
        # with the version counter of the original, so that a change which breaks backward is found.
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return (ctx.zeros, *gradients)


class _Carrier(nn.Module):
    """What DDP wraps: the user's module, and the parameter whose gradient carries signals."""

    def __init__(
        self, model: nn.Module, *, cells: int, device: torch.device, take: Callable[[], Tensor]
    ) -> None:
        super().__init__()
        self.model = model
        self.signal = nn.Parameter(torch.zeros(cells, device=device, dtype=torch.float32))
        # Runs where the gradient is added to the parameter's, and so not for torch.autograd.grad().
        self.signal.register_hook(lambda _: take())  # type: ignore[no-untyped-call]
        self.has_graph = False  # of an output of this step, to any parameter
        self.seen = PLAIN_FORM  # there is no loss in here that could have other parts

    def begin_step(self) -> None:
        """No output of this step has been seen yet."""
        self.has_graph = False

    def forward(self, *args: Any, **named: Any) -> Any:
        outputs = self.model(*args, **named)
        if not torch.is_grad_enabled():
            return outputs
        found: list[Tensor] = []
        _each_tensor(outputs, found.append)
        tied = [tensor for tensor in found if tensor.requires_grad]
        if not tied:
            return outputs
        self.has_graph = True
        passed = dict(zip(map(id, tied), _Tie.apply(self.signal, *tied), strict=True))  # type: ignore[no-untyped-call]
        return _each_tensor(outputs, lambda tensor: passed.get(id(tensor), tensor))


class ModelReplica(Replica):
    """A user's module wrapped for one generation: gradients are averaged over ranks, as DDP does.

    Every rank of the group must build it. ``take`` gives this rank's signals of the step, a float32
    tensor of ``cells`` numbers; it is called in each backward that passes outputs of the module.
    """

    averages = True

    def __init__(
        self,
        model: nn.Module,
        *,
        cells: int,
        take: Callable[[], Tensor],
        group: Group,
        settings: ReplicaSettings,
        slot: Slot,
        device: DeviceProgress | None = None,
    ) -> None:
        carrier = _Carrier(model, cells=cells, device=group.device, take=take)
        self._wrap(carrier, group=group, settings=settings, slot=slot, device=device)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """The module's outputs, to be led to a loss and backward."""
        return self._ddp(*args, **named)

    @property
    def failure(self) -> Exception | None:
        """Of a sum over ranks, in the step in hand: a loop may swallow it."""
        return self.sums.failure

    def no_sync(self) -> AbstractContextManager[None]:
        """As of DDP: backward within only adds to this rank's own gradients."""
        return self.without_sync()

    def drop_signals(self) -> None:
        """A step begins. Other gradients are the loop's own to drop."""
        self.sums.drop()
        self._module.begin_step()
        self._module.signal.grad = None


def _each_tensor(value: Any, use: Callable[[Tensor], Any]) -> Any:
    """``value`` with each tensor in it replaced by what ``use`` returns for it; others are as they were."""
    return rebuilt(value, lambda one: use(one) if isinstance(one, Tensor) else one, OF_FORWARD)
