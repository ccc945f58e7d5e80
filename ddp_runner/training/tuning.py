"""What a run learns about itself and keeps: sizes that fit, and what DDP has to look for."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

import torch

from ddp_runner.core.faults import Fault, FaultKind
from ddp_runner.core.phases import Phase
from ddp_runner.core.settings import Settings

WAIT_DOUBLINGS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The same on every rank of a generation; part of the saved and the sent state.

    ``rate_factor`` scales the learning rate (below 1 after a roll-back for explosions);
    ``found_unused`` says that relaxing ``find_unused_parameters`` was a mistake once. The micro-batch
    was halved ``reductions`` times, and last changed at ``resized_at_step``.
    """

    micro_batch_size: int
    evaluation_batch_size: int
    find_unused_parameters: bool
    found_unused: bool = False
    rate_factor: float = 1.0
    reductions: int = 0
    resized_at_step: int = 0

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
            reductions=max(other.reductions for other in others),
            resized_at_step=max(other.resized_at_step for other in others),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mended:
    """A change of the tuning: how a rank mends a fault of its own, or what a run in peace tries.

    ``inexact_reason`` is empty where no bit changes.
    """

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
                tuning=replace(
                    tuning,
                    micro_batch_size=size,
                    reductions=tuning.reductions + 1,
                    resized_at_step=fault.step,
                ),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptRules:
    """When a run in peace may become faster. 0 steps: never."""

    relax_after_steps: int
    regrow_after_steps: int
    micro_batch_size_max: int

    @classmethod
    def of(cls, settings: Settings) -> AdaptRules:
        """As the settings have it."""
        ddp, data = settings.ddp, settings.data
        auto = ddp.find_unused_parameters == "auto"
        return cls(
            relax_after_steps=ddp.relax_after_steps if auto else 0,
            regrow_after_steps=settings.memory.regrow_micro_batch,
            micro_batch_size_max=data.micro_batch_size or data.batch_size,
        )

    def watch_use(self, tuning: Tuning) -> bool:
        """Whether it still matters that every parameter is used."""
        return bool(
            self.relax_after_steps and tuning.find_unused_parameters and not tuning.found_unused
        )


def adapt(
    tuning: Tuning, rules: AdaptRules, *, committed_step: int, all_used_steps: int
) -> Mended | None:
    """What to try between two steps; None for nothing. A function of what all ranks know alike.

    Twice the micro-batch waits longer after each time that memory did not suffice.
    """
    if rules.watch_use(tuning) and all_used_steps >= rules.relax_after_steps:
        return Mended(
            tuning=replace(tuning, find_unused_parameters=False),
            remedy=f"find_unused_parameters=False after {all_used_steps} steps in a row that used all",
            inexact_reason="",
        )
    size = min(tuning.micro_batch_size * 2, rules.micro_batch_size_max)
    wait_steps = rules.regrow_after_steps * 2 ** min(max(0, tuning.reductions - 1), WAIT_DOUBLINGS)
    waited_steps = committed_step - tuning.resized_at_step
    if wait_steps and size > tuning.micro_batch_size and waited_steps >= wait_steps:
        return Mended(
            tuning=replace(tuning, micro_batch_size=size, resized_at_step=committed_step),
            remedy=f"trying micro-batches of {size} samples",
            inexact_reason=f"micro-batches of {size} samples from step {committed_step}",
        )
    return None


def free_memory() -> None:
    """Give back what a failed step held; its frames must be gone by now."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call,unused-ignore]
        torch.cuda.empty_cache()
