"""Hands one rank's update of a step to another process, and hashes its result.

From the same state, share, sums over ranks and buffers, any process must make the same update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ddp_runner.training.components.tensor_hash import state_hashes, tensor_hash
from ddp_runner.training.state import TrainState

if TYPE_CHECKING:
    from typing_extensions import Self

_PLAIN = (bool, int, float, str, type(None))


@dataclass(slots=True)
class Sums:
    """Holds the parts of a step that ranks sum: ``gradients``, by bare name, and the signals summed with them.

    ``buffers`` are rank 0's, which all ranks have after the step; None until the update begins.
    """

    gradients: dict[str, Tensor]
    signals: Tensor | None = None
    buffers: list[Tensor] | None = field(default=None)

    @classmethod
    def of(cls, state: TrainState, signals: Tensor | None) -> Self:
        """Copy the gradients as they are. Raises ValueError for one that is sparse."""
        found: dict[str, Tensor] = {}
        for name, parameter in state.named_parameters():
            if parameter.grad is None:
                continue
            if parameter.grad.layout is not torch.strided:
                raise ValueError(f"the gradient of {name} is sparse")
            found[name] = parameter.grad.detach().clone()
        return cls(gradients=found, signals=None if signals is None else signals.detach().clone())

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`to_record`."""
        return cls(
            gradients=dict(record["gradients"]),
            signals=record["signals"],
            buffers=list(record["buffers"]),
        )

    def to_record(self) -> dict[str, Any]:
        """Return all of it, for a file."""
        return {"gradients": self.gradients, "signals": self.signals, "buffers": self.buffers}

    def give_gradients(self, state: TrainState) -> None:
        """Set the gradients of another process's parameters to these; clear all others."""
        for name, parameter in state.named_parameters():
            found = self.gradients.get(name)
            parameter.grad = None if found is None else found.to(parameter.device)

    def give_buffers(self, live: list[Tensor]) -> None:
        """Write rank 0's buffers into another process's. Raises ValueError if a shape or type differs."""
        for own, found in zip(live, self.buffers or (), strict=True):
            if own.shape != found.shape or own.dtype != found.dtype:
                raise ValueError("a buffer has another shape or type")
            own.copy_(found)


def bytes_of_sums(state: TrainState) -> int:
    """Return about how many bytes :class:`Sums` takes for a step of ``state``."""
    return sum(one.nbytes for one in state.model.parameters() if one.requires_grad)


def hashes_after(state: TrainState) -> dict[str, str]:
    """Return hashes of the result of an update by name, the options of the optimizer's groups first."""
    return dict(options_of(state)) | state_hashes(state.replicated())


def hashes_given(state: TrainState) -> dict[str, str]:
    """Return hashes of what an optimizer is given by name: the options first, then the gradients."""
    return dict(options_of(state)) | {
        f"the gradient of {name}": tensor_hash(parameter.grad.resolve_conj().resolve_neg())
        for name, parameter in state.named_parameters()
        if parameter.grad is not None and parameter.grad.layout is torch.strided
    }


def options_of(state: TrainState) -> Iterator[tuple[str, str]]:
    """Yield the options of the optimizer's groups by name, as text; of a tensor its hash."""
    for number, group in enumerate(state.optimizer.param_groups):
        for key, value in group.items():
            name = f"{key} of the optimizer's group {number}"
            if isinstance(value, Tensor):
                yield name, tensor_hash(value)
            elif isinstance(value, _PLAIN) or (
                isinstance(value, (tuple, list)) and all(isinstance(one, _PLAIN) for one in value)
            ):
                yield name, repr(value)


def first_unlike(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Return the first name of ``one`` with another value in ``other``; an empty text if there is none."""
    return next((name for name in one if other.get(name) != one[name]), "")


def after_backward(call: Callable[[], None]) -> None:
    """Call ``call`` once the current backward is over and DDP has put its sums into the gradients."""
    engine: Any = torch.autograd.Variable
    queue = engine._execution_engine.queue_callback  # noqa: SLF001 - as DDP's and FSDP's own hooks do
    # DDP queues its own behind the hook of its last bucket: from within a callback, ours comes after that one.
    queue(lambda: queue(call))
