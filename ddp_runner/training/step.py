"""One optimizer step over one global batch. Never saves, evaluates or logs."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ddp_runner.core.settings import OptimSettings
from ddp_runner.data.loader import MicroBatch
from ddp_runner.kernel.replica.loss import BadWeightError, Loss, LossForm, bad_weight, no_graph
from ddp_runner.kernel.replica.loss_module import PLAIN_FORM, LossModule, Signal
from ddp_runner.kernel.replica.replica import Replica
from ddp_runner.kernel.rules.exits import StopReason
from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.kernel.step.commit import Commit
from ddp_runner.kernel.step.session import StepResult, Votes, WrapAgainError
from ddp_runner.kernel.wire.board import Slot
from ddp_runner.training.components.loss_spikes import Limits
from ddp_runner.training.components.lr_schedule import apply_learning_rate, learning_rate
from ddp_runner.training.components.tuning import Tuning
from ddp_runner.training.exactness.own_share import OwnShare, ShareNotes
from ddp_runner.training.loading.batch_copy import to_device
from ddp_runner.training.state import TrainState
from ddp_runner.values.generators import seed_step

COPY_VOTE = 0.5  # of rank 0 alone; a vote for a save is 1
_SIGNALS = len(Signal)
_NO_VOTES = (0.0,) * _SIGNALS


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRules:
    """The values that stay the same for every step of a generation."""

    seed: int
    rank: int
    global_batch: int
    total_steps: int
    optim: OptimSettings
    device: torch.device
    others: tuple[torch.device, ...] = ()  # which have parts of each batch
    first_step: int = 0  # of the stage
    watch_use: bool = False  # count the steps in which every parameter was used
    tokens_per_sample: float | None = None  # of all samples alike, where the task says so
    turn_to: Callable[[int], None] = lambda _: None  # has the loss be that of a step

    @property
    def unit(self) -> float:
        """The factor of summed totals and weights: a power of two, so that no bit is lost, and small enough."""
        return 2.0 ** -(self.global_batch - 1).bit_length()


_NOTHING_WANTED, _NO_LIMITS = Votes(), Limits()


class SparseGradientError(Exception):
    """A parameter's gradient is sparse."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} has sparse gradients, which are neither clipped nor compared here: make it with sparse=False"
        )


