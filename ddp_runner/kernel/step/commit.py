"""Commits a step in two halves: the checks before the state may change, and the stores that make the change count.

The code that trains makes the update between them; a commit computes no gradient and updates no weight.
:class:`State` is all that the ranks' agreement, commit and repair know of what is trained.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from ddp_runner.kernel.replica.loss_module import Signal
from ddp_runner.kernel.replica.replica import Relaid, Replica
from ddp_runner.kernel.rules.phases import Moment, Phase
from ddp_runner.kernel.wire.board import Cell, Slot


class Buffers(Relaid, Protocol):
    """The buffers of a model, which forward writes."""

    def live(self) -> list[Tensor]:
        """Return the buffers that are rank 0's on every rank after a step."""
        ...


class State(Protocol):
    """Everything that a step changes on one rank.

    ``committed_step`` is the number of committed steps; EMPTY_STEP means that this process has no state yet and
    must receive one. ``boundary_done_step``: the step up to which due evaluations and saves are made.
    ``trained_since``: the committed step with which this process began to train. ``is_in_doubt``: a comparison has just
    found that this state differs from that of other ranks.
    """

    committed_step: int
    samples: int
    boundary_done_step: int
    trained_since: int
    is_in_doubt: bool

    @property
    def buffers(self) -> Buffers:
        """The buffers of the model."""
        ...

    @property
    def is_calm(self) -> bool:
        """True if the newest steps were applied: a later roll-back to this state helps."""
        ...

    @property
    def is_at_goal(self) -> bool:
        """True if a step has reached what the run is for, before its last step."""
        ...

    @property
    def is_spent(self) -> bool:
        """True if an evaluation has found that more steps do not help."""
        ...

    def before_change(self) -> None:
        """Wait until no thread reads what a step changes, as a save does. Call it before each change."""
        ...

    def change_begins(self) -> None:
        """Note what the step has made until its update."""
        ...

    def change_ends(self, step: int, *, applied: bool, all_used: bool) -> None:
        """Keep what ``step`` has made besides its update; what it wrote is put back where it is not ``applied``."""
        ...

    def drop_unfinished_step(self) -> None:
        """Forget what an unfinished step has changed."""
        ...

    def capture(self) -> dict[str, Any]:
        """Return the state by name; references, which are valid until the next update."""
        ...

    def to_write_over(self) -> dict[str, Any] | None:
        """Return the tensors that a received state may be written into; None while this state counts."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over a captured state. Until that is complete, ``committed_step`` is EMPTY_STEP."""
        ...


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
    """Commits the steps of one replica. Every rank calls both halves."""

    def __init__(
        self, state: State, replica: Replica, *, slot: Slot, watch_use: bool = False
    ) -> None:
        """``slot``: this rank's cells on the board, shared memory that the supervisor reads.

        ``watch_use``: count the steps in a row in which every parameter was used.
        """
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
        """Wait, after backward, until nothing keeps this rank from the update; return what all ranks share.

        Returns None if ``may_commit``, asked on every rank, returns False. Raises the errors that keep the step from being
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
        """Mark this rank as dirty: the update comes next.

        From here to :meth:`end_change` nothing may wait for another rank. A rank that fails in between is
        replaced, because its weights may be half updated.
        """
        # INVARIANT dirty-around-update: the board says dirty while weights are half updated.
        # Broken if: the optimizer runs outside the two stores.
        # Guarded by: test_half_updated_weights_never_spread.
        self._slot.set(Cell.DIRTY, 1)
        self._state.change_begins()

    def end_change(self, agreed: Agreed, *, applied: bool, samples: int) -> None:
        """Count the step; its update is over, or was left out if it is not ``applied``."""
        state = self._state
        step = state.committed_step + 1
        state.change_ends(step, applied=applied, all_used=agreed.all_used)
        state.committed_step = step
        state.samples += samples
        self._slot.set(Cell.COMMITTED_STEP, state.committed_step)
        self._slot.set(Cell.DIRTY, 0)
