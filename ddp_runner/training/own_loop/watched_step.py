"""Surrounds the step in hand of a user's own loop with what works beside it, and notes this rank's own share of it.

A loop's step is no call of ours: it begins where its batch is taken, and ends with its commit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ddp_runner.kernel.group.group import Group
from ddp_runner.kernel.rules.election import EMPTY_STEP
from ddp_runner.training.beside_steps import BesideSteps
from ddp_runner.training.exactness.own_share import OwnShare, ShareNotes
from ddp_runner.training.own_loop.kept import KeptState


@dataclass(slots=True)
class LoopNotes(ShareNotes):
    """The notes of a share up to its first sum over ranks: what a body computes from that, other ranks have a part in."""

    _seen: set[int] = field(default_factory=set)

    def gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """The rank's own gradient of the backward whose sum comes first; a later one of the step does not count."""
        if id(parameter) in self._seen:
            return
        self._seen.add(id(parameter))
        ShareNotes.gradient(self, parameter, gradient)

    def has(self, parameter: Tensor) -> bool:
        """Return True if a gradient of the parameter has been noted."""
        return id(parameter) in self._seen

    def begin_again(self) -> None:
        """Forget everything: the step is made again, of the same batch."""
        self.samples.clear()
        self.gradients.clear()
        self._seen.clear()


class WatchedStep:
    """The step in hand of one generation. Every call comes from the training thread."""

    def __init__(self, state: KeptState, group: Group, *, beside: Sequence[BesideSteps]) -> None:
        self._state = state
        self._group = group
        self._beside = tuple(beside)
        self._around = contextlib.ExitStack()
        self._step = EMPTY_STEP  # which is surrounded
        self._notes: LoopNotes | None = None  # of that, where somebody wants them
        self.rehearsed: OwnShare | None = None  # of a body of that step that was for nothing

    def begin(self, batches: Sequence[Any]) -> None:
        """The step of the state begins, or begins again, with these batches."""
        step = self._state.committed_step
        if step != self._step:
            self.end()
            self._step, self.rehearsed = step, None
            for one in self._beside:
                self._around.enter_context(one.beside(self, self._group, ()))
        if self._notes is not None:
            self._notes.begin_again()
            for batch in batches:
                self._notes.batch(batch)

    def end(self) -> None:
        """The step is committed, or nobody makes it in this generation any more."""
        self._step = EMPTY_STEP
        self._around.close()

    @contextlib.contextmanager
    def noted(self) -> Iterator[LoopNotes]:
        """Note this rank's own share of the step that begins, as it is made last."""
        if self._notes is not None:  # somebody else wants them too
            yield self._notes
            return
        self._notes = notes = LoopNotes.of(self._state)
        try:
            yield notes
        finally:
            self._notes = None

    @property
    def gradient(self) -> Any:
        """What a replica gives each of this rank's own gradients to; None where nobody wants them."""
        return None if self._notes is None else self._notes.gradient

    def has_rehearsed(self) -> None:
        """The body that has just ended was for nothing; what it has changed is put back."""
        if self._notes is not None:
            self.rehearsed = self._notes.share()