class Stepper:
    """Runs the steps of one generation on this rank."""

    def __init__(
        self, state: TrainState, replica: Replica, *, rules: StepRules, slot: Slot
    ) -> None:
        self._state = state
        self._replica = replica
        self._rules = rules
        self._slot = slot
        self._commit = Commit(state, replica, slot=slot, watch_use=rules.watch_use)
        self._parameters = state.trainable()
        self._is_on_host = are_on_host(self._parameters)
        # The form of the loss that ranks have agreed on, and the tuning that has the same.
        self._compared: tuple[LossForm, Tuning] | None = None
        self._share = Accumulator(state, replica, rules=rules, slot=slot, flags=state.flags())
        self._notes: ShareNotes | None = None  # of the step in hand, where somebody wants them

    @contextlib.contextmanager
    def noted(self) -> Iterator[ShareNotes]:
        """Note the results of this rank's own share of a step that is run inside."""
        if self._notes is not None:  # somebody else wants them too
            yield self._notes
            return
        self._notes = notes = ShareNotes.of(self._state)
        self._replica.on_own_gradient = notes.gradient
        try:
            yield notes
        finally:
            self._notes, self._replica.on_own_gradient = None, None

    def settle(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Run one throw-away forward and backward, from which DDP learns a static graph.

        Every rank must call it, right after the replica was built.
        """
        self._share.compute(micro_batches, step=self._state.committed_step)
        self._replica.check_reduced()
        self._state.drop_unfinished_step()

    def run(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        votes: Votes,
        may_commit: Callable[[], bool] = lambda: True,
        while_reducing: Callable[[], None] = lambda: None,
    ) -> StepResult | None:
        """Forward, backward, reduce, check, update, commit. Raises whatever a part of it raises.

        ``while_reducing`` and ``may_commit``: as of :meth:`Commit.ready_to_change`; None where it says no.
        """
        limits = self._state.loss_spikes.limits()
        self._compute(micro_batches, votes=votes, limits=limits)
        return self.change(limits, while_reducing=while_reducing, may_commit=may_commit)

    def change(
        self,
        limits: Limits,
        *,
        while_reducing: Callable[[], None] = lambda: None,
        may_commit: Callable[[], bool] = lambda: True,
    ) -> StepResult | None:
        """Check, update and commit, once the gradients are summed over ranks. Raises and returns as :meth:`run`."""
        state, scaler = self._state, self._state.precision.scaler
        if self._notes is not None:
            self._notes.summed(self._replica.carried)
        scale = state.precision.scale()
        agreed = self._commit.ready_to_change(
            scale=scale,
            measure=lambda: self._measure(scale),
            while_reducing=while_reducing,
            may_commit=may_commit,
        )
        if agreed is None:
            return None
        self._compare_form()
        means = self._replica.means(agreed.signals)
        norm, loss = agreed.measured, means.loss
        if norm is None:
            scaler.unscale_(state.optimizer)
            norm = float(self._gradient_norm())
        if state.own_step == 0 and norm == 0.0 and not self._replica.has_graph:
            raise no_graph()
        rate = self._learning_rate()
        applied, explosion = self._judged(limits, loss=loss, norm=norm)
        if self._notes is not None:
            self._notes.update_begins(is_relaid=agreed.signals[Signal.RELAID] > 0)
        self._commit.begin_change()
        self._update(rate, applied=applied)
        self._commit.end_change(agreed, applied=applied, samples=self._rules.global_batch)
        self._count_tokens(means.weight, applied=applied)
        return StepResult(
            step=state.committed_step,
            loss=loss,
            grad_norm=norm,
            learning_rate=rate,
            applied=applied,
            explosion=explosion,
            overflowed=math.isfinite(loss) and state.precision.has_lowered(scale),
            loss_scale=scale if scaler.is_enabled() else None,
            broken_ranks=_ranks_in(int(agreed.signals[Signal.TROUBLE])),
            waited_ns=self._replica.waited_ns(),
            wanted=agreed_votes(agreed.signals),
            parts=means.parts,
            without_weight=means.weight == 0,
        )

    def _compare_form(self) -> None:
        """Raise WrapAgainError where the loss has another form than the tuning says."""
        form, tuning = self._replica.agreed_form, self._state.tuning
        known = self._compared
        if known is not None and known[0] is form and known[1] is tuning:
            return
        if form != tuning.loss_form:
            self._state.tuning = tuning.with_loss_form(form)
            raise WrapAgainError
        self._compared = form, tuning

    def _compute(
        self, micro_batches: Sequence[MicroBatch], *, votes: Votes, limits: Limits
    ) -> None:
        """Compute the share of the next step; seal the per-rank state before other ranks can commit the step."""
        state, step = self._state, self._state.committed_step
        self._share.compute(
            micro_batches,
            step=step,
            votes=votes,
            limits=limits,
            notes=self._notes,
            before_sum=lambda: state.local.seal(step + 1),
        )

    def _judged(self, limits: Limits, *, loss: float, norm: float) -> tuple[bool, str]:
        """Return whether the step in hand is to change the weights, and how it exploded, if it did."""
        spikes, step = self._state.loss_spikes, self._state.own_step
        explosion = limits.exceeded_by(loss=loss, grad_norm=norm)
        applied = math.isfinite(norm) and math.isfinite(loss) and not explosion
        if applied:
            spikes.observe(step=step, loss=loss, grad_norm=norm)
        elif explosion:
            spikes.exploded(step=step)
        return applied, explosion

    def _count_tokens(self, weight: float | None, *, applied: bool) -> None:
        """Add the tokens of a step: the weight of its loss, else those of its samples."""
        state, size, each = self._state, self._rules.global_batch, self._rules.tokens_per_sample
        if weight is None and each is None:
            return
        before = state.tokens
        if before is None:  # the first step, or one after a checkpoint that counts none
            before = 0.0 if each is None else each * (state.samples - size)
        counted = weight if weight is not None else (each or 0.0) * size
        state.tokens = before + (counted if applied else 0.0)

    def own_gradient_norm(self, micro_batches: Sequence[MicroBatch]) -> float | None:
        """Compute this rank's gradient of the step just skipped once more, without reducing it.

        That step has changed nothing, so its gradient is the same one, unless the hardware erred. None where ranks
        keep something of their own: that step has changed it.
        """
        if self._state.local.names:
            return None
        step = self._state.committed_step - 1
        self._share.compute(micro_batches, step=step, reduces=False)
        norm = float(self._total_norm()) / self._state.precision.scale()
        self._replica.zero_gradients()
        self._state.drop_unfinished_step()
        return norm

    def share_again(self, micro_batches: Sequence[MicroBatch]) -> OwnShare:
        """Return this rank's share of the next step, without reducing it; kept state stays unchanged.

        No step may be unfinished. Changes by forward are put back.
        """
        state, notes = self._state, ShareNotes.of(self._state)
        state.side.look_again(whole=True)  # so that all of it can be
        step = state.committed_step
        try:
            self._share.compute(micro_batches, step=step, reduces=False, notes=notes)
            for parameter in self._parameters:
                if parameter.grad is not None:
                    notes.gradient(parameter, parameter.grad)
        finally:
            self._replica.zero_gradients()
            state.drop_unfinished_step()
        return notes.share()

    def _measure(self, scale: float) -> Tensor | None:
        """Return the gradient norm after the sum over ranks, unless gradients are still scaled; divide totals first."""
        if self._replica.sums_totals:
            self._replica.divide_by_weight(gradients_of(self._parameters), scale=scale)
        return None if self._state.precision.scaler.is_enabled() else self._gradient_norm()

    def _gradient_norm(self) -> Tensor:
        """The norm over all gradients, which are clipped in place then. The same bits on every rank.

        It is that of gradients which nothing has clipped: what is not finite, or explodes, shows.
        """
        limit, value = self._rules.optim.max_grad_norm, self._rules.optim.max_grad_value
        norm = self._total_norm()
        if limit is not None:
            clip = clip_on_host if self._is_on_host else torch.nn.utils.clip_grads_with_norm_
            clip(self._parameters, limit, norm)
        if value is not None:
            torch.nn.utils.clip_grad_value_(self._parameters, value)
        return norm

    def _total_norm(self) -> Tensor:
        gradients = gradients_of(self._parameters)
        if gradients and self._is_on_host:
            return norm_on_host(gradients)
        return torch.nn.utils.get_total_norm(gradients)

    def _learning_rate(self) -> float:
        """Return the learning rate of the current step: the schedule's, with all reductions since."""
        state = self._state
        spikes = state.loss_spikes.rate_factor(state.own_step)
        factors = (state.tuning.rate_factor, spikes, state.improvement.rate_factor)
        own = state.own_rate(factors=factors)
        if own is not None:
            return own
        rate = learning_rate(
            state.own_step,
            total_steps=self._rules.total_steps - self._rules.first_step,
            settings=self._rules.optim,
        )
        for factor in factors:
            rate *= factor
        return rate

    def _update(self, rate: float, *, applied: bool) -> None:
        """Optimizer, loss scale and average; of a step that is not ``applied`` the scale alone."""
        state, scaler = self._state, self._state.precision.scaler
        if applied:
            if not state.apply_own_rate():
                apply_learning_rate(state.optimizer, rate)
            if scaler.is_enabled():
                scaler.step(state.optimizer)
            else:
                state.optimizer.step()
            if state.ema is not None and state.ema.is_due(state.own_step + 1):
                state.ema.update(state.model)
        state.precision.update()


class Accumulator:
    """Computes a rank's share of steps: forward and backward of each of its micro-batches."""

    def __init__(
        self,
        state: TrainState,
        replica: Replica | Alone,
        *,
        rules: StepRules,
        slot: Slot,
        flags: Sequence[bool] | None = None,
    ) -> None:
        """``flags``: which parameters DDP expects to require a gradient."""
        self._state = state
        self._replica = replica
        self._rules = rules
        self._slot = slot
        self._flags = flags

    def compute(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        step: int,
        votes: Votes = _NOTHING_WANTED,
        limits: Limits = _NO_LIMITS,
        reduces: bool = True,
        notes: ShareNotes | None = None,
        before_sum: Callable[[], None] = lambda: None,
    ) -> None:
        """Compute the share of ``step``, with the sum over ranks where it ``reduces``.

        ``before_sum`` is called once all losses are computed, before this rank adds to a sum for which others wait.

        Raises WrapAgainError where forward has changed which parameters require a gradient.
        """
        state, replica, rules, slot = self._state, self._replica, self._rules, self._slot
        state.begin_training()
        rules.turn_to(step)
        replica.zero_gradients()
        replica.use_unit(rules.unit)
        signals = as_signals(votes)
        last = len(micro_batches) - 1
        for number, micro_batch in enumerate(micro_batches):
            own_step = step - rules.first_step
            seed_step(seed=rules.seed, step=own_step, rank=rules.rank, micro_step=number)
            batch = to_device(micro_batch.batch, rules.device)
            if notes is not None:
                notes.batch(batch)
            count = len(micro_batch.indices)
            is_reduced = reduces and number == last
            with contextlib.nullcontext() if is_reduced else replica.without_sync():
                slot.stamp(Phase.FORWARD, time.monotonic_ns())
                try:
                    with state.precision.autocast():
                        loss = replica.forward(
                            batch,
                            weight=count / rules.global_batch,
                            votes=signals if number == last else _NO_VOTES,
                            loss_limit=limits.loss,
                            count=count,
                        )
                except BadWeightError as error:
                    raise bad_weight(error, rank=rules.rank, samples=micro_batch.indices) from error
                if notes is not None:
                    notes.loss(loss)
                # INVARIANT wrapped-as-trained: DDP sums the gradients of just those parameters that
                # required one when it wrapped the model. Broken if: a backward follows a forward that
                # has changed which do. Guarded by: test_layers_unfrozen_or_frozen_while_training.
                if self._flags is not None and state.flags() != self._flags:
                    raise WrapAgainError
                if number == last:
                    before_sum()
                slot.stamp(Phase.BACKWARD, time.monotonic_ns())
                scaled = state.precision.scaler.scale(loss)
                if reduces:
                    scaled.backward()  # type: ignore[no-untyped-call]
                else:
                    replica.backward_alone(scaled)


class Alone:
    """A model without a replica: a rank's own share of a step, of which nobody else hears."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        *,
        device: torch.device,
        rank: int,
        form: LossForm = PLAIN_FORM,
        others: Sequence[torch.device] = (),
    ) -> None:
        self._module = LossModule(model, loss, device=device, rank=rank, form=form, others=others)

    def forward(
        self,
        batch: Any,
        *,
        weight: float,
        votes: Sequence[float],
        loss_limit: float = math.inf,
        count: float = 1.0,
    ) -> Tensor:
        """Return the loss, as :class:`Replica` does."""
        loss: Tensor = self._module(batch, weight, votes, loss_limit, count)
        return loss

    def use_unit(self, unit: float) -> None:
        """Set the unit, as :class:`Replica` does."""
        self._module.unit = unit

    def without_sync(self) -> AbstractContextManager[None]:
        """Return an empty context: there is no reduction to leave out."""
        return contextlib.nullcontext()

    def backward_alone(self, loss: Tensor) -> None:
        """Run the backward of ``loss``."""
        loss.backward()  # type: ignore[no-untyped-call]

    def zero_gradients(self) -> None:
        """Drop every gradient: a step begins, or it was for nothing."""
        self._module.begin_step()
        self._module.zero_grad(set_to_none=True)

    def own_gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Return each parameter that has a gradient, with it; not the signals'."""
        for parameter in self._module.model.parameters():
            if parameter.grad is not None:
                yield parameter, parameter.grad


def own_share(
    state: TrainState,
    loss: Loss,
    micro_batches: Sequence[MicroBatch],
    *,
    rules: StepRules,
    slot: Slot,
    step: int,
) -> OwnShare:
    """Compute a rank's share of ``step`` with the bare model, without any other rank; keeps no gradient.

    What forward changes beside that is the caller's to take back.
    """
    form = state.tuning.loss_form
    alone = Alone(
        state.model, loss, device=rules.device, rank=rules.rank, form=form, others=rules.others
    )
    notes = ShareNotes.of(state)
    share = Accumulator(state, alone, rules=rules, slot=slot)
    share.compute(micro_batches, step=step, notes=notes)
    for parameter, gradient in alone.own_gradients():
        if gradient.layout is not torch.strided:
            raise SparseGradientError(
                next(n for n, p in state.named_parameters() if p is parameter)
            )
        notes.gradient(parameter, gradient)
    alone.zero_gradients()
    return notes.share()


def as_signals(votes: Votes) -> list[float]:
    """``votes`` as a replica's signals: one number for each :class:`Signal`."""
    values = [0.0] * _SIGNALS
    values[Signal.PREEMPT] = float(votes.stop is StopReason.PREEMPTED)
    values[Signal.INTERRUPT] = float(votes.stop is StopReason.INTERRUPTED)
    values[Signal.NEWS] = float(votes.news)
    values[Signal.SAVE] = 1.0 if votes.save else COPY_VOTE * votes.copy
    return values


# What torch.nn.utils has for gradients of any kind, bit for bit: its looks at each of them take a third of its time.


def are_on_host(parameters: Sequence[Tensor]) -> bool:
    """Return True for plain parameters of one type on the CPU."""
    return len({one.dtype for one in parameters}) == 1 and all(
        one.is_cpu and type(one) in (Tensor, nn.Parameter) for one in parameters
    )


def gradients_of(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return those that there are."""
    return [one.grad for one in parameters if one.grad is not None]


def norm_on_host(gradients: list[Tensor]) -> Tensor:
    """Return what ``get_total_norm`` does of gradients of parameters that :func:`are_on_host`."""
    norms = torch._foreach_norm(gradients, 2.0)  # noqa: SLF001 - as torch itself does
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), 2.0)
    return norm


def clip_on_host(parameters: Sequence[Tensor], limit: float, norm: Tensor) -> None:
    """Do what ``clip_grads_with_norm_`` does; a multiplication by 1 changes no bit, and is left out."""
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    if factor.item() != 1.0 and (gradients := gradients_of(parameters)):
        torch._foreach_mul_(gradients, factor)


def _ranks_in(mask: int) -> tuple[int, ...]:
    return tuple(rank for rank in range(mask.bit_length()) if mask >> rank & 1)


def agreed_votes(signals: Sequence[float], *, ranks: int = 1) -> Votes:
    """Return what some rank wants, of which :func:`as_signals` were summed over ranks; a mean is of ``ranks``."""
    return Votes(
        stop=agreed_stop(signals),
        save=agreed_save(signals[Signal.SAVE] * ranks),
        copy=signals[Signal.SAVE] > 0,
        news=signals[Signal.NEWS] > 0,
    )


def agreed_save(votes: float) -> bool:
    """Return True if the sum of all votes has one for a file, and not only that for a copy in memory."""
    return votes > (1.0 + COPY_VOTE) / 2


def agreed_stop(signals: Sequence[float]) -> StopReason | None:
    """An interrupt weighs more than a preemption: a person asked."""
    if signals[Signal.INTERRUPT] > 0:
        return StopReason.INTERRUPTED
    if signals[Signal.PREEMPT] > 0:
        return StopReason.PREEMPTED
    return None
