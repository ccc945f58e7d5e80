"""The two halves of every commit: when the state may change, and what makes the change count.

Whoever trains makes the update between them. Computes no gradient and updates no weight.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ddp_runner.collective.loss_module import Signal
from ddp_runner.collective.replica import Replica
from ddp_runner.core.board import Cell, Slot
from ddp_runner.core.phases import Moment, Phase
from ddp_runner.training.state import TrainState


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """The facts that all ranks share about a step that may change the state.

    ``signals``: by :class:`Signal`, summed over ranks; ``measured``: what was measured of the gradients,
    if anything was; ``all_used``: every rank had a gradient for every parameter, where that is watched.
    """

    signals: list[float]
    measured: float | None
    all_used: bool


class Commit:
    """Takes the steps of one replica over the change of the state. Every rank calls both halves."""

    def __init__(
        self, state: TrainState, replica: Replica, *, slot: Slot, watch_use: bool = False
    ) -> None:
        """``watch_use``: count the steps in a row in which every parameter was used."""
        self._state = state
        self._replica = replica
        self._slot = slot
        self._watch_use = watch_use

    def ready_to_change(
        self,
        *,
        scale: float = 1.0,
        measure: Callable[[], Tensor | None] = lambda: None,
        while_reducing: Callable[[], None] = lambda: None,
        may_commit: Callable[[], bool] = lambda: True,
    ) -> Agreed | None:
        """Return after backward, once nothing keeps this rank from the update.

        None if ``may_commit``, asked on every rank, returns False. Raises the errors that keep the step from being
        complete; nothing that survives has been changed then. ``scale``: of the gradients. ``measure``: a
        number of the reduced gradients, which is read with the signals, since each read from a device waits
        for it. ``while_reducing`` is called once all work of the step is enqueued on the device, just
        before the host waits for it.
        """
        state, replica, slot = self._state, self._replica, self._slot
        # INVARIANT check-before-step: no optimizer runs before every rank's gradients are known to
        # be reduced. Broken if: begin_change() comes before check_reduced().
        # Guarded by: test_an_unfinished_reduction_is_found_before_the_optimizer.
        replica.check_reduced()
        replica.note_reduced()
        all_used = self._watch_use and replica.every_parameter_was_used()
        beside = measure()
        while_reducing()
        signals, measured = replica.signals(scale=scale, beside=beside)
        slot.reach(Moment.REDUCED)
        if signals[Signal.RELAID] > 0:
            replica.share_layouts(state.buffers, step=state.committed_step)
        replica.share_buffers(state.buffers.live())
        if not may_commit():
            return None
        # INVARIANT copied-before-change: a checkpoint is of exactly one committed step: weights,
        # optimizer and average wait for the copy that a save may still be making of them.
        # Broken if: something that changes them runs without before_change().
        # Guarded by: test_a_save_beside_the_next_step_holds_its_own_step.
        state.before_change()
        slot.stamp(Phase.OPTIMIZER, time.monotonic_ns())
        # INVARIANT confirmed-before-commit: a step is committed only if its collectives came to
        # their end. Broken if: what was read from the device is used before confirm().
        # Guarded by: test_a_step_that_an_abort_may_have_cut_short_is_not_committed.
        replica.group.confirm()
        return Agreed(signals=signals, measured=measured, all_used=all_used)

    def begin_change(self) -> None:
        """The update comes next. From here to :meth:`end_change` nothing may wait for another rank.

        A rank that fails in between stands as dirty on the board: it is replaced.
        """
        # INVARIANT dirty-around-update: the board says dirty while weights are half updated.
        # Broken if: the optimizer runs outside the two stores.
        # Guarded by: test_half_updated_weights_never_spread.
        self._slot.set(Cell.DIRTY, 1)
        self._state.buffers.notice()

    def end_change(self, agreed: Agreed, *, applied: bool, samples: int) -> None:
        """The update is over, or was left out where it is not ``applied``: the step counts."""
        state = self._state
        if applied:
            state.buffers.keep()
        else:
            state.buffers.drop()
        state.all_used_steps = state.all_used_steps + 1 if agreed.all_used else 0
        state.committed_step += 1
        state.samples += samples
        state.side.keep(state.committed_step)
        self._slot.set(Cell.COMMITTED_STEP, state.committed_step)
        self._slot.set(Cell.DIRTY, 0)
