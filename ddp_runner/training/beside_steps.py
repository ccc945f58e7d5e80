"""Work beside the steps of a rank, by features. It changes no bit of the run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from ddp_runner import installed
from ddp_runner.data.loader import MicroBatch
from ddp_runner.kernel.group.group import Group
from ddp_runner.training.exactness.own_share import ShareNotes
from ddp_runner.training.own_loop.declared import OwnLoop
from ddp_runner.training.rank_context import RankParts, TaskParts


class Noting(Protocol):
    """Makes the steps that something works beside."""

    def noted(self) -> AbstractContextManager[ShareNotes]:
        """Note the results of this rank's own share of a step that is made inside."""
        ...


class BesideSteps:
    """Lives as long as the rank's process. All calls come from the training thread; what is not overridden does nothing."""

    def beside(
        self, stepper: Noting, group: Group, micro_batches: Sequence[MicroBatch]
    ) -> AbstractContextManager[None]:
        """Return what surrounds the step that begins now, of ``micro_batches``; a loop's has none of these."""
        del stepper, group, micro_batches
        return nullcontext()

    def conclude(self, group: Group) -> None:
        """Take note that the last step is made, and the run complete."""


def beside_steps(parts: TaskParts) -> tuple[BesideSteps, ...]:
    """Make whoever the features bring along: ``beside_steps(TaskParts)`` of a ``child.py``. Nobody works beside an unwatched rank."""
    if not parts.runtime.is_watched:
        return ()
    return tuple(
        part.beside_steps(parts)
        for part in installed.parts("child")
        if hasattr(part, "beside_steps")
    )


def beside_loop(parts: RankParts, loop: OwnLoop) -> tuple[BesideSteps, ...]:
    """Make the same for a loop of the user's own: ``beside_loop(LoopParts, OwnLoop)`` of a ``child.py``."""
    if not parts.runtime.is_watched:
        return ()
    return tuple(
        part.beside_loop(parts, loop)
        for part in installed.parts("child")
        if hasattr(part, "beside_loop")
    )
