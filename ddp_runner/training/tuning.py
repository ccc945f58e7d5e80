"""What a run learns about itself and keeps: sizes that fit, and what DDP has to look for."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

import torch

from ddp_runner.core.faults import Fault, FaultKind
from ddp_runner.core.phases import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The same on every rank of a generation; part of the saved and the sent state.

    ``rate_factor`` scales the learning rate (below 1 after a roll-back for explosions);
    ``found_unused`` says that relaxing ``find_unused_parameters`` was a mistake once.
    """

    micro_batch_size: int
    evaluation_batch_size: int
    find_unused_parameters: bool
    found_unused: bool = False
    rate_factor: float = 1.0

    def to_record(self) -> dict[str, int | float | bool]:
        """Plain values, for checkpoint and wire."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, object], *, otherwise: Tuning) -> Tuning:
        """Read back; a field that is missing is taken from ``otherwise``."""
        return cls(**{**asdict(otherwise), **record})

    def agreed_with(self, others: list[Tuning]) -> Tuning:
        """What suits every rank: the smallest sizes, and caution if anybody needs it."""
        found_unused = any(other.found_unused for other in others)
        return Tuning(
            micro_batch_size=min(other.micro_batch_size for other in others),
            evaluation_batch_size=min(other.evaluation_batch_size for other in others),
            find_unused_parameters=found_unused
            or any(other.find_unused_parameters for other in others),
            found_unused=found_unused,
            rate_factor=self.rate_factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mended:
    """How a rank mends a fault of its own. ``inexact_reason`` is empty where no bit changes."""

    tuning: Tuning
    remedy: str
    inexact_reason: str


def mend(fault: Fault, tuning: Tuning, *, samples: int) -> Mended | None:
    """What this rank changes so that the same step works; None where nothing is left to change.

    ``samples``: this rank's share of the global batch, which bounds a micro-batch that helps.
    """
    match fault.kind:
        case FaultKind.OUT_OF_MEMORY if fault.phase == Phase.EVALUATE.label:
            if tuning.evaluation_batch_size == 1:
                return None
            size = tuning.evaluation_batch_size // 2
            return Mended(
                tuning=replace(tuning, evaluation_batch_size=size),
                remedy=f"evaluating {size} samples at a time",
                inexact_reason="",
            )
        case FaultKind.OUT_OF_MEMORY:
            size = min(tuning.micro_batch_size, samples) // 2
            if size == 0:
                return None
            return Mended(
                tuning=replace(tuning, micro_batch_size=size),
                remedy=f"micro-batches of {size} samples, same global batch",
                inexact_reason=f"micro-batches of {size} samples from step {fault.step}",
            )
        case FaultKind.REDUCTION_UNFINISHED if not tuning.find_unused_parameters:
            return Mended(
                tuning=replace(tuning, find_unused_parameters=True, found_unused=True),
                remedy="find_unused_parameters=True from here on",
                inexact_reason=f"find_unused_parameters turned on at step {fault.step}",
            )
        case _:
            return None


def free_memory() -> None:
    """Give back what a failed step held; its frames must be gone by now."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call,unused-ignore]
        torch.cuda.empty_cache()
