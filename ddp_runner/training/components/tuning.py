"""Finds and keeps the sizes and DDP options with which a run works."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ddp_runner.core.batch_sizes import micro_batch
from ddp_runner.core.settings import DdpSettings, Settings
from ddp_runner.kernel.replica.loss import LossForm
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.faults import Fault, FaultKind
from ddp_runner.kernel.rules.phases import Phase

WAIT_DOUBLINGS = 20
SINGLE_RETRIES_MAX = 2  # of one step, with single samples
_READY_TWICE = "Expected to mark a variable ready only once"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The same on every rank of a generation; part of the saved and the sent state.

    ``rate_factor`` scales the learning rate (below 1 after a roll-back for explosions);
    ``found_unused`` says that relaxing ``find_unused_parameters`` was a mistake once, and
    ``must_not_search`` that DDP cannot have it, because of reentrant activation checkpoints;
    ``may_compile`` that no compilation has failed. The micro-batch
    was halved ``reductions`` times, and last changed at ``resized_at_step``. At ``retried_at_step`` a
    single sample did not fit, and was tried ``retries_there`` times more. ``loss_names`` and
    ``loss_is_weighted``: what the task's loss has had beside its number.
    """

    micro_batch_size: int
    evaluation_batch_size: int
    find_unused_parameters: bool
    found_unused: bool = False
    must_not_search: bool = False
    may_compile: bool = True
    rate_factor: float = 1.0
    reductions: int = 0
    resized_at_step: int = 0
    retried_at_step: int = -1
    retries_there: int = 0
    loss_names: tuple[str, ...] = ()
    loss_is_weighted: bool = False

    @property
    def loss_form(self) -> LossForm:
        """The form of the numbers that ``loss()`` returns next to its loss, as far as it has been seen."""
        return LossForm(names=self.loss_names, is_weighted=self.loss_is_weighted)

    def with_loss_form(self, form: LossForm) -> Tuning:
        """The same for another one."""
        return replace(self, loss_names=form.names, loss_is_weighted=form.is_weighted)

    def to_record(self) -> dict[str, object]:
        """Plain values, for checkpoint and wire."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, object], *, otherwise: Tuning) -> Tuning:
        """Read back; a field that is missing is taken from ``otherwise``."""
        found: dict[str, Any] = {**asdict(otherwise), **record}
        return cls(**{**found, "loss_names": tuple(found["loss_names"])})

    def agreed_with(self, others: list[Tuning]) -> Tuning:
        """Return a tuning that suits every rank: the smallest sizes, and caution if any rank needs it."""
        found_unused = any(other.found_unused for other in others)
        must_not_search = any(other.must_not_search for other in others)
        retried_at_step = max(other.retried_at_step for other in others)
        form = self.loss_form.united(other.loss_form for other in others)
        return Tuning(
            micro_batch_size=min(other.micro_batch_size for other in others),
            evaluation_batch_size=min(other.evaluation_batch_size for other in others),
            find_unused_parameters=not must_not_search
            and (found_unused or any(other.find_unused_parameters for other in others)),
            found_unused=found_unused,
            must_not_search=must_not_search,
            may_compile=all(other.may_compile for other in others),
            rate_factor=min(other.rate_factor for other in others),
            reductions=max(other.reductions for other in others),
            resized_at_step=max(other.resized_at_step for other in others),
            retried_at_step=retried_at_step,
            retries_there=max(
                other.retries_there for other in others if other.retried_at_step == retried_at_step
            ),
            loss_names=form.names,
            loss_is_weighted=form.is_weighted,
        )


def searches_at_first(ddp: DdpSettings) -> bool:
    """Return True if DDP looks for unused parameters until the run learns that it need not."""
    return ddp.find_unused_parameters is not False and not ddp.static_graph


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningChange:
    """A change of the tuning: how a rank repairs a fault of its own, or what a fault-free run tries.

    ``inexact_reason`` is empty where no bit changes. With ``plain_retry`` nothing else changes either.
    """

    tuning: Tuning
    action: str
    inexact_reason: str
    plain_retry: bool = False


def repair_tuning(  # noqa: PLR0911 - a row a kind
    fault: Fault, tuning: Tuning, *, samples: int
) -> TuningChange | None:
    """Return the change with which this rank retries the same step; None if nothing is left to change.

    ``samples``: this rank's share of the global batch, which bounds a micro-batch that helps.
    """
    match fault.kind:
        case FaultKind.OUT_OF_MEMORY if fault.phase == Phase.EVALUATE.label:
            if tuning.evaluation_batch_size == 1:
                return _plain_retry(fault, tuning)
            size = tuning.evaluation_batch_size // 2
            return TuningChange(
                tuning=replace(tuning, evaluation_batch_size=size),
                action=f"evaluating {size} samples at a time",
                inexact_reason="",
            )
        case FaultKind.OUT_OF_MEMORY:
            size = min(tuning.micro_batch_size, samples) // 2
            if size == 0:
                return _plain_retry(fault, tuning)
            return TuningChange(
                tuning=replace(
                    tuning,
                    micro_batch_size=size,
                    reductions=tuning.reductions + 1,
                    resized_at_step=fault.step,
                ),
                action=f"micro-batches of {size} samples, same global batch",
                inexact_reason=f"micro-batches of {size} samples from step {fault.step}",
            )
        case FaultKind.COMPILATION_FAILED:
            return _not_compiled(fault, tuning)
        case FaultKind.REDUCTION_UNFINISHED:
            return _search_changed(fault, tuning)
        case _:
            return None


def _not_compiled(fault: Fault, tuning: Tuning) -> TuningChange | None:
    if not tuning.may_compile:
        return None
    return TuningChange(
        tuning=replace(tuning, may_compile=False),
        action="compile is off on all ranks from here on",
        inexact_reason=f"not compiled from step {fault.step} on" if fault.step else "",
    )


def _plain_retry(fault: Fault, tuning: Tuning) -> TuningChange | None:
    """The same again, where no less can be asked for; None if that was tried often at this step.

    A shortage may pass; and who follows a rank that ended may find that others have halved since, or
    have just been short of memory themselves.
    """
    retries = tuning.retries_there if fault.step == tuning.retried_at_step else 0
    if retries == SINGLE_RETRIES_MAX:
        return None
    return TuningChange(
        tuning=replace(tuning, retried_at_step=fault.step, retries_there=retries + 1),
        action="once more with single samples, which cannot be split",
        inexact_reason="",
        plain_retry=True,
    )


def _search_changed(fault: Fault, tuning: Tuning) -> TuningChange | None:
    """Look for unused parameters from here on, or no longer, as DDP's complaint has it. Sums stay the same."""
    if _READY_TWICE in fault.cause and tuning.find_unused_parameters:
        return TuningChange(
            tuning=replace(tuning, find_unused_parameters=False, must_not_search=True),
            action="find_unused_parameters=False from here on: reentrant checkpoints need it so",
            inexact_reason="",
        )
    if tuning.find_unused_parameters or tuning.must_not_search:
        return None
    return TuningChange(
        tuning=replace(tuning, find_unused_parameters=True, found_unused=True),
        action="find_unused_parameters=True from here on",
        inexact_reason="",
    )


