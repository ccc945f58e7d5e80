"""Surrounds the current step of a user's own loop with background work, and notes this rank's share of it.

We do not call a loop's step: it begins when the loop takes its batch, and ends with its commit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ddp_runner.kernel.group.group import Group
from ddp_runner.kernel.replica.loss_module import Signal
from ddp_runner.kernel.rules.election import EMPTY_STEP
from ddp_runner.kernel.step.commit import Agreed
from ddp_runner.training.beside_steps import BesideSteps
from ddp_runner.training.exactness.own_share import OwnShare, ShareNotes
from ddp_runner.training.exactness.own_update import after_backward, hashes_given
from ddp_runner.training.own_loop.kept import KeptState


@dataclass(slots=True)
class LoopNotes(ShareNotes):
    """Notes a share up to its first sum over ranks: later results also depend on the other ranks."""

    _seen: set[int] = field(default_factory=set)
    _is_in_backward: bool = False  # a backward whose sums are wanted

    def gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """Note the rank's own gradient of the backward that is summed first; ignore later ones of the step."""
        if self.wants_sums and not self._is_in_backward:
            self._is_in_backward = True
            self._await_sums()
        if id(parameter) in self._seen:
            return
        self._seen.add(id(parameter))
        ShareNotes.gradient(self, parameter, gradient)

    def _await_sums(self) -> None:
        try:
            after_backward(self._take_sums)
        except RuntimeError:  # of a compiled backward, say
            self.give_up_sums()

    def _take_sums(self) -> None:
        self._is_in_backward = False
        if self.sums is not None:  # a second sum in one step, which follows from the first one
            self.give_up_sums()
        self.summed()

    def has(self, parameter: Tensor) -> bool:
        """Return True if a gradient of the parameter has been noted."""
        return id(parameter) in self._seen

    def begin_again(self) -> None:
        """Forget all notes: the step begins again, with the same batch."""
        self.samples.clear()
        self.sums, self._is_in_backward = None, False
        self.gradients.clear()
        self._seen.clear()


class WatchedStep:
    """Watches the current step of one generation. Every call comes from the training thread."""

    def __init__(self, state: KeptState, group: Group, *, beside: Sequence[BesideSteps]) -> None:
        self._state = state
        self._group = group
        self._beside = tuple(beside)
        self._around = contextlib.ExitStack()
        self._step = EMPTY_STEP  # the step that is surrounded
        self._notes: LoopNotes | None = None  # of that step, if they are requested
        self.rehearsed: OwnShare | None = None  # of a warm-up run of that step's body
        self.wants_given = False  # what the optimizers are given in the two runs is to be compared
        self.given: dict[str, str] = {}  # in the newest run
        self.given_rehearsed: dict[str, str] = {}

    def begin(self, batches: Sequence[Any]) -> None:
        """Begin the next step, or begin it again, with these batches."""
        step = self._state.committed_step
        if step != self._step:
            self.end()
            self._step, self.rehearsed = step, None
            self.given_rehearsed = {}
            for one in self._beside:
                self._around.enter_context(one.beside(self, self._group, ()))
        self.given = {}
        if self._notes is not None:
            self._notes.begin_again()
            for batch in batches:
                self._notes.batch(batch)

    def end(self) -> None:
        """End the step: it is committed, or this generation gives it up."""
        self._step = EMPTY_STEP
        self._around.close()

    @contextlib.contextmanager
    def noted(self) -> Iterator[LoopNotes]:
        """Note this rank's own share of the step that begins; if it is repeated, of the last attempt."""
        if self._notes is not None:  # another caller notes them already
            yield self._notes
            return
        self._notes = notes = LoopNotes.of(self._state)
        try:
            yield notes
        finally:
            self._notes = None

    def update_begins(self, agreed: Agreed) -> None:
        """Take note that the first update of the body comes next."""
        if self._notes is not None:
            self._notes.update_begins(is_relaid=agreed.signals[Signal.RELAID] > 0)

    @property
    def gradient(self) -> Any:
        """The function that takes each of this rank's own gradients; None if no notes are requested."""
        return None if self._notes is None else self._notes.gradient

    def has_rehearsed(self) -> None:
        """Take in that the body that has just ended was a warm-up run, whose changes are put back."""
        if self._notes is not None:
            self.rehearsed = self._notes.share()
            self.given_rehearsed = self.given

    def optimizer_is_called(self) -> None:
        """Take note of what the optimizers are given, before the first one of the body steps."""
        if self.wants_given:
            self.given = hashes_given(self._state)
