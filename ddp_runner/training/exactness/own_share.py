"""Hashes one rank's share of a step: its samples, its losses, its own gradients.

From the same state and the same samples, any process must compute the same hashes. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ddp_runner.kernel.values.nested import IN_BATCH, tensors_in
from ddp_runner.training.components.tensor_hash import combined, tensor_hash
from ddp_runner.training.exactness.own_update import Sums
from ddp_runner.training.state import TrainState

if TYPE_CHECKING:
    from typing_extensions import Self

SAMPLES = "the samples"  # as first_difference names them
_OF_ZEROS = "0" * 16  # as a bucket has it where there was no gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnShare:
    """``samples`` and ``losses``: a hash each micro-batch; ``gradients``: by bare parameter name.

    A parameter without a gradient, or with nothing but zeros, is not among them.
    """

    samples: tuple[str, ...]
    losses: tuple[str, ...]
    gradients: Mapping[str, str]

    def to_record(self) -> dict[str, Any]:
        """Return the hashes as plain values."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> OwnShare:
        """The inverse. Raises KeyError or TypeError where it is none."""
        return cls(
            samples=tuple(record["samples"]),
            losses=tuple(record["losses"]),
            gradients=dict(record["gradients"]),
        )


@dataclass(slots=True)
class ShareNotes:
    """The notes of a share while it is computed.

    ``wants_sums``: a drill needs what the update begins with, which is put into ``sums`` if it can be copied.
    """

    state: TrainState
    samples: list[str] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    gradients: dict[str, str] = field(default_factory=dict)
    wants_sums: bool = False
    sums: Sums | None = None
    _names: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, state: TrainState) -> Self:
        """Return empty notes for a share of a step of ``state``."""
        return cls(
            state, _names={id(parameter): name for name, parameter in state.named_parameters()}
        )

    def batch(self, batch: Any) -> None:
        """Note the content of a micro-batch before the loss sees it, which may change it."""
        self.samples.append(batch_hash(batch))

    def loss(self, loss: Tensor) -> None:
        """The weighted loss of a micro-batch."""
        self.losses.append(tensor_hash(loss))

    def gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """The rank's own gradient of the whole step, not summed over ranks."""
        found = tensor_hash(gradient.resolve_conj().resolve_neg())
        name = self._names.get(id(parameter))
        if name is not None and found != _OF_ZEROS:
            self.gradients[name] = found

    def summed(self, signals: Tensor | None = None) -> None:
        """Copy the gradients just after they were summed over ranks, if they are wanted."""
        if not self.wants_sums:
            return
        try:
            self.sums = Sums.of(self.state, signals)
        except (RuntimeError, ValueError, MemoryError):  # a sparse gradient, or no memory
            self.give_up_sums()

    def update_begins(self, *, is_relaid: bool) -> None:
        """Copy rank 0's buffers, which all ranks have by now. ``is_relaid``: some have got another shape."""
        if self.sums is None:
            return
        if is_relaid:
            self.give_up_sums()
            return
        self.sums.buffers = [one.clone() for one in self.state.buffers.live()]

    def give_up_sums(self) -> None:
        """Hand over nothing of this step's update."""
        self.wants_sums, self.sums = False, None

    def share(self) -> OwnShare:
        """Return the hashes of the share."""
        return OwnShare(
            samples=tuple(self.samples), losses=tuple(self.losses), gradients=dict(self.gradients)
        )


def first_difference(one: OwnShare, other: OwnShare, *, names: Sequence[str]) -> str:
    """Return the first difference between two computations of one share, in words; empty if there is none.

    ``names``: of the parameters, in their order. The samples come before the gradients, and the
    gradients before the loss, which says less.
    """
    if one.samples != other.samples:
        return SAMPLES
    for name in names:
        if one.gradients.get(name) != other.gradients.get(name):
            return name
    return "" if one.losses == other.losses else "the loss"


def batch_hash(batch: Any) -> str:
    """16 hex digits over the tensors in ``batch``, in their order; of other things, nothing."""
    return combined(
        [
            tensor_hash(one.resolve_conj().resolve_neg())
            for one in tensors_in(batch, IN_BATCH)
            if one.layout is torch.strided and not one.is_nested
        ]
    )