def beyond_repair(fault: Fault, ddp: DdpSettings) -> Fault:
    """``fault``, for which this rank can change nothing, as what its user can do about it."""
    fault = replace(fault, may_retry=False)
    if _READY_TWICE not in fault.cause or ddp.static_graph:
        return fault
    cure = "reentrant checkpoints use a parameter twice in one step: set it to true, or use_reentrant=False"
    cause = str(BadInputError("ddp.static_graph", "false", cure))
    return replace(fault, kind=FaultKind.BAD_INPUT, cause=cause)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptRules:
    """When a fault-free run may become faster. 0 steps: never."""

    relax_after_steps: int
    regrow_after_steps: int
    micro_batch_size_max: int

    @classmethod
    def of(cls, settings: Settings, *, devices: int = 1) -> AdaptRules:
        """Return the rules that the settings ask for, for a rank with that number of ``devices``."""
        ddp, data = settings.ddp, settings.data
        auto = ddp.find_unused_parameters == "auto"
        return cls(
            relax_after_steps=ddp.relax_after_steps if auto else 0,
            regrow_after_steps=settings.memory.regrow_micro_batch,
            micro_batch_size_max=micro_batch(data, devices=devices),
        )

    def watch_use(self, tuning: Tuning) -> bool:
        """Return True if it still matters that every parameter is used."""
        return bool(
            self.relax_after_steps and tuning.find_unused_parameters and not tuning.found_unused
        )


def adapt(
    tuning: Tuning, rules: AdaptRules, *, committed_step: int, all_used_steps: int
) -> TuningChange | None:
    """Return a change to try between two steps, or None; a function of values that are equal on all ranks.

    The wait before the micro-batch is doubled again grows with each time that memory did not suffice.
    """
    if rules.watch_use(tuning) and all_used_steps >= rules.relax_after_steps:
        return TuningChange(
            tuning=replace(tuning, find_unused_parameters=False),
            action=f"find_unused_parameters=False after {all_used_steps} steps in a row that used all",
            inexact_reason="",
        )
    size = min(tuning.micro_batch_size * 2, rules.micro_batch_size_max)
    wait_steps = rules.regrow_after_steps * 2 ** min(max(0, tuning.reductions - 1), WAIT_DOUBLINGS)
    waited_steps = committed_step - tuning.resized_at_step
    if wait_steps and size > tuning.micro_batch_size and waited_steps >= wait_steps:
        return TuningChange(
            tuning=replace(tuning, micro_batch_size=size, resized_at_step=committed_step),
            action=f"trying micro-batches of {size} samples",
            inexact_reason=f"micro-batches of {size} samples from step {committed_step}",
        )
    return None


def free_memory() -> None:
    """Give back what a failed step held; its frames must be gone by now."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call,unused-ignore]
        torch.cuda.empty_cache()
