"""A loop of the user's own in one generation: what its steps do to the state, seen through the optimizer's hook.

The loop computes and updates; here it is held before the update until the step's sums over ranks are whole.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from ddp_runner.core.step_schedule import due_by_settings
from ddp_runner.kernel.group.group import Group, collectives_begun
from ddp_runner.kernel.group.waits import waiting_for_peers
from ddp_runner.kernel.replica.loss_module import Signal
from ddp_runner.kernel.replica.replica import UnreducedError
from ddp_runner.kernel.rules.election import EMPTY_STEP
from ddp_runner.kernel.rules.exits import StopReason
from ddp_runner.kernel.rules.faults import Fault, FaultError, FaultKind
from ddp_runner.kernel.rules.phases import DueActions, Phase
from ddp_runner.kernel.step.commit import Agreed, Commit
from ddp_runner.kernel.step.session import Outcome, StepInHand, StepResult, Votes
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.kernel.wire.messages import Metrics
from ddp_runner.training.beside_steps import BesideSteps
from ddp_runner.training.components.buffers import is_spread
from ddp_runner.training.components.sync_batchnorm import Peers
from ddp_runner.training.exactness.first_step import (
    note_counted,
    report_large_local,
    report_lost_carried,
    report_lost_local,
)
from ddp_runner.training.exactness.kept_kinds import Kept
from ddp_runner.training.figures.use_figures import memory_figures
from ddp_runner.training.guard import NumericsGuard
from ddp_runner.training.local_state.gathering import gather_local
from ddp_runner.training.own_loop.declared import LOSS, OwnLoop, RepeatStep
from ddp_runner.training.own_loop.misuse import misuse
from ddp_runner.training.own_loop.model_replica import ModelReplica
from ddp_runner.training.own_loop.parts import LoopParts
from ddp_runner.training.own_loop.repeat_check import RepeatCheck
from ddp_runner.training.own_loop.watched_step import WatchedStep
from ddp_runner.training.saves.save_room import ROOM_SHARE_MAX
from ddp_runner.training.step import agreed_votes, as_signals
from ddp_runner.values.generators import seed_step

_ONE_UPDATE = (
    "a block holds one update, after its last backward(); put each update into its own block,"
    " as in: if run.step_number % 2 == 0"
)
_COUNTED_TO = 4096  # steps, modulo which ranks show each other where they are: exact in float32


class _Own(IntEnum):
    """Signals beside those of every replica."""

    NOTED = len(Signal)  # ranks that have noted a loss before backward
    STEP = len(Signal) + 1
    UPDATED = len(Signal) + 2  # ranks whose last block has updated
    STOP = len(Signal) + 3  # ranks whose loop has asked for its end


_CELLS = len(Signal) + len(_Own)


class LoopSteps:
    """Makes the steps of a loop in one generation. Every rank calls its methods at the same places."""

    def __init__(
        self,
        parts: LoopParts,
        loop: OwnLoop,
        *,
        group: Group,
        guard: NumericsGuard,
        beside: Sequence[BesideSteps],
        repeats: RepeatCheck,
    ) -> None:
        self._parts = parts
        self._repeats = repeats
        self._watched = WatchedStep(parts.state, group, beside=(*beside, repeats))
        self._settings = parts.settings
        self._length = parts.workload.length
        self._state = parts.state
        self._runtime = parts.runtime
        self._slot = parts.runtime.slot
        self._rank = parts.runtime.rank_info.rank
        self._loop = loop
        self._group = group
        self._guard = guard
        self._zeros = torch.zeros(_CELLS, device=group.device, dtype=torch.float32)
        self._votes = Votes()
        self._failure: Exception | None = None  # of the step in hand, whatever the loop makes of it
        self._agreed: Agreed | None = None  # of the step in hand, once its update has begun
        self.in_body = False  # a step's body has begun, and has not ended
        self._has_carried = False  # the signals have been given to a backward of this step
        self._has_carried_loss = False  # so has a loss that was noted
        self._is_to_stop = False
        self._rehearses = False  # the next body is for nothing: see _wrap
        self._has_rehearsed = False  # in this generation
        self._must_undo = False  # the newest body was for nothing
        self._begun_at_update = 0  # collectives
        # Torch's counts of changes of loss scales, when the block began.
        self._scales: list[int] = []
        # What there was before the first rehearsal: what the body writes beside the optimizer shows.
        self._held: tuple[dict[str, Tensor], dict[str, Kept]] | None = None
        self._given_up = False  # the step in hand: for an older state, or for another wrapping
        self._has_called = False  # the net, in the step in hand
        self._wrapped_at = EMPTY_STEP  # the step whose body has changed requires_grad
        self._alone: contextlib.ExitStack | None = None  # within no_sync()
        self._logged_at_ns = time.monotonic_ns()
        self._watches = parts.settings.log.gpu_watch_s > 0
        self._logged_step = max(0, self._state.committed_step)
        self._waited_ns = 0
        self._state.buffers.forget_agreement()
        guard.went_back.append(self._has_gone_back)
        parts.device.begin(group.membership.generation)
        self._wrap()

    @property
    def at_end(self) -> bool:
        """True if all steps of the run are made."""
        return self._state.committed_step >= self._length.total_steps

    def close(self) -> None:
        """Unwrap the module."""
        self._watched.end()
        self._state.local.leave()
        assert self._loop.net is not None, "checked before the first step"
        self._loop.net.use(None)
        self._replica.close()

    def settle(self) -> None:
        """The first block of a generation does it: see :meth:`_wrap`."""

    def adapt(self) -> None:
        """Undo a body that was for nothing."""
        if self._must_undo:
            self._must_undo = False
            self._undo()

    def take(self, step: int) -> list[Any]:
        """Give this rank's batches of ``step``, the same ones where it is done again."""
        slot = self._slot
        slot.set(Cell.STEP, step)
        slot.set(Cell.EPOCH, self._length.epoch_of(step))
        slot.stamp(Phase.DATA, time.monotonic_ns())
        self._runtime.logger.step = step
        batches = self._parts.loader.take(step)
        note_counted(self._parts, self._parts.loader.counted)
        slot.stamp(Phase.FORWARD, time.monotonic_ns())
        self._watched.begin(batches)
        return batches

    def _has_gone_back(self) -> None:
        report_lost_local(self._parts)
        report_lost_carried(self._parts, went_back=True)

    def wrap_again(self) -> None:
        """Nothing raises WrapAgainError here."""

    @property
    def waited_s(self) -> float:
        """Seconds that the newest :meth:`take` has waited."""
        return self._parts.loader.waited_s

    def due(self, step: int) -> DueActions:
        """Say what the settings have due; functions of the loop when it says, before the last step."""
        is_due = any(one.is_due(step, self._length) for one in self._loop.recurring)
        due = due_by_settings(self._settings, self._length, step)
        return replace(due, evaluate=is_due and step < self._length.total_steps)

    def seed(self) -> None:
        """Seed for the step in hand, whose batch is handed out: what is drawn before the block counts too."""
        # INVARIANT seeded-with-batch: every draw between a batch and the end of its block follows one seed of
        # (seed, step, rank). Broken if: the block seeds again: draws before it would then be of no known state.
        # Guarded by: test_habits_of_loops_make_no_difference.
        step = self._state.committed_step
        seed_step(seed=self._settings.run.seed, step=step, rank=self._group.rank, micro_step=0)

    def begin_body(self, votes: Votes) -> None:
        """The body of a step begins: no signal is given yet."""
        self._votes, self._failure, self._agreed = votes, None, None
        self._has_carried = self._has_carried_loss = False
        self._given_up = self._has_called = False
        self._loop.noted, self._loop.received = {}, []
        self._replica.drop_signals()
        self._replica.on_own_gradient = self._watched.gradient
        self._slot.stamp(Phase.FORWARD, time.monotonic_ns())
        if self._rehearses:
            self._begin_rehearsal()
        self._scales = self._loop.scales()
        self.in_body = True

    def forward(self, *args: Any, **named: Any) -> Any:
        """Call the module, within the body of a step."""
        if not self.in_body:
            raise misuse("the net is called with gradients outside of a step: with run.step(): ...")
        if self._agreed is not None:
            raise misuse(f"the net is called after optimizer.step() within one step: {_ONE_UPDATE}")
        self._follow_flags()
        self._sync_norms(with_peers=True)
        outputs = self._replica(*args, **named)
        if not self._sums_all(self._state.flags()):
            # The module's own forward has changed them, so what it has computed is for nothing.
            self._wrap_again()
            self._held, self._given_up = None, True
            raise RepeatStep
        self._has_called = True
        return outputs

    # INVARIANT summed-as-trained: DDP sums the gradient of each parameter that requires one in a step.
    # Broken if: requires_grad is compared before the loop may change it for the last time, as between steps.
    # Guarded by: test_parameters_are_unfrozen_anywhere_before_the_net_is_called.
    def _follow_flags(self) -> None:
        """Wrap the module again where other parameters require a gradient than when it was wrapped."""
        flags = self._state.flags()
        if flags == self._flags:
            return
        if self._has_called and not self._sums_all(flags):
            raise misuse(
                "requires_grad changes between two calls of the net within one step: change it before the first"
            )
        # A body that is repeated begins with the flags that the one before it has changed.
        is_known = self._wrapped_at == self._state.committed_step and self._sums_all(flags)
        if not self._has_called and not is_known:
            self._wrap_again()

    def _sync_norms(self, *, with_peers: bool) -> None:
        """Within a step batch norms of the net are over all ranks: a recomputed forward is in backward."""
        if self._loop.norms is not None and self._loop.norms.names:
            peers = Peers(group=self._group, slot=self._slot) if with_peers else None
            self._loop.norms.peers = peers

    def _sums_all(self, flags: list[bool]) -> bool:
        """Return True if DDP sums the gradients of all parameters that require one by ``flags``."""
        if flags == self._flags:  # as nearly always
            return True
        return not any(now and not wrapped for now, wrapped in zip(flags, self._flags, strict=True))

    def _wrap_again(self) -> None:
        self._wrapped_at = self._state.committed_step
        self._replica.close()
        self._wrap()
        self._replica.on_own_gradient = self._watched.gradient
        if self._alone is not None:
            self._alone.enter_context(self._replica.no_sync())
        self._slot.stamp(Phase.FORWARD, time.monotonic_ns())

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context like that of DDP; between steps it does nothing."""
        return self._adding_alone() if self.in_body else contextlib.nullcontext()

    @contextlib.contextmanager
    def _adding_alone(self) -> Iterator[None]:
        """A module that is wrapped again within the block sums nothing over ranks either."""
        outer = self._alone
        with contextlib.ExitStack() as alone:
            alone.enter_context(self._replica.no_sync())
            self._alone = alone
            try:
                yield
            finally:
                self._alone = outer

    def before_update(self, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Called by each kept optimizer before it steps. Raises RepeatStep where it must not."""
        if not self.in_body:
            raise misuse("optimizer.step() outside of a step: with run.step(): ...")
        if self._failure is not None or self._given_up:
            raise RepeatStep
        if self._agreed is not None:
            return  # another optimizer of the same step
        try:
            _refuse_closure((*args, *named.values()))
            self._watched.optimizer_is_called()
            self._refuse_early_update()
            self._agreed = self._get_ready()
        except Exception as error:
            self._failure = error
            raise RepeatStep from error
        if self._agreed is None:
            raise RepeatStep
        self._watched.update_begins(self._agreed)
        self._commit.begin_change()
        self._begun_at_update = collectives_begun()

    def end_body(self, error: Exception | None) -> StepResult | None:
        """The body has ended, by ``error`` or without one; None where the step is to be begun again.

        Raises what broke the step, also where the body has swallowed it.
        """
        self.in_body = False
        self._sync_norms(with_peers=False)
        failure = self._failure or self._replica.failure or error
        if failure is not None:
            raise failure
        if self._given_up:
            self._must_undo = True
            return None
        if self._agreed is None:
            if self._rehearses:
                self._replica.check_reduced()
                if self._held is not None:
                    self._watched.has_rehearsed()
                self._rehearses, self._must_undo = False, True
                return None
            return self._without_update()
        if collectives_begun() != self._begun_at_update:
            raise misuse(
                "a collective after optimizer.step() within one step: put it before, or behind the block"
            )
        return self._commit_step(self._agreed, has_updated=True)

    def after(self, step: StepInHand, result: StepResult, *, due: DueActions) -> Outcome:
        """Take in a step that was made."""
        self._waited_ns += step.waited_ns
        epoch = self._length.epoch_of(result.step - 1)
        if math.isfinite(result.loss):  # else the loop has noted none, or one that is none
            self._state.monitor.observe(
                step=result.step, epoch=epoch, loss=result.loss, applied=True, overflowed=False
            )
            self._parts.progress.loss = result.loss
            self._slot.set_loss(result.loss)
        self._parts.memory.after_step(result.step)
        if len(sys.modules) != self._loop.modules:  # the step has imported some
            self._parts.workload.note_files(self._loop.note_files())
        report_large_local(self._parts)
        if due.log:
            self._log(result)
        self._repeats.after(result.step, self._group, at_end=self.at_end or self._is_to_stop)
        return Outcome.ALL_DONE if self._is_to_stop else Outcome.GOES_ON

    def gather(self) -> None:
        """Collect the per-rank state of other machines; all other state of a loop is equal on all ranks."""
        gather_local(self._state.local, self._group, step=self._state.committed_step)

    def evaluate(self, *, is_again: bool = False) -> StopReason | None:
        """Call the functions that are due between steps. The net's buffers are put back behind them."""
        step, slot = self._state.committed_step, self._slot
        due = [one for one in self._loop.recurring if one.is_due(step, self._length)]
        if is_again or not due:  # the state has what they have changed
            return None
        began_ns = time.monotonic_ns()
        self._state.begin_functions(room_bytes=self._room_bytes())
        assert self._loop.net is not None, "checked before the first step"
        buffers = self._loop.net.module.buffers()
        own = [(one, one.clone()) for one in buffers if not is_spread(one)]
        for one in due:
            slot.stamp(Phase.EVALUATE, time.monotonic_ns())
            with self._loop.between.drawing(step, one.call):
                one.call()
            slot.count_done(step)
        for live, was in own:  # of a net that was not put into eval mode
            live.copy_(was)
        self._state.end_functions()
        slot.add(Cell.EVALUATION_NS, time.monotonic_ns() - began_ns)
        return None

    def end_epoch(self) -> None:
        """Do nothing: the program has its own epochs."""

    def must_keep(self) -> bool:
        """Never: nothing here is known to be an evaluation."""
        return False

    def _room_bytes(self) -> float:
        """Return the bytes that a second copy of parameters may take."""
        room_bytes = ROOM_SHARE_MAX * self._parts.memory.room_bytes()
        return room_bytes / self._runtime.rank_info.local_world_size

    def bucket_sizes(self) -> str:
        """Return the bucket sizes of the replica."""
        return self._replica.bucket_sizes()

    def _wrap(self) -> None:
        net = self._loop.net
        assert net is not None, "checked before the first step"
        searches = self._state.tuning.find_unused_parameters
        self._flags = self._state.flags()
        self._replica = ModelReplica(
            net.module,
            cells=_CELLS,
            take=self._own_signals,
            group=self._group,
            settings=replace(self._loop.ddp, find_unused_parameters=searches),
            slot=self._slot,
            device=self._parts.device,
        )
        self._commit = Commit(self._state, self._replica, slot=self._slot)
        # The first body of a launch is for nothing, to see what it writes beside the update.
        is_rehearsed = self._state.is_rehearsed or self._has_rehearsed
        self._rehearses = self._loop.rehearses is not False and not is_rehearsed
        net.use(self)

    def _own_signals(self) -> Tensor:
        """Return the signals that are summed with this step's gradients: each once, for any number of backwards.

        Raises BadInputError in a backward after the update, which nothing would sum.
        """
        if self._agreed is not None:
            raise misuse(f"backward() comes after optimizer.step() within one step: {_ONE_UPDATE}")
        self._state.gradients.backward_begins()
        loop, loss = self._loop, self._loop.noted.get(LOSS)
        if loss is None and not self._has_carried:
            loss = loop.late_loss
        is_noted = loss is not None and not self._has_carried_loss
        if self._has_carried and not is_noted:
            return self._zeros
        cells = [0.0] * _CELLS
        if not self._has_carried:
            cells[: len(Signal)] = as_signals(self._votes)
            cells[Signal.RELAID] = float(self._state.buffers.is_relaid())
            cells[_Own.STEP] = float(self._state.committed_step % _COUNTED_TO)
            cells[_Own.UPDATED] = float(self._state.has_updated)
            cells[_Own.STOP] = float(loop.wants_stop)
            self._has_carried = True
        cells[_Own.NOTED] = float(is_noted)
        # One copy of all: a tensor that is written cell by cell takes some microseconds for each.
        carried = torch.tensor(cells, dtype=torch.float32)
        carried = carried.to(self._zeros.device, non_blocking=True)
        if is_noted and loss is not None:
            self._has_carried_loss = LOSS in loop.noted
            carried[Signal.LOSS] = loss.mean().float() if isinstance(loss, Tensor) else loss
        return carried

    def _refuse_early_update(self) -> None:
        """Raise BadInputError if gradients of this block are still to come: nothing would sum them in this step."""
        finds_unused = self._state.tuning.find_unused_parameters
        if self._runtime.is_watched and not finds_unused:
            return  # the block may leave these parameters out, which is repaired
        try:
            self._replica.check_reduced()
        except UnreducedError as error:
            if not error.names:
                raise
            unused = (
                "" if finds_unused else "run.ddp(..., find_unused_parameters=True) permits that; "
            )
            raise misuse(
                f"no gradient came for {', '.join(error.names)} before optimizer.step(): {unused}{_ONE_UPDATE}"
            ) from error

    def _get_ready(self) -> Agreed | None:
        """Agree with the other ranks before the update; None if there must be no update."""
        if self._rehearses:
            return None
        agreed = self._commit.ready_to_change(
            scale=1.0 / self._group.world_size, may_commit=self._guard.may_commit
        )
        if agreed is None:
            self._given_up = True
            return None
        world_size, step = self._group.world_size, self._state.committed_step % _COUNTED_TO
        signals = agreed.signals
        is_alike = round(signals[_Own.STEP]) == step * world_size
        if not is_alike or round(signals[_Own.UPDATED]) not in (0, world_size):
            raise FaultError(
                Fault(
                    kind=FaultKind.COLLECTIVE_FAILED,
                    rank=self._rank,
                    step=self._state.committed_step,
                    cause="the ranks are not at the same step, or their last one did not end alike",
                    at_ns=time.monotonic_ns(),
                )
            )
        self._state.local.seal(self._state.committed_step + 1)
        self._state.local.await_all(self._group, self._slot, self._state.committed_step + 1)
        return agreed

    def _begin_rehearsal(self) -> None:
        state = self._state
        needed_bytes = state.buffers.hold_all_bytes() + state.side.hold_bytes()
        if not state.is_rehearsed and needed_bytes <= self._room_bytes():
            self._held = (state.buffers.hold_all(), state.side.hold())

    def _undo(self) -> None:
        """Take back what a body that was for nothing has changed, and what the loop has done behind it.

        Raises FaultError where this rank has to receive what was changed.
        """
        state = self._state
        if self._held is not None:  # the first one of a launch
            parameters, side = self._held
            state.buffers.follow_changed_since(parameters)
            state.side.follow_changed_since(side)
            # INVARIANT interrupted-is-asked-again: a loop's first step that a fault interrupts is rehearsed again, until it is made.
            # Broken if: a rank is lost in it, and state in the environment that changes the step goes unreported.
            # Guarded by: test_a_first_body_that_is_interrupted_is_rehearsed_again.
            self._has_rehearsed, self._held = True, None
        state.drop_rehearsed()
        if state.committed_step == EMPTY_STEP:
            state.is_rehearsed = True  # once is enough: this would only happen again
            raise FaultError(
                Fault(
                    kind=FaultKind.COLLECTIVE_FAILED,
                    rank=self._rank,
                    step=self._slot.get(Cell.COMMITTED_STEP),
                    cause="a kept tensor was written before the update, for the first time",
                    at_ns=time.monotonic_ns(),
                )
            )

    def _without_update(self) -> StepResult:
        """A block in which no kept optimizer stepped, as one whose fp16 gradients overflow.

        Counts once all ranks say the same of theirs. One whose collective was cut short, and whose body
        swallowed that, waits here for ranks that never answer, until it is told to leave.
        """
        state, step = self._state, self._state.committed_step
        is_overflow = self._loop.scales() != self._scales
        has_gradients = self._has_carried and any(p.grad is not None for p in state.trainable())
        if not is_overflow and (has_gradients or state.gradients.has_more()):
            raise misuse(
                "the block ended without optimizer.step(), and with gradients: one block is one step;"
                " steps(..., accumulate=N) gives N batches"
            )
        state.local.seal(step + 1)
        with waiting_for_peers(self._slot):
            asked = self._group.exchange(
                f"without update/{step}", "stop" if self._loop.wants_stop else ""
            )
        self._replica.share_buffers(state.buffers.live())
        state.before_change()
        self._group.confirm()
        agreed = Agreed(signals=[0.0] * _CELLS, measured=None, all_used=False)
        agreed.signals[_Own.STOP] = float("stop" in asked)
        self._commit.begin_change()
        return self._commit_step(agreed, has_updated=False)

    def _commit_step(self, agreed: Agreed, *, has_updated: bool) -> StepResult:
        self._commit.end_change(agreed, applied=True, samples=self._parts.workload.global_batch)
        self._state.committed()
        # Where nothing was rehearsed, or held for it, the first step shows what steps change.
        if not self._state.is_rehearsed:
            if not self._has_rehearsed:
                self._state.side.look_again(whole=True)
            self._state.is_rehearsed = True
        self._watched.end()
        # What the loop does before it asks for the next batch may take as long as an evaluation.
        self._slot.stamp(Phase.EVALUATE, time.monotonic_ns())
        self._state.has_updated = has_updated
        self._loop.late_loss = None if self._has_carried_loss else self._loop.noted.get(LOSS)
        signals = agreed.signals
        noted = signals[_Own.NOTED]
        self._is_to_stop = signals[_Own.STOP] > 0
        return StepResult(
            step=self._state.committed_step,
            loss=signals[Signal.LOSS] / noted if noted else math.nan,
            grad_norm=math.nan,
            learning_rate=float(self._state.optimizer.param_groups[0]["lr"]),
            applied=True,
            explosion="",
            overflowed=False,
            broken_ranks=(),
            waited_ns=self._replica.waited_ns() if has_updated else 0,
            wanted=agreed_votes(signals, ranks=self._group.world_size),  # DDP gives their mean
        )

    def _log(self, result: StepResult) -> None:
        now_ns = time.monotonic_ns()
        seconds = max(1e-9, (now_ns - self._logged_at_ns) / 1e9)
        steps = max(1, result.step - self._logged_step)
        values = {
            **self._loop.shown(),
            "learning_rate": result.learning_rate,
            "epoch": float(self._length.epoch_of(result.step - 1)),
            "steps_per_s": steps / seconds,
            "data_wait_share": min(1.0, self._waited_ns / 1e9 / seconds),
            "step_s": self._slot.get(Cell.STEP_NS) / 1e9,
        }
        if not math.isnan(result.loss):
            values[LOSS] = result.loss
        more = memory_figures(self._parts.memory) if self._watches else {}
        self._logged_at_ns, self._logged_step, self._waited_ns = now_ns, result.step, 0
        self._runtime.report(Metrics(rank=self._rank, step=result.step, values={**values, **more}))
        shown = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        self._runtime.logger.progress(shown, step=result.step)


def _refuse_closure(arguments: tuple[Any, ...]) -> None:
    if any(callable(one) for one in arguments):
        raise misuse("optimizer.step(closure) computes the loss again: call it without a closure")
